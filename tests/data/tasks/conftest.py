"""Tokenizers of several kinds, and a model that knows the answer where it stands near enough."""

import re
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from hf_recurrent_lengthgen.data import byte_tokenizer

TEXT = [
    "There is an important info hidden inside a lot of irrelevant text. The grass is green. The sky is blue.\n",
    "What is the pass key? The pass key is 12345.\nQuestion: Where is Mary?\nAnswer: bathroom. 0 1 2 3 4 5 6 7 8 9",
] * 20


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
    pieces = pre_tokenizers.Sequence([metaspace, *marks, pre_tokenizers.Digits(True)])
    return trained(pieces, decoders.Metaspace(prepend_scheme="always"))


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


class Reader(nn.Module):
    """Reads bytes; after "...: " or "pass key is" it goes on with the first number read, if that is within reach.

    Its state is all that it has read.
    """

    def __init__(self, reach: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.reach = reach
        self.lengths: list[int] = []

    def next_byte(self, read: bytes) -> int:
        found = re.search(rb"\d+", read)
        asked = re.search(rb"\? The pass ?key is( ?\d*)$", read)
        if found is None or asked is None or len(read) - found.start() > self.reach:
            return ord("x")
        return (b" " + found[0] + b".")[len(asked[1])]

    def forward(
        self, input_ids: Tensor, logits_to_keep: int = 0, initial_state: list[bytes] | None = None
    ) -> SimpleNamespace:
        self.lengths.append(input_ids.shape[1])
        before = initial_state or [b""] * len(input_ids)
        new = [bytes((row - 3).tolist()) for row in input_ids]
        logits = torch.zeros(*input_ids.shape, 384)
        for row, (old, added) in enumerate(zip(before, new, strict=True)):
            for place in range(len(added))[-logits_to_keep:]:
                logits[row, place, self.next_byte(old + added[: place + 1]) + 3] = 1
        state = [old + added for old, added in zip(before, new, strict=True)]
        return SimpleNamespace(logits=logits[:, -logits_to_keep:] * self.scale, final_state=state)


@pytest.fixture
def reader() -> Callable[[int], Reader]:
    return Reader
