"""Readings from and to the prompt caches of mlx-lm (`mlx_lm.cache_prompt`, `save_prompt_cache`).

Such a file is a safetensors file, with one cache for each layer that has one, in the order of the layers. Names are
those of a flattened list: "3.0" is the first array of the fourth cache. `ArraysCache` holds the last K-1 inputs of the
convolution, (B, K-1, C), and the state; `KVCache` holds keys and values; a `CacheList` of both has "3.0.0" to "3.1.1".
The metadata hold what describes each cache ("0.3"), texts of the user ("1.model"), and the classes ("2.3").

The file tells neither the position of a model without attention, nor which weights or tokens were read: the caller
answers for the model. The layout is that of mlx-lm's source at version 0.32 (cache.py and the model files); no file of
mlx-lm itself was at hand to test it.
"""

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hf_recurrent_lengthgen.models.checked_files import read_tensors, write_tensors
from hf_recurrent_lengthgen.models.recurrent_state import LayerState, state_dtype
from hf_recurrent_lengthgen.readings.fitting import fitted
from hf_recurrent_lengthgen.readings.origin import origin_of, unwrapped
from hf_recurrent_lengthgen.readings.reading import LayerKeys, Reading

TYPES = {
    "falcon_h1": False,
    "granitemoehybrid": False,
    "jamba": False,
    "mamba": False,
    "mamba2": False,
    "nemotron_h": False,
    "qwen3_next": True,
    "stateful_mamba": False,
    "stateful_mamba2": False,
}
"""Model types whose layout in mlx-lm is known -> whether keys and values of a state are swapped there."""
CHECKSUM = "1.checksum"
"""Where mlx-lm keeps texts of users. Its own files have none, so their damage is not found."""
ARRAYS, KEYS, BOTH = "ArraysCache", "KVCache", "CacheList"


def save_mlx_cache(
    path: str | os.PathLike[str], reading: Reading, model: Any, metadata: Mapping[str, str] | None = None
) -> None:
    """Write a reading as a prompt cache of mlx-lm.

    Args:
        path: File to write; mlx-lm wants the ending .safetensors.
        reading: A reading of the model.
        model: The model; mlx-lm must have its weights, too.
        metadata: Texts for mlx-lm; its `generate` compares "model" with its own, and reads "tokenizer_config".

    Raises:
        ValueError: for model types whose layout is not known, and readings that do not fit the model.
    """
    model = unwrapped(model)
    swapped = _swapped(model)
    reading = fitted(reading, model, None, (), "The reading")
    if reading.attention == "omitted":
        raise ValueError("mlx-lm cannot continue a hybrid without keys and values: read the text with them.")
    tensors: dict[str, Tensor] = {}
    fields = {f"1.{name}": text for name, text in (metadata or {}).items()}
    for place, (layer, kind) in enumerate(_caches(model)):
        arrays = _arrays(reading.state[layer], swapped, model.dtype)
        keys = reading.keys[layer][:2] if layer in reading.keys else ()
        fields[f"2.{place}"] = kind
        if kind == BOTH:
            fields |= {f"0.{place}.0.{i}": name for i, name in enumerate((ARRAYS, KEYS))}
            fields |= {f"0.{place}.1.{i}": "" for i in range(2)}
        else:
            fields[f"0.{place}"] = ""
        prefixes = (f"{place}.0.", f"{place}.1.") if kind == BOTH else (f"{place}.",) * 2
        tensors |= {f"{prefixes[0]}{i}": x for i, x in enumerate(arrays)} if kind != KEYS else {}
        tensors |= {f"{prefixes[1]}{i}": x for i, x in enumerate(keys)} if kind != ARRAYS else {}
    write_tensors(path, tensors, fields, CHECKSUM)


