"""What a tokenizer puts before a text stands once at the beginning of each prompt, and the length counts it."""

from typing import Any

import pytest

from hf_recurrent_lengthgen.data import token_stream
from hf_recurrent_lengthgen.data.tasks import BabilongGrid, BabiQuestion, KeyGrid, NeedleGrid, PasskeyGrid
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
