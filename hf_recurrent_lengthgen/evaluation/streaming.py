"""Position-wise negative log-likelihood of long streams, read in chunks with carried states.

Buitrago Ruiz and Gu, 2025 (arXiv:2507.02782), Definition 3.1, report perplexity by position, as the mean over texts:
they print E[exp(q(x_t | x_0:t-1))], where exp(-log q) is meant. Here the quantity is the negative log-likelihood (NLL)
in nats per token, and the perplexity of several texts is the exp of its mean, as usual: a few tokens of each text make
up most of a mean of exps. `EvaluationResult.mean_perplexity` has the mean of exps.

Indexing, used in the whole package: tokens (S, L + 1) give NLLs (S, L), and entry t is the NLL of
tokens[:, t + 1] given tokens[:, : t + 1]. Position t is thus scored with t + 1 tokens of context, and a model
trained on blocks of T + 1 tokens was trained on the positions [0, T).
"""

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from tqdm.auto import tqdm  # type: ignore[import-untyped]

from hf_recurrent_lengthgen.evaluation.readers import Reader, nll_of, reader_of
from hf_recurrent_lengthgen.evaluation.text_configs import attention_window
from hf_recurrent_lengthgen.models.modeling_protocols import evaluation_mode
from hf_recurrent_lengthgen.models.state_value import RecurrentState, concatenate_rows, state_batch_size, take_rows

TOKENS_PER_FORWARD, TOKENS_PER_FORWARD_ON_CPU = 4096, 2048
"""Default limits of tokens in one forward pass (rows x chunk), which bound the activations. More take longer per token
on a CPU, whose caches they leave."""
LOGITS_PER_FORWARD = 2**25
"""Default limit of logits in one forward pass (rows x chunk x vocabulary): 128 MiB."""
STATES_PER_FORWARD = 2**28
"""Default limit of elements in the states, keys and values that the rows of a forward pass carry: 1 GiB."""
LOGITS_AT_ONCE = 2**29
"""Limit of logits in one forward pass of a model that must read a text at once: 2 GiB."""
SHORTEST_CHUNK = 256
"""Rows are split into batches before a chunk gets shorter than this many tokens."""

Tokens = np.ndarray | Tensor
"""Token ids, (S, L + 1), of any integer dtype; cast chunk by chunk, so a memory map is not loaded as a whole."""


def check_forward_sizes(batch_size: int | None, chunk_length: int | None) -> None:
    for name, value in (("batch_size", batch_size), ("chunk_length", chunk_length)):
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, or None to choose by memory; got {value}.")


class StreamNll(NamedTuple):
    """NLL in nats per token, (S, L) float32, and the state after tokens[:, :L], () for a model without states."""

    nll: np.ndarray
    final_state: RecurrentState


class Chunk(NamedTuple):
    """Positions [start, start + C) of some rows: their NLL (B, C) float32, and the state and cache after them.

    Reading on may change the cache, see `StateReader.fork`.
    """

    start: int
    nll: Tensor
    state: RecurrentState
    cache: Any = None


def check_tokens(tokens: Tokens, vocabulary: int, shortest: int = 1) -> np.ndarray:
    """Token ids (S, L + 1) as an array of the same integer dtype, without a copy of CPU data.

    Raises:
        ValueError: for another shape or dtype, no sequence, L < `shortest`, or ids outside the vocabulary.
    """
    array = tokens.numpy(force=True) if isinstance(tokens, Tensor) else np.asarray(tokens)
    if array.ndim != 2 or not np.issubdtype(array.dtype, np.integer):
        raise ValueError(
            f"tokens must be integers of shape (sequences, length + 1), got {array.dtype} of shape {array.shape}."
        )
    if len(array) < 1 or array.shape[1] < shortest + 1:
        raise ValueError(
            f"tokens of shape {array.shape} are too few: give at least one sequence, and {shortest + 1} tokens in "
            "each (one more than positions to score)."
        )
    lowest, highest = int(array.min()), int(array.max())
    if lowest < 0 or highest >= vocabulary:
        row, position = np.argwhere((array < 0) | (array >= vocabulary))[0]
        raise ValueError(
            f"Token ids must be from 0 to {vocabulary - 1}, the model's vocabulary, got {lowest} to {highest} (first "
            f"{array[row, position]}, row {row}, position {position}): use the model's own tokenizer, and no label "
            "mask such as -100."
        )
    return array


