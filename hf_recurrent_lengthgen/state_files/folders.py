"""Text states in files and folders: save one, read a text while saving every n tokens, load at a position.

A folder holds the states after several positions of one text, one file each. Each state is whole, but keys and values
of attention layers stand in it once: each file has those of the tokens since the file before.
"""

import os
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import torch

from hf_recurrent_lengthgen.evaluation.streaming import Tokens
from hf_recurrent_lengthgen.state_files.files import Continued, StateFile, write_file
from hf_recurrent_lengthgen.state_files.fitting import fitted
from hf_recurrent_lengthgen.state_files.origin import prefix_hash
from hf_recurrent_lengthgen.state_files.text_state import LayerKeys, TextState, check_rows, text_states

_NAME = re.compile(r"position-(\d{12,18})\.safetensors")


def file_at(folder: str | os.PathLike[str], position: int) -> Path:
    """The file of the text state at a position."""
    return Path(folder) / f"position-{position:012}.safetensors"


def positions_in(folder: str | os.PathLike[str]) -> list[int]:
    """The positions of the text states in a folder, ascending; [] without any or without a folder."""
    names = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
    return sorted(int(match[1]) for name in names if (match := _NAME.fullmatch(name)))


def save_text_state(path: str | os.PathLike[str], text_state: TextState) -> None:
    """Write a text state as one file that needs no other; an existing file is replaced when the new one is complete.

    Raises:
        ValueError: for NaN and infinite values, and for a folder in place of a file.
    """
    if os.path.isdir(path):
        raise ValueError(f"{path} is a folder: give the name of a file.")
    write_file(path, text_state)


def load_text_state(
    path: str | os.PathLike[str],
    model: Any = None,
    tokenizer: Any = None,
    *,
    position: int | None = None,
    tokens: Tokens | None = None,
    allow: Collection[str] = (),
) -> TextState:
    """Read a file of `save_text_state`, or a position of a folder of `read_into`.

    Args:
        path: File or folder.
        model: The model that is to continue the text, on whose device the state is put; None to look at it without a
            check against a model.
        tokenizer: Its tokenizer; None not to compare it.
        position: In a folder, the text state at this position or the nearest one before it; None for the last.
        tokens: The text, (T,) or (B, T), of which the text state must have read the beginning; None not to compare it.
        allow: What may differ between the model that read the text and this one: names of `OVERRIDES`.

    Raises:
        ValueError: if a file is cut, damaged, of a newer major version, or does not fit the model, its revision, the
            tokenizer or the tokens; the message names what differs.
    """
    if os.path.isdir(path):
        file = file_at(path, _nearest(path, position))
    else:
        file = Path(path)
        if not file.is_file():
            raise ValueError(f"{path} does not exist: give a state file, or a folder of lengthgen state read.")
    text_state = _from_file(file)
    if position is not None and text_state.position > position:
        raise ValueError(
            f"{path} has read {text_state.position} tokens, and nothing in it has read {position} or fewer."
        )
    if tokens is not None:
        check_prefix(text_state, tokens, str(path))
    if model is None:
        return text_state
    return fitted(text_state, model, tokenizer, allow, str(path))


def _nearest(folder: str | os.PathLike[str], position: int | None) -> int:
    positions = positions_in(folder)
    before = [place for place in positions if position is None or place <= position]
    if not before:
        what = f"none up to {position}, only at {positions}" if positions else "none at all"
        raise ValueError(f"{folder} holds no such text state ({what}): read the text into it first.")
    return before[-1]


def _from_file(path: Path) -> TextState:
    file = StateFile(path)
    named = _NAME.fullmatch(path.name)
    if named and int(named[1]) != file.header.position:
        raise ValueError(f"{path} has read {file.header.position} tokens, which is not what its name tells.")
    return file.text_state(_all_keys(path, file))


def _all_keys(path: Path, file: StateFile) -> dict[int, LayerKeys]:
    """The keys by layer, those in the files before included."""
    header, wanted = file.header, {*file.header.keys}
    parts = {layer: [file.layer_keys(layer)] for layer in wanted}
    while (continues := header.continues) is not None and (wanted := wanted & header.continued):
        before_path = file_at(path.parent, continues.position)
        if not before_path.is_file():
            raise ValueError(f"{path} continues {before_path.name}, which is not in its folder: copy it there.")
        before = StateFile(before_path)
        header = before.header
        if (header.position, header.prefix) != continues or not wanted <= header.keys.keys():
            raise ValueError(f"{before_path} is not the file that {path.name} continues: it has read another text.")
        for layer in wanted:
            parts[layer].insert(0, before.layer_keys(layer))
    return {layer: _joined(pieces, path) for layer, pieces in sorted(parts.items())}


