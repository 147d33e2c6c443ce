"""Perplexity of long texts from a folder of text files, one book per file, as for PG-19 (Rae et al., 2019).

The first tokens of each book are one stream. Shorter books are left out.
"""

import logging
import math
import sys
from collections.abc import Sequence
from typing import Any

import datasets

from hf_recurrent_lengthgen.harness.local_files import Splits, folder_of, metadata_tokenizer

logger = logging.getLogger(__name__)


def rows(length: int, data_dir: str | None = None, **metadata: Any) -> Splits:
    """Texts of `length` tokens with their number of tokens, which can differ if a cut changes the tokens next to it.

    Args:
        length: Tokens per text.
        data_dir: Folder of .txt files; required.
        metadata: Other metadata, with the tokenizer.

    Raises:
        ValueError: without such a folder or a tokenizer, and if all books are shorter.
    """
    folder = folder_of(data_dir, ", with the books as .txt files")
    tokenizer = metadata_tokenizer(metadata, "cutting books to a number of tokens")
    texts, lengths = [], []
    for path in sorted(folder.glob("*.txt")):
        tokens = tokenizer.encode(path.read_text(encoding="utf-8"), add_special_tokens=False, verbose=False)
        lengths.append(len(tokens))
        if len(tokens) >= length:
            text = tokenizer.decode(tokens[:length])
            count = len(tokenizer.encode(text, add_special_tokens=False, verbose=False))
            texts.append({"text": text, "tokens": count, "book": path.name})
    if not texts:
        raise ValueError(
            f"{folder} has no .txt file of {length} tokens or more; the longest has {max(lengths, default=0)}."
        )
    if len(texts) < len(lengths):
        logger.warning("%d books have fewer than %d tokens and are left out.", len(lengths) - len(texts), length)
    return {"test": datasets.Dataset.from_list(texts)}


def perplexities(doc: dict[str, Any], results: list[float]) -> dict[str, tuple[float, int]]:
    """Log-likelihood in nats, with the number of tokens, words and bytes of the text."""
    text = doc["text"]
    counts = {"token": doc["tokens"], "word": len(text.split()), "byte": len(text.encode())}
    return {f"{unit}_perplexity": (results[0], count) for unit, count in counts.items()}


def perplexity(items: Sequence[tuple[float, int]]) -> float:
    """exp of the mean loss over all texts, from log-likelihoods and counts; infinite if it overflows."""
    mean = -sum(likelihood for likelihood, _ in items) / sum(count for _, count in items)
    return math.exp(mean) if mean < math.log(sys.float_info.max) else math.inf
