"""`Trainer` divides by the number of all labels, also those that a model does not score; here these are -100."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from hf_recurrent_lengthgen.models.modeling_heads import scored_labels
from hf_recurrent_lengthgen.models.rows import Rows, read_rows


def token_labels(model: nn.Module, inputs: Mapping[str, Any]) -> list[str]:
    """The names of labels with one token per token of `inputs`; none for a model with another head than a language
    model's, such as one that classifies tokens. A model without `get_output_embeddings` counts as a language model."""
    head = getattr(model, "get_output_embeddings", None)
    if head is not None and head() is None:
        return []
    shape = token_shape_of(inputs)
    targets = {name: inputs.get(name) for name in ("labels", "shift_labels")}
    return [name for name, labels in targets.items() if isinstance(labels, Tensor) and labels.shape == shape]


def with_scored_labels(model: nn.Module, inputs: dict[str, Any], rows: Rows | None = None) -> dict[str, Any]:
    """A batch with -100 in the labels that a model with states does not score (see `scored_labels`).

    `rows` are those of the batch, if they were read.

    Raises:
        ValueError: for an attention mask or positions that such a model refuses.
    """
    names = token_labels(model, inputs)
    if not names:
        return inputs
    rows = read_rows(inputs) if rows is None else rows
    scored = {name: scored_labels(inputs[name], rows, shifted=name == "shift_labels") for name in names}
    return {**inputs, **scored}


def token_shape_of(inputs: Mapping[str, Any]) -> tuple[int, int]:
    """(B, T) of a batch."""
    rows, length = next(inputs[name] for name in ("input_ids", "inputs_embeds") if name in inputs).shape[:2]
    return rows, length
