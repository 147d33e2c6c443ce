"""The diagnosis of a model's states, by itself or from the observer of an evaluation.

Buitrago Ruiz and Gu, 2025 (arXiv:2507.02782), section 3.5 and appendix C; Chen et al., 2024 (arXiv:2410.07145),
sections 3.2 and 3.3.
"""

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from torch import nn

from hf_recurrent_lengthgen.evaluation.measurement import Measurement
from hf_recurrent_lengthgen.evaluation.readers import StateReader
from hf_recurrent_lengthgen.evaluation.results import Estimate
from hf_recurrent_lengthgen.evaluation.settings import (
    CONFIDENCE,
    DEFAULTS,
    PATCHED_HEADS,
    DiagnosisSettings,
    EvaluationSettings,
)
from hf_recurrent_lengthgen.evaluation.statistics import check_training_length, estimate
from hf_recurrent_lengthgen.evaluation.streaming import Tokens, stream_nll
from hf_recurrent_lengthgen.metrics.attention.measure import attention_harm
from hf_recurrent_lengthgen.metrics.context_harm.measure import evaluated
from hf_recurrent_lengthgen.metrics.states.distance import SMALLEST_DRIFT, Drift, pooled_std, state_drift
from hf_recurrent_lengthgen.metrics.states.patching import (
    Head,
    Heads,
    Patching,
    StateKeeper,
    heads_of,
    patch_heads,
    patched_place,
)
from hf_recurrent_lengthgen.metrics.states.result import (
    FEWEST_SEQUENCES,
    ConvStates,
    Extremes,
    HeadPatching,
    HeadStates,
    LayerStates,
    PatchedHeads,
    RecurrenceInputs,
    StateDiagnosis,
    Values,
)
from hf_recurrent_lengthgen.metrics.states.trajectory import (
    LayerTrajectory,
    PartStatistics,
    StateObserver,
    StateTrajectory,
    sample_positions,
)
from hf_recurrent_lengthgen.models.scan_forgetting import Forgetting
from hf_recurrent_lengthgen.models.state_value import RecurrentState

DETAILED_HEADS = 64
"""Number of heads whose means, extremes and inputs are also kept in results: those with the largest distances."""
DIGITS = 4
"""Significant digits of curves in results."""


def diagnose_states(
    model: nn.Module,
    tokens: Tokens,
    training_length: int,
    settings: EvaluationSettings = DEFAULTS,
    *,
    positions: Sequence[int] | None = None,
    patched_heads: int = PATCHED_HEADS,
) -> StateDiagnosis:
    """Statistics, distances, inputs and patching of the states of a model; a forward pass per token, and patching.

    Args:
        model: A recurrent model of this package, loaded with or without its remote code, or wrapped by `stateful`.
        tokens: Token ids (S, L + 1): S >= 2 texts of L > training_length positions. Heads can be said to drift with
            `FEWEST_SEQUENCES` texts or more.
        training_length: Tokens per training sequence, T.
        settings: Confidence, rows and tokens per forward pass, progress.
        positions: Numbers of tokens read at which states are taken; by default `sample_positions`.
        patched_heads: Number of heads that are exchanged one by one, largest distance first; 0 for no patching.

    Raises:
        ValueError: for models without states, and as in `stream_nll` and `state_drift`. If heads could not be patched,
            `left_out` of the result says why.
    """
    check_training_length(training_length)
    if patched_heads < 0:
        raise ValueError(f"patched_heads must be at least 0, got {patched_heads}.")
    chosen = tuple(positions or sample_positions(int(tokens.shape[1]) - 1, training_length))
    observer = StateObserver(model, len(tokens), chosen)
    with state_keeper(observer, model, tokens, training_length, patched_heads) as keeper:
        stream_nll(model, tokens, observer=keeper, **settings.reading)
    described = describe_states(model, observer.trajectory(), training_length, settings.confidence)
    described = with_attention(model, tokens, described, settings)
    return with_patching(model, tokens, described, patched_heads, settings, keeper.state())


def measure_states(task: Measurement) -> StateDiagnosis:
    """The states in the stream of the evaluation; cached before and after what follows it."""
    settings = task.settings
    assert isinstance(settings, DiagnosisSettings)
    if reason := _no_states(task):
        raise ValueError(reason)
    heads = settings.patched_heads
    observer = StateObserver(task.model, len(task.tokens), sample_positions(task.length, task.training_length))
    keeper = state_keeper(observer, task.model, task.tokens, task.training_length, heads)

    def describe() -> StateDiagnosis:
        evaluated(task, keeper)
        confidence = settings.confidence
        return describe_states(task.model, observer.trajectory(), task.training_length, confidence)

    result, apart = task.kept("states", StateDiagnosis, describe), {}
    if getattr(task.model, "attends", False):
        separate = partial(with_attention, task.model, task.tokens, result, settings)
        result, apart = task.kept("states and attention", StateDiagnosis, separate), {"attention": "exchanged"}
    if not heads:
        return result
    patch = partial(with_patching, task.model, task.tokens, result, heads, settings, keeper.state())
    return task.kept("patched states", StateDiagnosis, patch, patched_heads=heads, **apart)


