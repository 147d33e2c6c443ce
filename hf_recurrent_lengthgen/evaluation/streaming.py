"""Position-wise negative log-likelihood of long streams, in chunks with the state carried.

"Unexplored states" (Buitrago & Gu 2025, arXiv:2507.02782), Definition 3.1 reports perplexity by position.
Here the quantity is the negative log-likelihood (NLL) in nats per token; perplexity is its exponential.

Indexing, used in the whole package: tokens (S, L + 1) give NLLs (S, L), and entry t is the NLL of
tokens[:, t + 1] given tokens[:, : t + 1]. Position t is thus scored with t + 1 tokens of context, and a model
trained on blocks of T + 1 tokens was trained on the positions [0, T).
"""

import inspect
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm.auto import tqdm  # type: ignore[import-untyped]

from hf_recurrent_lengthgen.models.forgetting import Forgetting
from hf_recurrent_lengthgen.models.recurrent_state import (
    RecurrentState,
    concatenate_rows,
    state_batch_size,
    take_rows,
)

TOKENS_PER_FORWARD = 4096
"""Most tokens in one forward pass (rows x chunk) unless the caller chooses; bounds the activations."""
LOGITS_PER_FORWARD = 2**25
"""Most logits in one forward pass (rows x chunk x vocabulary) unless the caller chooses: 128 MiB."""
STATES_PER_FORWARD = 2**28
"""Most numbers in the windows of states that forget (rows x state) unless the caller chooses: 1 GiB."""
SHORTEST_CHUNK = 64
"""Rows are split into batches before a chunk gets shorter than this many tokens."""

Tokens = np.ndarray | Tensor
"""Integer token ids, (S, L + 1), of any integer dtype; cast chunk by chunk, so a memory map stays one."""


class StreamNll(NamedTuple):
    """NLL in nats per token, (S, L) float32, and the state after tokens[:, :L]."""

    nll: np.ndarray
    final_state: RecurrentState


class Chunk(NamedTuple):
    """Positions [start, start + C) of some rows: their NLL (B, C) float32 and the state after them."""

    start: int
    nll: Tensor
    state: RecurrentState


def check_stateful(model: nn.Module) -> int:
    """Raise a `ValueError` unless `model.forward` takes `initial_state`; return its vocabulary size."""
    if "initial_state" not in inspect.signature(model.forward).parameters:
        raise ValueError(
            f"{type(model).__name__}.forward takes no initial_state, so its state cannot be carried from "
            "chunk to chunk. Load it with hf_recurrent_lengthgen.load_model(...), or wrap it with stateful(model); "
            "of a PEFT wrapper, give model.get_base_model()."
        )
    config: Any = model.config
    return int(config.vocab_size)


