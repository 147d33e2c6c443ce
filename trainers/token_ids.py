"""Ids outside the vocabulary, which an embedding or a loss would index with: refused before weights change."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hf_recurrent_lengthgen.data.packing import IGNORED_LABEL
from hf_recurrent_lengthgen.models.modeling_protocols import base_of
from hf_recurrent_lengthgen.trainers.run.scored_targets import token_labels

IDS = torch.int64, torch.int32  # what embeddings index with


def check_token_ids(ids: Tensor, vocabulary: int, name: str = "input_ids", ignored: int | None = None) -> None:
    """Check ids (B, T) before an embedding or a loss indexes with them and fails without a position, or not at all."""
    if ids.dtype not in IDS:
        raise ValueError(
            f"{name} must be int64 or int32, got {ids.dtype} of shape {tuple(ids.shape)}. Of other integers, such as "
            "uint16, PaddingCollator (data_collator), PackedBlocks and ContinuedChunks make int64."
        )
    wrong = (ids < 0) | (ids >= vocabulary)
    if ignored is not None:
        wrong &= ids != ignored
    if wrong.any():
        row, *_, place = wrong.nonzero()[0].tolist()
        also = "" if ignored is None else f", or {ignored} for none"
        raise ValueError(
            f"{name} must be from 0 to {vocabulary - 1}{also}, got {int(ids[wrong][0])} in row {row}, position "
            f"{place}: tokenize with the model's own tokenizer."
        )


def check_batch(model: nn.Module | None, inputs: Mapping[str, Any]) -> None:
    """Raise a `ValueError` with row and position for input ids and labels outside the vocabulary."""
    for name, ids, vocabulary in _token_ids(model, inputs):
        check_token_ids(ids, vocabulary, name, None if name == "input_ids" else IGNORED_LABEL)


def _token_ids(model: nn.Module | None, inputs: Mapping[str, Any]) -> Iterator[tuple[str, Tensor, int]]:
    """Name and value of input ids and labels, and the vocabulary; none for a model that names no vocabulary."""
    vocabulary: Any = getattr(getattr(base_of(model), "config", None), "vocab_size", None)
    for name in () if vocabulary is None else ("input_ids", *token_labels(base_of(model), inputs)):
        if isinstance(ids := inputs.get(name), Tensor):
            yield name, ids, vocabulary


def usable_ids(
    model: nn.Module | None, inputs: Mapping[str, Any], ask: Callable[[Tensor, Callable[[bool], None]], None]
) -> dict[str, Any]:
    """The inputs without ids and labels outside the vocabulary; `ask` has `check_batch` refuse them before weights
    change, so that the device is not waited for."""
    usable, questions = dict(inputs), []
    for name, ids, vocabulary in _token_ids(model, inputs):
        if ids.dtype not in IDS:
            check_batch(model, inputs)
        wrong = (ids < 0) | (ids >= vocabulary)
        wrong &= ids != IGNORED_LABEL if name != "input_ids" else True
        usable[name] = ids.masked_fill(wrong, 0 if name == "input_ids" else IGNORED_LABEL)
        questions.append(wrong.any())
    if questions:
        ask(torch.stack(questions).any(), lambda is_wrong: check_batch(model, inputs) if is_wrong else None)
    return usable
