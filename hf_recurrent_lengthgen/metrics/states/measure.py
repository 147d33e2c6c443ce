"""The diagnosis of a model's states, by itself or from the observer of an evaluation.

Buitrago Ruiz and Gu, 2025 (arXiv:2507.02782), section 3.5 and appendix C; Chen et al., 2024 (arXiv:2410.07145),
sections 3.2 and 3.3.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from torch import nn

from hf_recurrent_lengthgen.evaluation.measurement import Measurement
from hf_recurrent_lengthgen.evaluation.provenance import config_digest
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
from hf_recurrent_lengthgen.metrics.context_harm.measure import evaluated
from hf_recurrent_lengthgen.metrics.states.attention import attention_harm
from hf_recurrent_lengthgen.metrics.states.attention_windows import attention_window_harm, windows_to_read
from hf_recurrent_lengthgen.metrics.states.distance import Drift, pooled_std, state_drift
from hf_recurrent_lengthgen.metrics.states.patching import Head, Heads, heads_of, patch_heads
from hf_recurrent_lengthgen.metrics.states.result import (
    FEWEST_SEQUENCES,
    ConvStates,
    HeadPatching,
    HeadStates,
    PatchedHeads,
    StateDiagnosis,
    StateRank,
    Values,
    WindowHarm,
)
from hf_recurrent_lengthgen.metrics.states.trajectory import (
    LayerTrajectory,
    StateObserver,
    StateTrajectory,
    sample_positions,
)
from hf_recurrent_lengthgen.models.scan_forgetting import Forgetting

DIGITS = 4
"""Significant digits of curves in results."""


def diagnose_states(
    model: nn.Module,
    tokens: Tokens,
    training_length: int,
    settings: EvaluationSettings = DEFAULTS,
    *,
    patched_heads: int = PATCHED_HEADS,
) -> StateDiagnosis:
    """Statistics, distances and patching of the states of a model; a forward pass per token, and patching.

    Args:
        model: A recurrent model of this package, loaded with or without its remote code, or wrapped by `stateful`.
        tokens: Token ids (S, L + 1): S >= 2 texts of L > training_length positions. Drift requires
            `FEWEST_SEQUENCES` texts or more.
        training_length: Tokens per training sequence, T.
        settings: Confidence, sequences and tokens per forward pass, progress.
        patched_heads: Number of heads that are exchanged one by one, largest distance first; 0 for no patching.

    Raises:
        ValueError: for models without states, and as in `stream_nll` and `state_drift`. If heads could not be patched,
            `left_out` of the result says why.
    """
    check_training_length(training_length)
    StateReader.of(model, "a diagnosis of states")
    observer = StateObserver(model, len(tokens), sample_positions(int(tokens.shape[1]) - 1, training_length))
    with observer:
        stream_nll(model, tokens, observer=observer, **settings.reading)
    states = describe_states(model, observer.trajectory(), training_length, settings.confidence)
    windows = functools.partial(attention_window_harm, model, tokens, training_length, settings=settings)
    return with_exchanges(model, tokens, states, patched_heads, settings, windows)


def measure_states(task: Measurement) -> StateDiagnosis:
    """The states in the stream of the evaluation, then exchanges and windows; both are cached."""
    settings = task.settings
    assert isinstance(settings, DiagnosisSettings)
    if not isinstance(task.reader, StateReader):
        task.reader.refuse("a diagnosis of states")
    heads = settings.patched_heads
    observer = StateObserver(task.model, len(task.tokens), sample_positions(task.length, task.training_length))

    def describe() -> StateDiagnosis:
        evaluated(task, observer)
        return describe_states(task.model, observer.trajectory(), task.training_length, settings.confidence)

    states = task.kept("states", StateDiagnosis, describe)

    read = windows_to_read(task.model, task.training_length, task.length, settings.attention_windows)

    def windows() -> WindowHarm:
        """Measured once for a model, whatever the window in its config."""
        model = task.key["model"] | {"config": config_digest(task.model.config, without="attention_window")}
        sweep = functools.partial(attention_window_harm, task.model, task.tokens, task.training_length, read, settings)
        return task.kept("windows of attention", WindowHarm, sweep, model=model, windows=read)

    exchange = functools.partial(with_exchanges, task.model, task.tokens, states, heads, settings, windows)
    return task.kept("states and exchanges", StateDiagnosis, exchange, patched_heads=heads, windows=read)


def describe_states(
    model: nn.Module,
    trajectory: StateTrajectory,
    training_length: int,
    confidence: float = CONFIDENCE,
    *,
    fixed: bool = False,
) -> StateDiagnosis:
    """The diagnosis without exchanges, from the trajectory of the states.

    Arguments as in `diagnose_states`; `fixed` as in `state_drift`: one text is enough if it is not random.
    """
    recurrent = [layer for layer in trajectory.layers if layer.recurrent is not None]
    if not recurrent:
        raise ValueError(
            f"{type(model).__name__} has no recurrent state that could drift: it only carries the last inputs of its "
            "convolutions."
        )
    drifts = state_drift(trajectory, training_length, confidence=confidence, fixed=fixed)
    layers = enumerate(zip(trajectory.layers, drifts, strict=True))
    sequences = recurrent[0].recurrent.mean.shape[1]  # type: ignore[union-attr]
    return StateDiagnosis(
        training_length=training_length,
        positions=trajectory.positions,
        sequences=sequences,
        confidence=confidence,
        std=_whole_std(recurrent),
        heads=tuple(head for index, (layer, drift) in layers if drift for head in _heads(index, layer, drift)),
        patching=None,
        left_out=tuple(_left_out(model, recurrent, FEWEST_SEQUENCES if fixed else sequences)),
        conv=tuple(part for index, layer in enumerate(trajectory.layers) for part in _conv(index, layer)),
        ranks=tuple(rank for index, layer in enumerate(trajectory.layers) for rank in _ranks(index, layer)),
    )


def with_exchanges(
    model: nn.Module,
    tokens: Tokens,
    states: StateDiagnosis,
    patched_heads: int,
    settings: EvaluationSettings,
    windows: Callable[[], WindowHarm],
) -> StateDiagnosis:
    """The diagnosis of `describe_states` with patching, and in hybrids with the excess loss from attention and by
    window, which `windows` measures. What could not be measured has its reason in `left_out`."""
    attends, left_out = getattr(model, "attends", False), list(states.left_out)
    attention = patching = None
    if attends:
        try:
            attention = attention_harm(model, tokens, states.training_length, settings)
            attention = dataclasses.replace(attention, windows=windows())
        except ValueError as error:
            what = "from long states was not measured apart from that from long attention"
            if attention is not None:
                what = "with windows of attention was not measured"
            left_out.append(f"The excess loss {what}: {error}")
    if patched_heads:
        order = [(head.layer, head.head) for head in states.ranking]
        groups = patched_groups(order, len(states.drifting), patched_heads)
        if attends:
            groups["attention"] = ["attention"]
        try:
            patching = _patching(model, tokens, states, groups, settings)
        except ValueError as error:
            left_out.append(f"Heads were not patched: {error}")
    return dataclasses.replace(states, attention=attention, patching=patching, left_out=tuple(left_out))


def patched_groups(order: Sequence[Head], drift: int, alone: int) -> dict[str, Heads]:
    """The groups of heads (layer, head) to exchange: the first `drift` together, which drift, the rest together, and
    the first `alone` heads one by one."""
    drifting, rest = order[:drift], order[drift:]
    groups: dict[str, Heads] = {}
    if drifting:
        groups[f"the {len(drifting)} that drift" if len(drifting) > 1 else "the one that drifts"] = drifting
    if rest:
        groups[f"the {len(rest)} others" if drifting else f"all {len(rest)}"] = rest
    return groups | {f"layer {layer}, head {head}": [(layer, head)] for layer, head in order[:alone]}


def _patching(
    model: nn.Module, tokens: Tokens, states: StateDiagnosis, groups: dict[str, Heads], settings: EvaluationSettings
) -> HeadPatching:
    reading: Any = {"batch_size": settings.batch_size, "progress": settings.progress}
    result = patch_heads(model, tokens, states.training_length, list(groups.values()), **reading)

    def mean(values: np.ndarray) -> Estimate:
        return estimate(values[:, None], states.confidence)

    patched = tuple(
        PatchedHeads(name, tuple(heads_of(group)), mean(restored), mean(broken))
        for (name, group), restored, broken in zip(groups.items(), result.restored, result.broken, strict=True)
    )
    return HeadPatching(result.position, result.kept, result.width, mean(result.harm), patched)


def _left_out(model: nn.Module, layers: Sequence[LayerTrajectory], sequences: int) -> list[str]:
    reasons = []
    if sequences < FEWEST_SEQUENCES:
        reasons.append(
            f"Drift of heads was not measured: {sequences} sequences cannot tell it from differences between texts; "
            f"{FEWEST_SEQUENCES} or more can."
        )
    ranks = [layer.ranks for layer in layers if layer.ranks is not None]
    if unranked := len(layers) - len(ranks):
        reasons.append(f"Effective rank was not measured in {unranked} of {len(layers)} layers: no matrices.")
    if ranks and (few := ranks[0].shape[1]) < (count := layers[0].recurrent.mean.shape[1]):  # type: ignore[union-attr]
        which = f"the first {few} of {count} sequences"
        reasons.append(f"Effective rank was measured in {which}: the model has many heads.")
    unread = sum(layer.inputs is None for layer in layers)
    if not unread:
        return reasons
    reason = "their scans are not known to this package"
    if why := getattr(model.config, "why_not_forget", ""):
        reason = f"{why} (lengthgen maps shows the retention of each token of a short text)"
    if Forgetting.of(model.config).in_recurrence:
        reason = "the model is made to forget, so its scans get other inputs than its layers computed"
    return [*reasons, f"Retention was not measured in {unread} of {len(layers)} layers: {reason}."]


def _heads(index: int, layer: LayerTrajectory, drift: Drift) -> list[HeadStates]:
    """The units of a layer: standard deviations pooled over sequences, distances, and retention."""
    assert layer.recurrent is not None
    mean, variance = (values.astype(np.float64) for values in layer.recurrent[:2])
    std, inputs = pooled_std(mean, variance), layer.inputs
    largest = np.abs(layer.recurrent.extreme).max(1)
    known = {} if inputs is None else {name: of for name, of in inputs._asdict().items() if of is not None}
    log_retention = known.pop("log_retention", None)
    return [
        HeadStates(
            index,
            layer.unit,
            head,
            _curve(std[:, head]),
            _curve(drift.distance[:, head]),
            _rounded(drift.late[head]),
            bool(drift.drifts[head]),
            drift.leaves_at[head],
            None if log_retention is None else _curve(log_retention[:, :, head].mean(1)),
            _curve(mean[:, :, head].mean(1)),
            _curve(largest[:, head]),
            {name: _curve(of[:, :, head].mean(1)) for name, of in known.items()},
        )
        for head in range(len(drift.late))
    ]


def _conv(index: int, layer: LayerTrajectory) -> list[ConvStates]:
    if layer.conv is None:
        return []
    mean, variance = (values.astype(np.float64) for values in layer.conv[:2])
    std = pooled_std(mean, variance)
    return [
        ConvStates(index, part, _curve(mean[:, :, place].mean(1)), _curve(std[:, place]))
        for place, part in enumerate(layer.conv_parts)
    ]


def _ranks(index: int, layer: LayerTrajectory) -> list[StateRank]:
    if layer.ranks is None or layer.recurrent is None:
        return []
    matrices, units = layer.ranks.shape[2], layer.recurrent.mean.shape[2]
    most = min(layer.shape[0] * units // matrices, layer.shape[1])
    curves = [map(_curve, layer.ranks.mean(1)[:, place].T) for place in range(matrices)]
    return [StateRank(index, n if layer.unit == "head" else None, most, *both) for n, both in enumerate(curves)]


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
