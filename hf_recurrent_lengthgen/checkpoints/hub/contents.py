"""Which files of a checkpoint folder go to the Hub, and which must not."""

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from hf_recurrent_lengthgen.checkpoints.adapters import holds_adapter, merge_advice
from hf_recurrent_lengthgen.checkpoints.private_text import private_in
from hf_recurrent_lengthgen.checkpoints.records import CHECKPOINT_FILES, TOKENIZER_FILES, TRAINER_STATES

PUSHED = (
    *CHECKPOINT_FILES,
    "README.md",
    "LICENSE*",
    "NOTICE*",
    "lineage.json",
    "verification.json",
    "figures/*.png",
    "figures/*.svg",
    "results/*.json",
    "states/*.safetensors",
)
"""Patterns of the files to push, each for names in its own folder only."""
LOADED = (
    *("*.safetensors", "*.bin", "*.pth", "*.index.json", "adapter_*", "learned_state*", "generation_config.json"),
    *TOKENIZER_FILES,
)
"""Files at the top of a repository that Transformers looks for, and which therefore change what is loaded."""


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether a relative path matches one of the patterns, part by part."""
    parts = name.split("/")
    split = (pattern.split("/") for pattern in patterns)
    return any(len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted)) for wanted in split)


def choose_files(folder: Path) -> tuple[list[str], list[str]]:
    """Names of the files to push, and of other files and whole folders ("checkpoint-10/"), which are left out."""
    paths = {path for pattern in PUSHED for path in folder.glob(pattern) if path.is_file()}
    pushed = sorted(path.relative_to(folder).as_posix() for path in paths if not path.match(TRAINER_STATES))
    used = {name.partition("/")[0] for name in pushed}
    left_out = sorted(path for path in folder.iterdir() if path.name not in used)
    return pushed, [f"{path.name}/" if path.is_dir() else path.name for path in left_out]


def refusals_of_files(folder: Path, pushed: Sequence[str], token: str | None) -> list[str]:
    """Reasons not to push the files of a folder: secrets, paths of this machine, no weights that can be loaded."""
    problems = []
    for name in pushed:
        secrets, paths = private_in(folder / name, token, (Path.home(), Path.cwd(), folder.resolve()))
        problems += [f"{name}, {private}" for private in secrets + paths]
    if holds_adapter(folder):
        problems.append(f"{merge_advice(folder)}, verify FOLDER and push it")
    elif not any(name.endswith(".safetensors") and "/" not in name for name in pushed):
        problems.append("it holds no weights as safetensors: lengthgen convert writes them")
    return problems