def load_mlx_cache(path: str | os.PathLike[str], model: Any, position: int | None = None) -> Reading:
    """Read a prompt cache of mlx-lm.

    Args:
        path: A file of `mlx_lm.cache_prompt` or `save_prompt_cache`, without quantized keys.
        model: The model that has read the text, with the same weights, as from `load_model`.
        position: Number of tokens read; needed for a model without attention, else found by the keys.

    Raises:
        ValueError: if the file is cut or does not fit the model, for other kinds of caches, and for model types whose
            layout is not known.
    """
    inner, name = unwrapped(model), os.fspath(path)
    swapped = _swapped(inner)
    fields, tensors, _ = read_tensors(path, inner.device, CHECKSUM)
    caches = _caches(inner)
    found = [fields.get(f"2.{place}") for place in range(len(caches))]
    if found != [kind for _, kind in caches] or f"2.{len(caches)}" in fields:
        kinds = sorted({value for key, value in fields.items() if key.startswith("2.")})
        raise ValueError(
            f"{path} is no prompt cache of mlx-lm for {type(inner).__name__}: its caches are {kinds or 'none'}, but "
            f"this model needs {len(caches)}: {', '.join(sorted({kind for _, kind in caches}))}."
        )
    dtype, shapes = state_dtype(inner.dtype), inner.state_shapes()
    expected = {key for place, (layer, kind) in enumerate(caches) for key in _names(place, kind, shapes[layer])}
    if {*tensors} != expected:
        raise ValueError(
            f"{path} does not fit {type(inner).__name__}: it lacks {sorted(expected - {*tensors})} and has unexpected "
            f"{sorted({*tensors} - expected)}."
        )
    for key, tensor in tensors.items():
        if not (tensor.is_floating_point() and tensor.ndim and bool(tensor.isfinite().all())):
            raise ValueError(f"{path} holds '{key}' as {tensor.dtype} or with NaN: it must be finite numbers.")
    rows = len(next(iter(tensors.values())))
    empty = torch.empty(rows, 0, device=inner.device, dtype=dtype)
    state = [LayerState(empty, empty)] * len(shapes)
    keys = {}
    for place, (layer, kind) in enumerate(caches):
        names = _names(place, kind, shapes[layer])
        if kind != ARRAYS:
            held, values = (tensors[name].to(inner.dtype) for name in names[-2:])
            keys[layer] = LayerKeys(held, values, held.shape[2] if held.ndim == 4 else -1)
        if kind != KEYS:
            parts = iter(tensors[key].to(dtype) for key in names)
            conv = empty if shapes[layer].conv == (0,) else next(parts).mT
            recurrent = empty if shapes[layer].recurrent == (0,) else next(parts)
            state[layer] = LayerState((recurrent.mT if swapped else recurrent).contiguous(), conv.contiguous())
    lengths = {layer.tokens for layer in keys.values()}
    if len(lengths) > 1 or (lengths and position not in (None, *lengths)) or (not lengths and position is None):
        raise ValueError(
            f"{path} holds the keys of {sorted(lengths) or 'no'} tokens, and position is {position}: give the number "
            "of tokens that were read."
        )
    found_position = lengths.pop() if lengths else int(position or 0)
    texts = {f"mlx.{key[2:]}": value for key, value in fields.items() if key.startswith("1.")}
    attention: Any = "kept" if keys else "none"
    reading = Reading(tuple(state), found_position, "", origin_of(model), attention, keys, (), texts)
    return fitted(reading, model, None, (), name)


def _swapped(model: Any) -> bool:
    kind = model.config.get_text_config(decoder=True).model_type
    if kind not in TYPES:
        raise ValueError(
            f"How mlx-lm lays out the states of {kind} is not known here; it is for {', '.join(sorted(TYPES))}."
        )
    return TYPES[kind]


def _caches(model: Any) -> list[tuple[int, str]]:
    """The layers that have a cache, and its class."""
    attending = model._layout.attending if getattr(model, "attends", False) else {}
    caches = []
    for index, shape in enumerate(model.state_shapes()):
        recurs = any(part != (0,) for part in shape)
        if recurs or index in attending:
            caches.append((index, BOTH if recurs and index in attending else ARRAYS if recurs else KEYS))
    return caches


def _arrays(state: LayerState, swapped: bool, dtype: torch.dtype) -> list[Tensor]:
    """Convolution part and recurrent part of a layer as mlx-lm holds them; those that it lacks are left out."""
    arrays = [state.conv.mT.to(dtype)] if state.conv.ndim > 2 else []
    return arrays + ([state.recurrent.mT if swapped else state.recurrent] if state.recurrent.ndim > 2 else [])


def _names(place: int, kind: str, shape: Any) -> list[str]:
    arrays = [f"{place}.{i}" for i in range(sum(part != (0,) for part in shape))]
    if kind == ARRAYS:
        return arrays
    if kind == KEYS:
        return [f"{place}.0", f"{place}.1"]
    return [*(name.replace(".", ".0.") for name in arrays), f"{place}.1.0", f"{place}.1.1"]
