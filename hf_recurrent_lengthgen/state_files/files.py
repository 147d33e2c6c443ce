"""State files: text states as safetensors files, whose layout docs/state_files.md documents for other programs.

A file stands for itself, or continues another one in its folder: then it holds the keys and values of new tokens only,
and `folders.py` puts them together.
"""

import json
import os
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_recurrent_lengthgen.models.state_on_disk import CHECKSUM, no_checksum, read_tensors, write_tensors
from hf_recurrent_lengthgen.models.state_value import WindowedLayerState, check_finite_state, layer_state
from hf_recurrent_lengthgen.state_files.origin import Origin
from hf_recurrent_lengthgen.state_files.text_state import LayerKeys, TextState
from hf_recurrent_lengthgen.versions import version_of

FORMAT, MAJOR, MINOR = "text_state", 1, 0
"""A file of a newer minor version is read, and what is new in it is kept; one of a newer major version is refused."""
STATE_PARTS = WindowedLayerState._fields
_ORIGIN = ("model_name", "model_revision", "model_dtype", "model_config", "weights_fingerprint", "tokenizer_sha256")
_KNOWN: tuple[str, ...] = (
    "format",
    "format_version",
    "written_by",
    "num_layers",
    "position",
    "prefix_sha256",
    "attention",
)
_KNOWN += ("next_position", "key_layers", "continues", "model_attends", CHECKSUM, *_ORIGIN)


class Continued(NamedTuple):
    """The file that another one continues: its position and the hash of its tokens."""

    position: int
    prefix: str


class Header(NamedTuple):
    """What a file says of its tensors.

    Attributes:
        layers: Number of layers.
        position, prefix, attention, origin, metadata: As in `TextState`.
        keys: For each layer with keys, the position of the first one in this file, and how many tokens it has read.
        continues: The file that holds the keys before, for the layers whose first key here is at its position.
        continued: The layers for which it does.
    """

    layers: int
    position: int
    prefix: str
    attention: Any
    origin: Origin | None
    metadata: dict[str, str]
    keys: dict[int, tuple[int, int]]
    continues: Continued | None
    continued: frozenset[int]


def write_file(path: str | os.PathLike[str], text_state: TextState, continues: Continued | None = None) -> None:
    """Write a text state; with `continues`, the keys that stand in the file before are left out.

    Raises:
        ValueError: for values that are not finite, metadata with the names of other fields, and keys of other rows.
    """
    check_finite_state(text_state.state, "The state of the text")
    for name, value in text_state.metadata.items():
        if name in _KNOWN or not isinstance(name, str) or not isinstance(value, str):
            raise ValueError(f"metadata must be texts under names other than {', '.join(_KNOWN)}; got {name!r}.")
    tensors = {
        f"layers.{i}.{k}": part for i, layer in enumerate(text_state.state) for k, part in layer._asdict().items()
    }
    keys, continued = {}, []
    for index, (key, values, tokens) in text_state.keys.items():
        if len(key) != text_state.rows or not bool(key.isfinite().all() and values.isfinite().all()):
            raise ValueError(
                f"The keys and values of layer {index} must be finite ones of {text_state.rows} rows, got shape "
                f"{tuple(key.shape)}: give those of the text that the state has read."
            )
        first = tokens - key.shape[2]
        if continues is not None and first <= continues.position and first == 0:
            first = continues.position
            key, values = key[:, :, first:], values[:, :, first:]
            continued.append(index)
        tensors |= {f"layers.{index}.keys": key, f"layers.{index}.values": values}
        keys[index] = (first, tokens)
    header = {
        "format": FORMAT,
        "format_version": f"{MAJOR}.{MINOR}",
        "written_by": f"hf_recurrent_lengthgen {version_of('hf_recurrent_lengthgen')}",
        "num_layers": str(len(text_state.state)),
        "position": str(text_state.position),
        "prefix_sha256": text_state.prefix,
        "attention": text_state.attention,
        "next_position": str(text_state.position if text_state.attention == "kept" else 0),
        "key_layers": json.dumps(keys),
    }
    if continues is not None:
        header["continues"] = json.dumps({**continues._asdict(), "layers": continued})
    header |= _origin_fields(text_state.origin) | dict(text_state.metadata)
    write_tensors(path, tensors, header)


def _origin_fields(origin: Origin | None) -> dict[str, str]:
    if origin is None:
        return {}
    values = (origin.name, origin.revision, origin.dtype, json.dumps(origin.config), origin.weights, origin.tokenizer)
    return dict(zip(_ORIGIN, values, strict=True)) | {"model_attends": json.dumps(origin.attends)}


