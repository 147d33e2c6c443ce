"""Effective Remembrance as a part of a diagnosis."""

from collections.abc import Sequence

from hf_recurrent_lengthgen.evaluation.measurement import Measurement
from hf_recurrent_lengthgen.evaluation.results import Estimate
from hf_recurrent_lengthgen.evaluation.words import cell, interval_text
from hf_recurrent_lengthgen.metrics.part import Fact, Part, PartRow, Picture
from hf_recurrent_lengthgen.metrics.remembrance.figure import remembrance_figure
from hf_recurrent_lengthgen.metrics.remembrance.measure import LENGTHS_OF_TRAINING, effective_remembrance
from hf_recurrent_lengthgen.metrics.remembrance.result import Remembrance


def _compute(task: Measurement) -> Remembrance:
    length = min(LENGTHS_OF_TRAINING * task.training_length, task.length + 1)
    return task.kept(
        "remembrance",
        Remembrance,
        lambda: effective_remembrance(task.model, task.tokens, task.training_length, task.settings, length=length),
    )


def far_tokens(result: Remembrance) -> Estimate | None:
    return None if result.length <= result.training_length else result.beyond_training


def remembrance_text(result: Remembrance) -> str:
    if result.length <= result.training_length:
        return f"Texts of {result.length:,} tokens do not show the effect of tokens beyond the training length."
    if (beyond := far_tokens(result)) is None:
        return "The effect of tokens beyond the training length was not measured."
    return (
        f"At {result.length:,} tokens, the tokens before the last {result.training_length:,} change the prediction by "
        f"{interval_text(beyond)}, on a scale from 0 to 1."
    )


def _facts(result: Remembrance) -> Sequence[Fact]:
    if (beyond := far_tokens(result)) is None:
        return ()
    sentence = (
        "Effective remembrance: tokens further back than the training length change predictions by "
        f"{interval_text(beyond, bounds=' [{}, {}]')} (total variation, 0 to 1)."
    )
    note = " beyond training (0: no effect of distant tokens)"
    return (Fact("Effective Remembrance", f"{beyond.mean:.3f}", note, sentence),)


def _cell(result: Remembrance) -> str:
    beyond = far_tokens(result)
    return "" if beyond is None else cell(beyond)


REMEMBRANCE = Part(
    name="remembrance",
    title="Effective Remembrance",
    summary="how much distant tokens change predictions (Effective Remembrance)",
    result=Remembrance,
    compute=_compute,
    section="What it remembers",
    texts=lambda result, unit: (remembrance_text(result),),
    facts=_facts,
    rows=(PartRow("Effective Remembrance", "of tokens beyond the training length, 0 to 1", _cell),),
    pictures={
        "remembrance": Picture(
            lambda result, roles, unit: remembrance_figure(result, roles),
            "Change of the prediction if only the last tokens are kept. To the right of the training length, it is "
            "the effect of tokens further back than that.",
            bands=True,
        )
    },
    definitions=lambda _: (
        "Effective Remembrance (Buitrago Ruiz and Gu, 2025, Definition 3.3) is the total variation between the "
        "predictions after all tokens and after the last ones only: 0 if the earlier tokens make no difference, at "
        "most 1. Distant tokens change the predictions of a model that breaks without helping it; a model that holds "
        "may do so by forgetting them. lengthgen retrieve measures whether a model retrieves distant tokens.",
    ),
)
