"""Compare the readings of two texts, and merge those of several texts of one model into one.

A layer with an affine recurrence maps the state S before a text to A S + W, where W is the state that the text gives
from zero. So the state after text 1 and then text 2 is A_2 S_1 + S_2 (PICASO: Liu et al. 2025, arXiv:2502.17605), if
text 2 gave the layer the same inputs. In the first layer it does, but for the short convolution or token shift at the
border; in later layers the inputs of text 2 depend on text 1, and the formula is an approximation.
`examples/merged_readings.py` measures how good it is.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from hf_recurrent_lengthgen.models.recurrent_state import LayerState, RecurrentState, layer_state
from hf_recurrent_lengthgen.readings.decays import then
from hf_recurrent_lengthgen.readings.reading import Reading

Merging = Literal["mean", "sum", "order", "cyclic", "all"]
"""How readings are merged: their mean or sum (souping: Pióro et al. 2024, arXiv:2406.08423; Jafari et al. 2025,
arXiv:2505.24033), one after the other, or the mean over all cyclic orders (PICASO-R) or all orders (PICASO)."""
MERGINGS: tuple[Merging, ...] = get_args(Merging)
MOST_ORDERS = 5040
"""Largest number of orders for "all", that of 7 readings."""


_SCALED = {"xlstm"}
"""Types of models whose states hold sums and the exponent of their scale, so that a mean of states means nothing."""


class LayerDistance(NamedTuple):
    """How far two states are apart in a layer: norms of the differences of the recurrent and convolution part, divided
    by those of the first state (0 where both are empty)."""

    recurrent: float
    conv: float


def compare_readings(one: Reading, other: Reading) -> list[LayerDistance]:
    """The distance of the states of two readings of one model, for each layer."""
    _check_same_model([one, other])
    return [
        LayerDistance(*(_distance(a, b) for a, b in zip(mine[:2], theirs[:2], strict=True)))
        for mine, theirs in zip(one.state, other.state, strict=True)
    ]


def _distance(one: Tensor, other: Tensor) -> float:
    norm, difference = float(one.double().norm()), float((one.double() - other.double()).norm())
    return difference if difference == 0 else difference / norm if norm else math.inf


def merge_readings(readings: Sequence[Reading], how: Merging = "mean") -> Reading:
    """One reading that stands for several texts.

    Its position is the number of tokens of all texts. It has read no one text, so its `prefix` is empty.

    Args:
        readings: Readings of one model, with as many rows each, from zero states. Keys and values of attention layers
            cannot be merged: leave them out first (`without_attention`).
        how: "order" keeps the order of the readings. All but "mean" and "sum" need their decays (`record_decays`).

    Raises:
        ValueError: for readings of different models, of xLSTM, with keys, with windows, without the decays
            that are needed, or from a learned state (but for "mean").
    """
    _check_same_model(readings)
    if any(reading.attention == "kept" for reading in readings):
        raise ValueError(
            "Keys and values of several texts cannot be merged, since they stand at the same positions: leave them "
            "out with without_attention(reading). Attention layers then see new tokens only."
        )
    if any(len(layer) > len(LayerState._fields) for reading in readings for layer in reading.state):
        raise ValueError("States with a window cannot be merged: read the texts one after the other.")
    if scaled := sorted({str(_config(reading).get("model_type")) for reading in readings} & _SCALED):
        raise ValueError(
            f"States of {', '.join(scaled)} cannot be merged, because each row holds sums at a scale of its own: read "
            "the texts one after the other."
        )
    if how != "mean" and any((_config(reading).get("learned_states") or {}).get("active") for reading in readings):
        raise ValueError(
            f'The readings start from a learned state, which how="{how}" would count more than once: merge by "mean", '
            "or read the texts within model.learned_states.disable_adapter()."
        )
    if how in ("mean", "sum"):
        divisor = len(readings) if how == "mean" else 1
        state = _combined([reading.state for reading in readings], divisor)
    else:
        orders = _orders(len(readings), how)
        state = _combined([_in_order([readings[i] for i in order]) for order in orders], len(orders))
    decays = readings[0].decays
    for reading in readings[1:]:
        decays = then(decays, reading.decays) if decays and reading.decays else ()
    position = sum(reading.position for reading in readings)
    return replace(readings[0], state=state, position=position, prefix="", decays=decays, metadata={"merged": how})


def _config(reading: Reading) -> Mapping[str, Any]:
    return {} if reading.origin is None else reading.origin.config


def _orders(count: int, how: str) -> list[tuple[int, ...]]:
    if how == "order":
        return [tuple(range(count))]
    if how == "cyclic":
        return [tuple((start + i) % count for i in range(count)) for start in range(count)]
    if how != "all":
        raise ValueError(f'how must be "mean", "sum", "order", "cyclic" or "all", got {how!r}.')
    if math.factorial(count) > MOST_ORDERS:
        raise ValueError(f'{count} readings have {math.factorial(count):,} orders: use "cyclic".')
    return list(itertools.permutations(range(count)))


def _in_order(readings: Sequence[Reading]) -> RecurrentState:
    """The state after the texts one after the other, each layer by itself."""
    if not all(reading.decays for reading in readings[1:]):
        raise ValueError(
            "Merging in an order needs what each text leaves of the state before it: read the texts with "
            'record_decays=True (lengthgen state read --decays), or merge with how="mean".'
        )
    state = readings[0].state
    for reading in readings[1:]:
        state = tuple(
            LayerState(decay.of(before.recurrent) + after.recurrent, _last_columns(before.conv, after.conv, reading))
            for before, after, decay in zip(state, reading.state, reading.decays, strict=True)
        )
    return state


def _last_columns(before: Tensor, after: Tensor, reading: Reading) -> Tensor:
    """The convolution part after two texts: that of the second, unless it is shorter than the convolution."""
    if after.ndim < 3 or reading.position >= after.shape[2]:
        return after
    return torch.cat([before[..., reading.position :], after[..., -reading.position :]], dim=-1)


def _combined(states: Sequence[RecurrentState], divisor: int) -> RecurrentState:
    return tuple(
        layer_state(torch.stack(parts).sum(0) / divisor for parts in zip(*layers, strict=True))
        for layers in zip(*states, strict=True)
    )


def _check_same_model(readings: Sequence[Reading]) -> None:
    if not readings:
        raise ValueError("Give at least one reading.")
    origins = [reading.origin for reading in readings]
    known = {(origin.weights, origin.dtype) for origin in origins if origin is not None}
    shapes = {tuple(part.shape for layer in reading.state for part in layer) for reading in readings}
    if len(known) > 1 or len(shapes) > 1:
        names = ", ".join(sorted({origin.name for origin in origins if origin is not None}))
        raise ValueError(
            f"The readings come from models with different weights or numbers of rows ({names}): only readings of one "
            "model can be compared or merged."
        )
