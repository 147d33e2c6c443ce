"""The loss on one repeated token as a part of a diagnosis."""

from typing import Any

from hf_recurrent_lengthgen.diagnosis.part import DiagnosisSettings, Fact, Part, PartRow, Picture
from hf_recurrent_lengthgen.evaluation.constant_prompt import constant_prompt
from hf_recurrent_lengthgen.evaluation.diagnosis_results import ConstantPrompt
from hf_recurrent_lengthgen.evaluation.evaluate import Measurement
from hf_recurrent_lengthgen.plotting.remembrance import constant_prompt_figure


def _compute(task: Measurement) -> ConstantPrompt:
    settings = task.settings
    assert isinstance(settings, DiagnosisSettings)
    token = settings.repeated_token
    if token is None:
        raise ValueError("The tokenizer has no single token for a line break.")
    reading: Any = {"chunk_length": settings.chunk_length, "progress": settings.progress}
    return task.kept(
        "constant prompt",
        ConstantPrompt,
        lambda: constant_prompt(task.model, token, task.training_length, task.length, **reading),
        token=token,
        length=task.length,
    )


def constant_prompt_text(found: ConstantPrompt) -> str:
    highest = f"at most {found.inside:.3g} nats per token inside the training length and {found.beyond:.3g} beyond it"
    limit = f"{found.factor:g} times the highest loss inside"
    if found.exceeded_from is None:
        return f"The loss is {highest}. Up to {found.length:,} tokens it never exceeds {limit}."
    return f"The loss is {highest}. At {found.exceeded_from:,} tokens it exceeds {limit}."


def _fact(found: ConstantPrompt) -> Fact:
    start = found.exceeded_from
    return Fact("Constant prompt", "holds" if start is None else f"fails at {start:,} tokens")


CONSTANT_PROMPT = Part(
    name="constant prompt",
    title="Constant prompt",
    summary="the loss on a text of line breaks only",
    result=ConstantPrompt,
    compute=_compute,
    section="One token repeated",
    texts=lambda found, unit: (constant_prompt_text(found),),
    facts=lambda found: (_fact(found),),
    rows=(
        PartRow(
            "Constant prompt",
            "highest loss beyond the training length, and inside",
            lambda found: f"<b>{found.beyond:.3g}</b><small>{found.inside:.3g} inside</small>",
        ),
    ),
    pictures={
        "constant_prompt": Picture(
            lambda found, roles, unit: constant_prompt_figure(found, roles),
            "Loss on a text that repeats one token. A model whose loss is above the dotted line has failed.",
        )
    },
    definitions=lambda _: (
        "The constant prompt repeats one token (the “newlines” prompt of Chen et al., 2024, section 4). It is easy "
        "text, on which some models fail because their states overflow. A model that holds on it may still fail on "
        "other texts.",
    ),
)
