"""Loss on a prompt of one repeated token: does a model still predict it after reading nothing new for a long time?

Chen et al., 2024 (arXiv:2410.07145), section 4 and Appendix I, read the "newlines" prompt, which holds nothing but
newlines. The prompt is not random, so one text is enough, and there are no intervals.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import nn

from hf_recurrent_lengthgen.evaluation.json_schema import document
from hf_recurrent_lengthgen.evaluation.measurement import Measurement
from hf_recurrent_lengthgen.evaluation.results import Curve, PartResult, Role
from hf_recurrent_lengthgen.evaluation.settings import DiagnosisSettings
from hf_recurrent_lengthgen.evaluation.statistics import bin_means, make_curve, position_edges
from hf_recurrent_lengthgen.evaluation.streaming import stream_nll
from hf_recurrent_lengthgen.metrics.part import Fact, Part, PartRow, Picture

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BINS_PER_OCTAVE = 4
FAILURE_FACTOR = 2.0
"""A model fails where its loss exceeds this factor times the largest loss inside the training length (section 4.2)."""


@document("constant_prompt")
@dataclass(frozen=True)
class ConstantPrompt(PartResult):
    """NLL of a prompt of one repeated token (the "newlines" prompt of Chen et al., 2024, section 4).

    `inside` is the highest bin inside the training length without the first bin, `beyond` the highest bin beyond it.
    `exceeded_from` is the start of the first bin beyond the training length above `factor` times `inside`. If there is
    none, it is None, and the model is said to have forgotten the beginning of the prompt.
    """

    token: int
    training_length: int
    length: int
    curve: Curve
    inside: float
    beyond: float
    factor: float
    exceeded_from: int | None


def newline_token(tokenizer: Any) -> int | None:
    """The id of the token that is exactly one newline inside a text; None if there is none."""
    # a tokenizer that puts a space before every text encodes a lone newline as two tokens: use the one after a letter
    alone, letter, inside = (tokenizer.encode(text, add_special_tokens=False) for text in ("\n", "a", "a\n"))
    for ids in (alone, inside[len(letter) :] if inside[: len(letter)] == letter else []):
        if len(ids) == 1 and tokenizer.decode(ids) == "\n":
            return int(ids[0])
    return None


def constant_prompt(
    model: nn.Module,
    token: int,
    training_length: int,
    length: int,
    *,
    chunk_length: int | None = None,
    progress: bool = True,
) -> ConstantPrompt:
    """NLL by position of a text that repeats `token`, and whether it rises beyond the training length.

    It rises if a bin is above `FAILURE_FACTOR` times the highest bin inside, without the first bin: the rule of
    section 4.2 for ordinary texts.

    Args:
        model, chunk_length, progress: As in `stream_nll`.
        token: The repeated token; `newline_token(tokenizer)` for the paper's prompt.
        training_length: Tokens per training sequence, at least 2.
        length: Positions to score, above `training_length`.

    Raises:
        ValueError: for a token outside the vocabulary, impossible lengths, and as in `stream_nll`.
    """
    if training_length < 2 or length <= training_length:
        raise ValueError(
            "training_length must be at least 2 and length above it, because the prompt shows what happens beyond "
            f"the training length; got {training_length} and {length}."
        )
    prompt = np.broadcast_to(np.int64(token), (1, length + 1))
    nll = stream_nll(model, prompt, chunk_length=chunk_length, progress=progress).nll
    edges = position_edges(length, training_length, 0, BINS_PER_OCTAVE)
    curve = make_curve(edges, bin_means(nll, edges))
    inside = max(curve.mean[1 : edges.index(training_length)])
    beyond = [
        (start, mean) for (start, _), mean in zip(pairwise(edges), curve.mean, strict=True) if start >= training_length
    ]
    return ConstantPrompt(
        token=token,
        training_length=training_length,
        length=length,
        curve=curve,
        inside=inside,
        beyond=max(mean for _, mean in beyond),
        factor=FAILURE_FACTOR,
        exceeded_from=next((start for start, mean in beyond if mean > FAILURE_FACTOR * inside), None),
    )


# --- as a part of a diagnosis ---


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


def constant_prompt_figure(models: Mapping[str, ConstantPrompt], roles: Sequence[Role]) -> "Figure":
    """NLL of a prompt of one repeated token by position, with a dotted line above which a model has failed."""
    from hf_recurrent_lengthgen.plotting import style

    figure, axes = style.new_axes("Loss on one token repeated (nats per token)")
    ends = []
    for (name, result), role, color in zip(models.items(), roles, style.role_colors(roles), strict=True):
        # The limit, too, leaves out the first bin.
        x, y = style.bin_centers(result.curve)[1:], result.curve.mean[1:]
        axes.plot(x, y, color=color, linewidth=2, linestyle=style.ROLE_LINES[role])
        limit = result.factor * result.inside
        axes.plot([result.training_length, result.length], [limit, limit], color=color, linewidth=1.2, linestyle=":")
        axes.annotate(
            f"{result.factor:g}x the highest inside",
            (result.length, limit),
            xytext=(-2, 2),
            textcoords="offset points",
            ha="right",
            fontsize=style.FONT_SIZE - 2,
            color=color,
        )
        ends.append((y[-1], name, color))
    axes.set_ylim(0, axes.get_ylim()[1] * 1.15)  # room for the mark above the lines
    style.position_axis(axes, 2, max(result.length for result in models.values()))
    axes.set_xlabel("Tokens read", fontsize=style.FONT_SIZE - 0.5, color=style.MUTED)
    style.mark_training_lengths(axes, [result.training_length for result in models.values()])
    style.label_ends(axes, ends)
    return figure


def constant_prompt_text(result: ConstantPrompt) -> str:
    highest = (
        f"at most {result.inside:.3g} nats per token inside the training length and {result.beyond:.3g} beyond it"
    )
    limit = f"{result.factor:g} times the highest loss inside"
    if result.exceeded_from is None:
        return f"The loss is {highest}. Up to {result.length:,} tokens it never exceeds {limit}."
    return f"The loss is {highest}. At {result.exceeded_from:,} tokens it exceeds {limit}."


def _fact(result: ConstantPrompt) -> Fact:
    start = result.exceeded_from
    return Fact("Constant prompt", "holds" if start is None else f"fails at {start:,} tokens")


CONSTANT_PROMPT = Part(
    name="constant prompt",
    title="Constant prompt",
    summary="the loss on a text of line breaks only",
    result=ConstantPrompt,
    compute=_compute,
    section="One token repeated",
    texts=lambda result, unit: (constant_prompt_text(result),),
    facts=lambda result: (_fact(result),),
    rows=(
        PartRow(
            "Constant prompt",
            "highest loss beyond the training length, and inside",
            lambda result: f"<b>{result.beyond:.3g}</b><small>{result.inside:.3g} inside</small>",
        ),
    ),
    pictures={
        "constant_prompt": Picture(
            lambda result, roles, unit: constant_prompt_figure(result, roles),
            "Loss on a text that repeats one token. A model whose loss is above the dotted line has failed.",
        )
    },
    definitions=lambda _: (
        "The constant prompt repeats one token (the “newlines” prompt of Chen et al., 2024, section 4). It is easy "
        "text, on which some models fail because their states overflow. A model that holds on it may still fail on "
        "other texts.",
    ),
)
