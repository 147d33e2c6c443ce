"""Tokenizers as evaluations need them: a beginning of text where the tokenizer puts one, never an end."""

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from hf_recurrent_lengthgen.data import byte_tokenizer


def find_tokenizer(name: str, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer in a folder or on the Hub; "bytes" is ByT5's, which needs no files.

    Raises:
        ValueError: if there is none.
    """
    if name == "bytes":
        return byte_tokenizer()
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, ImportError) as error:
        raise ValueError(f"{name} holds no tokenizer ({error}): give one as tokenizer=FOLDER.") from error
    # Without files, Transformers guesses a class from the model's type and makes it of special tokens only.
    if set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens):
        raise ValueError(f"{name} holds no tokenizer: give one as tokenizer=FOLDER.")
    return tokenizer


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
    return find_tokenizer(str(named), bool(metadata.get("trust_remote_code")))
