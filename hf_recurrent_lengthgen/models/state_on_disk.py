"""Files of states: safetensors with a checksum, read into memory of their own, and replaced as a whole."""

import hashlib
import json
import os
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from .state_value import LayerState, RecurrentState, WindowedLayerState, check_finite_state, layer_state

STATE_FORMAT = "recurrent_state"
STATE_FORMAT_VERSION = 1
CHECKSUM = "checksum"
"""Field of the header with the digest of all else in the file."""
_PREFIX = "sha256-of-fields-and-tensors:"


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary path next to `path` that replaces `path` when the block ends without an error.

    An error (a full disk, an interrupt) removes the temporary file and leaves `path` as it was.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        with open(temporary, "rb") as written:
            os.fsync(written.fileno())
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o666 & ~umask)
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a text as UTF-8; see `replacing`."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def digest_of(tensors: Mapping[str, Tensor], fields: Mapping[str, str] | None = None) -> str:
    """SHA-256 of text fields and of name, dtype, shape and bytes of tensors; their order does not matter."""
    digest = hashlib.sha256(json.dumps(sorted((fields or {}).items())).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"\n{name} {str(tensor.dtype).removeprefix('torch.')} {[*tensor.shape]}\n".encode())
        digest.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def write_tensors(path: str | os.PathLike[str], tensors: Mapping[str, Tensor], fields: Mapping[str, str]) -> None:
    """Write tensors and text fields with their checksum; an old file is replaced at the end."""
    whole = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
    with replacing(path) as temporary:
        save_file(whole, temporary, {**fields, CHECKSUM: _PREFIX + digest_of(whole, fields)})


def read_tensors(
    path: str | os.PathLike[str], device: torch.device | str = "cpu"
) -> tuple[dict[str, str], dict[str, Tensor], bool]:
    """The fields of a file, its tensors, and whether it has a checksum, which then is right.

    The tensors are copies: what happens to the file later does not touch them.

    Raises:
        ValueError: for a file that is cut, no safetensors file, or not what its checksum tells.
    """
    if os.path.isdir(path):
        raise ValueError(f"{path} is a folder: give a file in it.")
    try:
        with safe_open(os.fspath(path), framework="pt") as file:
            fields = file.metadata() or {}
            tensors = {key: file.get_tensor(key).clone() for key in file.keys()}
    except SafetensorError as error:
        raise ValueError(f"{path} is not a readable safetensors file ({error}); it may be cut.") from error
    # One damaged byte cannot take away both the name of the field and the beginning of its value.
    has_checksum = CHECKSUM in fields or any(value.startswith(_PREFIX) for value in fields.values())
    stored = fields.pop(CHECKSUM, "")
    if has_checksum and stored != _PREFIX + digest_of(tensors, fields):
        raise ValueError(
            f"{path} is damaged: its tensors or fields are not those that were written, by their checksum. Copy or "
            "write it again."
        )
    return fields, {name: tensor.to(device) for name, tensor in tensors.items()}, has_checksum


def no_checksum(path: str | os.PathLike[str]) -> str:
    return (
        f"{path} has no checksum, as files of earlier versions and of other programs: damaged numbers in it cannot "
        "be found. Load and save it again to give it one."
    )


def save_state(path: str | os.PathLike[str], state: RecurrentState, metadata: Mapping[str, str] | None = None) -> None:
    """Write a state as a safetensors file (`layers.{i}.recurrent`, `layers.{i}.conv`, `layers.{i}.window` if any).

    Args:
        path: File to write; replaced only when the new one is complete.
        state: State to write; must be finite.
        metadata: Text fields stored in the file, for example the name of the model.
    """
    check_finite_state(state, "state")
    tensors = {
        f"layers.{index}.{part_name}": part
        for index, layer in enumerate(state)
        for part_name, part in zip(WindowedLayerState._fields, layer, strict=False)
    }
    header = {
        "format": STATE_FORMAT,
        "format_version": str(STATE_FORMAT_VERSION),
        "num_layers": str(len(state)),
        "metadata": json.dumps(dict(metadata or {})),
    }
    write_tensors(path, tensors, header)


def load_state(
    path: str | os.PathLike[str], device: torch.device | str = "cpu"
) -> tuple[RecurrentState, dict[str, str]]:
    """Read a state written by `save_state`.

    Returns:
        The state, in memory of its own, and its metadata.

    Raises:
        ValueError: if the file is cut or damaged, not a state, of a newer format, or has missing, unexpected or
            non-finite parts.

    Warns:
        UserWarning: for a file without a checksum, as earlier versions wrote it.
    """
    header, tensors, has_checksum = read_tensors(path, device)
    if (header.get("format"), header.get("format_version")) != (STATE_FORMAT, str(STATE_FORMAT_VERSION)):
        raise ValueError(
            f"{path} has the format {header.get('format')!r}, version {header.get('format_version')!r}, and must have "
            f"{STATE_FORMAT!r}, {STATE_FORMAT_VERSION}: update hf_recurrent_lengthgen for a newer version; files with "
            "their text, model, keys and values are read by load_text_state of hf_recurrent_lengthgen.state_files."
        )
    if not has_checksum:
        warnings.warn(no_checksum(path), stacklevel=2)
    layers = header.get("num_layers", "")
    count = min(int(layers), len(tensors)) if layers.isdecimal() else 0  # a damaged number must not allocate memory
    parts = WindowedLayerState._fields if "layers.0.window" in tensors else LayerState._fields
    expected = {f"layers.{index}.{part}" for index in range(count) for part in parts}
    if not expected or set(tensors) != expected:
        raise ValueError(
            f"{path} does not hold the parts of {layers!r} layers: missing {sorted(expected - set(tensors))}, "
            f"unexpected {sorted(set(tensors) - expected)}."
        )
    state = tuple(layer_state(tensors[f"layers.{index}.{part}"] for part in parts) for index in range(count))
    check_finite_state(state, os.fspath(path))
    return state, json.loads(header.get("metadata", "{}"))
