"""Tokenizers of converted checkpoints: their files are copied, their code is not run."""

import shutil
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.dynamic_module_utils import get_relative_import_files

from hf_recurrent_lengthgen.checkpoints.records import TOKENIZER_FILES, read_json_object


def copy_tokenizer(source: Path, target: Path) -> list[str]:
    """Copy the tokenizer files of a folder, with the code that its config names; returns the names of the files."""
    names = tokenizer_files(source)
    if same := [name for name in names if (target / name).exists()]:
        raise ValueError(
            f"The tokenizer in {source} has files with the names of files of the model: {', '.join(same)}."
        )
    for name in names:
        (target / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(source / name, target / name)
    return names


def tokenizer_files(folder: Path) -> list[str]:
    """Names of the tokenizer files in a folder, including its code; empty if there are none."""
    paths = [path for pattern in TOKENIZER_FILES for path in folder.glob(pattern) if path.is_file()]
    names = sorted({path.relative_to(folder).as_posix() for path in paths})
    if all("chat_template" in name for name in names):  # those of processors and servers, too
        return []
    return names + _code(folder)


def _code(source: Path) -> list[str]:
    """Names of the Python files of a tokenizer."""
    path = source / "tokenizer_config.json"
    auto_map = (read_json_object(path).get("auto_map") or {}) if path.is_file() else {}
    entries = [entry for value in auto_map.values() for entry in (value if isinstance(value, list) else [value])]
    modules = {entry.partition(".")[0] for entry in entries if entry and "--" not in entry}
    files = [source / f"{module}.py" for module in modules]
    needed = {Path(other).name for file in files for other in get_relative_import_files(file)}
    return sorted({file.name for file in files} | needed)


def checked_tokenizer(folder: Path, vocab_size: int) -> PreTrainedTokenizerBase | None:
    """The tokenizer in a folder; None for a tokenizer with remote code, which is not run."""
    config = folder / "tokenizer_config.json"
    if config.is_file() and read_json_object(config).get("auto_map"):
        return None
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder)
    if (largest := max(tokenizer.get_vocab().values(), default=-1)) >= vocab_size:
        raise ValueError(
            f"The tokenizer has ids up to {largest}, but the model only {vocab_size} embeddings: it belongs to "
            "another model."
        )
    return tokenizer
