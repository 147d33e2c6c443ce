"""Whether a reading fits a model, and its tensors on the device of that model."""

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from torch import Tensor

from hf_recurrent_lengthgen.models.recurrent_state import check_state, map_state, state_dtype
from hf_recurrent_lengthgen.readings.origin import check_origin, unwrapped
from hf_recurrent_lengthgen.readings.reading import LayerKeys, Reading


def fitted(reading: Reading, model: Any, tokenizer: Any, allow: Collection[str], name: str) -> Reading:
    """The reading on the device of the model.

    Raises:
        ValueError: if the model did not read it, but for what is allowed (`OVERRIDES`), or its tensors do not have the
            shapes and dtypes of the model.
    """
    inner = unwrapped(model)
    if not hasattr(inner, "state_shapes"):
        raise ValueError(
            f"{type(inner).__name__} takes no states: load it with load_model, or wrap it with stateful(model)."
        )
    origin = reading.origin
    if origin is not None:
        here = check_origin(origin, model, tokenizer, allow, name)
        # what was allowed need not be allowed again
        origin = replace(here, tokenizer=here.tokenizer or origin.tokenizer) if allow else origin
    elif allow:
        raise ValueError(
            f"{name} does not tell which model has read it, so there is nothing to allow: leave allow out."
        )
    attends = bool(getattr(inner, "attends", False))
    if attends == (reading.attention == "none"):
        has = "attention layers" if attends else "no attention layers"
        raise ValueError(
            f"{name} does not fit {type(inner).__name__}, which has {has}: its attention is {reading.attention!r}. "
            "The keys and values of a text belong into its file."
        )
    dtype = state_dtype(inner.dtype)

    def moved(part: Tensor) -> Tensor:
        return part.to(inner.device, dtype if "dtype" in allow else part.dtype)

    state = map_state(moved, reading.state)
    state = check_state(state, inner.state_shapes(), reading.rows, inner.device, dtype, name)
    keys = _fitted_keys(reading, inner, "dtype" in allow, name) if reading.attention == "kept" else {}
    return replace(reading, state=state, origin=origin, keys=keys)


def _fitted_keys(reading: Reading, model: Any, cast: bool, name: str) -> dict[int, LayerKeys]:
    sizes, layers = model._layout.attending, model.new_attention_cache().layers
    if set(reading.keys) != set(sizes):
        raise ValueError(
            f"{name} has keys and values of the layers {sorted(reading.keys)}, but {type(model).__name__} attends in "
            f"the layers {sorted(sizes)}."
        )
    fitted_keys = {}
    for index, (*pair, tokens) in reading.keys.items():
        held = pair[0].shape[2] if pair[0].ndim == 4 else -1
        for part, (heads, size) in zip(pair, sizes[index], strict=True):
            right = part.dtype == model.dtype or (cast and part.is_floating_point())
            if part.shape != (reading.rows, heads, held, size) or not right:
                raise ValueError(
                    f"{name}: layer {index} has keys or values of shape {tuple(part.shape)} and {part.dtype}, "
                    f"expected ({reading.rows}, {heads}, tokens, {size}) and {model.dtype}."
                )
        window = getattr(layers[index], "sliding_window", None)
        if held != (tokens if window is None else min(tokens, window - 1)):
            raise ValueError(f"{name}: layer {index} has the keys of {held} tokens after a text of {tokens}.")
        keys, values = (part.to(model.device, model.dtype) for part in pair)
        fitted_keys[index] = LayerKeys(keys, values, tokens)
    return fitted_keys
