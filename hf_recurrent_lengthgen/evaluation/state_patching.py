"""Which heads do the harm: the states of some heads are exchanged for other states of the same text.

At position n of a long text, the whole context gives the state h, and its last n' tokens alone give the state h'. The
next W tokens are read from h and from h', with n' + W <= T, so that the context of h' stays within the training length
T. Harm is the NLL from h minus the NLL from h'. Then, for some heads at a time:

    restored = NLL from h, minus NLL from h with these heads taken from h'     (the harm that goes with them)
    broken   = NLL from h' with these heads taken from h, minus NLL from h'    (the harm that they do alone)

If several heads fail at once, restoring one may change little, while breaking one shows its effect. So shares of the
harm need not add up to 1. Only the recurrent part is exchanged head by head. Models with attention are refused.
"""

from collections.abc import Sequence
from types import TracebackType
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from hf_recurrent_lengthgen.evaluation.readers import Reader, reader_of
from hf_recurrent_lengthgen.evaluation.state_trajectory import StateObserver, as_units
from hf_recurrent_lengthgen.evaluation.streaming import (
    Chunk,
    Tokens,
    check_tokens,
    progress_bar,
    reading_plan,
    state_arrays,
    state_from,
    stream_chunks,
)
from hf_recurrent_lengthgen.models.evaluation_mode import evaluation_mode
from hf_recurrent_lengthgen.models.recurrent_state import (
    RecurrentState,
    concatenate_rows,
    state_batch_size,
    state_to,
    take_rows,
)

Heads = Sequence[tuple[int, int]]
"""(layer, unit) of some heads; see `state_trajectory.as_units` for layers without heads."""


class Patching(NamedTuple):
    """NLL in nats per token over the W = `width` tokens after the exchange, for each of S sequences.

    `full` (S,) is from h after `position` tokens, `short` (S,) from h' after `kept` tokens; `restored` and `broken`
    (groups, S) are for each group of heads.
    """

    position: int
    kept: int
    width: int
    full: np.ndarray
    short: np.ndarray
    restored: np.ndarray
    broken: np.ndarray

    @property
    def harm(self) -> np.ndarray:
        return np.asarray(self.full - self.short)


