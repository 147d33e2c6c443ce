"""All diagnoses of one model in one go: how far it holds, and what goes wrong where it does not."""

from collections.abc import Sequence
from typing import Any

from torch import nn

from hf_recurrent_lengthgen.diagnosis import PARTS
from hf_recurrent_lengthgen.diagnosis.misalignment import misalignment_and_loss
from hf_recurrent_lengthgen.diagnosis.part import DEFAULTS, DiagnosisSettings, Part
from hf_recurrent_lengthgen.evaluation.diagnosis_results import DiagnosedModel, Diagnosis
from hf_recurrent_lengthgen.evaluation.evaluate import NOT_SAID, Measurement
from hf_recurrent_lengthgen.evaluation.json_schema import to_json
from hf_recurrent_lengthgen.evaluation.result_cache import ResultCache
from hf_recurrent_lengthgen.evaluation.results import DataRecord, Role
from hf_recurrent_lengthgen.evaluation.streaming import Tokens


def chosen_parts(settings: DiagnosisSettings) -> list[Part[Any]]:
    """The parts that the settings ask for; a `ValueError` for names of no part."""
    names = tuple(PARTS) if settings.parts is None else settings.parts
    if unknown := [name for name in names if name not in PARTS]:
        raise ValueError(f"parts must be some of {', '.join(PARTS)}; got {', '.join(unknown)}.")
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
    """Evaluate a model, and take the parts of `PARTS`.

    Args:
        model, tokens, training_length, label, data, cache: As for `evaluate_model`, with S >= 2 texts.
        settings: What is measured, and how.
        role: What the model is to the others of a comparison.

    Raises:
        ValueError: as `evaluate_model`, and for unknown parts. What a part raises is in `refused` of the result
            instead.
    """
    parts = chosen_parts(settings)
    task = Measurement(model, tokens, training_length, label, data, settings, cache)
    found, refused = {}, {}
    for part in parts:
        try:
            found[part.name] = _checked(part, part.compute(task))
        except ValueError as error:
            refused[part.name] = str(error)
    return DiagnosedModel(role, task.evaluate(), found, refused)


def _checked(part: Part[Any], result: Any) -> Any:
    """The result of a part, if it can be written to a file."""
    if not isinstance(result, part.result):
        raise TypeError(f"{part.name} gave {type(result).__name__} instead of {part.result.__name__}.")
    to_json(result)
    return result


def compared(title: str, models: Sequence[DiagnosedModel]) -> Diagnosis:
    """Diagnosed models side by side, with what their numbers tell together."""
    return Diagnosis(title, tuple(models), misalignment_and_loss(models))
