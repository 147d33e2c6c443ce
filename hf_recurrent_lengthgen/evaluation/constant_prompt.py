"""Loss on a prompt of one repeated token: does a model still predict it after reading nothing new for a long time?

Chen et al., 2024 (arXiv:2410.07145), section 4 and Appendix I, read the "newlines" prompt, which holds nothing but
newlines. The prompt is not random, so one text is enough, and there are no intervals.
"""

from itertools import pairwise
from typing import Any

import numpy as np
from torch import nn

from hf_recurrent_lengthgen.evaluation.diagnosis_results import ConstantPrompt
from hf_recurrent_lengthgen.evaluation.length_generalization import make_curve
from hf_recurrent_lengthgen.evaluation.statistics import bin_means, position_edges
from hf_recurrent_lengthgen.evaluation.streaming import stream_nll

BINS_PER_OCTAVE = 4
FAILURE_FACTOR = 2.0
"""A model fails where its loss exceeds this factor times the largest loss inside the training length (section 4.2)."""


def newline_token(tokenizer: Any) -> int | None:
    """The id of the token that is exactly one newline inside a text; None if there is none."""
    # a tokenizer that puts a space before every text encodes a lone newline as two tokens: use the one after a letter
    alone, letter, inside = (tokenizer.encode(text, add_special_tokens=False) for text in ("\n", "a", "a\n"))
    for ids in (alone, inside[len(letter) :] if inside[: len(letter)] == letter else []):
        if len(ids) == 1 and tokenizer.decode(ids) == "\n":
            return int(ids[0])
    return None


def constant_prompt(
    model: nn.Module,
    token: int,
    training_length: int,
    length: int,
    *,
    chunk_length: int | None = None,
    progress: bool = True,
) -> ConstantPrompt:
    """NLL by position of a text that repeats `token`, and whether it rises beyond the training length.

    It rises if a bin is above `FAILURE_FACTOR` times the highest bin inside, without the first bin: the rule of
    section 4.2 for ordinary texts.

    Args:
        model, chunk_length, progress: As in `stream_nll`.
        token: The repeated token; `newline_token(tokenizer)` for the paper's prompt.
        training_length: Tokens per training sequence, at least 2.
        length: Positions to score, above `training_length`.

    Raises:
        ValueError: for a token outside the vocabulary, impossible lengths, and as in `stream_nll`.
    """
    if training_length < 2 or length <= training_length:
        raise ValueError(
            "training_length must be at least 2 and length above it, because the prompt shows what happens beyond "
            f"the training length; got {training_length} and {length}."
        )
    prompt = np.broadcast_to(np.int64(token), (1, length + 1))
    nll = stream_nll(model, prompt, chunk_length=chunk_length, progress=progress).nll
    edges = position_edges(length, training_length, 0, BINS_PER_OCTAVE)
    curve = make_curve(edges, bin_means(nll, edges))
    inside = max(curve.mean[1 : edges.index(training_length)])
    beyond = [
        (start, mean) for (start, _), mean in zip(pairwise(edges), curve.mean, strict=True) if start >= training_length
    ]
    return ConstantPrompt(
        token=token,
        training_length=training_length,
        length=length,
        curve=curve,
        inside=inside,
        beyond=max(mean for _, mean in beyond),
        factor=FAILURE_FACTOR,
        exceeded_from=next((start for start, mean in beyond if mean > FAILURE_FACTOR * inside), None),
    )
