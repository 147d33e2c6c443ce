"""Files with the state, keys and values of a hybrid model after a text; `save_state` writes the state only."""

import json
import os
from collections.abc import Mapping
from typing import Any

from safetensors.torch import save_file
from transformers.cache_utils import Cache

from hf_recurrent_lengthgen.models.atomic_files import replacing
from hf_recurrent_lengthgen.models.recurrent_state import (
    RecurrentState,
    check_finite_state,
    check_state,
    layer_state,
    read_state_file,
    state_batch_size,
    state_dtype,
)

FORMAT, FORMAT_VERSION = "hybrid_state", 1


def save_hybrid_state(
    path: str | os.PathLike[str],
    state: RecurrentState,
    attention_cache: Cache | None,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write a state with the keys and values of its text as a safetensors file.

    Args:
        path: File to write; replaced only when the new one is complete.
        state: State after the text; must be finite.
        attention_cache: The attention cache after the same text; None for a model without attention layers.
        metadata: Text fields that are stored in the file, for instance the name of the model.

    Raises:
        ValueError: for values that are not finite, and a cache with other rows than the state.
    """
    check_finite_state(state, "state")
    layers: list[Any] = [] if attention_cache is None else attention_cache.layers
    tensors = {f"layers.{i}.{k}": part for i, layer in enumerate(state) for k, part in layer._asdict().items()}
    lengths = {}
    for index, layer in enumerate(layers):
        if getattr(layer, "keys", None) is not None:
            if len(layer.keys) != state_batch_size(state) or not bool(layer.keys.isfinite().all()):
                raise ValueError(
                    f"attention_cache must have finite keys for the {state_batch_size(state)} rows of the state, got "
                    f"{tuple(layer.keys.shape)} in layer {index}: give the one that has read the same text."
                )
            tensors |= {f"layers.{index}.keys": layer.keys, f"layers.{index}.values": layer.values}
            lengths[index] = layer.get_seq_length()
    header = {
        "format": FORMAT,
        "format_version": str(FORMAT_VERSION),
        "num_layers": str(len(state)),
        "lengths": json.dumps(lengths),
        "metadata": json.dumps(dict(metadata or {})),
    }
    with replacing(path) as temporary:
        save_file({k: x.detach().to("cpu", copy=True).contiguous() for k, x in tensors.items()}, temporary, header)


def load_hybrid_state(path: str | os.PathLike[str], model: Any) -> tuple[RecurrentState, Cache | None, dict[str, str]]:
    """Read a file of `save_hybrid_state` for a wrapped model.

    Returns:
        The state and the attention cache, None for a model without attention layers, on the device of the model; and
        the metadata.

    Raises:
        ValueError: if the file is truncated, of another kind or newer format, or does not fit the model.
    """
    name = os.fspath(path)
    header, tensors = read_state_file(path, model.device, FORMAT, FORMAT_VERSION)
    try:
        lengths = {int(k): int(n) for k, n in json.loads(header["lengths"]).items()}
        metadata = dict(json.loads(header["metadata"]))
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{name} has a damaged header ({error!r}): write it again.") from error
    if not hasattr(model, "state_shapes"):
        raise ValueError(f"load_hybrid_state needs a model from stateful(model), got {type(model).__name__}.")
    shapes = model.state_shapes()
    attention_cache = model.new_attention_cache()
    layers: list[Any] = [] if attention_cache is None else attention_cache.layers
    fields = shapes[0]._fields
    expected = {f"layers.{i}.{k}" for i in range(len(shapes)) for k in fields}
    expected |= {f"layers.{i}.{k}" for i in model._layout.attending for k in ("keys", "values")}
    if set(tensors) != expected:
        raise ValueError(
            f"{name} does not fit {type(model).__name__}: it lacks {sorted(expected - set(tensors))} and has "
            f"unexpected {sorted(set(tensors) - expected)}. The attention cache of a text must be saved with its "
            "state."
        )
    state = tuple(layer_state(tensors[f"layers.{i}.{k}"] for k in fields) for i in range(len(shapes)))
    rows = len(state[0].recurrent) if state[0].recurrent.ndim else 0
    state = check_state(state, shapes, rows, model.device, state_dtype(model.dtype), name)
    check_finite_state(state, name)
    longest = max(lengths.values(), default=0)
    for index, sizes in model._layout.attending.items():
        pair = [tensors[f"layers.{index}.{part}"] for part in ("keys", "values")]
        tokens = pair[0].shape[2] if pair[0].ndim == 4 else 0
        for part, (heads, size) in zip(pair, sizes, strict=True):
            fits = part.shape == (rows, heads, tokens, size) and part.is_floating_point()
            if not fits or not bool(part.isfinite().all()):
                raise ValueError(
                    f"{name}: layer {index} has keys or values of shape {tuple(part.shape)} and {part.dtype}, "
                    f"expected finite ones of ({rows}, {heads}, tokens, {size})."
                )
        layers[index].update(*(part.to(model.dtype) for part in pair))
        length, held = lengths.get(index, -1), pair[0].shape[2]
        windowed = hasattr(layers[index], "cumulative_length")
        if length != longest or length < held or (not windowed and length != held):
            raise ValueError(f"{name}: layer {index} has the keys of {held} tokens, but its header says {lengths}.")
        if windowed:
            layers[index].cumulative_length = length
    return state, attention_cache, metadata
