"""Loss and states on a prompt of one repeated token: does a model still predict it after nothing new for a long time?

Chen et al., 2024 (arXiv:2410.07145), section 4 and Appendices G and I, read the "newlines" prompt, which holds nothing
but newlines. The prompt is not random, so one text is enough, and there are no intervals.
"""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import nn

from hf_recurrent_lengthgen.evaluation.json_schema import document
from hf_recurrent_lengthgen.evaluation.measurement import Measurement
from hf_recurrent_lengthgen.evaluation.results import Curve, PartResult, Role
from hf_recurrent_lengthgen.evaluation.settings import DiagnosisSettings
from hf_recurrent_lengthgen.evaluation.statistics import bin_means, make_curve, position_edges
from hf_recurrent_lengthgen.evaluation.streaming import stream_nll
from hf_recurrent_lengthgen.metrics.part import Part, Picture
from hf_recurrent_lengthgen.metrics.states.distance import SMALLEST_DRIFT
from hf_recurrent_lengthgen.metrics.states.measure import describe_states
from hf_recurrent_lengthgen.metrics.states.result import StateDiagnosis
from hf_recurrent_lengthgen.metrics.states.trajectory import StateObserver, sample_positions
from hf_recurrent_lengthgen.models.modeling_protocols import base_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BINS_PER_DOUBLING = 4
FAILURE_FACTOR = 2.0
"""A model fails where its loss exceeds this factor times the largest loss inside the training length (section 4.2)."""


@document("constant_prompt", version=3)
@dataclass(frozen=True)
class ConstantPrompt(PartResult):
    """NLL of a prompt of one repeated token (the "newlines" prompt of Chen et al., 2024, section 4).

    `inside` is the highest bin inside the training length without the first bin, `beyond` the highest bin beyond it.
    `exceeded_from` is the start of the first bin beyond the training length above `factor` times `inside`. If there is
    none, it is None, and the model passes: it forgets the beginning of the prompt. `states` are the statistics
    of the states on this prompt (section 3.3, Appendix G); None for a model without recurrent states.
    """

    token: int
    training_length: int
    length: int
    curve: Curve
    inside: float
    beyond: float
    factor: float
    exceeded_from: int | None
    states: StateDiagnosis | None = None


def single_token(tokenizer: Any, text: str = "\n") -> int | None:
    """The id of the token that is exactly `text` inside a text; None if it is several tokens, or none.

    Whether the tokenizer would merge the repeated text, as some merge two newlines, makes no difference: the prompt
    repeats the id.
    """
    # a tokenizer that puts a space before every text encodes a lone newline as two tokens: use the one after a letter
    alone, letter, inside = (tokenizer.encode(one, add_special_tokens=False) for one in (text, "a", f"a{text}"))
    for ids in (alone, inside[len(letter) :] if inside[: len(letter)] == letter else []):
        if len(ids) == 1 and tokenizer.decode(ids) == text:
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
    """NLL by position of a text that repeats `token`, whether it rises beyond the training length, and the states.

    It rises if a bin is above `FAILURE_FACTOR` times the highest bin inside, without the first bin: the rule of
    section 4.2 for ordinary texts.

    Args:
        model, chunk_length, progress: As in `stream_nll`.
        token: The repeated token; `single_token(tokenizer)` for the paper's prompt.
        training_length: Tokens per training sequence, at least 2.
        length: Positions to score, above `training_length`.

    Raises:
        ValueError: for a token outside the vocabulary, and as in `stream_nll`.
    """
    prompt, states = np.broadcast_to(np.int64(token), (1, length + 1)), None
    stateful = hasattr(base_of(model), "zero_state")
    observer = StateObserver(model, 1, sample_positions(length, training_length)) if stateful else None
    with observer or nullcontext():
        nll = stream_nll(model, prompt, chunk_length=chunk_length, progress=progress, observer=observer).nll
    if observer is not None and any(layer.recurrent is not None for layer in observer.trajectory().layers):
        states = describe_states(model, observer.trajectory(), training_length, fixed=True)
    edges = position_edges(length, training_length, 0, BINS_PER_DOUBLING)
    curve = make_curve(edges, bin_means(nll, edges))
    border = edges.index(training_length)
    inside, beyond = max(curve.mean[1:border]), curve.mean[border:]
    exceeded = (start for start, mean in zip(edges[border:], beyond, strict=False) if mean > FAILURE_FACTOR * inside)
    numbers = inside, max(beyond), FAILURE_FACTOR
    return ConstantPrompt(token, training_length, length, curve, *numbers, next(exceeded, None), states)


def _compute(task: Measurement) -> ConstantPrompt:
    settings = task.settings
    assert isinstance(settings, DiagnosisSettings)
    token = settings.repeated_token
    if token is None:
        raise ValueError(
            "The tokenizer has no single token for a line break: give a text that is one token with --repeated-text."
        )
    options: Any = {"chunk_length": settings.chunk_length, "progress": settings.progress}
    compute = partial(constant_prompt, task.model, token, task.training_length, task.length, **options)
    return task.kept("constant prompt", ConstantPrompt, compute, token=token, length=task.length)


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
        when = f"Up to {result.length:,} tokens it never exceeds {limit}."
    else:
        when = f"At {result.exceeded_from:,} tokens it exceeds {limit}."
    if result.states is None:
        return f"The loss is {highest}. {when}"
    drifting, (furthest, *_) = result.states.drifting, result.states.ranking
    return (
        f"The loss is {highest}. {when} {len(drifting):,} of {len(result.states.heads):,} {furthest.unit}s drift on "
        f"this prompt, {furthest.name} the furthest: {furthest.late_distance:,.3g} standard deviations."
    )


def _states_picture(name: str, caption: str) -> Picture[ConstantPrompt]:
    def draw(models: Mapping[str, ConstantPrompt], *_: Any) -> "Figure":
        from hf_recurrent_lengthgen.metrics.states import figure

        return getattr(figure, name)({model: result.states for model, result in models.items()})

    return Picture(draw, caption, lambda result: result.states is not None)


CONSTANT_PROMPT = Part(
    name="constant prompt",
    title="Constant prompt",
    summary="the loss and the states on a text of line breaks only",
    compute=_compute,
    section="One token repeated",
    texts=lambda result, unit: (constant_prompt_text(result),),
    facts=lambda result: {
        "Constant prompt": "passes" if (start := result.exceeded_from) is None else f"fails at {start:,} tokens"
    },
    pictures={
        "constant_prompt": Picture(
            lambda result, roles, unit: constant_prompt_figure(result, roles),
            "Loss on a text that repeats one token. A model whose loss is above the dotted line has failed.",
        ),
        "constant_prompt_std": _states_picture(
            "state_std_figure", "On this text. Convolutions hold a few tokens only, so their states (dotted) settle."
        ),
        "constant_prompt_mean": _states_picture(
            "state_mean_figure", "On this text. Some heads may leave the training distribution."
        ),
        "constant_prompt_inputs": _states_picture(
            "state_inputs_figure",
            "On this text. If the largest element grows more than the spread does, few channels of the head explode.",
        ),
    },
    definitions=lambda _: (
        "The constant prompt repeats one token (the “newlines” prompt of Chen et al., 2024, section 4). It is easy "
        "text, on which some models fail because their states overflow. A model that passes may still fail on "
        "other texts. A head drifts on it if its distance over the last doubling of the position is above "
        f"{SMALLEST_DRIFT:g} and above those inside the training length.",
    ),
)
