"""In a hybrid, the excess loss from long recurrent states apart from that from long attention.

A text is read up to a border. The next T tokens, as many as the model was trained on, are then read four times: the
recurrent layers go on from the state there or from zero, and the attention layers from the keys and values there or
from none (then at position 0). The last T // 2 of the T tokens are scored, so that each has at least half a training
length of context in all four. With everything of the text and with nothing of it, these are the two NLLs of excess
loss from context (`context_harm/windows.py`), so

    excess loss(recurrent) = NLL(state of the text, no keys) - NLL(zero state, no keys)
    excess loss(attention) = NLL(zero state, keys of the text) - NLL(zero state, no keys)

The two need not add up to the excess loss from both: keys of the text were computed from its states, too.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from hf_recurrent_lengthgen.evaluation.readers import StateReader, reader_of
from hf_recurrent_lengthgen.evaluation.results import Estimate
from hf_recurrent_lengthgen.evaluation.settings import DEFAULTS, EvaluationSettings
from hf_recurrent_lengthgen.evaluation.statistics import check_training_length, estimate, last_doubling
from hf_recurrent_lengthgen.evaluation.streaming import Tokens, check_tokens, chunk_borders, progress_bar, reading_plan
from hf_recurrent_lengthgen.metrics.states.result import AttentionHarm
from hf_recurrent_lengthgen.metrics.states.trajectory import sample_positions
from hf_recurrent_lengthgen.models.modeling_protocols import evaluation_mode


class AttentionApart(NamedTuple):
    """NLL in nats per token after each of P `borders` of S sequences, (S, P), each over T // 2 tokens.

    What goes on from the text: `both` recurrent states and keys, only the states (`recurrent`), only the keys
    (`attention`), or `neither`.
    """

    borders: tuple[int, ...]
    both: np.ndarray
    recurrent: np.ndarray
    attention: np.ndarray
    neither: np.ndarray


@torch.inference_mode()
def attention_apart(
    model: nn.Module,
    tokens: Tokens,
    training_length: int,
    *,
    borders: Sequence[int] | None = None,
    batch_size: int | None = None,
    progress: bool = True,
) -> AttentionApart:
    """Measure what long recurrent states and long attention of a hybrid do, each alone.

    Args:
        model: A hybrid: `stateful(model)` with attention layers.
        tokens: Token ids (S, L + 1).
        training_length: T in tokens.
        borders: Numbers of tokens read before T more are scored, at most L - T; by default the multiples of T in the
            second half of the texts.
        batch_size: Sequences per forward pass; by default what memory allows.
        progress: Show a progress bar.

    Raises:
        ValueError: for models without attention layers or without states, borders outside the texts, T < 4, and
            texts that are too short.
    """
    check_training_length(training_length)
    reader = reader_of(model)
    if not isinstance(reader, StateReader) or not getattr(reader.model, "attends", False):
        raise ValueError(
            f"{reader.name} has no attention layers beside recurrent ones, or is not wrapped: give stateful(model) of "
            "a hybrid. For other models, window_nll measures the excess loss."
        )
    array = check_tokens(tokens, reader.vocabulary, 2 * training_length)
    length = array.shape[1] - 1
    places = _places(borders, length, training_length)
    batch, chunk = reading_plan(reader, len(array), length, batch_size, None)
    nlls = np.empty((4, len(array), len(places)))
    total = len(array) * (places[-1] + 4 * training_length * len(places))
    with evaluation_mode(reader.model), progress_bar(total, "attention apart", progress) as bar:

        def ids(rows: slice, begin: int, stop: int) -> torch.Tensor:
            bar.update((stop - begin) * len(array[rows]))
            return torch.from_numpy(array[rows, begin:stop].astype(np.int64)).to(reader.device)

        for begin in range(0, len(array), batch):
            rows = slice(begin, min(begin + batch, len(array)))
            state, keys = reader.begin(reader.model.first_state(rows.stop - rows.start))
            zero, start = state, 0
            for number, border in enumerate(places):
                for begin_and_stop in chunk_borders(border, chunk, (), start):
                    _, (state, keys) = reader.read(ids(rows, *begin_and_stop), (state, keys), 1)
                start = border
                for case, context in enumerate([(state, keys), (state, None), (zero, keys), (zero, None)]):
                    read, end = ids(rows, border, border + training_length), border + training_length + 1
                    targets = array[rows, end - training_length // 2 : end].astype(np.int64)
                    nlls[case, rows, number] = _mean_nll(reader, context, read, torch.from_numpy(targets))
    if not np.isfinite(nlls).all():
        raise ValueError(
            f"The NLL is NaN or infinite within {training_length} tokens after a border of {places}: the model "
            "overflows there or has broken weights. Evaluate in float32, or shorter texts."
        )
    return AttentionApart(tuple(places), *nlls)


def _places(borders: Sequence[int] | None, length: int, training_length: int) -> list[int]:
    """The borders in order, by default the multiples of T in the second half of texts of `length` tokens."""
    most = length - training_length
    if borders is None:
        first = -(-last_doubling(length, training_length)[0] // training_length) * training_length
        borders = range(min(first, most), most + 1, training_length)
    places = sorted(set(borders))
    if not places or not 1 <= places[0] <= places[-1] <= most:
        raise ValueError(
            f"borders must be from 1 to {most}, so that {training_length} of {length} tokens are left; got "
            f"{list(borders)}."
        )
    return places


def _mean_nll(reader: StateReader, context: tuple[Any, Any], ids: torch.Tensor, targets: torch.Tensor) -> np.ndarray:
    """NLL (B,) of the last targets (B, n) of `ids`, read after a state and keys, either of which may be None."""
    state, keys = context
    cache = reader.fork((state, keys or reader.begin()[1]))
    logits, _ = reader.read(ids, cache, targets.shape[1])
    nll = F.cross_entropy(logits.mT.double(), targets.to(logits.device), reduction="none").mean(1)
    return np.asarray(nll.cpu())


def attention_harm(
    model: nn.Module, tokens: Tokens, training_length: int, settings: EvaluationSettings = DEFAULTS
) -> AttentionHarm:
    """The excess loss from long states and from long attention alone, at two borders per doubling beyond T."""
    last = int(tokens.shape[1]) - 1 - training_length
    borders = [place for place in sample_positions(max(last, 1), training_length) if place >= training_length]
    options: Any = {"batch_size": settings.batch_size, "progress": settings.progress}
    apart = attention_apart(model, tokens, training_length, borders=borders or [last], **options)

    def harm(case: np.ndarray) -> tuple[Estimate, ...]:
        return tuple(estimate(values[:, None], settings.confidence) for values in (case - apart.neither).T)

    return AttentionHarm(apart.borders, harm(apart.both), harm(apart.recurrent), harm(apart.attention))
