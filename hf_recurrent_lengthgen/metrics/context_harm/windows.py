"""Excess loss from context (`context_harm`): the cost of context beyond the training length, on the same tokens.

At position t it is the NLL given the whole context minus the NLL of the same token given only its last tokens, at most
as many as the model was trained on. The difficulty of the text cancels. It is zero for a model that uses no tokens
before the truncated context.

Windows, with T the training length and h = T // 2: a window starts at every multiple w of h and runs from the zero
state over the inputs tokens[w : w + T]. It scores the positions [w, w + T) with 1 to T tokens of context (indexing of
`streaming`). Its last h positions, with T - h + 1 to T tokens of context, give the truncated-context NLLs of those
positions: the windows tile [T - h, L), each position once. Excess loss is defined on [T, L). If L cuts the last
window, that window is shorter. Full windows also give the NLL by position inside [0, T), averaged over many windows of
each sequence.
"""

from typing import NamedTuple

import numpy as np
from torch import nn

from hf_recurrent_lengthgen.evaluation.readers import reader_of
from hf_recurrent_lengthgen.evaluation.statistics import check_training_length
from hf_recurrent_lengthgen.evaluation.streaming import Tokens, check_tokens, progress_bar, reading_plan, stream_chunks
from hf_recurrent_lengthgen.models.modeling_protocols import evaluation_mode


class WindowNll(NamedTuple):
    """NLL in nats per token from the zero state.

    truncated: (S, L - T) float32; entry j belongs to position T + j.
    in_window: (S, T) float64; entry i is the mean over a sequence's full windows, at i + 1 tokens of context.
    """

    truncated: np.ndarray
    in_window: np.ndarray


def window_nll(
    model: nn.Module,
    tokens: Tokens,
    training_length: int,
    *,
    batch_size: int | None = None,
    chunk_length: int | None = None,
    progress: bool = True,
) -> WindowNll:
    """Run all windows of the module's definition; about two forward passes per token.

    Args:
        model, tokens, progress: As in `stream_nll`, with L > T.
        training_length: T in tokens.
        batch_size, chunk_length: Windows, and tokens of each, per forward pass; by default what memory limits allow.

    Raises:
        ValueError: as in `stream_nll`, and for L <= training_length or training_length < 4.
    """
    check_training_length(training_length)
    reader, half = reader_of(model), training_length // 2
    array = check_tokens(tokens, reader.vocabulary, training_length + 1)
    sequences, length = array.shape[0], array.shape[1] - 1
    full = list(range(0, length - training_length + 1, half))
    tail = full[-1] + half
    truncated = np.empty((sequences, length - training_length), np.float32)
    in_window = np.zeros((sequences, training_length))

    windows = [(sequence, start) for sequence in range(sequences) for start in full]
    scored_in_tail = length - tail - (training_length - half)
    tail_rows = range(sequences if scored_in_tail > 0 else 0)
    total = len(windows) * training_length + len(tail_rows) * (length - tail)
    with evaluation_mode(reader.model), progress_bar(total, "windows", progress) as bar:

        def run(origins: list[tuple[int, int]], width: int) -> np.ndarray:
            """NLL (B, width) of windows that start at (sequence, position)."""
            bar.update(len(origins) * width)
            rows = np.stack([array[sequence, start : start + width + 1] for sequence, start in origins])
            _, chunk = reading_plan(reader, len(rows), width, len(rows), chunk_length)
            parts = stream_chunks(reader, rows, chunk, None, origins)
            return np.concatenate([part.nll.cpu().numpy() for part in parts], 1)

        # Whole windows, so that no state is carried inside one, as long as their tokens fit into a forward pass.
        batch, _ = reading_plan(reader, len(windows), training_length, batch_size, chunk_length, training_length)
        for first in range(0, len(windows), batch):
            origins = windows[first : first + batch]
            for (sequence, start), nll in zip(origins, run(origins, training_length), strict=True):
                in_window[sequence] += nll
                if start:
                    truncated[sequence, start - half : start] = nll[training_length - half :]
        for first in tail_rows[::batch]:
            rows = tail_rows[first : first + batch]
            nll = run([(sequence, tail) for sequence in rows], length - tail)
            truncated[rows.start : rows.stop, -scored_in_tail:] = nll[:, training_length - half :]
    return WindowNll(truncated, in_window / len(full))


def context_use_bands(training_length: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Positions [T/4 - w, T/4 + w) and [T - 2w, T) with w = max(1, T // 16) and T/4 rounded down.

    A model uses its context if its in-window NLL falls from the first band to the second.
    """
    width, quarter = max(1, training_length // 16), training_length // 4
    return (quarter - width, quarter + width), (training_length - 2 * width, training_length)
