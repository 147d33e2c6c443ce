"""Perplexity of long texts from a folder of text files, one book per file, as for PG-19 (Rae et al., 2019).

The first tokens of each book are one stream; further streams follow without gaps (`streams_per_book`). Shorter books
are left out.
"""

import logging
import math
import sys
from collections.abc import Sequence
from typing import Any

import datasets

from hf_recurrent_lengthgen.harness.local_files import Splits, folder_of, metadata_tokenizer

logger = logging.getLogger(__name__)


def rows(length: int, data_dir: str | None = None, streams_per_book: int = 1, **metadata: Any) -> Splits:
    """Texts of `length` tokens with their number of tokens, which can differ if a cut changes the tokens beside it.

    Args:
        length: Tokens per text.
        data_dir: Folder of .txt files; required.
        streams_per_book: Maximum number of texts per book.
        metadata: Other metadata, with the tokenizer.

    Raises:
        ValueError: without such a folder or a tokenizer, and if all books are shorter.
    """
    if data_dir is None:
        raise ValueError(
            "The books are read from local files: give --metadata data_dir=FOLDER, a folder of .txt files."
        )
    if streams_per_book < 1:
        raise ValueError(f"streams_per_book must be at least 1, got {streams_per_book}.")
    folder = folder_of(data_dir)
    tokenizer = metadata_tokenizer(metadata, "cutting books to a number of tokens")
    texts, short, longest = [], 0, 0
    for path in sorted(folder.glob("*.txt")):
        try:
            book = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not UTF-8 text: {error}.") from error
        tokens = tokenizer.encode(book, add_special_tokens=False, verbose=False)
        longest = max(longest, len(tokens))
        short += len(tokens) < length
        for start in range(0, min(len(tokens) // length, streams_per_book) * length, length):
            text = tokenizer.decode(tokens[start : start + length])
            count = len(tokenizer.encode(text, add_special_tokens=False, verbose=False))
            texts.append({"text": text, "tokens": count, "book": path.name})
    if not texts:
        raise ValueError(f"{folder} has no .txt file of {length} tokens or more; the longest has {longest}.")
    if short:
        logger.warning("%d books have fewer than %d tokens and are left out.", short, length)
    return {"test": datasets.Dataset.from_list(texts)}


def perplexities(doc: dict[str, Any], results: list[float]) -> dict[str, tuple[float, int]]:
    """Log-likelihood in nats, with the number of tokens, words and bytes of the text."""
    text = doc["text"]
    counts = {"token": doc["tokens"], "word": len(text.split()), "byte": len(text.encode())}
    return {f"{unit}_perplexity": (results[0], count) for unit, count in counts.items()}


def perplexity(items: Sequence[tuple[float, int]]) -> float:
    """Perplexity over all texts, from log-likelihoods and counts; infinite if it overflows."""
    mean = -sum(likelihood for likelihood, _ in items) / sum(count for _, count in items)
    return math.exp(mean) if mean < math.log(sys.float_info.max) else math.inf
