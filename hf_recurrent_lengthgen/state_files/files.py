"""State files: text states as safetensors files, whose layout docs/state_files.md documents for other programs.

A file stands for itself. A folder holds the states after several positions of one text, one file each.
"""

import json
import os
import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from hf_recurrent_lengthgen.evaluation.streaming import Tokens
from hf_recurrent_lengthgen.models.modeling_protocols import base_of
from hf_recurrent_lengthgen.models.state_on_disk import CHECKSUM, no_checksum, read_tensors, write_tensors
from hf_recurrent_lengthgen.models.state_value import (
    WindowedLayerState,
    check_finite_state,
    check_state,
    layer_state,
    map_state,
    state_dtype,
)
from hf_recurrent_lengthgen.state_files.origin import Origin, check_origin, prefix_hash
from hf_recurrent_lengthgen.state_files.text_state import LayerKeys, TextState, attends, check_rows, text_states
from hf_recurrent_lengthgen.versions import version_of

FORMAT, MAJOR, MINOR = "text_state", 2, 0
"""A file of a newer minor version is read, and what is new in it is kept; one of another major version is refused."""
_FIELDS = ("format", "format_version", "written_by", "position", "prefix_sha256", "origin", CHECKSUM)
_PART = re.compile(r"layers\.(\d+)\.(recurrent|conv|window|keys|values)")
_NAME = re.compile(r"position-(\d{12,18})\.safetensors")


def save_text_state(path: str | os.PathLike[str], text_state: TextState) -> None:
    """Write a text state; an existing file is replaced when the new one is complete.

    Raises:
        ValueError: for values that are not finite, a folder in place of a file, and metadata with the names of other
            fields.
    """
    if os.path.isdir(path):
        raise ValueError(f"{path} is a folder: give the name of a file.")
    _check_finite(text_state, "The text state")
    for name, value in text_state.metadata.items():
        if name in _FIELDS or not isinstance(name, str) or not isinstance(value, str):
            raise ValueError(f"metadata must be texts under names other than {', '.join(_FIELDS)}; got {name!r}.")
    layers: list[tuple[int, Any]] = [*enumerate(text_state.state), *text_state.keys.items()]
    tensors = {f"layers.{i}.{name}": part for i, layer in layers for name, part in layer._asdict().items()}
    header = {
        "format": FORMAT,
        "format_version": f"{MAJOR}.{MINOR}",
        "written_by": f"hf_recurrent_lengthgen {version_of('hf_recurrent_lengthgen')}",
        "position": str(text_state.position),
        "prefix_sha256": text_state.prefix,
        "origin": json.dumps(asdict(text_state.origin)),
    }
    write_tensors(path, tensors, header | dict(text_state.metadata))


def load_text_state(
    path: str | os.PathLike[str],
    model: Any = None,
    tokenizer: Any = None,
    *,
    position: int | None = None,
    tokens: Tokens | None = None,
) -> TextState:
    """Read a file of `save_text_state`, or a position of a folder of `read_into`.

    Args:
        path: File or folder.
        model: The model that is to continue the text, on whose device the state is put; None to look at it without a
            check against a model.
        tokenizer: Its tokenizer; None not to compare it.
        position: In a folder, the text state at this position or the nearest one before it; None for the last.
        tokens: The text, (T,) or (B, T), of which the text state must have read the beginning; None not to compare it.

    Raises:
        ValueError: if a file is cut, damaged, of another major version, or does not fit the model, its revision, the
            tokenizer or the tokens; the message names what differs.
    """
    file = file_at(path, _nearest(path, position)) if os.path.isdir(path) else Path(path)
    if not file.is_file():
        raise ValueError(f"{path} does not exist: give a state file, or a folder of lengthgen state read.")
    text_state = _read(file)
    if tokens is not None:
        _check_prefix(text_state, tokens, str(path))
    return text_state if model is None else _fitted(text_state, model, tokenizer, str(path))


def _nearest(folder: str | os.PathLike[str], position: int | None) -> int:
    positions = positions_in(folder)
    before = [place for place in positions if position is None or place <= position]
    if not before:
        what = f"none up to {position}, only at {positions}" if positions else "none at all"
        raise ValueError(f"{folder} holds no such text state ({what}): read the text into it first.")
    return before[-1]


