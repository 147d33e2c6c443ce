"""Token streams: the byte path is the tokenizer, text makes no special tokens, one separator a document."""

from itertools import pairwise

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import ByT5Tokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from hf_recurrent_lengthgen.data import byte_tokenizer, token_stream
from hf_recurrent_lengthgen.data.tokens import text_ids, text_prefix

EOS = 1
NASTY = [
    "",
    "plain",
    "a </s> b",
    "<pad><pad> <unk>",
    "<extra_id_0><extra_id_124> <extra_id_125>",
    "</s",
    " \t\r\n  trailing  ",
    "é漢😀 e\u0301 \u200d",
    "\x00\x7f\x80\ufeff\uffff",
]


class SubclassedByteTokenizer(ByT5Tokenizer):
    """Not the class that the fast path supports, so it takes the path of every other tokenizer."""


def byte_level_tokenizer(**special: str) -> PreTrainedTokenizerFast:
    """A Rust tokenizer whose ids are the ranks of the byte-level alphabet, with no merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, **special)


BEFORE = {"nothing": "$A", "BOS": "<s> $A", "GLM": "[gMASK] <sop> $A", "OPT": "</s> $A", "both ends": "<s> $A </s>"}
"""What tokenizers put before a text, and one that also ends it."""


def putting(template: str, made: PreTrainedTokenizerFast | None = None) -> PreTrainedTokenizerFast:
    """A tokenizer that puts special tokens around each text."""
    made = made or byte_level_tokenizer()
    special = {"bos_token": "<s>", "eos_token": "</s>", "additional_special_tokens": ["[gMASK]", "<sop>"]}
    made.add_special_tokens(special)
    tokens = [(token, made.convert_tokens_to_ids(token)) for token in ("<s>", "</s>", "[gMASK]", "<sop>")]
    made.backend_tokenizer.post_processor = processors.TemplateProcessing(template, special_tokens=tokens)
    return made


@pytest.mark.parametrize("name", BEFORE)
def test_documents_have_what_the_tokenizer_puts_before_a_text(name: str) -> None:
    """As TRL, which tokenizes each text with its end, but one end of text is enough between two of them."""
    tokenizer, texts = putting(BEFORE[name]), ["one two", "3", "four"]
    by_itself = putting(BEFORE[name].removesuffix(" </s>"))
    expected = [token for text in texts for token in by_itself(f"{text}</s>")["input_ids"]]
    eos = tokenizer.eos_token_id
    expected = [expected[0]] + [token for last, token in pairwise(expected) if (last, token) != (eos, eos)]
    assert token_stream(texts, tokenizer).tolist() == expected
    prefix = by_itself("")["input_ids"]
    assert text_prefix(tokenizer) == prefix
    for text in ("one", tokenizer.decode(prefix) + "one"):
        assert text_ids(tokenizer, text) == by_itself("one")["input_ids"]


def test_bytes_by_hand() -> None:
    # "a" is byte 97, "é" bytes 195 169, each plus 3; 1 ends each document.
    assert token_stream(["a", "", "é"]).tolist() == [100, EOS, EOS, 198, 172, EOS]
    assert token_stream(["a"]).dtype == torch.int64


@pytest.mark.parametrize("text", NASTY, ids=repr)
def test_byte_path_is_the_tokenizer_on_nasty_text(text: str) -> None:
    tokenizer = byte_tokenizer()
    expected = tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    assert token_stream([text, "z"]).tolist() == [*expected, EOS, ord("z") + 3, EOS]


@pytest.mark.parametrize(
    "tokenizer", [byte_tokenizer(), SubclassedByteTokenizer(), byte_level_tokenizer(eos_token="</s>")],
    ids=["bytes", "python", "rust"],
)  # fmt: skip
def test_each_document_has_one_separator_and_comes_back(tokenizer: PreTrainedTokenizerBase) -> None:
    texts = [text for text in NASTY if text]
    stream = token_stream(texts, tokenizer).tolist()
    documents: list[list[int]] = [[]]
    for token in stream:
        if token == tokenizer.eos_token_id:
            documents.append([])
        else:
            documents[-1].append(token)
    assert documents.pop() == []
    assert [tokenizer.decode(ids, clean_up_tokenization_spaces=False) for ids in documents] == texts


def test_many_documents_keep_their_order_across_batches() -> None:
    tokenizer = byte_level_tokenizer(eos_token="</s>")
    texts = [f"document {i}" for i in range(1000)]
    stream = token_stream(texts, tokenizer)
    assert tokenizer.decode(stream, clean_up_tokenization_spaces=False) == "".join(t + "</s>" for t in texts)


def test_byte_path_ignores_tokens_that_were_added() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["q", "é", "漢", "word"])
    expected = tokenizer("q é 漢 word", add_special_tokens=False, split_special_tokens=True)["input_ids"]
    assert token_stream(["q é 漢 word"], tokenizer).tolist() == [*expected, EOS]


def test_a_tokenizer_without_end_of_text_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no end-of-text token.*set tokenizer.eos_token .*save_pretrained"):
        token_stream(["a"], byte_level_tokenizer())


@pytest.mark.parametrize("texts", [[], [""], ["", ""]], ids=["none", "empty", "two empty"])
def test_no_text_is_refused(texts: list[str]) -> None:
    with pytest.raises(ValueError, match=f"the {len(texts)} documents hold no token"):
        token_stream(texts)


def test_what_is_no_list_of_texts_is_refused() -> None:
    with pytest.raises(ValueError, match=r"give \[text\]"):
        token_stream("one string")
