"""State files: text states as safetensors files, whose layout docs/state_files.md documents for other programs.

A file stands for itself. A folder holds the states after several positions of one text, one file each.
"""

import json
import os
import re
import warnings
from collections.abc import Iterator
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
from hf_recurrent_lengthgen.state_files.text_state import LayerKeys, TextState, check_rows, text_states
from hf_recurrent_lengthgen.state_files.transitions import check_transitions
from hf_recurrent_lengthgen.versions import version_of

FORMAT, MAJOR, MINOR = "text_state", 2, 1
"""A file of a newer minor version is read, with its new fields; one of another major version is refused."""
_FIELDS = ("format", "format_version", "written_by", "position", "prefix_sha256", "origin", CHECKSUM)
_PART = re.compile(r"layers\.(\d+)\.(recurrent|conv|window|keys|values|transition)")
_NAME = re.compile(r"position-(\d{12,18})\.safetensors")


def save_text_state(path: str | os.PathLike[str], text_state: TextState) -> None:
    """Write a text state; an existing file is replaced when the new one is complete.

    Raises:
        ValueError: for values that are not finite, and metadata with the names of other fields.
    """
    _check_finite(text_state, "The text state")
    if names := {*_FIELDS} & {*text_state.metadata}:
        raise ValueError(f"metadata must be texts under names other than {', '.join(_FIELDS)}; got {names}.")
    layers: list[tuple[int, Any]] = [*enumerate(text_state.state), *text_state.keys.items()]
    tensors = {f"layers.{i}.{name}": part for i, layer in layers for name, part in layer._asdict().items()}
    tensors |= {f"layers.{i}.transition": part.contiguous() for i, part in text_state.transitions.items()}
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
    file = Path(path)
    if not file.is_file():
        before = [place for place in positions_in(path) if position is None or place <= position]
        if not before:
            where = f"up to {position}, only at {positions_in(path)}" if position is not None else "at all"
            raise ValueError(f"{path} holds no text state {where}: read the text into this file or folder first.")
        file = file_at(path, before[-1])
    text_state = _read(file)
    if tokens is not None:
        _check_prefix(text_state, tokens, str(path))
    return text_state if model is None else _fitted(text_state, model, tokenizer, str(path))


def _read(path: Path) -> TextState:
    fields, tensors, has_checksum = read_tensors(path)
    kind, version = fields.get("format"), fields.get("format_version", "")
    if (kind, version.partition(".")[0]) != (FORMAT, str(MAJOR)):
        advice = "load_state reads it" if kind == "recurrent_state" else "read the text again, or update this package"
        raise ValueError(
            f"{path} holds no text state of version {MAJOR}.x: it has the format {kind!r}, version {version!r}; "
            f"{advice}."
        )
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
    transitions = {i: parts[i]["transition"] for i in sorted(parts) if "transition" in parts[i]}
    text_state = TextState(state, position, prefix, origin, keys, metadata, transitions)
    _check_finite(text_state, str(path))
    return text_state


def _check_finite(text_state: TextState, name: str) -> None:
    check_finite_state(text_state.state, name)
    check_transitions(text_state.transitions, text_state.state, name)
    for index, layer in text_state.keys.items():
        if not all(bool(part.isfinite().all()) for part in layer):
            raise ValueError(f"{name}: the keys or values of layer {index} are NaN or infinite.")


def _check_prefix(text_state: TextState, tokens: Tokens, name: str) -> None:
    """Raise a `ValueError` if a text state has not read the beginning of the tokens, or has no prefix."""
    rows = check_rows(tokens)
    what = "of another text, or of another batch"
    if rows.shape[1] < text_state.position:
        what = f"and this text has only {rows.shape[1]}"
    elif not text_state.prefix:
        what = "and does not tell which"
    elif len(rows) == text_state.rows and prefix_hash(rows[:, : text_state.position]) == text_state.prefix:
        return
    raise ValueError(
        f"{name} has read {text_state.position} tokens {what}: give that text, or read this one into another file or "
        "folder."
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
    sizes = model._layout.attending if getattr(model, "attends", False) else {}
    for index in sorted({*text_state.keys, *sizes}):
        stored = [(*part.shape, part.dtype) for part in text_state.keys.get(index, ())]
        length = text_state.keys[index].keys.shape[2] if stored else 0
        needed = [(text_state.rows, heads, length, size, model.dtype) for heads, size in sizes.get(index, ())]
        if stored != needed:
            raise ValueError(
                f"{name}: layer {index} has the keys and values {stored}, but {type(model).__name__} needs {needed}."
            )
    keys = {i: LayerKeys(*(part.to(model.device) for part in layer)) for i, layer in text_state.keys.items()}
    transitions = {i: part.to(model.device) for i, part in text_state.transitions.items()}
    return replace(text_state, state=state, keys=keys, transitions=transitions)


def file_at(folder: str | os.PathLike[str], position: int) -> Path:
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
    transitions: bool = False,
) -> Iterator[TextState]:
    """Read a text while saving every so many tokens, and at its end; goes on after the last file in the folder.

    Memory does not grow with the text but for keys and values of attention layers, which each file holds.

    Args:
        folder: New folder, or one in which the same model has begun to read this text.
        model, tokens, tokenizer, chunk_length, transitions: As in `read_text`.
        every: Tokens between two files.

    Yields:
        The last text state in the folder if there is one, and each text state after it has been written.

    Raises:
        ValueError: as `load_text_state` and `read_text`, and if the folder has read another text.
    """
    rows, done, before = check_rows(tokens), 0, None
    if positions_in(folder):
        before = load_text_state(folder, model, tokenizer, tokens=rows)
        done = before.position
        if transitions and not before.transitions:
            raise ValueError(f"{folder} was read without transitions: read the text into another folder.")
        yield before
    if done == rows.shape[1]:
        return
    rest = rows[:, done:]
    stops = [*range(every - done % every, rest.shape[1], every), rest.shape[1]]
    for text_state in text_states(model, rest, stops, before, tokenizer, chunk_length, transitions):
        save_text_state(file_at(folder, text_state.position), text_state)
        yield text_state
