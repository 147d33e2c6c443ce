"""Ids outside the vocabulary, which an embedding or a loss would index with: refused before weights change."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hf_recurrent_lengthgen.data.packing import IGNORED_LABEL
from hf_recurrent_lengthgen.models.modeling_protocols import base_of
from hf_recurrent_lengthgen.trainers.run.scored_targets import token_labels

IDS = torch.int64, torch.int32  # what embeddings index with


def usable_ids(
    model: nn.Module | None, inputs: Mapping[str, Any], ask: Callable[[Tensor, Callable[[], str]], None]
) -> dict[str, Any]:
    """The inputs without ids and labels outside the vocabulary; `ask` refuses them before weights change, with row and
    position, without waiting for the device. A model that names no vocabulary takes all.

    Raises:
        ValueError: for ids of another type than embeddings index with.
    """
    usable = dict(inputs)
    vocabulary: Any = getattr(getattr(base_of(model), "config", None), "vocab_size", None)
    for name in () if vocabulary is None else ("input_ids", *token_labels(base_of(model), inputs)):
        ids, of_input = inputs.get(name), name == "input_ids"
        if not isinstance(ids, Tensor):
            continue
        if ids.dtype not in IDS:
            raise ValueError(
                f"{name} must be int64 or int32, got {ids.dtype} of shape {tuple(ids.shape)}. Of other integers, such "
                "as uint16, PaddingCollator (data_collator), PackedBlocks and ContinuedChunks make int64."
            )
        wrong = (ids < 0) | (ids >= vocabulary)
        wrong = wrong if of_input else wrong & (ids != IGNORED_LABEL)
        usable[name] = ids.masked_fill(wrong, 0 if of_input else IGNORED_LABEL)
        allowed = f"from 0 to {vocabulary - 1}" + ("" if of_input else f", or {IGNORED_LABEL} for none")
        ask(wrong.any(), partial(_first_wrong, name, ids, wrong, allowed))
    return usable


def _first_wrong(name: str, ids: Tensor, wrong: Tensor, allowed: str) -> str:
    row, *_, place = wrong.nonzero()[0].tolist()
    return (
        f"{name} must be {allowed}, got {int(ids[wrong][0])} in row {row}, position {place}: tokenize with the "
        "model's own tokenizer."
    )
