"""All metrics of one model: up to which length it generalizes, and why it fails beyond."""

from typing import Any

from torch import nn

from hf_recurrent_lengthgen.evaluation.json_schema import to_json
from hf_recurrent_lengthgen.evaluation.measurement import Measurement
from hf_recurrent_lengthgen.evaluation.result_cache import ResultCache
from hf_recurrent_lengthgen.evaluation.results import NOT_SAID, DataRecord, Role
from hf_recurrent_lengthgen.evaluation.settings import DiagnosisSettings
from hf_recurrent_lengthgen.evaluation.streaming import Tokens
from hf_recurrent_lengthgen.metrics.context_harm.measure import evaluated
from hf_recurrent_lengthgen.metrics.diagnosis.result import DiagnosedModel
from hf_recurrent_lengthgen.metrics.part import Part
from hf_recurrent_lengthgen.metrics.parts import PARTS
from hf_recurrent_lengthgen.metrics.remembrance.measure import check_distances

DEFAULTS = DiagnosisSettings()


def chosen_parts(settings: DiagnosisSettings) -> list[Part[Any]]:
    """The parts that the settings name; a `ValueError` for unknown names, and for distances that do not exist."""
    names = tuple(PARTS) if settings.parts is None else settings.parts
    if unknown := [name for name in names if name not in PARTS]:
        raise ValueError(f"parts must be some of {', '.join(PARTS)}; got {', '.join(unknown)}.")
    check_distances(settings.remembrance_distances)
    return [part for name, part in PARTS.items() if name in names]


def diagnose_model(
    model: nn.Module,
    tokens: Tokens,
    training_length: int,
    label: str = "model",
    data: DataRecord = NOT_SAID,
    settings: DiagnosisSettings = DEFAULTS,
    *,
    role: Role = "other",
    cache: ResultCache | None = None,
) -> DiagnosedModel:
    """Evaluate a model, and measure the parts of `PARTS`.

    Args:
        model, tokens, training_length, label, data, cache: As in `evaluate_model`, with S >= 2 texts.
        settings: What is measured, and how.
        role: Role of the model in a comparison.

    Raises:
        ValueError: as in `evaluate_model`, and for unknown parts. If a part raises one, the result has its message in
            `refused` instead.
    """
    parts = chosen_parts(settings)
    task = Measurement(model, tokens, training_length, label, data, settings, cache)
    results, refused = {}, {}
    for part in parts:
        try:
            result = part.compute(task)
            to_json(result)  # refuses what no file can hold
            results[part.name] = result
        except ValueError as error:
            refused[part.name] = str(error)
    return DiagnosedModel(role, evaluated(task), results, refused)
