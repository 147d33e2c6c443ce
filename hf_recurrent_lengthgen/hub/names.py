"""Names of files that are safe to write on any system, and that no program runs by chance."""

import sys
import unicodedata
from collections import Counter
from collections.abc import Iterable

LONGEST = 255
"""Bytes of a name between slashes, as file systems have it."""
_FORBIDDEN = set('\\:*?"<>|')
_DEVICES = {"con", "prn", "aux", "nul", *(f"{port}{number}" for port in ("com", "lpt") for number in range(10))}
# What Python, pytest and pip run by themselves, and what the code of checkpoints imports: in the folder of a
# checkpoint, a file of that name would be taken instead.
_TAKEN = {
    *sys.stdlib_module_names,
    *("sitecustomize", "usercustomize", "conftest", "setup", "hf_recurrent_lengthgen"),
    *(
        "torch",
        "transformers",
        "tokenizers",
        "safetensors",
        "huggingface_hub",
        "accelerate",
        "peft",
        "datasets",
        "numpy",
    ),
    *(
        "scipy",
        "matplotlib",
        "yaml",
        "tqdm",
        "packaging",
        "regex",
        "requests",
        "httpx",
        "filelock",
        "fsspec",
        "jinja2",
    ),
    *("sympy", "triton", "einops", "fla", "mamba_ssm", "causal_conv1d", "kernels", "trl", "vllm", "lm_eval", "pytest"),
    *("pip", "setuptools", "wheel", "sentencepiece", "tiktoken", "torchvision", "torchaudio", "pandas", "pyarrow"),
}


def unsafe_names(names: Iterable[str]) -> list[str]:
    """Why files of these names, relative to a folder, must not be written; empty if all may be."""
    names = sorted(names)
    problems = [f"{_shown(name)} {reason}" for name in names if (reason := _unsafe(name))]
    places = {place for name in names for place in _places(name)}
    same = Counter(_folded(place) for place in places)
    alike = [
        sorted(place for place in places if _folded(place) == folded) for folded, count in same.items() if count > 1
    ]
    problems += [f"{' and '.join(map(_shown, group))} are one name where case is not told" for group in alike]
    files = [name for name in names if name in {place for other in names if other != name for place in _places(other)}]
    return problems + [f"{_shown(name)} is a file and a folder" for name in files]


def _places(name: str) -> Iterable[str]:
    """A name and the folders it is in."""
    parts = name.split("/")
    return ("/".join(parts[: count + 1]) for count in range(len(parts)))


def _folded(name: str) -> str:
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", name).casefold())


def _shown(name: str) -> str:
    return repr(name if len(name) <= 80 else f"{name[:80]}...") if _unsafe(name) else name


def _unsafe(name: str) -> str | None:
    parts = name.split("/")
    if any(part in ("", ".", "..") for part in parts):
        return "leads out of its folder, or to no file"
    if any(len(part.encode("utf-8", "surrogatepass")) > LONGEST for part in parts):
        return f"is longer than {LONGEST} bytes"
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
