"""Long-short misalignment as a part of a diagnosis, and its correlation with the loss over several models."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from hf_recurrent_lengthgen.diagnosis.part import Fact, Part, PartRow
from hf_recurrent_lengthgen.evaluation.diagnosis_results import DiagnosedModel, Misalignment, RankCorrelation
from hf_recurrent_lengthgen.evaluation.evaluate import Measurement
from hf_recurrent_lengthgen.evaluation.misalignment import long_short_misalignment
from hf_recurrent_lengthgen.evaluation.rank_correlation import FEWEST_MODELS, rank_correlation
from hf_recurrent_lengthgen.evaluation.results import EvaluationResult
from hf_recurrent_lengthgen.plotting.findings import interval_text, number_text
from hf_recurrent_lengthgen.plotting.page_parts import INSIDE, cell

CHANCE = 0.05
"""p-value from which a correlation counts as not shown."""


def _compute(task: Measurement) -> Misalignment:
    drawn: Any = {"seed": task.settings.seed}
    measured: Any = {"confidence": task.settings.confidence, "progress": task.settings.progress}
    return task.kept(
        "misalignment",
        Misalignment,
        lambda: long_short_misalignment(task.model, task.tokens, task.training_length, **drawn, **measured),
        **drawn,
    )


MISALIGNMENT = Part(
    name="misalignment",
    title="Long-short misalignment",
    summary="how far predictions move when the context is cut a little shorter",
    result=Misalignment,
    compute=_compute,
    section=INSIDE,
    texts=lambda found, unit: (f"Long-short misalignment {interval_text(found)} nats.",),
    facts=lambda found: (
        Fact(
            "Misalignment",
            f"{found.mean:.3f} nats",
            " (lower is better)",
            f"Long-short misalignment: {interval_text(found, bounds=' [{}, {}]')} nats.",
        ),
    ),
    rows=(PartRow("Long-short misalignment", "inside the training length, nats", cell),),
    definitions=lambda _: (
        "Long-short misalignment is the symmetric cross-entropy between the predictions after a context and after "
        "the same context cut a little shorter. It is not 0 for equal predictions: compare models on the same text.",
    ),
)


def misalignment_and_loss(models: Sequence[DiagnosedModel]) -> RankCorrelation | None:
    """Rank correlation of misalignment and last-octave loss; None for too few models or without different values."""
    found = {model.evaluation.model: (model.evaluation, model.found(Misalignment)) for model in models}
    misalignment = {name: part.mean for name, (_, part) in found.items() if part is not None}
    loss = {name: late_loss(found[name][0]) for name in misalignment}
    if len(loss) < FEWEST_MODELS or len(set(misalignment.values())) < 2 or len(set(loss.values())) < 2:
        return None
    return rank_correlation(misalignment, loss, "misalignment", "loss in the last octave")


def late_loss(evaluation: EvaluationResult) -> float:
    curve, (start, stop) = evaluation.position_wise.coarse, evaluation.harm.last_range
    bins = [
        (b - a, mean)
        for (a, b), mean in zip(pairwise(curve.edges), curve.mean, strict=True)
        if a >= start and b <= stop
    ]
    return sum(width * mean for width, mean in bins) / sum(width for width, _ in bins)


def correlation_text(found: RankCorrelation) -> str:
    pairings = "all pairings" if found.exact else f"{found.pairings:,} random pairings"
    count = len(found.models)
    shown = "" if found.p_value < CHANCE else " That does not show a correlation."
    least = f"; at least {found.least_p_value:.2g} for {count} models" if found.least_p_value >= CHANCE / 5 else ""
    return (
        f"Over {count} models, {found.metric} and {found.score} have a rank correlation of "
        f"{number_text(found.coefficient, '.2f')} (Spearman; p = {found.p_value:.2g} over {pairings}{least}).{shown}"
    )
