"""Whether a text state fits a model, and its tensors on the device of that model."""

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from torch import Tensor

from hf_recurrent_lengthgen.models.modeling_protocols import base_of
from hf_recurrent_lengthgen.models.state_value import check_state, map_state, state_dtype
from hf_recurrent_lengthgen.state_files.origin import check_origin
from hf_recurrent_lengthgen.state_files.text_state import LayerKeys, TextState


def fitted(text_state: TextState, model: Any, tokenizer: Any, allow: Collection[str], name: str) -> TextState:
    """The text state on the device of the model.

    Raises:
        ValueError: if the model did not read it, but for what is allowed (`OVERRIDES`), or its tensors do not have the
            shapes and dtypes of the model.
    """
    inner = base_of(model)
    if not hasattr(inner, "state_shapes"):
        raise ValueError(
            f"{type(inner).__name__} takes no states: load it with load_model, or wrap it with stateful(model)."
        )
    origin = text_state.origin
    if origin is not None:
        here = check_origin(origin, model, tokenizer, allow, name)
        # what was allowed need not be allowed again
        origin = replace(here, tokenizer=here.tokenizer or origin.tokenizer) if allow else origin
    elif allow:
        raise ValueError(
            f"{name} does not tell which model has read it, so there is nothing to allow: leave allow out."
        )
    attends = bool(getattr(inner, "attends", False))
    if attends == (text_state.attention == "none"):
        has = "attention layers" if attends else "no attention layers"
        raise ValueError(
            f"{name} does not fit {type(inner).__name__}, which has {has}: its attention is {text_state.attention!r}. "
            "The keys and values of a text belong into its file."
        )
    dtype = state_dtype(inner.dtype)

    def moved(part: Tensor) -> Tensor:
        return part.to(inner.device, dtype if "dtype" in allow else part.dtype)

    state = map_state(moved, text_state.state)
    state = check_state(state, inner.state_shapes(), text_state.rows, inner.device, dtype, name)
    keys = _fitted_keys(text_state, inner, "dtype" in allow, name) if text_state.attention == "kept" else {}
    return replace(text_state, state=state, origin=origin, keys=keys)


def _fitted_keys(text_state: TextState, model: Any, cast: bool, name: str) -> dict[int, LayerKeys]:
    sizes, layers = model._layout.attending, model.new_attention_cache().layers
    if set(text_state.keys) != set(sizes):
        raise ValueError(
            f"{name} has keys and values of the layers {sorted(text_state.keys)}, but {type(model).__name__} attends "
            f"in the layers {sorted(sizes)}."
        )
    fitted_keys = {}
    for index, (*pair, tokens) in text_state.keys.items():
        held = pair[0].shape[2] if pair[0].ndim == 4 else -1
        for part, (heads, size) in zip(pair, sizes[index], strict=True):
            right = part.dtype == model.dtype or (cast and part.is_floating_point())
            if part.shape != (text_state.rows, heads, held, size) or not right:
                raise ValueError(
                    f"{name}: layer {index} has keys or values of shape {tuple(part.shape)} and {part.dtype}, "
                    f"expected ({text_state.rows}, {heads}, tokens, {size}) and {model.dtype}."
                )
        window = getattr(layers[index], "sliding_window", None)
        if held != (tokens if window is None else min(tokens, window - 1)):
            raise ValueError(f"{name}: layer {index} has the keys of {held} tokens after a text of {tokens}.")
        keys, values = (part.to(model.device, model.dtype) for part in pair)
        fitted_keys[index] = LayerKeys(keys, values, tokens)
    return fitted_keys
