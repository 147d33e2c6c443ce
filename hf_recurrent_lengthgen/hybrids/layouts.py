"""What one forward pass shows of the states of a wrapped model."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_recurrent_lengthgen.hybrids.registry import cache_adapter_of
from hf_recurrent_lengthgen.models.modeling_protocols import evaluation_mode
from hf_recurrent_lengthgen.models.state_value import LayerShape, state_dtype, zero_state


class Layout(NamedTuple):
    """What a forward pass of one token shows of the model's states."""

    shapes: tuple[LayerShape, ...]  # of the state of every layer
    dropped_columns: tuple[int, ...]  # of the stock convolution state of every layer, which are not part of ours
    attending: dict[int, list[tuple[int, int]]]  # heads and size of keys and values of the layers with attention


def layout_of(model: Any) -> Layout:
    """The layout of the model's states, from a forward pass of one token.

    Raises:
        ValueError: if there are no states, or if the state before the first token is not zero.
    """
    token = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    adapter, dtype = cache_adapter_of(model), state_dtype(model.dtype)
    with torch.no_grad(), evaluation_mode(model):
        state_cache = adapter.state_cache(None, True, None)
        from_nothing = model._carry(state_cache, {"input_ids": token})
        state = state_cache.final_state(1, model.device, dtype)
        shapes = tuple(LayerShape(*(tuple(part.shape[1:]) for part in layer)) for layer in state)
        if all(size == (0,) for shape in shapes for size in shape):
            raise ValueError(f"{type(model).__name__} has no recurrent layers: there is no state to carry.")
        zero = zero_state(shapes, 1, model.device, dtype)
        from_zero = model._carry(adapter.state_cache(zero, True, None), {"input_ids": token})
    if model.device.type != "meta" and not close(from_zero[0], from_nothing[0], model.dtype):
        raise ValueError(f"{type(model).__name__} starts from a state that is not zero, which is not supported.")
    return Layout(shapes, tuple(state_cache.dropped_columns), dict(sorted(state_cache.attending.items())))


def close(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> bool:
    """Whether the largest error, relative to the largest expected entry, is within the rounding of this dtype."""
    tolerance = 0.05 if dtype.itemsize < 4 else 1e-3  # not by the outputs' dtype: some models widen their logits
    return bool((actual - expected).abs().max() <= tolerance * expected.abs().max())
