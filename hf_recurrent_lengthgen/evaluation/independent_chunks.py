"""OPRM (arXiv:2505.07793): chunks of a context are read independently; the answer is that after the surest one.

A prompt of prefix P, context C and suffix S becomes X_i = [P, C_i, S] for each chunk C_i. Surest is that whose first
answer token has the least entropy, E_i = -sum_v Pr(v | X_i) log2 Pr(v | X_i). The last chunk is as long as the others,
and may begin in the one before it (the paper's code pads it): chunks are rows of equal length.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def chunk_prompts(prompt: Sequence[int], length: int, after: int = 0, before: int = 0) -> list[list[int]]:
    """The prompts [P, C_i, S] with chunks of `length` tokens; P is the first `before` tokens, S the last `after`."""
    if length < 1 or min(after, before) < 0:
        raise ValueError(f"A chunk has 1 token or more, 0 or more around it; got {length}, {before}, {after}.")
    stop = max(before, len(prompt) - after)
    starts = [*range(before, stop - length, length), max(before, stop - length)]
    return [[*prompt[:before], *prompt[start : min(start + length, stop)], *prompt[stop:]] for start in starts]


def entropy_bits(logits: Tensor) -> Tensor:
    """Entropy in bits (...) float64 of predictions from logits (..., V), of which -inf masks a token."""
    entropies = torch.special.entr(logits.double().softmax(-1)).sum(-1) / np.log(2)
    if not bool(entropies.isfinite().all()):
        raise ValueError("Predictions after a chunk are NaN or infinite: the model overflows. Evaluate in float32.")
    return entropies
