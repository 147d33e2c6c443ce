"""Long-short misalignment as a part of a diagnosis."""

from typing import Any

from hf_recurrent_lengthgen.diagnosis.part import Fact, Part, PartRow
from hf_recurrent_lengthgen.evaluation.diagnosis_results import Misalignment
from hf_recurrent_lengthgen.evaluation.evaluate import Measurement
from hf_recurrent_lengthgen.evaluation.misalignment import long_short_misalignment
from hf_recurrent_lengthgen.plotting.findings import interval_text
from hf_recurrent_lengthgen.plotting.page_parts import INSIDE, cell


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
