"""Tokenizers as evaluations need them: a beginning of text where the tokenizer puts one, never an end."""

from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from hf_recurrent_lengthgen.loading import load_tokenizer


def metadata_tokenizer(metadata: dict[str, Any], purpose: str) -> PreTrainedTokenizerBase:
    """The tokenizer that the metadata of a task names as `tokenizer`, or the model's as `pretrained`.

    The command line puts the model's arguments there.

    Raises:
        ValueError: if they name none.
    """
    named = metadata.get("tokenizer") or metadata.get("pretrained")
    if isinstance(named, PreTrainedTokenizerBase):
        return named
    if not isinstance(named, str | Path):
        raise ValueError(
            f"{purpose} needs a tokenizer: give tokenizer=FOLDER in the model's arguments or the metadata, got "
            f"{type(named).__name__}."
        )
    return load_tokenizer(str(named), bool(metadata.get("trust_remote_code")))
