"""Which heads cause the excess loss: the states of some heads are exchanged for other states of the same text.

At position n of a long text, the whole context gives the state h, and its last n' tokens alone give the state h'. The
next W tokens are read from h and from h', with n' + W <= T, so that the context of h' stays within the training length
T. Excess loss is the NLL from h minus the NLL from h'. Then, for some heads at a time:

    restored = NLL from h, minus NLL from h with these heads taken from h'     (the excess loss that they remove)
    broken   = NLL from h' with these heads taken from h, minus NLL from h'    (the excess loss that they add alone)

If several heads fail at once, restoring one may change little, while breaking one shows its effect. So shares of the
excess loss need not add up to 1. Only the recurrent part is exchanged head by head.

In a hybrid, h and h' also hold the keys and values of the attention layers after the same tokens. They can be
exchanged all together, which also moves the positions: "attention" in place of a head.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import nn

from hf_recurrent_lengthgen.evaluation.readers import Reader, StateReader
from hf_recurrent_lengthgen.evaluation.statistics import check_training_length
from hf_recurrent_lengthgen.evaluation.streaming import Tokens, check_tokens, progress_bar, reading_plan, stream_chunks
from hf_recurrent_lengthgen.metrics.states.trajectory import as_units
from hf_recurrent_lengthgen.models.modeling_protocols import evaluation_mode
from hf_recurrent_lengthgen.models.state_value import RecurrentState

Head = tuple[int, int]
"""(layer, unit); see `trajectory.as_units` for layers without heads."""
Heads = Sequence[Head | Literal["attention"]]
"""Some heads, and "attention" for the keys and values of all attention layers."""


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


def patch_heads(
    model: nn.Module,
    tokens: Tokens,
    training_length: int,
    groups: Sequence[Heads],
    *,
    batch_size: int | None = None,
    progress: bool = True,
) -> Patching:
    """Exchange groups of heads at a position of long texts and measure the NLL of the tokens after it.

    Scored is half the training length, or the length of the texts beyond it if that is less; h' has read the tokens
    before them that make up the training length.

    Args:
        model: A model whose state is a value; a hybrid is wrapped by `stateful`.
        tokens: Token ids (S, L + 1).
        training_length: Tokens per training sequence, T.
        groups: Groups of heads that are exchanged together; each group is one measurement.
        batch_size, progress: As in `stream_nll`.

    Raises:
        ValueError: for models without a state that is a value, heads or attention that do not exist, T < 4, and texts
            that are too short.
    """
    reader = StateReader.of(model, "an exchange of heads")
    check_training_length(training_length)
    array = check_tokens(tokens, reader.vocabulary, training_length + 1)
    width = max(1, min(training_length // 2, array.shape[1] - 1 - training_length))
    position, short_length = array.shape[1] - 1 - width, training_length - width
    _check_groups(groups, reader)
    after = array[:, position : position + width + 1]
    nll = np.empty((2 + 2 * len(groups), len(array)))
    total = len(array) * (position + short_length + len(nll) * width)
    together = len(array)
    if not reader.carried_by_row:  # then no more rows than can carry their keys at once
        together, _ = reading_plan(reader, len(array), position, batch_size, None)
        batch_size = together
    with evaluation_mode(reader.model), progress_bar(total, "patching", progress) as bar:
        for first in range(0, len(array), together):
            rows = slice(first, min(first + together, len(array)))
            full = _cache_after(reader, array[rows, : position + 1], batch_size, bar, first)
            short = _cache_after(reader, array[rows, position - short_length : position + 1], batch_size, bar, first)
            for index, cache in enumerate(_variants(full, short, groups)):
                nll[index, rows] = _nll_from(reader, cache, after[rows], batch_size, bar)
            del full, short, cache  # before the next rows fill theirs
    return Patching(position, short_length, width, nll[0], nll[1], nll[0] - nll[2::2], nll[3::2] - nll[1])


def _variants(full: Any, short: Any, groups: Sequence[Heads]) -> Iterator[Any]:
    """The caches (state, keys) to read from: both, then both with each group taken from the other."""
    yield from (full, short)
    for group in groups:
        for (state, keys), (other, other_keys) in ((full, short), (short, full)):
            yield exchange(state, other, heads_of(group)), other_keys if "attention" in group else keys


def heads_of(group: Heads) -> list[Head]:
    """The heads of a group, without attention."""
    return [place for place in group if not isinstance(place, str)]


@torch.no_grad()
def exchange(state: RecurrentState, other: RecurrentState, heads: Sequence[Head]) -> RecurrentState:
    """`state` with the recurrent part of some heads taken from `other`; a new value."""
    layers = list(state)
    for layer in {layer for layer, _ in heads}:
        units = as_units(state[layer].recurrent).clone()
        chosen = [unit for other_layer, unit in heads if other_layer == layer]
        units[:, chosen] = as_units(other[layer].recurrent)[:, chosen]
        layers[layer] = state[layer]._replace(recurrent=units.reshape(state[layer].recurrent.shape))
    return tuple(layers)


def _check_groups(groups: Sequence[Heads], reader: Reader) -> None:
    state = reader.model.zero_state(1)
    units = [as_units(layer.recurrent).shape[1] if layer.recurrent[0].numel() else 0 for layer in state]
    possible: set[Head | str] = {(layer, unit) for layer, count in enumerate(units) for unit in range(count)}
    possible |= set() if reader.carried_by_row else {"attention"}
    if unknown := {place for group in groups for place in group} - possible:
        raise ValueError(
            f"A group holds heads (layer, head), of which the layers of {reader.name} have {units}, and "
            f'"attention" in models with attention layers; got {unknown}.'
        )


def _cache_after(reader: Reader, rows: np.ndarray, batch_size: int | None, bar: Any, sequence: int) -> Any:
    """The cache after all tokens but the last of rows (S, n + 1), the first of which is a sequence of the texts."""
    caches = []
    batch, chunk = reading_plan(reader, len(rows), rows.shape[1] - 1, batch_size, None)
    for first in range(0, len(rows), batch):
        part = rows[first : first + batch]
        origins = [(sequence + first + row, 0) for row in range(len(part))]
        for read in stream_chunks(reader, part, chunk, None, origins):
            bar.update(read.nll.numel())
        caches.append(read.cache)
    return caches[0] if len(caches) == 1 else reader.join_rows(caches)


def _nll_from(reader: StateReader, cache: Any, rows: np.ndarray, batch_size: int | None, bar: Any) -> np.ndarray:
    """Mean NLL of each row (S, W + 1), read from a cache, (S,)."""
    batch, chunk = reading_plan(reader, len(rows), rows.shape[1] - 1, batch_size, None)
    losses = []
    for first in range(0, len(rows), batch):
        part = slice(first, min(first + batch, len(rows)))
        before = reader.fork(cache) if part == slice(0, len(rows)) else reader.take_rows(cache, part)
        nlls = []
        for read in stream_chunks(reader, rows[part], chunk, cache=before):
            nlls.append(read.nll)
            bar.update(read.nll.numel())
        losses.append(torch.cat(nlls, 1).double().mean(1).cpu().numpy())
    return np.concatenate(losses)
