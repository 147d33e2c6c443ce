"""Models, tokenizers and token streams from what a person types."""

from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from hf_recurrent_lengthgen.data import byte_tokenizer, load_texts, standard_library_corpus, token_stream
from hf_recurrent_lengthgen.models import StatefulMamba2Config, StatefulMamba2ForCausalLM

STANDARD_LIBRARY = "stdlib"
DATA_HELP = (
    f'"{STANDARD_LIBRARY}" (the source files of the Python standard library, split by file), a .txt, .jsonl or '
    ".parquet file, a folder of them or of datasets.save_to_disk, or the name of a data set on the Hub."
)


class Stream(NamedTuple):
    """Token ids (n,) and what they are."""

    tokens: Tensor
    description: str


def load_model(name: str, trust_remote_code: bool = False) -> PreTrainedModel:
    """Load a language model that takes states.

    Our checkpoints load as they are, Transformers' own Mamba-2 checkpoints into our class (same parameter names),
    others with their own code if `trust_remote_code` allows it.

    Raises:
        ValueError: for a folder that holds no checkpoint, or an architecture we have no stateful class for.
    """
    if Path(name).is_dir() and not (Path(name) / "config.json").is_file():
        raise ValueError(f"{name} holds no config.json, so it is no checkpoint.")
    config = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
    if config.model_type == "mamba2":
        settings = {
            key: value for key, value in config.to_dict().items() if key not in ("model_type", "architectures")
        }
        return StatefulMamba2ForCausalLM.from_pretrained(name, config=StatefulMamba2Config(**settings))
    if not config.model_type.startswith("stateful_"):
        raise ValueError(
            f"{name} is of type {config.model_type!r}; models that can be given states are mamba2 and the checkpoints "
            "of this package."
        )
    return AutoModelForCausalLM.from_pretrained(name, trust_remote_code=trust_remote_code)


def load_tokenizer(name: str, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Load a tokenizer; "bytes" is ByT5's, which needs no files."""
    if name == "bytes":
        return byte_tokenizer()
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
    return tokenizer


def token_unit(tokenizer: Any) -> str:
    """What one token is, in the singular."""
    return "byte" if type(tokenizer).__name__ == "ByT5Tokenizer" else "token"


def load_stream(data: str, split: str, tokenizer: PreTrainedTokenizerBase, text_column: str = "text") -> Stream:
    """Token stream of a data set with the tokenizer's end-of-sequence token after each document."""
    if data == STANDARD_LIBRARY:
        corpus = standard_library_corpus()
        return Stream(token_stream(corpus.texts(split), tokenizer), f"{corpus.description}, {split} files")
    return Stream(token_stream(load_texts(data, split, text_column), tokenizer), f"{data}, split {split}")
