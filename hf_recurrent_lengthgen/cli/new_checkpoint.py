"""Checkpoints that a command makes from others: written completely or not at all."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from hf_recurrent_lengthgen.checkpoints.conversion.new_folders import new_folder
from hf_recurrent_lengthgen.checkpoints.loading import load_tokenizer
from hf_recurrent_lengthgen.checkpoints.records import Lineage, record_step


def save_checkpoint(
    model: Any,
    folder: Path,
    source: str,
    trust_remote_code: bool,
    start: Lineage,
    kind: Literal["expand", "forget", "merge"],
    what: str,
    command: Sequence[str],
) -> None:
    """Save a model that was made from `source`, with the tokenizer of that, if it has one, and its lineage.

    The last four arguments are those of `record_step`.
    """
    try:
        tokenizer = load_tokenizer(source, trust_remote_code)
    except ValueError:
        tokenizer = None
        print(f"{source} holds no tokenizer, so none is saved.")
    with new_folder(folder) as temporary:
        model.save_pretrained(temporary)
        if tokenizer is not None:
            tokenizer.save_pretrained(temporary)
        record_step(temporary, start, kind, what, command)
