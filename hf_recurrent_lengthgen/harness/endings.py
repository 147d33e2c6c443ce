"""Ends of generated texts, each by its own tokens, so that no answer depends on the rest of its batch."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, StoppingCriteria

LOOK_BACK = 2
"""Extra tokens in which a stop string is searched, as in lm_eval: a text has many tokenizations."""


class Ending(StoppingCriteria):
    """Ends each row of `generate` at an end of text (`ends`) or a stop string; prompts are one token long.

    A single row ends as with lm_eval's `MultiTokenEOSCriteria`, which waits for all rows of a batch.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str], ends: Sequence[int]) -> None:
        self._decode: Callable[[list[int]], str] = tokenizer.decode
        lengths = [len(tokenizer.encode(text, add_special_tokens=False)) + LOOK_BACK for text in stop]
        self._stop = {length: [s for s, n in zip(stop, lengths, strict=True) if n == length] for length in lengths}
        self._ends = frozenset(ends)

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        """Which rows of input_ids (B, 1 + T) end with their last token, (B,) bool."""
        tokens = input_ids[:, max(1, input_ids.shape[1] - max(self._stop, default=1)) :]
        return torch.tensor([self._ended(row) for row in tokens.tolist()], device=input_ids.device)

    def cut(self, tokens: list[int]) -> list[int] | None:
        """The generated tokens up to and with the one that ends the text; None if it has not ended."""
        stops = (stop for stop in range(1, len(tokens) + 1) if self._ended(tokens[:stop]))
        return next((tokens[:stop] for stop in stops), None)

    def _ended(self, tokens: list[int]) -> bool:
        if tokens[-1] in self._ends:
            return True
        tails = ((self._decode(tokens[-length:]), strings) for length, strings in self._stop.items())
        return any(string in tail for tail, strings in tails for string in strings)


class BrokenLogits(LogitsProcessor):
    """Raises a `ValueError` for NaN and infinite predictions of texts that have not ended; -inf may mask tokens.

    `prompts` are the texts of the prompts, for the message; beams of one prompt are adjacent.
    """

    def __init__(self, ending: Ending, prompts: Sequence[str]) -> None:
        self._ending, self._prompts = ending, prompts

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """The scores (B, V), with zeros in broken rows that have ended."""
        broken = ~scores.amax(-1).isfinite()  # NaN, +inf, or -inf everywhere
        for row in broken.nonzero().flatten().tolist():
            generated = input_ids[row, 1:].tolist()
            if self._ending.cut(generated) is None:
                prompt = self._prompts[row * len(self._prompts) // len(input_ids)]
                raise ValueError(
                    f"The predictions after {prompt[-200:]!r} and {len(generated)} more tokens are NaN or infinite: "
                    "the model overflows there or has broken weights. Evaluate in float32."
                )
        return scores.masked_fill(broken[:, None], 0)
