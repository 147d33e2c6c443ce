"""Names of files that are safe to write on any system, and that no program runs by accident."""

import sys
import unicodedata
from collections.abc import Iterable

_LONGEST = 255
"""Longest name between slashes in bytes, as in common file systems."""
_FORBIDDEN = set('\\:*?"<>|')
_DEVICES = {"con", "prn", "aux", "nul", *(f"{port}{number}" for port in ("com", "lpt") for number in range(10))}
# Names that Python, pytest and pip run by themselves, or that the code of checkpoints imports. A file of that name in
# a checkpoint folder would be used instead.
_MODULES = """
sitecustomize usercustomize conftest setup hf_recurrent_lengthgen torch transformers tokenizers safetensors
huggingface_hub accelerate peft datasets numpy scipy matplotlib yaml tqdm packaging regex requests httpx filelock
fsspec jinja2 sympy triton einops fla mamba_ssm causal_conv1d kernels trl vllm lm_eval pytest pip setuptools wheel
sentencepiece tiktoken torchvision torchaudio pandas pyarrow
"""
_TAKEN = sys.stdlib_module_names | set(_MODULES.split())


def unsafe_names(names: Iterable[str]) -> list[str]:
    """Why files of these names, relative to a folder, must not be written; empty if all are safe."""
    names = sorted(names)
    alike: dict[str, set[str]] = {}
    for name in names:
        parts = name.split("/")
        for place in ("/".join(parts[: count + 1]) for count in range(len(parts))):
            folded = unicodedata.normalize("NFC", unicodedata.normalize("NFC", place).casefold())
            alike.setdefault(folded, set()).add(place)
    return [f"{name[:80]!r} {reason}" for name in names if (reason := _unsafe(name))] + [
        f"{' and '.join(repr(place[:80]) for place in sorted(places))} are the same name on systems that ignore case"
        for places in alike.values()
        if len(places) > 1
    ]


def _unsafe(name: str) -> str | None:
    parts = name.split("/")
    if any(part in ("", ".", "..") for part in parts):
        return "leads out of its folder, or names no file"
    if any(len(part.encode("utf-8", "surrogatepass")) > _LONGEST for part in parts):
        return f"is longer than {_LONGEST} bytes"
    if not name.isprintable():  # control, format and unassigned characters, and spaces other than " "
        return "contains control characters or invisible characters"
    if _FORBIDDEN & set(name) or any(part != part.strip() or part.endswith(".") for part in parts):
        return "is not a valid name on every system"
    if any(part.partition(".")[0].rstrip().lower() in _DEVICES for part in parts):
        return "is a device on Windows"
    stem, _, ending = parts[-1].rpartition(".")
    if ending.lower() in ("py", "pyi", "pyc", "pth") and stem.lower() in _TAKEN:
        return f"would be run or imported instead of {stem.lower()} by programs started in its folder"
    return None