def check_tokens(tokens: Tokens, vocabulary: int, shortest: int = 1) -> np.ndarray:
    """Token ids (S, L + 1) as an array of their own integer dtype, without a copy of CPU data.

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
            f"tokens of shape {array.shape} are too few: needed are at least one sequence and {shortest + 1} "
            "tokens in each (one more than positions to score)."
        )
    lowest, highest = int(array.min()), int(array.max())
    if lowest < 0 or highest >= vocabulary:
        raise ValueError(
            f"Token ids run from {lowest} to {highest}, the model's vocabulary from 0 to {vocabulary - 1}: "
            "tokenize with the model's own tokenizer, without a label mask such as -100."
        )
    return array


def window_elements(model: Any) -> int:
    """Numbers in the state of a row if it holds a window of tokens (`Forgetting`), which makes it large; else 0."""
    if Forgetting.of(model.config).window is None:
        return 0
    return sum(math.prod(part) for shape in model.state_shapes() for part in shape)


def forward_plan(
    rows: int, length: int, vocabulary: int, batch_size: int | None, chunk_length: int | None, state: int = 0
) -> tuple[int, int]:
    """Rows and tokens of one forward pass: the caller's, or the most within the three limits of this module.

    `state` is the `window_elements` of a row.
    """
    for name, value in (("batch_size", batch_size), ("chunk_length", chunk_length)):
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, or None to choose by memory; got {value}.")
    tokens = max(1, min(TOKENS_PER_FORWARD, LOGITS_PER_FORWARD // vocabulary))
    if batch_size is None:
        batch_size = max(1, tokens // min(length, chunk_length or SHORTEST_CHUNK))
        batch_size = max(1, min(batch_size, STATES_PER_FORWARD // max(state, 1)))
    batch_size = min(batch_size, rows)
    return batch_size, min(length, chunk_length or max(1, tokens // batch_size))


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put all modules into evaluation mode, and exactly those back that were in training mode."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


@torch.inference_mode()
def stream_chunks(
    model: nn.Module,
    rows: np.ndarray,
    chunk_length: int,
    initial_state: RecurrentState | None = None,
    origins: Sequence[tuple[int, int]] | None = None,
) -> Iterator[Chunk]:
    """Run rows (B, L + 1) through the model chunk by chunk; at most one chunk's logits exist at any time.

    The building block of `stream_nll`: it does not check the model or the ids, nor set evaluation mode.

    Args:
        model: A model of this package's contract.
        rows: Checked token ids.
        chunk_length: Tokens per forward pass.
        initial_state: State before the first token, with B rows; zero when None.
        origins: The sequence and the position in it at which each row begins, named in errors.

    Raises:
        ValueError: at the first NaN or infinite NLL or state, naming its position and sequence.
    """
    device = next(model.parameters()).device
    length = rows.shape[1] - 1
    origins = origins or [(row, 0) for row in range(len(rows))]
    state = initial_state
    # A stock hybrid (hybrids.stateful) has attention layers too, which must see all of the text.
    attends = getattr(model, "attends", False)
    everything = {"attention_cache": model.new_attention_cache()} if attends else {}  # type: ignore[operator]
    for start in range(0, length, chunk_length):
        stop = min(start + chunk_length, length)
        # One token more than is fed: the last target of a chunk is the first input of the next.
        ids = torch.from_numpy(rows[:, start : stop + 1].astype(np.int64)).to(device)
        output = model(input_ids=ids[:, :-1], initial_state=state, output_final_state=True, **everything)
        nll = F.cross_entropy(output.logits.float().flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
        nll, state = nll.view(len(rows), stop - start), output.final_state
        del output
        _check_finite(nll, state, start, stop, origins)
        yield Chunk(start, nll, state)


def _check_finite(
    nll: Tensor, state: RecurrentState, start: int, stop: int, origins: Sequence[tuple[int, int]]
) -> None:
    bad = ~nll.isfinite()
    if bool(bad.any()):
        column = int(bad.any(0).nonzero()[0])
        row = int(bad[:, column].nonzero()[0])
        sequence, origin = origins[row]
        raise ValueError(
            f"The NLL is {float(nll[row, column])} at position {origin + start + column} of sequence "
            f"{sequence}, {start + column + 1} tokens after the start of the context: the model overflows "
            "there or has broken weights. Evaluate in float32, or a shorter length."
        )
    for index, layer in enumerate(state):
        for part in layer:
            if not bool(part.isfinite().all()):
                row = int((~part.isfinite()).flatten(1).any(1).nonzero()[0])
                sequence, origin = origins[row]
                raise ValueError(
                    f"The state of layer {index} has NaN or infinite values after position "
                    f"{origin + stop - 1} of sequence {sequence}; it was finite before position "
                    f"{origin + start}. Evaluate in float32, or a shorter length."
                )


def progress_bar(total: int, description: str, enabled: bool) -> Any:
    """A bar that counts tokens."""
    return tqdm(total=total, desc=description, unit="tok", unit_scale=True, disable=not enabled)


def stream_nll(
    model: nn.Module,
    tokens: Tokens,
    *,
    initial_state: RecurrentState | None = None,
    batch_size: int | None = None,
    chunk_length: int | None = None,
    progress: bool = True,
) -> StreamNll:
    """Position-wise NLL of whole streams ("Unexplored states", Definition 3.1), of any length.

    Memory grows only by the 4 bytes per token of the result, and in hybrids by the keys and values of their
    attention. The pieces do not change the values beyond rounding.

    Args:
        model: A model whose forward takes `initial_state` and returns `logits` (B, T, V) and `final_state`;
            run in evaluation mode on the device of its parameters, and left in the mode it had.
        tokens: Token ids (S, L + 1).
        initial_state: State before the first token, with S rows on the model's device; zero when None.
        batch_size: Sequences per forward pass; by default as many as memory limits allow.
        chunk_length: Tokens per sequence and forward pass; by default as many as memory limits allow.
        progress: Show a progress bar.

    Raises:
        ValueError: for a model without the contract, unusable tokens, a state of another number of rows,
            and at the first NaN or infinite NLL or state.
    """
    vocabulary = check_stateful(model)
    array = check_tokens(tokens, vocabulary)
    sequences, length = array.shape[0], array.shape[1] - 1
    if initial_state is not None and state_batch_size(initial_state) != sequences:
        raise ValueError(
            f"initial_state has {state_batch_size(initial_state)} rows, the tokens {sequences} sequences."
        )
    batch, chunk = forward_plan(sequences, length, vocabulary, batch_size, chunk_length, window_elements(model))
    nll = np.empty((sequences, length), np.float32)
    final_states = []
    with evaluation_mode(model), progress_bar(sequences * length, "stream", progress) as bar:
        for first in range(0, sequences, batch):
            rows = slice(first, min(first + batch, sequences))
            start_state = None if initial_state is None else take_rows(initial_state, rows)
            origins = [(sequence, 0) for sequence in range(rows.start, rows.stop)]
            for piece in stream_chunks(model, array[rows], chunk, start_state, origins):
                nll[rows, piece.start : piece.start + piece.nll.shape[1]] = piece.nll.cpu().numpy()
                bar.update(piece.nll.numel())
            final_states.append(piece.state)
    # Joined outside inference mode, which makes them ordinary tensors that one may train from.
    return StreamNll(nll, concatenate_rows(final_states))
