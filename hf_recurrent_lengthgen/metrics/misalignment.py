"""Long-short misalignment: how far predictions move when the same context is cut a little shorter.

Du et al., 2025 (arXiv:2506.11769), section 4.1. Glossary: a, b logits (..., V); p = softmax(a), q = softmax(b);
normalizer = log sum exp of the logits, so log p = a - normalizer; expected (2, ...) = (E_p[log q], E_q[log p]).

The symmetric cross-entropy of a distribution with itself is twice its entropy, not zero. So a misalignment is compared
between models on the same text, never with zero. It also falls when a model becomes more certain.
"""

import inspect
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hf_recurrent_lengthgen.evaluation.formatting import interval_text
from hf_recurrent_lengthgen.evaluation.json_schema import document
from hf_recurrent_lengthgen.evaluation.measurement import Measurement
from hf_recurrent_lengthgen.evaluation.results import Estimate, PartResult
from hf_recurrent_lengthgen.evaluation.settings import CONFIDENCE
from hf_recurrent_lengthgen.evaluation.statistics import estimate
from hf_recurrent_lengthgen.evaluation.streaming import Tokens, check_tokens, progress_bar
from hf_recurrent_lengthgen.metrics.part import INSIDE, Part
from hf_recurrent_lengthgen.models.modeling_protocols import evaluation_mode

LOGITS_PER_CHUNK = {"cpu": 2**19, "accelerator": 2**25}
"""Default number of logits per chunk: what fits into a CPU's cache, and what fills an accelerator."""


@document("misalignment")
@dataclass(frozen=True)
class Misalignment(Estimate, PartResult):
    """Long-short misalignment (Du et al., 2025, Eq. 2) in nats, inside the training length, also by sequence.

    It is not 0 for equal predictions, so compare it only between models on the same text.
    """

    by_sequence: tuple[float, ...]


