"""A tokenizer of whole words for passkey prompts."""

import re
from itertools import chain
from typing import Any

from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hf_recurrent_lengthgen.data.tasks import PASSKEY_STYLES

WORDS = r"[A-Za-z]+|[^\sA-Za-z0-9]"
"""Words and signs; numbers are cut by the tokenizer."""
FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."


def words_of_prompts() -> list[str]:
    """Words and signs of the passkey prompts, without digits."""
    texts = chain([FILLER, "a"], *([style.head, style.needle, style.question] for style in PASSKEY_STYLES.values()))
    return sorted({word for text in texts for word in re.findall(WORDS, text)})


def word_tokenizer(digits: int = 2) -> PreTrainedTokenizerFast:
    """One token per word, sign or up to `digits` digits of the passkey prompts; id 0 is padding and any other word."""
    numbers = [f"{number:0{n}}" for n in range(1, digits + 1) for number in range(10**n)]
    vocabulary = {word: place for place, word in enumerate(["<other>", *words_of_prompts(), *numbers])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<other>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(rf"{WORDS}|[0-9]{{1,{digits}}}"), "removed", invert=True)
    fast: Any = PreTrainedTokenizerFast
    return fast(tokenizer_object=tokenizer, unk_token="<other>", pad_token="<other>")  # type: ignore[no-any-return]
