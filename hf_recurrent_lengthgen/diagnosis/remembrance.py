"""Effective Remembrance as a part of a diagnosis."""

from collections.abc import Sequence

from hf_recurrent_lengthgen.diagnosis.part import Fact, Part, PartRow, Picture
from hf_recurrent_lengthgen.evaluation.diagnosis_results import Remembrance
from hf_recurrent_lengthgen.evaluation.effective_remembrance import LENGTHS_OF_TRAINING, effective_remembrance
from hf_recurrent_lengthgen.evaluation.evaluate import Measurement
from hf_recurrent_lengthgen.evaluation.results import Estimate
from hf_recurrent_lengthgen.plotting.findings import interval_text
from hf_recurrent_lengthgen.plotting.page_parts import cell
from hf_recurrent_lengthgen.plotting.remembrance import remembrance_figure


def _compute(task: Measurement) -> Remembrance:
    length = min(LENGTHS_OF_TRAINING * task.training_length, task.length + 1)
    return task.kept(
        "remembrance",
        Remembrance,
        lambda: effective_remembrance(task.model, task.tokens, task.training_length, task.settings, length=length),
    )


def far_tokens(found: Remembrance) -> Estimate | None:
    return None if found.length <= found.training_length else found.beyond_training


def remembrance_text(found: Remembrance) -> str:
    if found.length <= found.training_length:
        return f"Texts of {found.length:,} tokens do not show what tokens beyond the training length do."
    if (beyond := far_tokens(found)) is None:
        return "What tokens beyond the training length do was not measured."
    return (
        f"At {found.length:,} tokens, those further back than the last {found.training_length:,} move the prediction "
        f"by {interval_text(beyond)} of at most 1."
    )


def _facts(found: Remembrance) -> Sequence[Fact]:
    if (beyond := far_tokens(found)) is None:
        return ()
    sentence = (
        "Effective remembrance: what lies further back than the training length changes predictions by "
        f"{interval_text(beyond, bounds=' [{}, {}]')} (total variation, 0 to 1)."
    )
    note = " beyond training (0: no effect of far tokens)"
    return (Fact("Effective Remembrance", f"{beyond.mean:.3f}", note, sentence),)


def _cell(found: Remembrance) -> str:
    beyond = far_tokens(found)
    return "" if beyond is None else cell(beyond)


REMEMBRANCE = Part(
    name="remembrance",
    title="Effective Remembrance",
    summary="how much of a prediction the tokens far back make (Effective Remembrance)",
    result=Remembrance,
    compute=_compute,
    section="What it remembers",
    texts=lambda found, unit: (remembrance_text(found),),
    facts=_facts,
    rows=(PartRow("Effective Remembrance", "of tokens beyond the training length, 0 to 1", _cell),),
    pictures={
        "remembrance": Picture(
            lambda found, roles, unit: remembrance_figure(found, roles),
            "How far the prediction moves when all but the last tokens are left out. What is right of the training "
            "length comes from tokens further back than it.",
            bands=True,
        )
    },
    definitions=lambda _: (
        "Effective Remembrance (arXiv:2507.02782, Definition 3.3) is the total variation between the predictions "
        "after all tokens and after the last ones only: 0 where the tokens before make no difference, at most 1. "
        "A model that breaks is moved by far tokens in vain; one that holds may do so by forgetting them. Whether "
        "it finds what stands far back is measured by lengthgen retrieve.",
    ),
)
