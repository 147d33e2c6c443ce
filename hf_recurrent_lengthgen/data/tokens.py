"""Token ids of texts: what a tokenizer puts before a text, once, and one stream of documents with separators."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import ByT5Tokenizer, PreTrainedTokenizerBase
from transformers.utils import logging

_DOCUMENTS_PER_CALL = 256


def byte_tokenizer() -> ByT5Tokenizer:
    """A tokenizer that needs no download: UTF-8 bytes, id = byte + 3, padding 0, end of text 1, 384 ids."""
    return ByT5Tokenizer()


def text_prefix(tokenizer: Any) -> list[int]:
    """What a tokenizer puts before each text: nothing, a beginning of text, or more, such as GLM's `[gMASK]<sop>`."""
    plain, whole = (tokenizer.encode("a", add_special_tokens=special) for special in (False, True))
    return next(whole[:n] for n in range(len(whole) + 1) if whole[n : n + len(plain)] == plain)


def text_ids(tokenizer: Any, text: str, prefix: Sequence[int] | None = None) -> list[int]:
    """Token ids of a text with the prefix of its tokenizer, or another one, unless the text begins with it.

    What some tokenizers (ByT5's) put after a text is left out.
    """
    prefix = text_prefix(tokenizer) if prefix is None else prefix
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False, verbose=False)
    return ids if ids[: len(prefix)] == list(prefix) else [*prefix, *ids]


def token_stream(texts: Iterable[str], tokenizer: PreTrainedTokenizerBase | None = None) -> Tensor:
    """Token ids of all texts in one stream, each after `text_prefix` and before the tokenizer's end-of-text token.

    Where these are the same token (OPT), one stands between two texts.

    Text never becomes special tokens: "</s>" inside a document is four ordinary bytes, not an end of text. That is
    `tokenizer(text, add_special_tokens=False, split_special_tokens=True)`; without the second option ByT5 reads
    "a </s> b" as a, end of text, b and loses both spaces.

    Args:
        texts: The documents. An empty one gives only its prefix and separator.
        tokenizer: Any Transformers tokenizer; None for the byte tokenizer.

    Returns:
        (number of tokens,) int64.

    Raises:
        ValueError: if there is no text, or the tokenizer has no end of text.
    """
    if isinstance(texts, str):
        raise ValueError("texts is one string, but must be several documents; give [text]")
    documents = list(texts)
    tokenizer = byte_tokenizer() if tokenizer is None else tokenizer
    if tokenizer.eos_token_id is None:
        raise ValueError(
            f"{type(tokenizer).__name__} has no end-of-text token to put between documents; set tokenizer.eos_token "
            "(for the command line in a copy, tokenizer.save_pretrained(FOLDER), and --tokenizer FOLDER)"
        )
    before, ending = (np.array(ids, np.int32) for ids in (text_prefix(tokenizer), [tokenizer.eos_token_id]))
    between = before[:0] if np.array_equal(before, ending) else before
    # A subclass may tokenize differently, so only the class itself is known to be plain bytes.
    encode = _encode_bytes if type(tokenizer) is ByT5Tokenizer else _encode
    encoded = list(encode(documents, tokenizer))
    if not any(map(len, encoded)):
        raise ValueError(f"the {len(documents)} documents hold no token; give some text")
    parts = [part for ids in encoded for part in (between, ids, ending)]
    parts[0] = before
    return torch.from_numpy(np.concatenate(parts, dtype=np.int64))


def _encode_bytes(documents: list[str], tokenizer: PreTrainedTokenizerBase) -> Iterator[np.ndarray]:
    assert isinstance(tokenizer, ByT5Tokenizer)
    for document in documents:
        yield np.frombuffer(document.encode("utf-8"), np.uint8).astype(np.int32) + np.int32(tokenizer.offset)


def _encode(documents: list[str], tokenizer: PreTrainedTokenizerBase) -> Iterator[np.ndarray]:
    with logging.tqdm(total=len(documents), desc="Tokenizing", unit="documents", disable=None) as progress:
        for start in range(0, len(documents), _DOCUMENTS_PER_CALL):
            batch = documents[start : start + _DOCUMENTS_PER_CALL]
            encoded = tokenizer(
                batch,
                add_special_tokens=False,
                split_special_tokens=True,
                return_attention_mask=False,
                verbose=False,  # no warning for documents beyond the model's context: the stream is cut later
            )
            for ids in encoded["input_ids"]:
                yield np.array(ids, np.int32)
            progress.update(len(batch))
