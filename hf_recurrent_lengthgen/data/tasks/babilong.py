"""BABILong-style tasks from local files: the facts of a bAbI question spread through background text.

bAbI is from Weston et al., 2015 (arXiv:1502.05698), BABILong from Kuratov et al., 2024 (arXiv:2406.10149). Buitrago
Ruiz and Gu, 2025 (arXiv:2507.02782), B.3, fine-tune on qa1 to qa10 for one epoch after post-training, without any
intervention, and also evaluate with examples in the prompt (few-shot). The wording of the prompt is ours:

    Text: sentence fact sentence sentence fact sentence
    Question: Where is Mary?
    Answer: bathroom.
"""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from hf_recurrent_lengthgen.data.tasks.answers import Prompts, Task, encode_answer, encode_next
from hf_recurrent_lengthgen.data.tasks.keyed_rows import Array, Lengths, drawn_lengths
from hf_recurrent_lengthgen.data.tokens import text_ids

BABILONG_TASKS = tuple(range(1, 11))
_LONGEST_SENTENCE = 40  # words; longer text is cut there, so that facts can be placed between


class BabiQuestion(NamedTuple):
    """One question.

    Attributes:
        facts: All statements of its story before it.
        question: The question, with its question mark.
        answer: One word, or several separated by commas.
        supporting: Indices of the `facts` that it depends on, from 0.
    """

    facts: tuple[str, ...]
    question: str
    answer: str
    supporting: tuple[int, ...]


def babi_files(folder: str | Path, split: str = "train", tasks: Sequence[int] = BABILONG_TASKS) -> list[Path]:
    """Files by task (qa1_..._train.txt) in a folder of the official archive, such as tasks_1-20_v1-2/en-10k.

    Raises:
        ValueError: if a task has no file or several.
    """
    all_files = []
    for task in tasks:
        files = sorted(Path(folder).glob(f"qa{task}_*_{split}.txt"))
        if len(files) != 1:
            raise ValueError(f"{folder} has {len(files)} files qa{task}_*_{split}.txt, but must have exactly one")
        all_files += files
    return all_files


def read_babi(path: str | Path) -> list[BabiQuestion]:
    """Questions of a bAbI file: lines "1 A fact." and "3 A question? <tab> answer <tab> 1", each story from 1.

    Raises:
        ValueError: for other lines, with file and line, and for a file without a question.
    """
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    questions: list[BabiQuestion] = []
    facts: dict[int, str] = {}  # of this story, by line number in it
    for line_number, line in enumerate(lines, start=1):
        try:
            number, text = int(line.partition(" ")[0]), line.partition(" ")[2]
            if number == 1:
                facts = {}
            if "\t" in text:
                question, answer, numbers = (field.strip() for field in text.split("\t"))
                supporting = tuple([*facts].index(int(number)) for number in numbers.split())
                questions.append(BabiQuestion(tuple(facts.values()), question, answer, supporting))
            else:
                facts[number] = text.strip()
        except ValueError as error:
            raise ValueError(
                f"{path}, line {line_number}: expected a fact after its number, or question, tab, answer, tab and the "
                f"numbers of earlier facts, got {line!r}"
            ) from error
    if not questions:
        raise ValueError(f"{path} has no question; a question has tabs before its answer and its supporting facts")
    return questions


def sentences(texts: Iterable[str]) -> list[str]:
    """Sentences in order, with single spaces, cut after 40 words; a sentence ends at . ! or ? before a space."""
    parts = []
    for text in texts:
        for sentence in re.split(r"(?<=[.!?])\s+", text):
            words = sentence.split()
            for start in range(0, len(words), _LONGEST_SENTENCE):
                parts.append(" ".join(words[start : start + _LONGEST_SENTENCE]))
    return parts


class NoQuestionFitsError(ValueError):
    """No question fits into a length."""


