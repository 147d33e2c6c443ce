"""Checkpoints that a command makes from others: written completely or not at all."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from hf_recurrent_lengthgen.checkpoints.conversion.new_folders import check_new as check_new
from hf_recurrent_lengthgen.checkpoints.conversion.new_folders import new_folder
from hf_recurrent_lengthgen.checkpoints.loading import load_tokenizer


def tokenizer_to_copy(model: str, trust_remote_code: bool) -> PreTrainedTokenizerBase | None:
    """The tokenizer of a checkpoint; if it has none, None and a message."""
    try:
        return load_tokenizer(model, trust_remote_code)
    except ValueError:
        print(f"{model} holds no tokenizer, so none is saved.")
        return None


def save_checkpoint(
    model: Any,
    tokenizer: PreTrainedTokenizerBase | None,
    folder: Path,
    add_files: Callable[[Path], object] | None = None,
) -> None:
    """Save into a temporary folder, let `add_files` write there too, and then rename it to `folder`."""
    with new_folder(folder) as temporary:
        model.save_pretrained(temporary)
        if tokenizer is not None:
            tokenizer.save_pretrained(temporary)
        if add_files is not None:
            add_files(temporary)
