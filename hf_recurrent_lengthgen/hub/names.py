"""Names of files that are safe to write on any system, and that no program runs by chance."""

import sys
import unicodedata
from collections.abc import Iterable

from huggingface_hub.utils import validate_repo_id

_LONGEST = 255
"""Bytes of a name between slashes, as file systems have it."""
_FORBIDDEN = set('\\:*?"<>|')
_DEVICES = {"con", "prn", "aux", "nul", *(f"{port}{number}" for port in ("com", "lpt") for number in range(10))}
# What Python, pytest and pip run by themselves, and what the code of checkpoints imports: in the folder of a
# checkpoint, a file of that name would be taken instead.
_MODULES = """
sitecustomize usercustomize conftest setup hf_recurrent_lengthgen torch transformers tokenizers safetensors
huggingface_hub accelerate peft datasets numpy scipy matplotlib yaml tqdm packaging regex requests httpx filelock
fsspec jinja2 sympy triton einops fla mamba_ssm causal_conv1d kernels trl vllm lm_eval pytest pip setuptools wheel
sentencepiece tiktoken torchvision torchaudio pandas pyarrow
"""
_TAKEN = sys.stdlib_module_names | set(_MODULES.split())


def check_repository(repo_id: str) -> None:
    """Raise a `ValueError` for what cannot be a name on the Hub."""
    try:
        validate_repo_id(repo_id)
    except ValueError as error:
        raise ValueError(f"{repo_id!r} cannot be a name on the Hub, give owner/name: {error}") from error


def unsafe_names(names: Iterable[str]) -> list[str]:
    """Why files of these names, relative to a folder, must not be written; empty if all may be."""
    names = sorted(names)
    problems = [f"{_shown(name)} {reason}" for name in names if (reason := _unsafe(name))]
    same: dict[str, set[str]] = {}
    folders = set()
    for name in names:
        parts = name.split("/")
        places = ["/".join(parts[: count + 1]) for count in range(len(parts))]
        folders.update(places[:-1])
        for place in places:
            folded = unicodedata.normalize("NFC", unicodedata.normalize("NFC", place).casefold())
            same.setdefault(folded, set()).add(place)
    alike = [sorted(group) for group in same.values() if len(group) > 1]
    problems += [f"{' and '.join(map(_shown, group))} are one name where case is not told" for group in alike]
    return problems + [f"{_shown(name)} is a file and a folder" for name in names if name in folders]


def _shown(name: str) -> str:
    return repr(name if len(name) <= 80 else f"{name[:80]}...") if _unsafe(name) else name


def _unsafe(name: str) -> str | None:
    parts = name.split("/")
    if any(part in ("", ".", "..") for part in parts):
        return "leads out of its folder, or to no file"
    if any(len(part.encode("utf-8", "surrogatepass")) > _LONGEST for part in parts):
        return f"is longer than {_LONGEST} bytes"
    if any(unicodedata.category(letter)[0] == "C" for letter in name):
        return "holds control characters, or such as cannot be seen"
    if _FORBIDDEN & set(name) or any(part != part.strip() or part.endswith(".") for part in parts):
        return "cannot be a name on each system"
    if any(part.partition(".")[0].rstrip().lower() in _DEVICES for part in parts):
        return "is a device on Windows"
    stem, _, ending = parts[-1].rpartition(".")
    if ending.lower() in ("py", "pyi", "pyc", "pth") and stem.lower() in _TAKEN:
        return f"would be run or imported in place of {stem.lower()} by programs that are started in its folder"
    return None