class BackgroundText:
    """The sentences of texts as token ids, encoded once for many prompts.

    Args:
        first: What stands before the first sentence, a space or a line break; before the others stands a space.

    Attributes:
        tokens: Token ids of all sentences, int64 (n,).
        ends: End of each sentence, (sentences,).
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, texts: Iterable[str], first: str = " ") -> None:
        encoded = [encode_next(tokenizer, (" " if i else first) + text) for i, text in enumerate(sentences(texts))]
        self.tokens = torch.tensor([token for ids in encoded for token in ids])
        self.ends = np.cumsum([len(ids) for ids in encoded])


class BabilongPrompts(Prompts):
    """bAbI questions hidden in background text, each once, with `length` tokens each.

    Background sentences have the order of their texts, from a random sentence on; the last is cut. The facts are in
    order at uniformly random places between them. Both depend only on the seed and the index of the item. Questions
    whose facts do not fit into `length` are left out.

    Items are those of `Prompts`; we add the period after the answer, as in passkey training.

    Args:
        questions: Questions from `read_babi`.
        background: Texts without bAbI's facts, such as books, or a `BackgroundText` with the same tokenizer; the first
            text follows the last.
        length: Tokens per sample, or their minimum and maximum: (512, 8192) draws a length for each sample, at least
            what its facts need.
        seed: Seed of places, background and lengths, at least 0.
        shots: Questions that precede the text with their answers, without background, for evaluation.

    Attributes:
        left_out: Number of questions that do not fit.

    Raises:
        ValueError: if no question fits.
    """

    name = "BABILong prompts"

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        questions: Sequence[BabiQuestion],
        background: Iterable[str] | BackgroundText,
        length: Lengths,
        seed: int = 0,
        shots: Sequence[BabiQuestion] = (),
    ) -> None:
        super().__init__(length, max(1, len(questions)), seed)
        self._tokenizer = tokenizer
        self._known: dict[str, list[int]] = {}  # bAbI has few different sentences
        if not isinstance(background, BackgroundText):
            background = BackgroundText(tokenizer, background)
        self._background = background
        self._head = self._shots(shots)
        needed = np.array([self._length_without_background(question) for question in questions], np.int64)
        self.questions = [question for question, least in zip(questions, needed, strict=True) if least <= self.longest]
        self.left_out = len(questions) - len(self.questions)
        if not self.questions:
            least = needed.min() if len(needed) else 0
            raise NoQuestionFitsError(
                f"none of {len(questions)} questions fits into {self.longest} tokens, the shortest needs {least}; "
                "give a larger length, fewer shots, or other questions"
            )
        self._needed = needed[needed <= self.longest]
        self.samples = len(self.questions)

    def _lengths(self, rows: Array) -> Array:
        return drawn_lengths(self.seed, rows, np.maximum(self.shortest, self._needed[rows]), self.longest)

    def _task(self, index: int, generator: np.random.Generator, length: int) -> Task:
        question = self.questions[index]
        body = self._take(generator, int(length - self._needed[index]))
        first = min(question.supporting)
        places = np.sort(generator.integers(0, len(body) + 1, len(question.facts)))
        *facts, ending = map(self._tokens, _texts(question))
        for fact, place in reversed(list(zip(facts, places.tolist(), strict=True))):
            body.insert(place, fact)
        parts = [self._head, *body, ending]
        after = places[first] + first + 1  # parts of the body up to and with the first fact needed
        distance = sum(map(len, parts[1 + after :]))
        answer, scored = encode_answer(self._tokenizer, question.answer)
        prompt = torch.tensor([token for part in parts for token in part])
        return Task(prompt, torch.tensor(answer), scored, distance)

    def _take(self, generator: np.random.Generator, room: int) -> list[list[int]]:
        """Consecutive sentences of `room` tokens in total, from a random one."""
        taken: list[list[int]] = []
        tokens, ends = self._background.tokens, self._background.ends
        sentence = int(generator.integers(len(ends)))
        while room > 0:
            start = ends[sentence - 1] if sentence else 0
            ids = tokens[start : ends[sentence]][:room].tolist()
            taken.append(ids)
            room -= len(ids)
            sentence = (sentence + 1) % len(ends)
        return taken

    def _shots(self, shots: Sequence[BabiQuestion]) -> list[int]:
        head = [*text_ids(self._tokenizer, "Text:")]
        for shot in shots:
            for text in _texts(shot):
                head += self._tokens(text)
            head += encode_answer(self._tokenizer, shot.answer)[0] + self._tokens("\n\nText:")
        return head

    def _length_without_background(self, question: BabiQuestion) -> int:
        texts = [*_texts(question), f" {question.answer}."]
        return len(self._head) + sum(len(self._tokens(text)) for text in texts)

    def _tokens(self, text: str) -> list[int]:
        if text not in self._known:
            self._known[text] = encode_next(self._tokenizer, text)
        return self._known[text]


def _texts(question: BabiQuestion) -> list[str]:
    """The facts, and what follows them up to the answer."""
    return [*(f" {fact}" for fact in question.facts), f"\nQuestion: {question.question}\nAnswer:"]
