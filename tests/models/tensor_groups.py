"""Files of tensors of several models: NAME:KEY is the tensor KEY of the model NAME, and notes stand under its name."""

import json
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor


def groups_of(file: Path) -> list[str]:
    """The names of all models of a file."""
    with safe_open(file, framework="pt") as opened:
        return sorted({key.partition(":")[0] for key in opened.keys()})


def read_group(file: Path, name: str) -> dict[str, Tensor]:
    """The tensors of one model."""
    with safe_open(file, framework="pt") as opened:
        keys = [key for key in opened.keys() if key.startswith(f"{name}:")]
        return {key.partition(":")[2]: opened.get_tensor(key) for key in keys}


def read_notes(file: Path, name: str) -> dict[str, str]:
    """The notes of one model."""
    with safe_open(file, framework="pt") as opened:
        return dict(json.loads((opened.metadata() or {}).get(name, "{}")))


def write_group(file: Path, name: str, tensors: dict[str, Tensor], notes: dict[str, str] | None = None) -> None:
    """Put a model into a file in place of what it has of it."""
    others = [other for other in groups_of(file) if other != name] if file.is_file() else []
    everything = {f"{other}:{key}": value for other in others for key, value in read_group(file, other).items()}
    everything |= {f"{name}:{key}": value.contiguous() for key, value in tensors.items()}
    all_notes = {other: read_notes(file, other) for other in others} | {name: notes or {}}
    save_file(everything, file, {other: json.dumps(said) for other, said in all_notes.items() if said})
