"""Passkey prompts: their words, lengths, labels and randomness."""

from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from transformers import PreTrainedTokenizerBase

from hf_recurrent_lengthgen.data import byte_tokenizer
from hf_recurrent_lengthgen.data.tasks import PasskeyPrompts, PasskeyTemplate
from tests.data.tasks.conftest import text_of

HEAD = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. "
    "I will quiz you about the important information there."
)
SENTENCES = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."


def test_the_prompt_of_figure_8() -> None:
    needle, question = (
        "The pass key is 33271. Remember it. 33271 is the pass key.",
        "What is the pass key? The pass key is",
    )
    prompt = f"{HEAD}\n{SENTENCES} The gra\n{needle}\n{SENTENCES} The gra\n{question}"
    task = PasskeyTemplate(byte_tokenizer(), len(prompt) + 7).fill(0.5, "33271")
    assert text_of(task.prompt) == prompt
    assert text_of(task.answer) == " 33271."
    assert text_of(task.answer[: task.scored]) == " 33271"


def test_the_prompt_of_stuffed_mamba() -> None:
    prompt = (
        "There is important info hidden inside a lot of irrelevant text. Find it and memorize it.\n"
        f"{SENTENCES}\nThe grass\nThe passkey is 34847. Remember it. 34847 is the passkey.\n"
        "What is the passkey? The passkey is"
    )
    task = PasskeyTemplate(byte_tokenizer(), len(prompt) + 7, "passkey").fill(1, "34847")
    assert text_of(task.prompt) == prompt


def test_samples_have_one_length_and_labels_on_key_and_period(tokenizer: PreTrainedTokenizerBase) -> None:
    samples = PasskeyPrompts(tokenizer, 300, 12)
    keys = []
    for index in range(len(samples)):
        item = samples[index]
        assert item["input_ids"].shape == item["labels"].shape == (300,)
        assert item["input_ids"].dtype == item["labels"].dtype == torch.int64
        scored = item["labels"] != -100
        answer = item["input_ids"][scored]
        assert torch.equal(item["labels"][scored], answer)
        assert bool(scored[-len(answer) :].all())  # the end of the row, and nothing else
        text = tokenizer.decode(item["input_ids"])
        key = tokenizer.decode(answer).strip().removesuffix(".")
        assert len(key) == 5
        assert text.count(f"The pass key is {key}. Remember it. {key} is the pass key.") == 1
        assert text.endswith(f"What is the pass key? The pass key is {key}.")
        keys.append(key)
    assert len(set(keys)) == 12


def test_chunks_are_tokenized_as_the_whole_text(tokenizer: PreTrainedTokenizerBase) -> None:
    needle = "The pass key is 12345. Remember it. 12345 is the pass key."
    question = "What is the pass key? The pass key is 12345."
    whole = f"{HEAD}\n{SENTENCES} {SENTENCES}\n{needle}\n{SENTENCES} {SENTENCES}\n{question}"
    ids = tokenizer(whole, add_special_tokens=False)["input_ids"]
    task = PasskeyTemplate(tokenizer, len(ids)).fill(0.5, "12345")
    assert torch.cat([task.prompt, task.answer]).tolist() == ids


def test_lengths_are_drawn_so_that_numbers_of_chunks_are_uniform() -> None:
    samples = PasskeyPrompts(byte_tokenizer(), (301, 1200), 900, seed=3)
    items = [samples[index] for index in range(900)]
    sizes = np.array([len(item["input_ids"]) for item in items])
    assert 301 <= sizes.min() <= sizes.max() <= samples.longest == 1200
    assert samples.item_lengths == sizes.tolist()
    chunks = np.bincount(-(-sizes // 300))  # of 300 tokens
    assert chunks[:2].tolist() == [0, 0]
    assert chisquare(chunks[2:]).pvalue > 0.001
    keys = [text_of(item["input_ids"][item["labels"] != -100]) for item in items]
    assert all(text_of(item["input_ids"]).count(key[1:6]) == 3 for item, key in zip(items, keys, strict=True))
    more = PasskeyPrompts(byte_tokenizer(), (301, 1200), 10**9, seed=3)
    assert all(torch.equal(more[index]["input_ids"], items[index]["input_ids"]) for index in (899, 0, 7))
    one, same = (PasskeyPrompts(byte_tokenizer(), length, 9, seed=3) for length in (400, (400, 400)))
    assert all(torch.equal(one[index]["input_ids"], same[index]["input_ids"]) for index in range(9))
    assert samples.resume_record == more.resume_record != one.resume_record


def test_wrong_use_is_refused(merging_tokenizer: Any) -> None:
    tokenizer = byte_tokenizer()
    needle, question = "The pass key is 12345. Remember it. 12345 is the pass key.", "What is the pass key?"
    shortest = len(f"{HEAD}\n{needle}\n{question} The pass key is 12345.")
    assert len(PasskeyTemplate(tokenizer, shortest).fill(0.3, "12345").prompt) == shortest - 7
    too_short = f"length is {shortest - 1}, .* has {shortest} tokens"
    for length, samples, complaint in (
        (shortest - 1, 1, too_short),
        ((shortest - 1, 400), 1, too_short),
        ((400, 300), 1, r"passkey prompts: the length must be .* got \(400, 300\), "),
        (400, 0, "samples at least 1"),
    ):
        with pytest.raises(ValueError, match=complaint):
            PasskeyPrompts(tokenizer, length, samples)
    with pytest.raises(ValueError, match=r"depth is 1\.1"):
        PasskeyTemplate(tokenizer, 400).fill(1.1, "12345")
    with pytest.raises(ValueError, match="merges"):
        PasskeyTemplate(merging_tokenizer, 400).fill(0, "12345")
