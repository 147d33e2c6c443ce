"""What all prompts have in common: their beginning, and that they depend on the seed and the index alone."""

import pickle
from typing import Any

import pytest
import torch

from hf_recurrent_lengthgen.data import byte_tokenizer, token_stream
from hf_recurrent_lengthgen.data.tasks import (
    BabilongGrid,
    BabilongPrompts,
    BabiQuestion,
    KeyGrid,
    KeyPrompts,
    NeedleGrid,
    PasskeyGrid,
    PasskeyPrompts,
)
from tests.data.tasks.conftest import like_gpt_neox, like_llama
from tests.data.test_tokens import BEFORE, putting

TEXTS = ["The river is wide. It never sleeps.\n" * 30, "Where is Mary? She is there. " * 30]
QUESTION = BabiQuestion(("Mary went to the garden.",), "Where is Mary?", "garden", (0,))
GRIDS: dict[str, Any] = {
    "passkey": lambda tokenizer: PasskeyGrid(tokenizer, [0.5], 2),
    "niah": lambda tokenizer: NeedleGrid(tokenizer, TEXTS, [0.5], 2),
    "keys": lambda tokenizer: KeyGrid(tokenizer, token_stream(TEXTS, tokenizer), [0.5], 2, keys=2),
    "babilong": lambda tokenizer: BabilongGrid(tokenizer, {"qa1": [QUESTION]}, TEXTS, 1),
}


@pytest.mark.parametrize("make", [like_gpt_neox, like_llama])
@pytest.mark.parametrize("before", ["BOS", "GLM"])
@pytest.mark.parametrize("task", GRIDS)
def test_a_prompt_begins_as_a_text_does(task: str, before: str, make: Any) -> None:
    tokenizer = putting(BEFORE[before], make())
    prefix = tokenizer("")["input_ids"]
    for found in GRIDS[task](tokenizer).tasks(0, 500):
        ids = found.prompt.tolist()
        assert ids[: len(prefix)] == prefix
        assert ids[1:].count(prefix[0]) == (0 if task != "keys" else ids[1:].count(tokenizer.eos_token_id))
        assert len(ids) + len(found.answer) == 500


MAKERS: dict[str, Any] = {
    "passkey": lambda samples, seed: PasskeyPrompts(byte_tokenizer(), 400, samples, seed),
    "keys": lambda samples, seed: KeyPrompts(byte_tokenizer(), token_stream(TEXTS), 400, samples, seed),
    "babilong": lambda samples, seed: BabilongPrompts(byte_tokenizer(), [QUESTION] * samples, TEXTS, 400, seed),
}


@pytest.mark.parametrize("task", MAKERS)
def test_samples_depend_on_seed_and_index_alone(task: str) -> None:
    samples, more, other = MAKERS[task](40, 3), MAKERS[task](1000, 3), MAKERS[task](40, 4)
    read = [samples[index]["input_ids"] for index in range(40)]
    assert all(torch.equal(more[index]["input_ids"], read[index]) for index in reversed(range(40)))
    assert sum(torch.equal(other[index]["input_ids"], read[index]) for index in range(40)) < 3
    assert len({tuple(ids.tolist()) for ids in read}) > 35  # of few places and passages
    copy = pickle.loads(pickle.dumps(samples))  # what a worker gets
    assert torch.equal(copy[7]["input_ids"], read[7])
    assert torch.equal(samples[-1]["input_ids"], read[39])
    with pytest.raises(IndexError):
        samples[40]