def state_elements(model: Any) -> int:
    """Elements in the state of a row, with the window of a model that forgets; 0 for a model without states."""
    shapes = model.state_shapes() if hasattr(model, "state_shapes") else ()
    return sum(math.prod(part) for shape in shapes for part in shape)


def carried_elements(reader: Reader, length: int) -> int:
    """Elements that a row carries after `length` tokens: its state, and the keys and values of attention layers."""
    tokens = min(length, attention_window(reader.model) or length)
    return state_elements(reader.model) + tokens * reader.elements_per_token


def forward_plan(
    rows: int,
    length: int,
    vocabulary: int,
    batch_size: int | None,
    chunk_length: int | None,
    state: int = 0,
    shortest: int = SHORTEST_CHUNK,
    most: int = TOKENS_PER_FORWARD,
) -> tuple[int, int]:
    """Rows and tokens of one forward pass, by default the most within the three limits of this module.

    `state` is the `carried_elements` of a row. Rows are split into batches before a chunk gets shorter than
    `shortest`. `most` is the limit of tokens.
    """
    check_forward_sizes(batch_size, chunk_length)
    tokens = max(1, min(most, LOGITS_PER_FORWARD // vocabulary))
    if batch_size is None:
        batch_size = max(1, tokens // min(length, chunk_length or shortest))
        batch_size = max(1, min(batch_size, STATES_PER_FORWARD // max(state, 1)))
    batch_size = min(batch_size, rows)
    return batch_size, min(length, chunk_length or max(1, tokens // batch_size))


@torch.inference_mode()
def stream_chunks(
    reader: Reader,
    rows: np.ndarray,
    chunk_length: int,
    initial_state: RecurrentState | None = None,
    origins: Sequence[tuple[int, int]] | None = None,
    stops: Sequence[int] = (),
    cache: Any = None,
) -> Iterator[Chunk]:
    """Run checked rows (B, L + 1) chunk by chunk, in the current mode of the model, with one chunk's logits in memory.

    Args:
        reader: A reader of the model; one that carries nothing reads everything at once.
        rows: Token ids.
        chunk_length: Tokens per forward pass.
        initial_state: State before the first token, with B rows; None for zero.
        origins: The sequence of each row and its start position in it, named in errors.
        stops: Numbers of tokens after which a chunk also ends, so that the state there can be seen.
        cache: The reader's cache after the tokens before the first, in place of a state.

    Raises:
        ValueError: at the first NaN or infinite NLL or state, with position and sequence.
    """
    length = rows.shape[1] - 1
    origins = origins or [(row, 0) for row in range(len(rows))]
    cache = reader.begin(initial_state) if cache is None else cache
    for begin, stop in chunk_borders(length, chunk_length if reader.carries else length, stops):
        # One token more than the model reads: the last target of a chunk is the first input of the next.
        ids = torch.from_numpy(rows[:, begin : stop + 1].astype(np.int64)).to(reader.device)
        logits, cache = reader.read(ids[:, :-1], cache)
        nll = nll_of(logits, ids[:, 1:])
        state = reader.state(cache)
        _check_finite(nll, state, begin, stop, origins)
        yield Chunk(begin, nll, state, cache)


def chunk_borders(
    length: int, chunk_length: int, stops: Sequence[int] = (), start: int = 0
) -> Iterator[tuple[int, int]]:
    """Start and stop of chunks of [start, length) of at most `chunk_length` tokens, which also end at `stops`."""
    edges = [start, *sorted({stop for stop in stops if start < stop < length}), length]
    for begin, end in pairwise(edges):
        for first in range(begin, end, chunk_length):
            yield first, min(first + chunk_length, end)


def _check_finite(
    nll: Tensor, state: RecurrentState, start: int, stop: int, origins: Sequence[tuple[int, int]]
) -> None:
    broken = ""
    if bool((bad := ~nll.isfinite()).any()):
        column = int(bad.any(0).nonzero()[0])
        row = int(bad[:, column].nonzero()[0])
        sequence, origin = origins[row]
        broken = (
            f"The NLL is {float(nll[row, column])} at position {origin + start + column} of sequence {sequence}, "
            f"{start + column + 1} tokens after the start of the context"
        )
    for index, layer in enumerate(state):
        for part in layer:
            if not broken and bool((bad := ~part.isfinite()).any()):
                sequence, origin = origins[int(bad.flatten(1).any(1).nonzero()[0])]
                broken = (
                    f"The state of layer {index} has NaN or infinite values after position {origin + stop - 1} of "
                    f"sequence {sequence}; it was finite before position {origin + start}"
                )
    if broken:
        raise ValueError(
            f"{broken}: the model overflows there or has broken weights. Evaluate in float32, or a shorter length."
        )


def reading_plan(
    reader: Reader,
    rows: int,
    length: int,
    batch_size: int | None,
    chunk_length: int | None,
    shortest: int = SHORTEST_CHUNK,
    logits: int | None = None,
) -> tuple[int, int]:
    """`forward_plan` for a reader; one that carries nothing reads whole texts.

    `logits` are those of a token that the model computes, by default for its whole vocabulary.

    Raises:
        ValueError: for a text that does not fit into one forward pass of such a model.
    """
    most = TOKENS_PER_FORWARD_ON_CPU if reader.device.type == "cpu" else TOKENS_PER_FORWARD
    logits = logits or reader.vocabulary
    if reader.carries:
        state = carried_elements(reader, length)
        return forward_plan(rows, length, logits, batch_size, chunk_length, state, shortest, most)
    if length > (longest := LOGITS_AT_ONCE // logits):
        reader.refuse(f"a text of {length:,} tokens", f" At once it can read at most {longest:,} tokens here.")
    batch = max(1, LOGITS_PER_FORWARD // (length * logits), most // length)
    return min(rows, batch_size or batch), length


def progress_bar(total: int, description: str, enabled: bool) -> Any:
    # below the bar of a training, it goes when it is done
    return tqdm(total=total, desc=description, unit="tok", unit_scale=True, leave=None, disable=not enabled)


class Observer(Protocol):
    """Sees the chunks of a stream, which also end after each of `positions` tokens, with their first sequence."""

    @property
    def positions(self) -> Sequence[int]: ...

    def see(self, first_sequence: int, chunk: Chunk) -> None: ...


def stream_nll(
    model: nn.Module,
    tokens: Tokens,
    *,
    initial_state: RecurrentState | None = None,
    batch_size: int | None = None,
    chunk_length: int | None = None,
    observer: Observer | None = None,
    progress: bool = True,
) -> StreamNll:
    """Position-wise NLL of whole streams of any length (Buitrago Ruiz and Gu, 2025, Definition 3.1).

    With a recurrent model memory grows by 4 bytes per token; models with attention also keep keys and values.

    Args:
        model: A causal language model, see `reader_of`; its mode is restored.
        tokens: Token ids (S, L + 1).
        initial_state: State before the first token, with S rows on the model's device; None for zero.
        batch_size, chunk_length: Sequences, and tokens of each, per forward pass; by default what memory allows.
        observer: Sees each chunk.
        progress: Show a progress bar.

    Raises:
        ValueError: for unusable models or tokens, a state with another number of rows, a text too long for a model
            that must read it at once, and at the first NaN or infinite NLL or state.
    """
    reader = reader_of(model)
    array = check_tokens(tokens, reader.vocabulary)
    sequences, length = array.shape[0], array.shape[1] - 1
    if initial_state is not None and state_batch_size(initial_state) != sequences:
        raise ValueError(
            f"initial_state must have one row per sequence, {sequences}, got {state_batch_size(initial_state)}."
        )
    batch, chunk = reading_plan(reader, sequences, length, batch_size, chunk_length)
    stops = () if observer is None else observer.positions
    nll = np.empty((sequences, length), np.float32)
    final_states: list[RecurrentState] = []
    with evaluation_mode(reader.model), progress_bar(sequences * length, "stream", progress) as bar:
        for first in range(0, sequences, batch):
            rows = slice(first, min(first + batch, sequences))
            state = None if initial_state is None else take_rows(initial_state, rows)
            origins = [(sequence, 0) for sequence in range(rows.start, rows.stop)]
            for read in stream_chunks(reader, array[rows], chunk, state, origins, stops):
                stop = read.start + read.nll.shape[1]
                nll[rows, read.start : stop] = read.nll.cpu().numpy()
                if observer is not None:
                    observer.see(first, read)
                bar.update(read.nll.numel())
            final_states.append(read.state)
    # Joined outside inference mode, so that they are ordinary tensors, from which training can start.
    return StreamNll(nll, concatenate_rows(final_states))
