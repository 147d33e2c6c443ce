"""The tokenizer that the metadata of a task names."""

from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from hf_recurrent_lengthgen.loading import load_tokenizer


def metadata_tokenizer(metadata: dict[str, Any], purpose: str) -> PreTrainedTokenizerBase:
    """The tokenizer in the metadata of a task: `tokenizer`, else the model's, `pretrained`.

    The command line puts the model's arguments into the metadata.

    Raises:
        ValueError: if the metadata have neither.
    """
    named = metadata.get("tokenizer") or metadata.get("pretrained")
    if isinstance(named, PreTrainedTokenizerBase):
        return named
    if not isinstance(named, str | Path):
        raise ValueError(
            f"{purpose} needs a tokenizer, got {type(named).__name__}: give tokenizer=FOLDER in the model's arguments "
            "or the metadata."
        )
    return load_tokenizer(str(named), bool(metadata.get("trust_remote_code")))