def chunk_positions(logits: Tensor, chunk_size: int | None) -> int:
    """Positions per chunk: `chunk_size`, or as many as `LOGITS_PER_CHUNK` allows, at least 1."""
    limit = LOGITS_PER_CHUNK["cpu" if logits.device.type == "cpu" else "accelerator"]
    return chunk_size or max(1, limit // logits.shape[-1])


def blocks(shape: Sequence[int], chunk: int) -> Iterator[tuple[int | slice, ...]]:
    """Indices that cut positions of a shape into runs of at most `chunk` along the last axis, without a copy."""
    if not shape:
        yield ()
        return
    for row in itertools.product(*map(range, shape[:-1])):
        for start in range(0, shape[-1], chunk):
            yield (*row, slice(start, min(start + chunk, shape[-1])))


def log_normalizers(logits: Tensor, chunk: int) -> Tensor:
    """log sum exp over the vocabulary, (..., V) -> (...), in float32 or wider."""
    dtype = torch.promote_types(logits.dtype, torch.float32)
    result = torch.empty(logits.shape[:-1], dtype=dtype, device=logits.device)
    for at in blocks(result.shape, chunk):
        result[at] = logits[at].to(dtype).logsumexp(-1)
    return result


def expected_logs(a: Tensor, b: Tensor, normalizer_a: Tensor, normalizer_b: Tensor, chunk: int) -> Tensor:
    """E_p[log q] and E_q[log p] as (2, ...); minus their sum is Eq. 1."""
    result = torch.empty((2, *normalizer_a.shape), dtype=normalizer_a.dtype, device=a.device)
    for at in blocks(normalizer_a.shape, chunk):
        log_p, log_q = a[at] - normalizer_a[at][..., None], b[at] - normalizer_b[at][..., None]
        result[0][at] = log_p.exp().mul_(log_q).sum(-1)
        result[1][at] = log_q.exp_().mul_(log_p).sum(-1)
    return result


def sce_gradients(log_p: Tensor, log_q: Tensor, expected: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of Eq. 1 with respect to the logits a and b of some positions.

    For a it is p - q - p (log q - E_p[log q]); for b the roles are exchanged.

    Args:
        log_p, log_q: Log-probabilities (..., V), overwritten.
        expected: (2, ...) of `expected_logs`.
    """
    p, q = log_p.exp(), log_q.exp()
    for_a = log_q.neg_().add_(1 + expected[0][..., None]).mul_(p).sub_(q)
    for_b = log_p.neg_().add_(1 + expected[1][..., None]).mul_(q).sub_(p)
    return for_a, for_b


@torch.no_grad()
def symmetric_cross_entropy(logits_a: Tensor, logits_b: Tensor) -> Tensor:
    """-(<p, log q> + <q, log p>) in nats at each position (Eq. 1), of finite logits (..., V) of one shape: (...).

    Computed in float32 or wider, without a gradient, which `trainers/alignment_loss.py` has.
    """
    chunk = chunk_positions(logits_a, None)
    normalizer_a, normalizer_b = log_normalizers(logits_a, chunk), log_normalizers(logits_b, chunk)
    return -expected_logs(logits_a, logits_b, normalizer_a, normalizer_b, chunk).sum(0)


def context_pairs(
    available: int, training_length: int, samples: int, seed: int, sequence: int
) -> list[tuple[int, tuple[int, ...]]]:
    """The random draws of `long_short_misalignment` for one sequence, keyed by seed and index of the sequence.

    A draw is (end, (l1, l2)), for the contexts tokens[end - l1 : end] and tokens[end - l2 : end]. `end` is uniform
    among the positions with at least T = training_length of the `available` tokens before them, (l1, l2) among the
    pairs of different integers in [T/2, T]; section 5.3 uses distances from 1.
    """
    generator = np.random.default_rng((seed, sequence))
    lengths = np.arange((training_length + 1) // 2, training_length + 1)
    return [
        (
            int(generator.integers(training_length, available + 1)),
            tuple(generator.choice(lengths, 2, replace=False).tolist()),
        )
        for _ in range(samples)
    ]


@torch.inference_mode()
def long_short_misalignment(
    model: nn.Module,
    tokens: Tokens,
    training_length: int,
    *,
    samples: int = 8,
    seed: int = 0,
    confidence: float = CONFIDENCE,
    progress: bool = True,
) -> Misalignment:
    """E over x, l1, l2 of the symmetric cross-entropy of the predictions after x[-l1:] and after x[-l2:] (Eq. 2).

    The paper does not say how x is cut from a text; see `context_pairs`. Each context is read in a separate forward
    pass from the zero state, without padding, which is exact for any causal model, also with position encodings that
    depend on the length.

    Args:
        model: A causal language model: `model(input_ids)` has `logits` (1, T, V).
        tokens: Token ids (S, L) with L >= training_length.
        training_length: T, the longest context of training, in tokens.
        samples: Context pairs per sequence; their mean is the value of the sequence.
        seed, confidence: Seed of the draws, and confidence of the interval over sequences.
        progress: Show a progress bar.

    Raises:
        ValueError: for tokens that are too few, outside the vocabulary or of a wrong type, and a misalignment that is
            not finite. Tokens that both contexts rule out (logits of -inf) count 0.
    """
    config: Any = model.config
    array = check_tokens(tokens, int(config.vocab_size), training_length - 1)
    device = next(model.parameters()).device
    last = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
    draws = [context_pairs(array.shape[1], training_length, samples, seed, i) for i in range(len(array))]
    total = sum(sum(lengths) for pairs in draws for _, lengths in pairs)
    values = np.empty((len(array), samples))
    with evaluation_mode(model), progress_bar(total, "context pairs", progress) as bar:
        for sequence, pairs in enumerate(draws):
            for sample, (end, lengths) in enumerate(pairs):
                contexts = [array[sequence, end - length : end].astype(np.int64) for length in lengths]
                after = [model(torch.from_numpy(x)[None].to(device), **last).logits[0, -1] for x in contexts]
                possible = ~((after[0] == -torch.inf) & (after[1] == -torch.inf))
                nats = symmetric_cross_entropy(*(x[possible] for x in after)).item() if possible.any() else np.nan
                if not np.isfinite(nats):
                    raise ValueError(
                        f"The misalignment of the predictions of {type(model).__name__} in sequence {sequence} after "
                        f"the {lengths[0]} and the {lengths[1]} tokens that end before position {end} is not finite: "
                        "logits overflow, weights are broken, or one prediction rules out a token that the other "
                        "allows."
                    )
                values[sequence, sample] = nats
                bar.update(sum(lengths))
    mean = estimate(values, confidence)
    return Misalignment(mean.mean, mean.low, mean.high, tuple(values.mean(1).tolist()))


def _compute(task: Measurement) -> Misalignment:
    options: Any = {name: getattr(task.settings, name) for name in ("seed", "confidence", "progress")}
    compute = partial(long_short_misalignment, task.model, task.tokens, task.training_length, **options)
    return task.kept("misalignment", Misalignment, compute, seed=task.settings.seed)


MISALIGNMENT = Part(
    name="misalignment",
    title="Long-short misalignment",
    summary="how far predictions move when the context is cut a little shorter",
    compute=_compute,
    section=INSIDE,
    texts=lambda result, unit: (f"Long-short misalignment {interval_text(result)} nats.",),
    facts=lambda result: {"Misalignment": f"{interval_text(result)} nats"},
    definitions=lambda _: (
        "Long-short misalignment is the symmetric cross-entropy between the predictions after a context and after "
        "the same context cut a little shorter. It is not 0 for equal predictions: compare models on the same text.",
    ),
)
