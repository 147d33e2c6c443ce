"""Models, tokenizers and token streams from what a person types."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

import datasets
import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging

from hf_recurrent_lengthgen.data import byte_tokenizer, load_texts, standard_library_corpus, token_stream
from hf_recurrent_lengthgen.hybrids import stateful
from hf_recurrent_lengthgen.hybrids.registry import REFUSED, SUPPORTED
from hf_recurrent_lengthgen.models import STATEFUL_CLASSES

STANDARD_LIBRARY = "stdlib"
DATA_HELP = (
    f'"{STANDARD_LIBRARY}" (the source files of the Python standard library, split by file), a .txt, .jsonl or '
    ".parquet file, a folder of them or of datasets.save_to_disk, or the name of a data set on the Hub."
)


class Stream(NamedTuple):
    """Token ids (n,) and what they are."""

    tokens: Tensor
    description: str


@contextmanager
def quiet_libraries(*what: Literal["warnings", "bars"]) -> Iterator[None]:
    """Silence warnings of Transformers, or progress bars of Transformers and datasets; afterwards all is as before."""
    level = logging.get_verbosity()
    bars, data_bars = logging.is_progress_bar_enabled(), not datasets.are_progress_bars_disabled()
    if "warnings" in what:
        logging.set_verbosity_error()
    if "bars" in what:
        logging.disable_progress_bar()
        datasets.disable_progress_bars()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if "bars" in what and bars:
            logging.enable_progress_bar()
        if "bars" in what and data_bars:
            datasets.enable_progress_bars()


def load_model(name: str, trust_remote_code: bool = False) -> PreTrainedModel:
    """Load a language model that takes states, with float32 weights.

    Our checkpoints load as they are; those of Transformers and fla load into our class of the same parameter names;
    hybrids and other recurrent models of Transformers are wrapped by `stateful`.

    Raises:
        ValueError: for a folder that holds no checkpoint, an architecture that cannot be given states, damaged
            weights, and weights that are missing, left over or of other shapes than the config says.
    """
    if Path(name).is_dir() and not (Path(name) / "config.json").is_file():
        raise ValueError(f"{name} holds no config.json, so it is no checkpoint.")
    # the small steps of post-training vanish in bfloat16 weights; --bf16 is for computing
    loading: dict[str, Any] = {"output_loading_info": True, "ignore_mismatched_sizes": True, "dtype": torch.float32}
    loader: Any = AutoModelForCausalLM
    wrap = False
    try:
        settings, _ = PreTrainedConfig.get_config_dict(name)
        model_type = settings.get("model_type")
        if model_type in STATEFUL_CLASSES:
            loader = STATEFUL_CLASSES[model_type]
            settings = {key: v for key, v in settings.items() if key not in ("architectures", "auto_map")}
            loading["config"] = loader.config_class.from_dict(settings)
        else:
            config = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
            model_type = config.model_type
    except OSError as error:
        raise ValueError(f"{name} is no checkpoint folder here, and no model on the Hub: {error}") from error
    if str(model_type).startswith("stateful_"):
        loading["trust_remote_code"] = trust_remote_code
    elif model_type not in STATEFUL_CLASSES:
        if model_type not in SUPPORTED:
            reason = f" ({REFUSED[model_type]})" if model_type in REFUSED else ""
            raise ValueError(
                f"{name} is of type {model_type!r}, which cannot be given states{reason}. Possible are checkpoints "
                f"of this package, {', '.join(sorted(STATEFUL_CLASSES))}, {', '.join(sorted(SUPPORTED))}."
            )
        wrap = True
    try:
        # Its warning about the weights becomes an error below.
        with quiet_libraries("warnings"):
            model, found = loader.from_pretrained(name, **loading)
    except SafetensorError as error:
        raise ValueError(f"The weights in {name} are damaged ({error}): copy or download them again.") from error
    problems = {what: sorted(map(str, found[f"{what}_keys"])) for what in ("missing", "unexpected", "mismatched")}
    if any(problems.values()):
        told = "; ".join(f"{what}: {', '.join(keys)}" for what, keys in problems.items() if keys)
        raise ValueError(f"The weights in {name} do not fit its config.json, {told}.")
    return stateful(model) if wrap else model


def load_tokenizer(name: str, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Load a tokenizer; "bytes" is ByT5's, which needs no files.

    Raises:
        ValueError: if there is none.
    """
    if name == "bytes":
        return byte_tokenizer()
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise ValueError(f"{name} holds no tokenizer ({error}): give one with --tokenizer.") from error
    # Without files, Transformers guesses a class from the model's type and makes it of special tokens only.
    if set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens):
        raise ValueError(f"{name} holds no tokenizer: give one with --tokenizer.")
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
