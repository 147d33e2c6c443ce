"""Keys in real text: codes of names between the sentences and lines of a text, and a question about one of them.

    ... and went home. The code of calm-river is 48213. The next day
    ...
    What is the code of calm-river now? The code of calm-river is 48213.

Other names distract, as in the multi-key needles of RULER (Hsieh et al., 2024, arXiv:2404.06654). A name may have
several codes, of which the last counts: the earlier ones must be overwritten, as in Wang and Sun, 2025
(arXiv:2506.08184). The wording is ours.

Nothing can be guessed. Names and codes are uniform, and none occurs twice in a text. All names of a text have equally
many codes, the last one at a uniform depth, the earlier ones uniformly before it, so that the question alone tells
which name counts. Chance is 1 in 90,000 without the text, 1 in `keys` for the last code of some name (also for the
last one of the text), and 1 in `keys` x `values` for some code of the text. At a fixed depth d
of the right code, the last code of the text is the answer with probability d^(`keys` - 1).
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from hf_recurrent_lengthgen.data.packing import as_stream, sampled_digest
from hf_recurrent_lengthgen.data.tasks.answers import Prompts, Task, encode, encode_answer, encode_next
from hf_recurrent_lengthgen.data.tasks.grids import DepthGrid
from hf_recurrent_lengthgen.data.tasks.keyed_rows import Lengths
from hf_recurrent_lengthgen.data.tasks.needle import WORDS
from hf_recurrent_lengthgen.data.tokens import text_prefix

ANOTHER_KEY, EARLIER_VALUE = "another key", "earlier value"
"""Kinds of wrong answers: a code of another name (confusion), an earlier code of this one (not overwritten)."""
_FACT, _IS, _QUESTION = "The code of", " is", "\nWhat is the code of {name} now? The code of {name} is"
_FIRST_CODE, _CODES = 10_000, 90_000
_CODE_TOKENS = len(" 12345.")  # at most: a token has a character or more


class KeyTexts:
    """Random prompts in the text of one stream.

    Args:
        tokenizer: The tokenizer of the stream.
        stream: (n,) integers, as from `token_stream`. The text of a prompt is a passage from a random end of a
            sentence or line on, after the tokenizer's prefix; after the last token comes the first. Codes stand after
            sentences and between lines.
        keys: Number of names in a prompt.
        values: Number of codes of each name, of which the last counts.

    Attributes:
        shortest: Least length of a prompt with its answer; short names and codes leave some of it to the text.

    Raises:
        ValueError: for a stream in which no sentence or line ends, for numbers out of range, and for a tokenizer
            without tokens for some letters or digits.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stream: Tensor, keys: int, values: int) -> None:
        stream = as_stream(stream).long()
        if not (1 <= keys <= len(WORDS) and 1 <= values <= _CODES // keys):
            raise ValueError(
                f"{keys} keys of {values} values are not possible: there are {len(WORDS)} names and {_CODES} codes"
            )
        self.keys, self.values = keys, values
        self._tokenizer, self._stream, self._prefix = tokenizer, stream, text_prefix(tokenizer)
        places, at_line = _places_for_facts(tokenizer, stream)
        self._places, self._at_line = np.concatenate([places, places + len(stream)]), np.tile(at_line, 2)
        self._heads = [encode_next(tokenizer, mark + _FACT) for mark in (" ", "\n")]
        self._is = encode_next(tokenizer, _IS)
        self._names = {word: encode_next(tokenizer, f" {word}") for word in WORDS}
        codes = [encode_next(tokenizer, f" {digit * 11_111}") for digit in range(1, 10)]
        if len({*map(tuple, [*self._names.values(), *codes])}) < len(WORDS) + len(codes):
            raise ValueError(
                f"{type(tokenizer).__name__} has the same tokens for different names or digits, so that they cannot "
                "be told apart; use a tokenizer that knows all letters"
            )
        longest = max(self._names, key=lambda word: len(self._names[word]))
        fact = max(map(len, self._heads)) + len(self._names[longest]) + len(self._is) + _CODE_TOKENS
        self.shortest = len(self._prefix) + keys * values * fact + len(self._question(longest)) + _CODE_TOKENS

    def check(self, length: int) -> None:
        """Raise a `ValueError` for a length without room for the codes, or with more tokens than the stream."""
        if not self.shortest <= length <= len(self._stream):
            raise ValueError(
                f"length is {length}, but must be from {self.shortest}, for {self.keys} keys of {self.values} values, "
                f"to the {len(self._stream)} tokens of the text, which does not repeat"
            )

    def task(self, generator: np.random.Generator, length: int, depth: float | None = None) -> Task:
        """A prompt up to "The code of {name} is" and its answer, of `length` tokens together.

        Args:
            generator: What is drawn from it depends neither on the length nor on the depth.
            length: Number of tokens.
            depth: Share of the text before the right code; None to draw it. Each code stands at the place
                nearest to its depth.
        """
        self.check(length)
        names = [WORDS[index] for index in generator.choice(len(WORDS), self.keys, replace=False)]
        codes = _FIRST_CODE + generator.choice(_CODES, self.keys * self.values, replace=False)
        last = generator.uniform(size=(self.keys, 1))
        if depth is not None:
            last[0] = depth
        earlier = last * np.sort(generator.uniform(size=(self.keys, self.values - 1)))
        depths = np.concatenate([earlier, last], 1).ravel()
        start = int(generator.integers(len(self._places) // 2))
        answers = [encode_answer(self._tokenizer, str(code)) for code in codes]
        facts = [self._names[names[i // self.values]] + self._is + answers[i][0] for i in range(len(codes))]
        question, right = self._question(names[0]), self.values - 1
        answer, scored = answers[right]
        size = length - len(self._prefix) - len(question) - len(answer)
        body, after = self._body(start, facts, depths, size, right)
        kinds = [EARLIER_VALUE] * right + [ANOTHER_KEY] * (len(codes) - self.values)
        others = [torch.tensor(ids[:size]) for ids, size in answers[:right] + answers[self.values :]]
        mistakes = tuple(zip(kinds, others, strict=True))
        prompt = torch.cat([torch.tensor(self._prefix, dtype=torch.long), body, torch.tensor(question)])
        return Task(prompt, torch.tensor(answer), scored, after + len(question), mistakes)

    def _body(
        self, start: int, facts: Sequence[list[int]], depths: np.ndarray, size: int, right: int
    ) -> tuple[Tensor, int]:
        """`size` tokens of text and facts from a place of the stream on, and the tokens after the `right` fact."""
        room = size - sum(map(len, facts)) - len(facts) * max(map(len, self._heads))  # places decide on the heads
        first = self._places[start]
        stop = np.searchsorted(self._places, first + room, "right")
        ends = self._places[start:stop] - first
        chosen = np.abs(ends[:, None] - room * depths).argmin(0)
        heads = [self._heads[line] for line in self._at_line[start + chosen].astype(int)]
        text_size = size - sum(map(len, [*facts, *heads]))
        text = self._stream[(first + torch.arange(text_size)) % len(self._stream)]
        parts: list[Tensor] = []
        done = written = end = 0
        for fact in np.argsort(depths, kind="stable"):  # the codes of a name keep their order
            parts += [text[done : ends[chosen[fact]]], torch.tensor(heads[fact] + facts[fact])]
            done = ends[chosen[fact]]
            written += len(parts[-2]) + len(parts[-1])
            end = written if fact == right else end
        return torch.cat([*parts, text[done:]]), size - end

    def _question(self, name: str) -> list[int]:
        return encode_next(self._tokenizer, _QUESTION.format(name=name))


def _places_for_facts(tokenizer: PreTrainedTokenizerBase, stream: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Indices of the tokens that begin with a line break, or with a space after a sentence; and which begin lines."""
    used = torch.bincount(stream).nonzero()[:, 0].tolist()
    anchor = encode(tokenizer, "a")  # some tokenizers strip the first space of a text
    options = {"clean_up_tokenization_spaces": False}
    before, *texts = tokenizer.batch_decode([anchor, *([*anchor, token] for token in used)], **options)
    begins_line, begins_word, ends_sentence = table = np.zeros((3, used[-1] + 1), bool)
    for token, text in zip(used, texts, strict=True):
        own = text.removeprefix(before)
        table[:, token] = own.startswith("\n"), own.startswith(" "), own.endswith((".", "!", "?"))
    ids = stream.numpy()
    at_line = begins_line[ids[1:]]
    places = 1 + np.flatnonzero(at_line | (begins_word[ids[1:]] & ends_sentence[ids[:-1]]))
    if not len(places):
        raise ValueError(
            "no sentence of the text ends with . ! or ? before a space, and no line ends, so that there is no place "
            "for a code; give other text"
        )
    return places, at_line[places - 1]


class KeyPrompts(Prompts):
    """Training samples as `Prompts` describes them; each has its own passage of the stream.

    Args:
        tokenizer, stream, keys, values: As in `KeyTexts`; evaluation needs another stream.
        length, samples, seed: As in `Prompts`.

    Raises:
        ValueError: as in `KeyTexts`, for its `check` of the lengths, and for less than one sample.
    """

    name = "keys"

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        stream: Tensor,
        length: Lengths,
        samples: int,
        seed: int = 0,
        keys: int = 4,
        values: int = 1,
    ) -> None:
        super().__init__(length, samples, seed)
        self._texts = KeyTexts(tokenizer, stream, keys, values)
        for bound in (self.shortest, self.longest):
            self._texts.check(bound)
        self._record = {"keys": keys, "values": values, "tokens": len(stream), "digest": sampled_digest(stream)}

    @property
    def resume_record(self) -> dict[str, Any]:
        return super().resume_record | self._record

    def _task(self, index: int, generator: np.random.Generator, length: int) -> Task:
        return self._texts.task(generator, length)


class KeyGrid(DepthGrid):
    """Prompts of `KeyTexts`, a row for each depth of the right code; see `RetrievalGrid` for the arguments."""

    task = "keys"

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        stream: Tensor,
        depths: Sequence[float],
        samples: int,
        seed: int = 0,
        keys: int = 4,
        values: int = 1,
    ) -> None:
        super().__init__(depths, samples, seed)
        self.style = f"{keys} keys of {values} values"
        self._texts = KeyTexts(tokenizer, stream, keys, values)

    def _task(self, generator: np.random.Generator, length: int, depth: float) -> Task:
        return self._texts.task(generator, length, depth)
