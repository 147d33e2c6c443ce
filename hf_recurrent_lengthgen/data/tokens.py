"""One stream of token ids from documents, each followed by one separator."""

from collections.abc import Iterable, Iterator

import numpy as np
import torch
from torch import Tensor
from transformers import ByT5Tokenizer, PreTrainedTokenizerBase
from transformers.utils import logging

_DOCUMENTS_PER_CALL = 256


def byte_tokenizer() -> ByT5Tokenizer:
    """A tokenizer that needs no download: UTF-8 bytes, id = byte + 3, padding 0, end of text 1, 384 ids."""
    return ByT5Tokenizer()


def token_stream(texts: Iterable[str], tokenizer: PreTrainedTokenizerBase | None = None) -> Tensor:
    """Token ids of all texts in one row, with the tokenizer's end-of-text token after each text.

    Text never becomes special tokens: "</s>" inside a document is four ordinary bytes, not an end of text. That is
    `tokenizer(text, add_special_tokens=False, split_special_tokens=True)`; without the second option ByT5 reads
    "a </s> b" as a, end of text, b and loses both spaces.

    Args:
        texts: The documents. An empty one gives only its separator.
        tokenizer: Any Transformers tokenizer; None for the byte tokenizer.

    Returns:
        (number of tokens,) int64.

    Raises:
        ValueError: if there is no text, a document is not a string, or the tokenizer has no end of text.
    """
    if isinstance(texts, str):
        raise ValueError("texts is one string, but must be several documents; give [text]")
    documents = list(texts)
    for index, document in enumerate(documents):
        if not isinstance(document, str):
            raise ValueError(f"document {index} is a {type(document).__name__}, but must be a string")
    tokenizer = byte_tokenizer() if tokenizer is None else tokenizer
    if tokenizer.eos_token_id is None:
        raise ValueError(
            f"{type(tokenizer).__name__} has no end-of-text token to put between documents; set tokenizer.eos_token "
            "(for the command line in a copy, tokenizer.save_pretrained(FOLDER), given as --tokenizer FOLDER)"
        )
    ending = np.array([tokenizer.eos_token_id], np.int32)
    # A subclass may tokenize differently, so only the class itself is known to be plain bytes.
    encode = _encode_bytes if type(tokenizer) is ByT5Tokenizer else _encode
    pieces: list[np.ndarray] = []
    number_of_tokens = 0
    for ids in encode(documents, tokenizer):
        number_of_tokens += len(ids)
        pieces += (ids, ending)
    if not number_of_tokens:
        raise ValueError(f"the {len(documents)} documents hold no token; give some text")
    return torch.from_numpy(np.concatenate(pieces, dtype=np.int64))


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
