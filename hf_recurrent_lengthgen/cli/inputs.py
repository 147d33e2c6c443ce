"""Texts and token streams from options of commands."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from hf_recurrent_lengthgen import data as sources
from hf_recurrent_lengthgen.checkpoints.private_text import portable
from hf_recurrent_lengthgen.cli.shared_options import STANDARD_LIBRARY
from hf_recurrent_lengthgen.data import evaluation_sequences, load_texts, split_names, token_stream
from hf_recurrent_lengthgen.evaluation.results import DataSource

standard_library_corpus = cache(sources.standard_library_corpus)  # which takes a fifth of a second


class Stream(NamedTuple):
    """Token ids (n,) and their source."""

    tokens: Tensor
    source: DataSource


def check_distinct(models: Sequence[str]) -> None:
    """Raise a `ValueError` if two models are the same folder or the same Hub name."""
    if len({Path(name).resolve() if Path(name).exists() else name for name in models}) < len(models):
        raise ValueError(f"Each model can be given once, got {' '.join(models)}.")


def token_unit(tokenizer: Any) -> str:
    """The word for one token: "byte" or "token"."""
    return "byte" if type(tokenizer).__name__ == "ByT5Tokenizer" else "token"


def chosen_split(data: str, split: str | None, default: str) -> str:
    """The split, without one the only split of the data, else the default, or "test" if there is no "validation"."""
    if split is not None or data == STANDARD_LIBRARY:
        return split or default
    names = split_names(data)
    if default == "validation" and default not in names and "test" in names:
        return "test"
    return names[0] if len(names) == 1 else default


def load_documents(data: str, split: str, text_column: str = "text") -> list[str]:
    """Texts of a data set; the standard library has no columns."""
    if data == STANDARD_LIBRARY:
        return list(standard_library_corpus().texts(split))
    return load_texts(data, split, text_column)


def load_stream(data: str, split: str, tokenizer: PreTrainedTokenizerBase, text_column: str = "text") -> Stream:
    """Token stream of a data set with the tokenizer's end-of-sequence token after each document."""
    tokens = token_stream(load_documents(data, split, text_column), tokenizer)
    return Stream(tokens, data_source(data, split))


def sequences_of(stream: Stream, count: int, length: int, training_length: int = 0) -> Tensor:
    """`count` sequences (count, length + 1) of a stream: `length` predictions each.

    Raises:
        ValueError: if the text is too short, with options above the training length that it is long enough for.
    """
    have, need = len(stream.tokens), count * (length + 1)
    if need > have:
        fewer, shorter = have // (length + 1), have // count - 1
        options = [f"--sequences {fewer}"] * (fewer > 0) + [f"--length {shorter}"] * (shorter > training_length)
        both = [f"--sequences 1 --length {have - 1}"] * (have - 1 > training_length)
        advice = " or ".join(options or both) or f"text of more than {training_length + 1:,} tokens"
        raise ValueError(
            f"{count:,} sequences of {length:,} tokens take {need:,}, one more each as the last target, and "
            f"{stream.source.description} has {have:,}: give {advice}."
        )
    return evaluation_sequences(stream.tokens, count, length + 1)


def data_source(data: str, split: str) -> DataSource:
    """The record of a split, with the last part of an absolute path only."""
    return DataSource(standard_library_corpus().source if data == STANDARD_LIBRARY else portable(data), split)
