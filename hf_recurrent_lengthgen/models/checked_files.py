"""Safetensors files of states with a checksum, read into memory of their own."""

import hashlib
import json
import os
from collections.abc import Mapping

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from .atomic_files import replacing

CHECKSUM = "checksum"
"""Field of the header with the digest of all else in the file."""
_PREFIX = "sha256-of-fields-and-tensors:"


def digest_of(tensors: Mapping[str, Tensor], fields: Mapping[str, str] | None = None) -> str:
    """SHA-256 of text fields and of name, dtype, shape and bytes of tensors; their order does not matter."""
    digest = hashlib.sha256(json.dumps(sorted((fields or {}).items())).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"\n{name} {str(tensor.dtype).removeprefix('torch.')} {[*tensor.shape]}\n".encode())
        digest.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def write_tensors(
    path: str | os.PathLike[str], tensors: Mapping[str, Tensor], fields: Mapping[str, str], checksum: str = CHECKSUM
) -> None:
    """Write tensors and text fields with their checksum, under this name; an old file is replaced at the end."""
    whole = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
    with replacing(path) as temporary:
        save_file(whole, temporary, {**fields, checksum: _PREFIX + digest_of(whole, fields)})


def read_tensors(
    path: str | os.PathLike[str], device: torch.device | str = "cpu", checksum: str = CHECKSUM
) -> tuple[dict[str, str], dict[str, Tensor], bool]:
    """The fields of a file, its tensors, and whether it has a checksum, which then is right.

    The tensors are copies: what happens to the file later does not touch them.

    Raises:
        ValueError: for a file that is cut, no safetensors file, or not what its checksum tells.
    """
    try:
        with safe_open(os.fspath(path), framework="pt") as file:
            fields = file.metadata() or {}
            tensors = {key: file.get_tensor(key).clone() for key in file.keys()}
    except SafetensorError as error:
        raise ValueError(f"{path} is not a readable safetensors file ({error}); it may be cut.") from error
    # One damaged byte cannot take away both the name of the field and the beginning of its value.
    has_checksum = checksum in fields or any(value.startswith(_PREFIX) for value in fields.values())
    told = fields.pop(checksum, "")
    if has_checksum and told != _PREFIX + digest_of(tensors, fields):
        raise ValueError(
            f"{path} is damaged: its tensors or fields are not those that were written, by their checksum. Copy or "
            "write it again."
        )
    return fields, {name: tensor.to(device) for name, tensor in tensors.items()}, has_checksum


def no_checksum(path: str | os.PathLike[str]) -> str:
    """What to say of a file without a checksum."""
    return (
        f"{path} has no checksum, as files of earlier versions and of other programs: damaged numbers in it cannot "
        "be found. Load and save it again to give it one."
    )
