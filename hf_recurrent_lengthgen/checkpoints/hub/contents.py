"""Which files of a checkpoint folder go to the Hub, and which must not."""

import os
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from hf_recurrent_lengthgen.checkpoints.adapters import holds_adapter, holds_learned_state, to_merge
from hf_recurrent_lengthgen.checkpoints.hub.names import unsafe_names
from hf_recurrent_lengthgen.checkpoints.private_text import private_in
from hf_recurrent_lengthgen.checkpoints.records import CHECKPOINT_FILES, TOKENIZER_FILES, TRAINER_STATES
from hf_recurrent_lengthgen.models.state_learned_files import CONFIG_FILE, read_folder

PUSHED = (
    *CHECKPOINT_FILES,
    "learned_state_config.json",
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
"""Files to push and pull. A pattern matches names in its own folder only."""
LOADED = (
    *("*.safetensors", "*.bin", "*.pth", "*.index.json", "adapter_*", "learned_state*", "generation_config.json"),
    *TOKENIZER_FILES,
)
"""Files at the top of a repository that Transformers looks for, and which therefore change what is loaded."""

TRAINER_FILES = (
    "training_args.bin",
    "trainer_state.json",
    "optimizer*",
    "scheduler*",
    "scaler*",
    "rng_state*",
    TRAINER_STATES,
    "digests.sha256",
    "events.out.*",
)
TRAINER_FOLDERS = ("checkpoint-*", "global_step*", "runs", "logs", "wandb", "mlruns")
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".joblib", ".npy", ".npz", ".dill")
SECRET_FILES = (".env*", "*.pem", "*.key", "id_rsa*", "id_ed25519*", "id_ecdsa*", ".netrc", ".git-credentials")


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether a relative path matches one of the patterns, part by part."""
    parts = name.split("/")
    split = (pattern.split("/") for pattern in patterns)
    return any(len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted)) for wanted in split)


def choose_files(folder: Path) -> tuple[list[str], dict[str, str]]:
    """Names of the files to push, and why other files and whole folders ("checkpoint-10/") are left out."""
    pushed, left_out = [], {}
    for name in sorted(_walk(folder)):
        if name.endswith("/"):
            left_out[name] = "of the trainer" if matches(name[:-1], TRAINER_FOLDERS) else "no part of a checkpoint"
        elif reason := _unwanted(name):
            left_out[name] = reason
        elif matches(name, PUSHED):
            pushed.append(name)
        else:
            left_out[name] = "no part of a checkpoint"
    return pushed, left_out


def _walk(folder: Path) -> Iterator[str]:
    """Relative names of files; a folder with nothing to push is given by its name with a slash."""
    wanted = {pattern.split("/")[0] for pattern in PUSHED if "/" in pattern}
    for path in folder.iterdir():
        if path.is_symlink() or not path.is_dir():
            yield path.name
        elif not matches(path.name, wanted) or matches(path.name, TRAINER_FOLDERS):
            yield f"{path.name}/"
        else:
            for place, _, names in os.walk(path):
                yield from (Path(place, name).relative_to(folder).as_posix() for name in names)


def _unwanted(name: str) -> str | None:
    """Why a file is never pushed; None if it may be."""
    last = name.rpartition("/")[2]
    if matches(last, TRAINER_FILES):
        return "of the trainer"
    if last.endswith(PICKLES):
        return "may run code when it is loaded"
    return None


def refusals_of_files(folder: Path, pushed: Sequence[str], token: str | None) -> list[str]:
    """Reasons not to push the files of a folder: unsafe names, secrets, links, paths, no weights."""
    problems = [
        f"{name} holds secrets, according to its name: move it out of the folder"
        for name in sorted({*pushed, *(path.name for path in folder.iterdir())})
        if matches(name.rpartition("/")[2], SECRET_FILES)
    ]
    problems += [f"{problem}: give it another name" for problem in unsafe_names(pushed)]
    for name in pushed:
        path = folder / name
        if not path.exists():
            problems.append(f"{name} is a link to nothing")
        elif not path.resolve().is_relative_to(folder.resolve()):
            problems.append(f"{name} is a link to a file outside the folder: copy the folder with cp -rL")
        else:
            secrets, paths = private_in(path, token, (Path.home(), Path.cwd(), folder.resolve()))
            problems += [f"{name}, {found}" for found in secrets + paths]
    if holds_adapter(folder):
        problems.append(f"{to_merge(folder)}, verify FOLDER and push it")
    elif holds_learned_state(folder):
        problems += refusals_of_learned_state(folder)
    elif not any(name.endswith(".safetensors") and "/" not in name for name in pushed):
        problems.append("it holds no weights as safetensors: lengthgen convert writes them")
    return problems


def refusals_of_learned_state(folder: Path) -> list[str]:
    """Reasons not to push a learned state: damaged files, a checkpoint beside it, a base that others cannot load."""
    if (folder / "config.json").exists():
        return ["it holds a checkpoint beside a learned state: push them one by one"]
    try:
        about, _ = read_folder(folder)
    except ValueError as error:
        return [str(error)]
    base = about["base_model_name_or_path"]
    if base.count("/") == 1 and not base.startswith(("/", ".")) and not Path(base).exists():
        return []
    return [f"its base is no name on the Hub: push the base, and write its name (owner/name) into {CONFIG_FILE}"]