def _joined(parts: list[LayerKeys], path: Path) -> LayerKeys:
    if len(parts) == 1:
        return parts[0]
    pairs = [part[:2] for part in parts]
    for tensors in zip(*pairs, strict=True):
        if len({(part.shape[:2], part.shape[3], part.dtype) for part in tensors}) > 1:
            raise ValueError(
                f"{path} and the files that it continues hold keys or values of different shapes or dtypes."
            )
    keys, values = (torch.cat(tensors, dim=2) for tensors in zip(*pairs, strict=True))
    return LayerKeys(keys, values, parts[-1].tokens)


def check_prefix(text_state: TextState, tokens: Tokens, name: str) -> None:
    """Raise a `ValueError` if a text state has not read the beginning of the tokens, or does not know what it read."""
    rows = check_rows(tokens)
    if not text_state.prefix:
        raise ValueError(f"{name} does not tell which tokens it has read: leave tokens out, or read the text again.")
    if rows.shape[1] < text_state.position:
        raise ValueError(
            f"{name} has read {text_state.position} tokens, more than the {rows.shape[1]} of the text given."
        )
    if len(rows) != text_state.rows or prefix_hash(rows[:, : text_state.position]) != text_state.prefix:
        raise ValueError(
            f"{name} has read {text_state.position} tokens of another text, or of other rows: give that text, or read "
            "this one into another file or folder."
        )


def read_into(
    folder: str | os.PathLike[str],
    model: Any,
    tokens: Tokens,
    every: int,
    *,
    tokenizer: Any = None,
    chunk_length: int | None = None,
    allow: Collection[str] = (),
) -> Iterator[TextState]:
    """Read a text while saving every so many tokens, and at its end; goes on after the last file in the folder.

    Memory does not grow with the text but for keys and values of attention layers.

    Args:
        folder: New folder, or one in which the same model has begun to read this text.
        model, tokens, tokenizer, chunk_length: As in `read_text`.
        every: Tokens between two files.
        allow: As in `load_text_state`, for the files that are there.

    Yields:
        The last text state in the folder if there is one, and each text state after it has been written.

    Raises:
        ValueError: as `load_text_state` and `read_text`, and if the folder has read another text.
    """
    if every < 1:
        raise ValueError(f"every must be a number of tokens of at least 1, got {every}.")
    rows, done, before = check_rows(tokens), 0, None
    if positions := positions_in(folder):
        if positions[-1] > rows.shape[1]:
            raise ValueError(
                f"{folder} has read {positions[-1]} tokens, more than the {rows.shape[1]} of the text: give a new "
                "folder, or use what is there."
            )
        before = load_text_state(folder, model, tokenizer, tokens=rows, allow=allow)
        done = before.position
        yield before
    stops = [*range((done // every + 1) * every, rows.shape[1], every), rows.shape[1]]
    if done == rows.shape[1]:
        return
    continues = None if before is None else Continued(before.position, before.prefix)
    options: Any = {"tokenizer": tokenizer, "chunk_length": chunk_length}
    for text_state in text_states(model, rows[:, done:], [stop - done for stop in stops], before, **options):
        write_file(file_at(folder, text_state.position), text_state, continues)
        continues = Continued(text_state.position, text_state.prefix)
        yield text_state


def crop_text_state(path: str | os.PathLike[str], position: int, output: str | os.PathLike[str]) -> TextState:
    """Write the text state at a position of a folder, or the nearest one before it, as one file that needs no other.

    Raises:
        ValueError: as `load_text_state` and `save_text_state`, and for an output that is a file of this folder.
    """
    target = Path(output)
    if os.path.isdir(path) and target.resolve().parent == Path(path).resolve() and _NAME.fullmatch(target.name):
        raise ValueError(f"{output} is a name of the files of {path}, which belong together: give another name.")
    text_state = load_text_state(path, position=position)
    save_text_state(output, text_state)
    return text_state
