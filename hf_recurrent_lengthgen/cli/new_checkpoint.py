"""Checkpoints that a command makes of others: written as a whole, or not at all."""

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from hf_recurrent_lengthgen.cli.inputs import load_tokenizer


def check_new(folder: Path) -> None:
    """Raise a `ValueError` for what is there already, unless it is an empty folder."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} is there already and not an empty folder: give another --output_dir.")


def tokenizer_to_copy(model: str, trust_remote_code: bool) -> PreTrainedTokenizerBase | None:
    """The tokenizer of a checkpoint; None, and a line that says so, if it has none."""
    try:
        return load_tokenizer(model, trust_remote_code)
    except ValueError:
        print(f"{model} holds no tokenizer, so none is saved.")
        return None


def save_checkpoint(
    model: Any,
    tokenizer: PreTrainedTokenizerBase | None,
    folder: Path,
    add_files: Callable[[Path], None] | None = None,
) -> None:
    """Save into a temporary folder that becomes `folder`, new or empty, when all is written.

    Args:
        model: Saved by its `save_pretrained`.
        tokenizer: Likewise; None for none.
        folder: Where the checkpoint will be.
        add_files: Writes further files into the folder that it is given.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".tmp", dir=folder.parent))
    try:
        model.save_pretrained(temporary)
        if tokenizer is not None:
            tokenizer.save_pretrained(temporary)
        if add_files is not None:
            add_files(temporary)
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o777 & ~umask)
        os.replace(temporary, folder)  # an empty folder is replaced, too
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
