"""A tokenizer of whole words for passkey prompts."""

import re
from itertools import chain
from typing import Any

from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hf_recurrent_lengthgen.data.tasks import PASSKEY_STYLES

PIECES = r"[A-Za-z]+|[0-9]{1,2}|[^\sA-Za-z0-9]"
"""Words, pairs of digits and signs; a key of 5 digits has 3 pieces."""
FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."


def words_of_prompts() -> list[str]:
    """Words and signs of the passkey prompts, without digits."""
    texts = chain([FILLER, "a"], *([style.head, style.needle, style.question] for style in PASSKEY_STYLES.values()))
    return sorted({word for text in texts for word in re.findall(PIECES, text) if not word.isdigit()})


def word_tokenizer() -> PreTrainedTokenizerFast:
    """One token per word, pair of digits or sign of the passkey prompts; id 0 is padding and any other word."""
    digits = [*map(str, range(10)), *(f"{number:02}" for number in range(100))]
    vocabulary = {word: place for place, word in enumerate(["<other>", *words_of_prompts(), *digits])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<other>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(PIECES), "removed", invert=True)
    fast: Any = PreTrainedTokenizerFast
    return fast(tokenizer_object=tokenizer, unk_token="<other>", pad_token="<other>")  # type: ignore[no-any-return]