def _no_states(task: Measurement) -> str:
    if not isinstance(task.reader, StateReader):
        return task.reader.refusal("a diagnosis of states")
    if len(task.tokens) < 2:
        return "A diagnosis of states needs at least two texts, to tell a drift from a different text."
    if not any(layer.recurrent.numel() for layer in task.reader.model.zero_state(1)):
        return (
            f"{task.reader.name} has no recurrent state that could drift: it only carries the inputs of convolutions."
        )
    return ""


def state_keeper(
    observer: StateObserver, model: nn.Module, tokens: Tokens, training_length: int, patched_heads: int
) -> StateKeeper:
    """The observer, which on its way also keeps the states that `with_patching` exchanges, without attention."""
    keeps = patched_heads and not getattr(model, "attends", False)
    return StateKeeper(observer, patched_place(int(tokens.shape[1]) - 1, training_length)[0] if keeps else None)


def describe_states(
    model: nn.Module,
    trajectory: StateTrajectory,
    training_length: int,
    confidence: float = CONFIDENCE,
) -> StateDiagnosis:
    """The diagnosis without patching, from the trajectory of the states; arguments as in `diagnose_states`."""
    recurrent = [layer for layer in trajectory.layers if layer.recurrent is not None]
    if not recurrent:
        raise ValueError(
            f"{type(model).__name__} has no recurrent state that could drift: it only carries the inputs of "
            "convolutions, which hold its last tokens."
        )
    drifts = state_drift(trajectory, training_length, confidence=confidence)
    order = ranked(drifts)
    detailed = set(order[:DETAILED_HEADS])
    sequences = recurrent[0].recurrent.mean.shape[1]  # type: ignore[union-attr]
    return StateDiagnosis(
        training_length=training_length,
        positions=trajectory.positions,
        sequences=sequences,
        confidence=confidence,
        smallest_drift=SMALLEST_DRIFT,
        std=_whole_std(recurrent),
        layers=tuple(
            _layer_states(index, layer, drift, detailed)
            for index, (layer, drift) in enumerate(zip(trajectory.layers, drifts, strict=True))
            if layer.recurrent is not None or layer.conv is not None
        ),
        patching=None,
        left_out=tuple(_left_out(model, recurrent, sequences)),
    )


def with_patching(
    model: nn.Module,
    tokens: Tokens,
    states: StateDiagnosis,
    patched_heads: int = PATCHED_HEADS,
    settings: EvaluationSettings = DEFAULTS,
    state_there: RecurrentState | None = None,
) -> StateDiagnosis:
    """The diagnosis of `describe_states` with patching, or the reason why heads could not be patched.

    `state_there` is that of `state_keeper`, if it has seen the texts.
    """
    if not patched_heads:
        return states
    order = [(layer.layer, head.head) for layer, head in states.ranking]
    groups = patched_groups(order, len(states.drifting), patched_heads)
    if getattr(model, "attends", False):
        groups["attention"] = ["attention"]
    try:
        reading: Any = {"batch_size": settings.batch_size, "progress": settings.progress, "state_there": state_there}
        result = patch_heads(model, tokens, states.training_length, list(groups.values()), **reading)
    except ValueError as error:
        return dataclasses.replace(states, left_out=(*states.left_out, f"Heads were not patched: {error}"))
    return dataclasses.replace(states, patching=_patching(result, groups, states.confidence))


def with_attention(
    model: nn.Module, tokens: Tokens, states: StateDiagnosis, settings: EvaluationSettings = DEFAULTS
) -> StateDiagnosis:
    """The diagnosis with the harm of long states and of long attention apart, if the model has attention layers."""
    if not getattr(model, "attends", False):
        return states
    try:
        result = attention_harm(model, tokens, states.training_length, settings)
    except ValueError as error:
        reason = f"The harm of long states was not measured apart from that of long attention: {error}"
        return dataclasses.replace(states, left_out=(*states.left_out, reason))
    return dataclasses.replace(states, attention=result)


def ranked(drifts: Sequence[Drift | None]) -> list[tuple[int, int]]:
    """All heads as (layer, head): drifting heads first, both kinds by decreasing distance in the last octave."""
    keys = [
        (not drift.drifts[head], -float(drift.late[head]), layer, head)
        for layer, drift in enumerate(drifts)
        if drift is not None
        for head in range(len(drift.late))
    ]
    return [(layer, head) for _, _, layer, head in sorted(keys)]


def patched_groups(order: Sequence[Head], drift: int, alone: int) -> dict[str, Heads]:
    """The groups of heads (layer, head) to exchange.

    They are the first `drift` together, which drift, all others together, those that drift in each of the first
    `alone` layers (unless there is only one), and the first `alone` heads one by one.
    """
    drifting, others = order[:drift], order[drift:]
    groups: dict[str, Heads] = {}
    if drifting:
        groups[f"the {len(drifting)} that drift" if len(drifting) > 1 else "the one that drifts"] = drifting
    if others:
        groups[f"the {len(others)} others" if drifting else f"all {len(others)}"] = others
    layers = list(dict.fromkeys(layer for layer, _ in drifting))
    if len(layers) > 1:
        groups |= {f"layer {layer}": [place for place in drifting if place[0] == layer] for layer in layers[:alone]}
    return groups | {f"layer {layer}, head {head}": [(layer, head)] for layer, head in order[:alone]}


