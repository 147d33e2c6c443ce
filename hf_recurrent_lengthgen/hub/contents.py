"""What of a checkpoint folder goes to the Hub, and what in it must not."""

import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

PUSHED = (
    "config.json",
    "generation_config.json",
    "*.safetensors",
    "*.safetensors.index.json",
    "*.py",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "rwkv_vocab*.txt",
    "*.model",
    "chat_template.jinja",
    "additional_chat_templates/*.jinja",
    "README.md",
    "LICENSE*",
    "NOTICE*",
    "lineage.json",
    "verification.json",
    "training_record.json",
    "forgetting_search.json",
    "recipe.yaml",
    "figures/*.png",
    "figures/*.svg",
    "results/*.json",
    "states/*.safetensors",
)
"""What is pushed and pulled. A pattern matches names in its own folder."""

TRAINER_FILES = (
    "training_args.bin",
    "trainer_state.json",
    "optimizer*",
    "scheduler*",
    "scaler*",
    "rng_state*",
    "initial_states_*",
    "events.out.*",
)
TRAINER_FOLDERS = ("checkpoint-*", "global_step*", "runs", "logs", "wandb", "mlruns")
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".joblib", ".npy", ".npz", ".dill")
SECRET_FILES = (".env*", "*.pem", "*.key", "id_rsa*", "id_ed25519*", "id_ecdsa*", ".netrc", ".git-credentials")

