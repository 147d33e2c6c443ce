"""Needles in running text: the paper's words, between sentences, in text that does not repeat."""

import re
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerBase

from hf_recurrent_lengthgen.data import byte_tokenizer
from hf_recurrent_lengthgen.data.tasks import PasskeyGrid, Task
from hf_recurrent_lengthgen.data.tasks.babilong import BackgroundText
from hf_recurrent_lengthgen.data.tasks.needle import needle_prompt, random_needle
from hf_recurrent_lengthgen.data.tasks.passkey import PasskeyTemplate
from tests.data.tasks.conftest import text_of

TEXTS = ["One dog barked. Two cats\n slept! Three", "birds sang. Four.", "Five. Six. Seven. Eight."]
HAYSTACK = "One dog barked. Two cats slept! Three birds sang. Four. Five. Six. Seven. Eight."
# arXiv:2509.22630, Table 12
HEAD = (
    "Some special magic numbers are hidden within the following text. Make sure to memorize it. I will quiz you about "
    "the numbers afterwards."
)
NEEDLE = "One of the special magic numbers for calm-river is: 1234567."
QUESTION = "What is the special magic number for calm-river mentioned in the provided text?"
PREFIX = "The special magic number for calm-river mentioned in the provided text is"
BARE = len(f"{HEAD}\n{NEEDLE}\n{QUESTION} {PREFIX} 1234567.")


def filled(length: int, depth: float, tokenizer: Any = None) -> Task:
    tokenizer = tokenizer or byte_tokenizer()
    texts = [" ".join(TEXTS)]  # a sentence reaches over two of TEXTS
    return needle_prompt(tokenizer, BackgroundText(tokenizer, texts, "\n"), length, depth, "calm-river", "1234567")


@pytest.mark.parametrize(
    ("depth", "body"),
    [
        (0, f"\n{NEEDLE}\nOne dog barked. Two cats slept! Thr"),
        (0.4, f"\nOne dog barked. {NEEDLE} Two cats slept! Thr"),
        (0.75, f"\nOne dog barked. Two cats slept! {NEEDLE} Thr"),
        (1, f"\nOne dog barked. Two cats slept! {NEEDLE} Thr"),
    ],
)
def test_the_prompt_of_table_12(depth: float, body: str) -> None:
    room = len("\nOne dog barked. Two cats slept! Thr")
    task = filled(BARE + room, depth)
    assert text_of(task.prompt) == f"{HEAD}{body}\n{QUESTION} {PREFIX}"
    assert text_of(task.answer) == " 1234567."
    assert text_of(task.answer[: task.scored]) == " 1234567"
    after = text_of(task.prompt).partition(NEEDLE)[2]
    assert task.distance == len(after)


def test_infinity_bench_is_that_of_table_12() -> None:
    filler = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
    needle = "The pass key is 12345. Remember it. 12345 is the pass key."
    prompt = "\n".join([filler, filler, filler, needle, filler, filler, "What is the pass key? The pass key is"])
    task = PasskeyTemplate(byte_tokenizer(), len(prompt) + 7, "infinity-bench").fill(0.5, "12345")
    assert text_of(task.prompt) == prompt
    assert task.distance == len(prompt.partition(needle)[2])


def test_chunks_are_tokenized_as_the_whole_text(tokenizer: PreTrainedTokenizerBase) -> None:
    whole = f"{HEAD}\nOne dog barked. Two cats slept! {NEEDLE} Three birds sang.\n{QUESTION} {PREFIX} 1234567."
    ids = tokenizer(whole, add_special_tokens=False)["input_ids"]
    task = filled(len(ids), 0.7, tokenizer)
    assert torch.cat([task.prompt, task.answer]).tolist() == ids
    after = tokenizer(f"{whole.partition(NEEDLE)[0]}{NEEDLE}", add_special_tokens=False)["input_ids"]
    assert task.distance == len(task.prompt) - len(after)


def test_what_cannot_be_filled_is_refused() -> None:
    with pytest.raises(ValueError, match=f"length is {BARE - 1}, but must be from {BARE}, "):
        filled(BARE - 1, 0)
    usable = len("\n" + HAYSTACK)
    filled(BARE + usable, 1)
    with pytest.raises(ValueError, match=f"to {BARE + usable}, since the text does not repeat"):
        filled(BARE + usable + 1, 0)


def test_random_needles() -> None:
    found = [random_needle(np.random.default_rng([3, number])) for number in range(300)]
    assert all(re.fullmatch("[a-z]+-[a-z]+", word) for word, _ in found)
    assert len({word for word, _ in found}) > 200
    assert all(re.fullmatch("[1-9][0-9]{6}", number) for _, number in found)


def test_the_samples_of_a_cell_begin_as_those_of_other_lengths() -> None:
    grid = PasskeyGrid(byte_tokenizer(), [0, 0.5], 3, seed=4)
    short, long = grid.tasks(0, 400), grid.tasks(0, 500)
    for one, other in zip(short, long, strict=True):
        assert torch.equal(one.answer, other.answer)
        assert torch.equal(one.prompt[:300], other.prompt[:300])
    assert len({tuple(task.answer.tolist()) for task in [*short, *grid.tasks(1, 400)]}) == 6
    assert not torch.equal(short[0].answer, PasskeyGrid(byte_tokenizer(), [0], 1, seed=5).tasks(0, 400)[0].answer)