def _patching(result: Patching, groups: dict[str, Heads], confidence: float) -> HeadPatching:
    def mean(values: np.ndarray) -> Estimate:
        return estimate(values[:, None], confidence)

    patched = tuple(
        PatchedHeads(name, tuple(heads_of(group)), mean(restored), mean(broken), "attention" in group)
        for (name, group), restored, broken in zip(groups.items(), result.restored, result.broken, strict=True)
    )
    full, short, harm = map(mean, (result.full, result.short, result.harm))
    return HeadPatching(result.position, result.kept, result.width, full, short, harm, patched)


def _left_out(model: nn.Module, layers: Sequence[LayerTrajectory], sequences: int) -> list[str]:
    reasons = []
    if sequences < FEWEST_SEQUENCES:
        reasons.append(
            f"No head is said to drift: {sequences} texts cannot tell a drift from differences between texts; "
            f"{FEWEST_SEQUENCES} or more texts can."
        )
    unread = sum(layer.inputs is None for layer in layers)
    if not unread:
        return reasons
    reason = "their scans are not known to this package"
    if why := getattr(model.config, "why_not_forget", ""):
        reason = f"{why} (lengthgen maps shows what is left of each token of a short text)"
    if Forgetting.of(model.config).in_recurrence:
        reason = "the model is made to forget, so its scans get other inputs than its layers computed"
    inputs = f"Inputs of the recurrence and retention were not read in {unread} of {len(layers)} layers: {reason}."
    return [*reasons, inputs]


def _layer_states(
    index: int, layer: LayerTrajectory, drift: Drift | None, detailed: set[tuple[int, int]]
) -> LayerStates:
    heads = () if drift is None else range(len(drift.late))
    return LayerStates(
        index,
        layer.unit,
        layer.shape,
        None if layer.recurrent is None else _whole_std([layer]),
        tuple(_head_states(head, layer, drift, (index, head) in detailed) for head in heads if drift is not None),
        ()
        if layer.conv is None
        else tuple(_conv_states(name, part, layer.conv) for part, name in enumerate(layer.conv_parts)),
    )


def _head_states(head: int, layer: LayerTrajectory, drift: Drift, detailed: bool) -> HeadStates:
    assert layer.recurrent is not None
    mean, std = _moments(layer.recurrent, head)
    inputs = None
    if layer.inputs is not None:
        inputs = RecurrenceInputs(
            *(None if values is None else _curve(values[:, :, head].mean(1)) for values in layer.inputs)  # type: ignore[arg-type]
        )
    return HeadStates(
        head,
        std,
        _curve(drift.distance[:, head]),
        _rounded(drift.late[head]),
        _rounded(drift.null[head]),
        bool(drift.drifts[head]),
        drift.leaves_at[head],
        _rounded(drift.growth[head]),
        mean if detailed else None,
        _extremes(layer.recurrent, head) if detailed else None,
        inputs if detailed else None,
    )


def _conv_states(name: str, part: int, conv: PartStatistics) -> ConvStates:
    mean, std = _moments(conv, part)
    return ConvStates(name, mean, std, _extremes(conv, part))


def _moments(statistics: PartStatistics, unit: int) -> tuple[Values, Values]:
    """Mean and standard deviation of a unit, pooled over sequences."""
    mean, variance = (values[:, :, unit].astype(np.float64) for values in statistics[:2])
    return _curve(mean.mean(1)), _curve(pooled_std(mean, variance))


def _extremes(statistics: PartStatistics, unit: int) -> Extremes:
    """The value of the largest magnitude over sequences, and its index."""
    values = statistics.extreme[:, :, unit]
    rows = np.abs(values).argmax(1)[:, None]
    index = np.take_along_axis(statistics.extreme_index[:, :, unit], rows, 1)[:, 0]
    return Extremes(_curve(np.take_along_axis(values, rows, 1)[:, 0]), tuple(index.tolist()))


def _whole_std(layers: Sequence[LayerTrajectory]) -> Values:
    """Standard deviation over all elements of the recurrent parts of some layers."""
    means, squares, elements = [], [], []
    for layer in layers:
        assert layer.recurrent is not None
        mean, variance = layer.recurrent.mean.astype(np.float64), layer.recurrent.variance.astype(np.float64)
        means.append(mean.mean((1, 2)))
        squares.append((variance + mean**2).mean((1, 2)))
        elements.append(mean.shape[2] * np.prod(layer.shape))
    mean = np.average(means, axis=0, weights=elements)
    return _curve(np.sqrt(np.maximum(np.average(squares, axis=0, weights=elements) - mean**2, 0)))


def _curve(values: np.ndarray) -> Values:
    return tuple(map(_rounded, values))


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")