def patched_place(length: int, training_length: int) -> tuple[int, int]:
    """Default position and width of `patch_heads` for texts of `length` positions."""
    width = max(1, min(training_length // 2, length - training_length))
    return length - width, width


class StateKeeper:
    """Keeps the states after `position` tokens, for `patch_heads`, of texts that are read for an observer.

    A stream takes it in place of the observer. With None it keeps nothing.
    """

    def __init__(self, observer: StateObserver, position: int | None) -> None:
        self._observer, self._position = observer, position
        self.positions = tuple(sorted({*observer.positions, *(() if position is None else (position,))}))
        self._states: list[RecurrentState] = []

    def __enter__(self) -> "StateKeeper":
        self._observer.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._observer.__exit__(kind, error, trace)

    def see(self, first_sequence: int, chunk: Chunk) -> None:
        self._observer.see(first_sequence, chunk)
        if chunk.start + chunk.nll.shape[1] == self._position:
            self._states.append(state_to(chunk.state, "cpu"))  # other texts follow before it is needed

    def arrays(self) -> dict[str, np.ndarray]:
        kept = {"groups": np.array(len(self._states))} if self._states else {}
        for group, state in enumerate(self._states):
            kept |= state_arrays(state, f"group.{group}.")
        return self._observer.arrays() | {f"keeper.{name}": array for name, array in kept.items()}

    def restore(self, arrays: dict[str, np.ndarray]) -> None:
        self._observer.restore(arrays)
        groups = int(arrays.get("keeper.groups", 0))
        self._states = [state_from(arrays, f"keeper.group.{group}.", torch.device("cpu")) for group in range(groups)]

    def state(self) -> RecurrentState | None:
        """The state of all texts that were read, None without any."""
        return concatenate_rows(self._states) if self._states else None


def patch_heads(
    model: nn.Module,
    tokens: Tokens,
    training_length: int,
    groups: Sequence[Heads],
    *,
    position: int | None = None,
    width: int | None = None,
    state_there: RecurrentState | None = None,
    batch_size: int | None = None,
    progress: bool = True,
) -> Patching:
    """Exchange groups of heads at a position of long texts and measure the NLL of the tokens after it.

    Args:
        model: A model whose state is a value.
        tokens: Token ids (S, L + 1).
        training_length: Tokens per training sequence, T.
        groups: Groups of heads that are exchanged together; each group is one measurement.
        position: Tokens read before the exchange; by default all but the last `width`.
        width: Tokens that are scored; by default half the training length, or the length of the texts beyond it if
            that is less. h' has read the T - `width` tokens before them.
        state_there: The states h, S rows, if they are known; None to read the texts up to `position`.
        batch_size, progress: As in `stream_nll`.

    Raises:
        ValueError: for models without a state that is a value, heads that do not exist, a width not below T (so also
            for T = 1), texts or positions that are too short, and states of another number of texts.
    """
    reader = reader_of(model)
    if not reader.carried_by_row:
        raise ValueError(reader.refusal("an exchange of heads"))
    array = check_tokens(tokens, reader.vocabulary, training_length + 1)
    length = array.shape[1] - 1
    width = patched_place(length, training_length)[1] if width is None else width
    if not 1 <= width < training_length:
        raise ValueError(f"width must be at least 1 and below the training length {training_length}, got {width}.")
    kept = training_length - width
    position = length - width if position is None else position
    if not training_length <= position <= length - width:
        raise ValueError(
            f"position must be from the training length {training_length} to {length - width}, which leaves {width} "
            f"tokens to score; got {position}."
        )
    _check_groups(groups, reader.model.zero_state(1))
    if state_there is not None and state_batch_size(state_there) != len(array):
        raise ValueError(f"state_there must have a row per text, {len(array)}, got {state_batch_size(state_there)}.")
    after = array[:, position : position + width + 1]
    variants = 2 + 2 * len(groups)
    total = len(array) * (position * (state_there is None) + kept + variants * width)
    with evaluation_mode(reader.model), progress_bar(total, "patching", progress) as bar:
        if state_there is None:
            full = _state_after(reader, array[:, : position + 1], batch_size, bar)
        else:
            full = state_to(state_there, reader.device)
        short = _state_after(reader, array[:, position - kept : position + 1], batch_size, bar)
        nll = np.empty((variants, len(array)))
        for index in range(variants):
            if index < 2:
                state = (full, short)[index]
            else:
                group = groups[(index - 2) // 2]
                state = exchange(full, short, group) if index % 2 == 0 else exchange(short, full, group)
            nll[index] = _nll_from(reader, state, after, batch_size, bar)
    return Patching(position, kept, width, nll[0], nll[1], nll[0] - nll[2::2], nll[3::2] - nll[1])


@torch.no_grad()
def exchange(state: RecurrentState, other: RecurrentState, heads: Heads) -> RecurrentState:
    """`state` with the recurrent part of some heads taken from `other`; a new value."""
    layers = list(state)
    for layer in {layer for layer, _ in heads}:
        units = as_units(state[layer].recurrent).clone()
        chosen = [unit for other_layer, unit in heads if other_layer == layer]
        units[:, chosen] = as_units(other[layer].recurrent)[:, chosen]
        layers[layer] = state[layer]._replace(recurrent=units.reshape(state[layer].recurrent.shape))
    return tuple(layers)


def _check_groups(groups: Sequence[Heads], state: RecurrentState) -> None:
    units = [as_units(layer.recurrent).shape[1] if layer.recurrent[0].numel() else 0 for layer in state]
    for layer, unit in (head for group in groups for head in group):
        if not 0 <= layer < len(units) or not 0 <= unit < units[layer]:
            raise ValueError(
                f"There is no head {unit} in layer {layer}: layers 0 to {len(units) - 1} have {units} heads or "
                "channel groups."
            )
    if not groups or not all(groups):
        raise ValueError("groups must hold at least one group, and each group at least one head (layer, head).")


def _state_after(reader: Reader, rows: np.ndarray, batch_size: int | None, bar: object) -> RecurrentState:
    """The state after all tokens but the last of rows (S, n + 1)."""
    states = []
    batch, chunk = reading_plan(reader, len(rows), rows.shape[1] - 1, batch_size, None)
    for first in range(0, len(rows), batch):
        origins = [(row, 0) for row in range(first, min(first + batch, len(rows)))]
        for piece in stream_chunks(reader, rows[first : first + batch], chunk, None, origins):
            bar.update(piece.nll.numel())  # type: ignore[attr-defined]
        states.append(piece.state)
    return concatenate_rows(states)


def _nll_from(
    reader: Reader, state: RecurrentState, rows: np.ndarray, batch_size: int | None, bar: object
) -> np.ndarray:
    """Mean NLL of each row (S, W + 1), read from a state, (S,)."""
    batch, chunk = reading_plan(reader, len(rows), rows.shape[1] - 1, batch_size, None)
    found = []
    for first in range(0, len(rows), batch):
        part = slice(first, min(first + batch, len(rows)))
        pieces = []
        for piece in stream_chunks(reader, rows[part], chunk, take_rows(state, part)):
            pieces.append(piece.nll)
            bar.update(piece.nll.numel())  # type: ignore[attr-defined]
        found.append(torch.cat(pieces, 1).double().mean(1).cpu().numpy())
    return np.concatenate(found)
