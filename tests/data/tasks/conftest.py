"""Tokenizers of several kinds, and the text of ids of bytes."""

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from hf_recurrent_lengthgen.data import byte_tokenizer

TEXT = [
    "There is an important info hidden inside a lot of irrelevant text. The grass is green. The sky is blue.\n",
    "What is the pass key? The pass key is 12345.\nQuestion: Where is Mary?\nAnswer: bathroom. 0 1 2 3 4 5 6 7 8 9",
] * 20


def text_of(ids: Tensor) -> str:
    """Of the byte tokenizer's ids."""
    return bytes((ids - 3).tolist()).decode()


def trained(pre_tokenizer: pre_tokenizers.PreTokenizer, decoder: decoders.Decoder) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoder
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(TEXT, trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", bos_token="<bos>")


def like_gpt_neox() -> PreTrainedTokenizerFast:
    return trained(pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel())


def like_llama() -> PreTrainedTokenizerFast:
    """Puts a space before the first word of whatever is encoded."""
    metaspace = pre_tokenizers.Metaspace(prepend_scheme="first")
    marks = [pre_tokenizers.Split(mark, "isolated") for mark in ("\n", ".", "?")]
    splits = pre_tokenizers.Sequence([metaspace, *marks, pre_tokenizers.Digits(True)])
    return trained(splits, decoders.Metaspace(prepend_scheme="always"))


TOKENIZERS = {"bytes": byte_tokenizer, "like GPT-NeoX": like_gpt_neox, "like Llama": like_llama}


@pytest.fixture(params=TOKENIZERS)
def tokenizer(request: pytest.FixtureRequest) -> PreTrainedTokenizerBase:
    return TOKENIZERS[request.param]()


@pytest.fixture(scope="session")
def merging_tokenizer() -> PreTrainedTokenizerBase:
    """A tokenizer with one token for "a" and the line break or space after it, and for "5.": no word is its own."""
    vocabulary = {character: place for place, character in enumerate(map(chr, range(128)))}
    merges = [("a", "\n"), ("5", ".")]
    for left, right in merges:
        vocabulary[left + right] = len(vocabulary)
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE(vocabulary, merges)))
