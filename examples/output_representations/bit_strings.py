"""Mean, sum or length of a bit string as a number to predict, and OutRep, the representation of that number.

arXiv:2506.11769, section 3 and appendices A, C and F: strings of 1 to
10 bits between a begin and an end token in training, up to 50 in the test. A model that is trained on f(y) instead of
y, and whose output is put through the inverse of f, meets fewer new outputs at new lengths.

Token ids: 0 padding, 1 begin, 2 end, 3 and 4 the bits.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor, nn

from hf_recurrent_lengthgen.data.collating import PADDING_ID
from hf_recurrent_lengthgen.data.tasks import EVALUATION_SEED
from hf_recurrent_lengthgen.data.tasks.keyed_rows import (
    Array,
    KeyedRows,
    Lengths,
    Rows,
    random_bits,
    random_integers,
)
from hf_recurrent_lengthgen.models.modeling_protocols import evaluation_mode

Quantity = Literal["mean", "sum", "length"]
BEGIN_ID, END_ID, FIRST_BIT_ID, BIT_VOCAB_SIZE = 1, 2, 3, 5
_ONES, _ORDER, _FIRST_BITS = 1, 2, 8  # streams of random numbers; redrawn bits have those from the last on


class Representation(NamedTuple):
    """A target f(y) and its inverse, both on tensors."""

    represent: Callable[[Tensor], Tensor]
    recover: Callable[[Tensor], Tensor]


LARGEST = 1000.0
"""Outputs are clamped before inversion so that recovered numbers are from 0 to this one."""

REPRESENTATIONS: dict[str, Representation] = {
    "identity": Representation(lambda y: y, lambda f: f),
    "sqrt": Representation(torch.sqrt, lambda f: f.clamp(0, LARGEST**0.5) ** 2),
    "log": Representation(torch.log, lambda f: f.clamp(max=float(np.log(LARGEST))).exp()),
    "inverse_sqrt": Representation(torch.rsqrt, lambda f: f.clamp(min=LARGEST**-0.5) ** -2),
}
"""f of section 3, "Explicit output alignment"; "identity" is the control."""


class BitStrings(KeyedRows):
    """Rows begin, bits, end, with a number as label.

    An item is `{"input_ids": (n + 2,) int64, "labels": () float32}`, and an "attention_mask" (n + 2,) for rows of
    several lengths. The label is f(y). Strings whose sum is asked for are never all zero, in training and in the test,
    whatever the representation: such a string is drawn anew.

    Args:
        quantity: What y is.
        length: Bits of a string, or the least and the most of them.
        samples: Number of rows.
        seed: from 0; evaluation needs another one than training.
        representation: f, one of `REPRESENTATIONS`.
        uniform_mean: Whether the number of ones is uniform, as in appendix F, or each bit is.

    Raises:
        ValueError: for another quantity or representation, for the mean, which may be 0, with one that 0 does not
            have, and as `KeyedRows` raises.
    """

    vocab_size = BIT_VOCAB_SIZE

    def __init__(
        self,
        quantity: Quantity,
        length: Lengths = (1, 10),
        samples: int = 1_000_000,
        seed: int = 0,
        representation: str = "identity",
        uniform_mean: bool = False,
    ) -> None:
        if quantity not in get_args(Quantity):
            raise ValueError(f"quantity is {quantity!r}, but must be one of {get_args(Quantity)}.")
        if representation not in REPRESENTATIONS:
            raise ValueError(f"representation is {representation!r}, but must be one of {list(REPRESENTATIONS)}.")
        if quantity == "mean" and representation in ("log", "inverse_sqrt"):
            raise ValueError(f"A mean may be 0, which has no {representation}: use identity or sqrt.")
        self.name = f"{quantity} of bits"
        self.quantity, self.representation, self.uniform_mean = quantity, representation, uniform_mean
        super().__init__(length, samples, seed)

    @property
    def resume_record(self) -> dict[str, Any]:
        fields = ("quantity", "representation", "uniform_mean")
        return super().resume_record | {name: getattr(self, name) for name in fields}

    def _rows(self, rows: Array, lengths: Array) -> Rows:
        longest = int(lengths.max())
        inside = np.arange(longest) < lengths[:, None]  # (B, longest)
        bits = self._uniform_mean(rows, lengths, inside) if self.uniform_mean else self._uniform(rows, inside)
        places = np.arange(longest + 2)
        tokens = np.full((len(rows), longest + 2), PADDING_ID)
        tokens[:, 0] = BEGIN_ID
        tokens[:, 1:-1][inside] = FIRST_BIT_ID + bits[inside]
        tokens[places == lengths[:, None] + 1] = END_ID
        total = bits.sum(1)
        values = {"mean": total / lengths, "sum": total, "length": lengths}[self.quantity]
        labels = REPRESENTATIONS[self.representation].represent(torch.from_numpy(values).double())
        return Rows(tokens, labels.float().numpy(), lengths + 2)

    def _uniform(self, rows: Array, inside: Array) -> Array:
        """Independent bits (B, longest), of which those `inside` (B, longest) count."""
        longest, stream = inside.shape[1], _FIRST_BITS
        bits = (random_integers(self.seed, rows, longest, 2, stream) == 1) & inside
        while self.quantity == "sum" and (empty := ~bits.any(1)).any():
            stream += 1
            again = random_integers(self.seed, rows[empty], longest, 2, stream) == 1
            bits[empty] = again & inside[empty]
        return bits

    def _uniform_mean(self, rows: Array, lengths: Array, inside: Array) -> Array:
        """Bits (B, longest) with a uniform number of ones in random places."""
        least = int(self.quantity == "sum")
        ones = least + random_integers(self.seed, rows, 1, lengths[:, None] + 1 - least, _ONES)
        ranks = np.where(inside, random_bits(self.seed, rows, inside.shape[1], _ORDER), np.uint64(2**64 - 1))
        bits = np.zeros(inside.shape, bool)
        np.put_along_axis(bits, ranks.argsort(axis=1), np.arange(inside.shape[1]) < ones, 1)
        return bits


@torch.inference_mode()
def errors_by_length(
    model: nn.Module,
    task: BitStrings,
    lengths: Sequence[int],
    samples: int = 256,
    batch_size: int = 256,
    seed: int = EVALUATION_SEED,
) -> dict[int, float]:
    """Mean squared error of the numbers themselves, after the inverse of the representation, at several lengths.

    Args:
        model: takes `input_ids` (B, T) and returns `logits` (B,), predictions of f(y).
        task: The data that the model was trained on.
        lengths: Bits of the strings.
        samples: Strings of each length.
        batch_size: Rows of a forward pass.
        seed: Seed of the strings, which should not be that of the training data.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}.")
    recover = REPRESENTATIONS[task.representation].recover
    device = next(model.parameters()).device
    errors = {}
    with evaluation_mode(model):
        for length in lengths:
            rows = task.resized(length, samples, seed)
            total = 0.0
            for start in range(0, samples, batch_size):
                batch = rows.batch(range(start, min(start + batch_size, samples)))
                predicted = recover(model(input_ids=batch["input_ids"].to(device)).logits.double().cpu())
                total += float((predicted - _numbers(batch["input_ids"], task.quantity)).square().sum())
            errors[length] = total / samples
    return errors


def _numbers(tokens: Tensor, quantity: Quantity) -> Tensor:
    """y (B,) of unpadded rows (B, n + 2)."""
    bits = (tokens[:, 1:-1] - FIRST_BIT_ID).double()
    if quantity == "length":
        return torch.full_like(bits[:, 0], bits.shape[1])
    return bits.sum(1) if quantity == "sum" else bits.mean(1)