class StateFile:
    """A file of a text state, read into memory.

    Raises:
        ValueError: for files that are cut, no text states, of a newer major version, or damaged.

    Warns:
        UserWarning: for a file without a checksum, as earlier versions and other programs wrote it.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.name = os.fspath(path)
        fields, self._tensors, has_checksum = read_tensors(path)
        _check_format(self.name, fields)
        try:
            self.header = _parsed(fields)
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"{path} has a damaged header ({error!r:.200}): write it again.") from error
        self._check_names()
        if not has_checksum:
            warnings.warn(no_checksum(path), stacklevel=5)

    def _check_names(self) -> None:
        header, names = self.header, {*self._tensors}
        windowed = "layers.0.window" in names
        layers = range(min(header.layers, len(names)))  # a damaged number must not allocate memory
        parts = STATE_PARTS if windowed else STATE_PARTS[:2]
        expected = {f"layers.{i}.{part}" for i in layers for part in parts}
        expected |= {f"layers.{i}.{part}" for i in header.keys for part in ("keys", "values")}
        missing = sorted(expected - names)
        # A part that a newer minor version adds is no reason to refuse a file; one of a known name is.
        known = {*STATE_PARTS, "keys", "values"}
        unexpected = sorted(key for key in names - expected if key.rpartition(".")[2] in known)
        if not header.layers or missing or unexpected:
            raise ValueError(
                f"{self.name} does not hold the parts of {header.layers} layers that its header tells: missing "
                f"{missing}, unexpected {unexpected}."
            )

    def tensor(self, layer: int, part: str) -> Tensor:
        tensor = self._tensors[f"layers.{layer}.{part}"]
        kinds = (torch.float32, torch.float64) if part in STATE_PARTS else ()
        if (kinds and tensor.dtype not in kinds) or not tensor.is_floating_point():
            allowed = "float32 or float64" if kinds else "floating-point numbers"
            raise ValueError(f"{self.name}: layer {layer} has '{part}' as {tensor.dtype}, but it must be {allowed}.")
        if not bool(tensor.isfinite().all()):
            raise ValueError(f"{self.name}: layer {layer}, part '{part}' has NaN or infinite values.")
        return tensor

    def layer_keys(self, layer: int) -> LayerKeys:
        """The keys and values of a layer that stand in this file."""
        first, tokens = self.header.keys[layer]
        keys, values = (self.tensor(layer, part) for part in ("keys", "values"))
        for part in (keys, values):
            if part.ndim != 4 or part.shape[:3] != (keys.shape[0], keys.shape[1], tokens - first):
                raise ValueError(
                    f"{self.name}: layer {layer} has keys or values of shape {tuple(part.shape)}, but by its "
                    f"header they are those of tokens {first} to {tokens}."
                )
        return LayerKeys(keys, values, tokens)

    def text_state(self, keys: Mapping[int, LayerKeys]) -> TextState:
        """The text state, with these keys and values."""
        header = self.header
        parts = STATE_PARTS if "layers.0.window" in self._tensors else STATE_PARTS[:2]
        state = tuple(layer_state(self.tensor(i, part) for part in parts) for i in range(header.layers))
        rows = {tensor.shape[:1] for layer in state for tensor in layer}
        rows |= {layer.keys.shape[:1] for layer in keys.values()}
        if len(rows) > 1:
            raise ValueError(f"{self.name} has parts with different numbers of rows: {sorted(map(tuple, rows))}.")
        return TextState(state, header.position, header.prefix, header.origin, header.attention, keys, header.metadata)


def _check_format(name: str, fields: Mapping[str, str]) -> None:
    kind = fields.get("format")
    if kind != FORMAT:
        advice = " It is a state alone: load_state reads it." if kind == "recurrent_state" else ""
        if kind in ("reading", "hybrid_state"):
            advice = " It was written before files of text states: read the text again (lengthgen state read)."
        raise ValueError(f"{name} holds no text state: its format is {kind!r}.{advice}")
    major, _, minor = fields.get("format_version", "").partition(".")
    if not (major.isdecimal() and minor.isdecimal()) or int(major) > MAJOR:
        raise ValueError(
            f"{name} has version {fields.get('format_version')!r} of the format, this code reads {MAJOR}.x: update "
            "hf_recurrent_lengthgen."
        )


def _parsed(fields: Mapping[str, str]) -> Header:
    """The fields of a file; errors of any kind for damaged ones."""
    position, layers = _number(fields["position"]), _number(fields["num_layers"])
    keys = {_number(k): (_number(a), _number(b)) for k, (a, b) in json.loads(fields["key_layers"]).items()}
    attention = fields["attention"]
    if attention not in ("kept", "none", "omitted") or (keys and attention != "kept"):
        raise ValueError(f"attention {attention!r} with keys of layers {sorted(keys)}")
    if any(not first <= tokens == position or layer >= layers for layer, (first, tokens) in keys.items()):
        raise ValueError(f"position {position}, but keys {keys}")
    if _number(fields["next_position"]) != (position if attention == "kept" else 0):
        raise ValueError(f"position {position}, but the next one {fields['next_position']}")
    continues, continued = None, frozenset[int]()
    if "continues" in fields:
        before = json.loads(fields["continues"])
        continues = Continued(_number(before["position"]), _hash(before["prefix"]))
        continued = frozenset(_number(layer) for layer in before["layers"])
        if not continues.position < position or any(keys[layer][0] != continues.position for layer in continued):
            raise ValueError(f"it continues {before}, but holds the keys {keys}")
    origin = None
    if any(key in fields for key in (*_ORIGIN, "model_attends")):  # a lost one is no reason to compare no model
        name, revision, dtype, config, weights, tokenizer = (fields[key] for key in _ORIGIN)
        attends = json.loads(fields["model_attends"])
        origin = Origin(name, revision, dtype, dict(json.loads(config)), _hash(weights), tokenizer, bool(attends))
    metadata = {name: value for name, value in fields.items() if name not in _KNOWN}
    prefix = fields["prefix_sha256"] and _hash(fields["prefix_sha256"])
    return Header(layers, position, prefix, attention, origin, metadata, keys, continues, continued)


def _number(value: str | int) -> int:
    number = -1 if isinstance(value, (bool, float)) else int(value)
    if not 0 <= number < 2**62:
        raise ValueError(f"{value!r} is no number of tokens or layers")
    return number


def _hash(text: str) -> str:
    if len(bytes.fromhex(text)) != 32:
        raise ValueError(f"{text!r} is no SHA-256")
    return text