def _read(path: Path) -> TextState:
    fields, tensors, has_checksum = read_tensors(path)
    _check_format(path, fields)
    try:
        position, prefix = int(fields["position"]), fields["prefix_sha256"]
        origin = Origin(**json.loads(fields["origin"]))
        parts: dict[int, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            if match := _PART.fullmatch(name):
                parts.setdefault(int(match[1]), {})[match[2]] = tensor
        names = WindowedLayerState._fields if "window" in parts[0] else WindowedLayerState._fields[:2]
        state = tuple(layer_state(parts[layer][name] for name in names) for layer in range(len(parts)))
        keys = {i: LayerKeys(parts[i]["keys"], parts[i]["values"]) for i in sorted(parts) if "keys" in parts[i]}
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(
            f"{path} lacks fields or tensors of a text state ({error!r:.200}): write it again."
        ) from error
    if not has_checksum:
        warnings.warn(no_checksum(path), stacklevel=3)
    metadata = {name: value for name, value in fields.items() if name not in _FIELDS}
    text_state = TextState(state, position, prefix, origin, keys, metadata)
    _check_finite(text_state, str(path))
    return text_state


def _check_finite(text_state: TextState, name: str) -> None:
    check_finite_state(text_state.state, name)
    for index, layer in text_state.keys.items():
        if not all(bool(part.isfinite().all()) for part in layer):
            raise ValueError(f"{name}: the keys or values of layer {index} are NaN or infinite.")


def _check_format(path: Path, fields: Mapping[str, str]) -> None:
    kind, version = fields.get("format"), fields.get("format_version", "")
    if kind != FORMAT:
        advice = " It is a state alone: load_state reads it." if kind == "recurrent_state" else ""
        raise ValueError(f"{path} holds no text state: its format is {kind!r}.{advice}")
    if version.partition(".")[0] != str(MAJOR):
        raise ValueError(
            f"{path} has version {version!r} of the format, this code reads {MAJOR}.x: read the text again, or update "
            "hf_recurrent_lengthgen."
        )


def _check_prefix(text_state: TextState, tokens: Tokens, name: str) -> None:
    """Raise a `ValueError` if a text state has not read the beginning of the tokens, or does not know what it read."""
    rows = check_rows(tokens)
    if not text_state.prefix:
        raise ValueError(f"{name} does not tell which tokens it has read: leave tokens out, or read the text again.")
    if rows.shape[1] < text_state.position:
        raise ValueError(
            f"{name} has read {text_state.position} tokens, more than the {rows.shape[1]} of the text given: give a "
            "new file or folder, or use what is there."
        )
    if len(rows) != text_state.rows or prefix_hash(rows[:, : text_state.position]) != text_state.prefix:
        raise ValueError(
            f"{name} has read {text_state.position} tokens of another text, or of other rows: give that text, or read "
            "this one into another file or folder."
        )


def _fitted(text_state: TextState, model: Any, tokenizer: Any, name: str) -> TextState:
    """The text state on the device of the model; a `ValueError` if the model did not read it."""
    model = base_of(model)
    if not hasattr(model, "state_shapes"):
        raise ValueError(
            f"{type(model).__name__} takes no states: load it with load_model, or wrap it with stateful(model)."
        )
    check_origin(text_state.origin, model, tokenizer, name)
    state = map_state(lambda part: part.to(model.device), text_state.state)
    state = check_state(state, model.state_shapes(), text_state.rows, model.device, state_dtype(model.dtype), name)
    sizes = model._layout.attending if attends(model) else {}
    if text_state.keys.keys() != sizes.keys():
        raise ValueError(
            f"{name} has keys and values of the layers {sorted(text_state.keys)}, but {type(model).__name__} attends "
            f"in the layers {sorted(sizes)}."
        )
    for index, layer in text_state.keys.items():
        for part, (heads, size) in zip(layer, sizes[index], strict=True):
            if part.shape != (text_state.rows, heads, layer.keys.shape[2], size) or part.dtype != model.dtype:
                raise ValueError(
                    f"{name}: layer {index} has keys or values of shape {tuple(part.shape)} and {part.dtype}, "
                    f"expected ({text_state.rows}, {heads}, tokens, {size}) and {model.dtype}."
                )
    keys = {i: LayerKeys(*(part.to(model.device) for part in layer)) for i, layer in text_state.keys.items()}
    return replace(text_state, state=state, keys=keys)


def file_at(folder: str | os.PathLike[str], position: int) -> Path:
    """The file of the text state at a position."""
    return Path(folder) / f"position-{position:012}.safetensors"


def positions_in(folder: str | os.PathLike[str]) -> list[int]:
    """The positions of the text states in a folder, ascending; [] without any or without a folder."""
    names = os.listdir(folder) if os.path.isdir(folder) else []
    return sorted(int(match[1]) for name in names if (match := _NAME.fullmatch(name)))


def read_into(
    folder: str | os.PathLike[str],
    model: Any,
    tokens: Tokens,
    every: int,
    *,
    tokenizer: Any = None,
    chunk_length: int | None = None,
) -> Iterator[TextState]:
    """Read a text while saving every so many tokens, and at its end; goes on after the last file in the folder.

    Memory does not grow with the text but for keys and values of attention layers, which each file holds.

    Args:
        folder: New folder, or one in which the same model has begun to read this text.
        model, tokens, tokenizer, chunk_length: As in `read_text`.
        every: Tokens between two files.

    Yields:
        The last text state in the folder if there is one, and each text state after it has been written.

    Raises:
        ValueError: as `load_text_state` and `read_text`, and if the folder has read another text.
    """
    if every < 1:
        raise ValueError(f"every must be a number of tokens of at least 1, got {every}.")
    rows, done, before = check_rows(tokens), 0, None
    if positions_in(folder):
        before = load_text_state(folder, model, tokenizer, tokens=rows)
        done = before.position
        yield before
    if done == rows.shape[1]:
        return
    stops = [*range((done // every + 1) * every, rows.shape[1], every), rows.shape[1]]
    options: Any = {"tokenizer": tokenizer, "chunk_length": chunk_length}
    for text_state in text_states(model, rows[:, done:], [stop - done for stop in stops], before, **options):
        save_text_state(file_at(folder, text_state.position), text_state)
        yield text_state