SECRETS = {
    "a Hub token": r"\b(?:hf|api_org)_[A-Za-z0-9]{20,}",
    "a GitHub token": r"\b(?:gh[pousr]_[A-Za-z0-9]{30,}|github_pat_\w{30,})",
    "an API key": r"\bsk-[A-Za-z0-9_-]{20,}",
    "an AWS key": r"\bAKIA[0-9A-Z]{16}\b",
    "a Slack token": r"\bxox[abprs]-[A-Za-z0-9-]{10,}",
    "a Google key": r"\bAIza[0-9A-Za-z_-]{35}",
    "a private key": r"-----BEGIN [A-Z ]*PRIVATE KEY-----",
    "a password or key": r"(?i)\b(?:api[_-]?key|secret[_-]?key|password|passwd|access[_-]?token|auth[_-]?token)"
    r"[\"']?\s*[:=]\s*[\"'][^\"'\s]{8,}[\"']",
    "a key of Weights & Biases": r"(?i)wandb\S*[\"']?\s*[:=]\s*[\"']?[0-9a-f]{40}\b",
}
# Where machines keep what belongs to a person or a job.
PERSONAL_ROOTS = (
    "home|Users|root|mnt|data|scratch|tmp|work|workspace|content|kaggle|gpfs|lustre|nfs|fsx|srv|media|private|Volumes"
    "|opt|var|export"
)
ABSOLUTE_PATH = rf"(?<![\w.:/~$}}-])(?:file:/+)?/(?:{PERSONAL_ROOTS})/[\w.@+-]+[^\s\"'`<>)\]}},;]*"
WINDOWS_PATH = r"(?<!\w)[A-Za-z]:\\+(?:Users|Documents and Settings)\\+[^\s\"'`<>]+"
TEXTS = (".json", ".md", ".py", ".yaml", ".txt", ".jinja", ".svg", ".safetensors")
VOCABULARIES = ("tokenizer.json", "vocab.json", "vocab.txt", "merges.txt", "rwkv_vocab*.txt", "*.model")
SHOWN = 3
"""Findings that are told of one kind and file."""


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether a relative path matches one of the patterns, part by part."""
    parts = name.split("/")
    split = (pattern.split("/") for pattern in patterns)
    return any(len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted)) for wanted in split)


def choose_files(folder: Path, include: Sequence[str] = ()) -> tuple[list[str], dict[str, str]]:
    """Which files of a checkpoint folder are pushed, and why others are not.

    Args:
        folder: The checkpoint.
        include: Patterns of further files, relative to the folder.

    Returns:
        Names of files to push, sorted; and reasons by the names of files and whole folders ("checkpoint-10/") that
        are left out.
    """
    pushed, left_out = [], {}
    for name in sorted(_walk(folder, include)):
        if name.endswith("/"):
            left_out[name] = "of the trainer" if matches(name[:-1], TRAINER_FOLDERS) else "no part of a checkpoint"
        elif reason := _unwanted(name):
            left_out[name] = reason
        elif matches(name, (*PUSHED, *include)):
            pushed.append(name)
        else:
            left_out[name] = "no part of a checkpoint; --include takes it along"
    return pushed, left_out


def _walk(folder: Path, include: Sequence[str]) -> Iterator[str]:
    """Relative names of files; of a folder that nothing can be pushed of only its own name, with a slash."""
    wanted = {pattern.split("/")[0] for pattern in (*PUSHED, *include) if "/" in pattern}
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


def refusals_of_files(folder: Path, pushed: Sequence[str], include: Sequence[str], token: str | None) -> list[str]:
    """What keeps the files of a folder from being pushed: secrets, links, paths, and what is missing."""
    problems = [
        f"--include {pattern} matches no file that may be pushed"
        for pattern in include
        if not any(matches(name, [pattern]) for name in pushed)
    ]
    problems += [
        f"{path.name} holds secrets, by its name: move it out of the folder"
        for path in sorted(folder.iterdir())
        if matches(path.name, SECRET_FILES)
    ]
    for name in pushed:
        path = folder / name
        if not path.exists():
            problems.append(f"{name} is a link to nothing")
        elif not path.resolve().is_relative_to(folder.resolve()):
            problems.append(f"{name} is a link to a file outside of the folder: copy the folder with cp -rL")
        else:
            problems += [f"{name}, {found}" for found in _findings(path, name, folder, token)]
    return problems + _missing_parts(folder, pushed)


def _findings(path: Path, name: str, folder: Path, token: str | None) -> list[str]:
    """Secrets and paths of this machine in a file, with their places."""
    text = _text(path)
    patterns = {f"{what}: take it out": pattern for what, pattern in SECRETS.items()}
    if token:
        patterns["your Hub token: take it out"] = re.escape(token)
    if name.endswith(TEXTS) and not matches(name.rpartition("/")[2], VOCABULARIES):
        here = {str(place) for place in (Path.home(), Path.cwd(), folder.resolve()) if len(place.parts) > 1}
        own = "|".join(map(re.escape, sorted(here, key=len, reverse=True)))
        path_of = f"{ABSOLUTE_PATH}|{WINDOWS_PATH}" + (rf"|(?<![\w.:/~$}}-])(?:{own})(?![\w-])" if own else "")
        patterns["a path of your machine: {found}"] = path_of
    found = []
    for what, pattern in patterns.items():
        hits = list(re.finditer(pattern, text))
        lines = ", ".join(str(text.count("\n", 0, hit.start()) + 1) for hit in hits[:SHOWN])
        more = f" and {len(hits) - SHOWN} more" if len(hits) > SHOWN else ""
        if hits:
            found.append(f"line {lines}{more}: {what.replace('{found}', hits[0].group())}")
    return found


def _text(path: Path) -> str:
    """What of a file may hold text: all of it, or the header of weights."""
    with open(path, "rb") as file:
        if path.name.endswith(".safetensors"):
            size = int.from_bytes(file.read(8), "little")
            return file.read(min(size, 100_000_000)).decode("latin-1")
        return file.read().decode("utf-8", errors="replace")


def _missing_parts(folder: Path, pushed: Sequence[str]) -> list[str]:
    """What a checkpoint cannot be loaded without."""
    if "adapter_config.json" in {path.name for path in folder.iterdir()}:
        return [
            "it holds an adapter, which brings no code and names its base model by where it was here: merge it into "
            "the model (merge_and_unload of PEFT), save that, and push the result"
        ]
    if "config.json" not in pushed:
        return ["it holds no config.json, so it is no checkpoint"]
    missing = []
    if not any(name.endswith(".safetensors") and "/" not in name for name in pushed):
        missing.append("it holds no weights as safetensors: lengthgen convert writes them")
    try:
        config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        entries = config.get("auto_map") or {}
        files = {str(entry).split("--")[-1].split(".")[0] + ".py" for entry in entries.values()}
    except (ValueError, AttributeError) as error:
        return [*missing, f"config.json is damaged ({error})"]
    if str(config.get("model_type", "")).startswith("stateful_") and not files:
        missing.append("config.json has no auto_map, so nobody could load the model: save it by its save_pretrained")
    if absent := sorted(files - set(pushed)):
        missing.append(f"code that config.json names is missing: {', '.join(absent)}; save_pretrained writes it")
    return missing
