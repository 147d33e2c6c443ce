"""Keys in real text, read back from the decoded prompts by regular expressions."""

import re
from collections import Counter
from typing import Any, NamedTuple

import pytest
import torch
from scipy.stats import kstest
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from hf_recurrent_lengthgen.data import byte_tokenizer, token_stream
from hf_recurrent_lengthgen.data.tasks import KeyGrid, KeyPrompts
from hf_recurrent_lengthgen.data.tasks.keys_in_text import ANOTHER_KEY, EARLIER_VALUE

FACT = re.compile(r"[ \n]The code of ([a-z]+-[a-z]+) is (\d{5})\.")
QUESTION = re.compile(r"\nWhat is the code of ([a-z]+-[a-z]+) now\? The code of \1 is$")
DOCUMENTS = [
    "".join(
        f"Line {part}.{number} has {number * part} words. Is it so? It is\n  and stays so!\n" for number in range(30)
    )
    for part in range(1, 4)
]


class Read(NamedTuple):
    """What a prompt of bytes says: its text without facts and question, the facts, and the name in the question."""

    text: str
    facts: list[tuple[str, str]]
    queried: str


def text_of(ids: Tensor) -> str:
    """Of the byte tokenizer's ids, with a bar for the end of a document."""
    return bytes(124 if token == 1 else token - 3 for token in ids.tolist()).decode()


def read(prompt: str) -> Read:
    question = QUESTION.search(prompt)
    assert question is not None
    body = prompt[: question.start()]
    return Read(FACT.sub("", body), FACT.findall(body), question[1])


def stream_of(*documents: str, tokenizer: Any = None) -> Tensor:
    return token_stream(documents, tokenizer or byte_tokenizer())


def prompts(length: Any, samples: int = 20, seed: int = 0, stream: Tensor | None = None, **numbers: int) -> KeyPrompts:
    stream = stream_of(*DOCUMENTS) if stream is None else stream
    return KeyPrompts(byte_tokenizer(), stream, length, samples, seed, **numbers)


@pytest.mark.parametrize(("keys", "values"), [(1, 1), (4, 1), (1, 3), (3, 4)])
def test_the_answer_is_the_last_code_of_the_name_in_the_question(keys: int, values: int) -> None:
    samples = prompts(1000, keys=keys, values=values)
    around = 2 * text_of(stream_of(*DOCUMENTS))
    for index in range(len(samples)):
        task, item = samples.task(index), samples[index]
        text, facts, queried = read(text_of(task.prompt))
        names, codes = zip(*facts, strict=True)
        assert set(Counter(names).values()) == {values}
        assert (len(set(names)), len(set(codes))) == (keys, keys * values)
        own = [code for name, code in facts if name == queried]
        assert text_of(task.answer) == f" {own[-1]}."
        assert text_of(task.answer[: task.scored]) == f" {own[-1]}"
        wrong = [(kind, text_of(ids).strip()) for kind, ids in task.mistakes]
        assert [code for kind, code in wrong if kind == EARLIER_VALUE] == own[:-1]
        others = {code for name, code in facts if name != queried}
        assert {code for kind, code in wrong if kind == ANOTHER_KEY} == others
        assert len(wrong) == keys * values - 1
        whole = text_of(task.prompt)
        assert task.distance == len(whole) - whole.index(f"{own[-1]}.") - 6
        assert text in around  # a passage, with nothing left out where the facts stand
        assert item["input_ids"].tolist() == task.prompt.tolist() + task.answer.tolist()
        assert len(item["input_ids"]) == 1000
        assert item["labels"].tolist() == [-100] * len(task.prompt) + task.answer.tolist()


@pytest.mark.parametrize("depth", [0, 0.2, 0.55, 0.93, 1])
def test_codes_stand_at_the_end_of_a_sentence_or_line_nearest_to_their_depth(depth: float) -> None:
    stream = stream_of(*DOCUMENTS)
    around = 2 * text_of(stream)
    for task in KeyGrid(byte_tokenizer(), stream, [depth], 25, keys=1).tasks(0, 400):
        prompt = text_of(task.prompt)
        text, [(name, code)], _ = read(prompt)
        start = around.index(text)
        read_on = around[start : start + len(text) + 1]  # a place may be at the end of the passage
        places = [match.start() for match in re.finditer(r"(?<=[.!?]) |\n|\A", read_on)]
        nearest = min(places, key=lambda place: abs(place - depth * len(text)))
        fact = f"{read_on[nearest]}The code of {name} is {code}."  # after a space or line break, as the text goes on
        assert prompt.startswith(f"{text[:nearest]}{fact}{text[nearest:]}\nWhat is")
        assert text[0] in " \n"


@pytest.mark.parametrize(
    ("depth", "expected"),
    [
        (0, [" F aaa. bbb\nc dzzz", " F bbb\nc dzzzzzzzz", "\nF\nc dzzzzzzzzzzzz"]),
        (0.3, [" aaa. F bbb\nc dzzz", " bbb\nF\nc dzzzzzzzz", "\nF\nc dzzzzzzzzzzzz"]),  # 4.8 of 16
        (0.5, [" aaa. bbb\nF\nc dzzz", " bbb\nF\nc dzzzzzzzz", "\nF\nc dzzzzzzzzzzzz"]),
    ],
)
def test_a_text_with_three_places_by_hand(depth: float, expected: list[str]) -> None:
    stream = stream_of(f"Who? aaa. bbb\nc d{'z' * 300}")
    name = "calm-orchard"
    bare = f" The code of {name} is 12345.\nWhat is the code of {name} now? The code of {name} is 12345."
    found = set()
    for task in KeyGrid(byte_tokenizer(), stream, [depth], 150, keys=1).tasks(0, len(bare) + 16):
        prompt = text_of(task.prompt)
        if len(read(prompt).queried) == len(name):
            found.add(re.sub(r"The code of [a-z-]+ is \d{5}\.", "F", prompt[: prompt.index("\nWhat")]))
    assert found == {*expected}


def test_all_tokenizers(tokenizer: PreTrainedTokenizerBase) -> None:
    text = "The grass is green. The sky is blue.\nThe sun is yellow. Here we go.\n" * 20
    stream = torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"])
    samples = KeyPrompts(tokenizer, stream, 310, 10, keys=2, values=2)
    for index in range(10):
        task, item = samples.task(index), samples[index]
        whole = str(tokenizer.decode(item["input_ids"]))
        *facts, _ = FACT.findall(f"\n{whole.lstrip()}")  # the last one answers the question
        queried, answer = re.findall(r"\nWhat is the code of (.*) now\? The code of \1 is (\d{5})\.$", whole)[0]
        assert (len(item["input_ids"]), len(facts)) == (310, 4)
        assert [code for name, code in facts if name == queried][-1] == answer
        assert tokenizer.decode(task.answer[: task.scored]).strip() == answer
        ids = tokenizer(whole.lstrip(), add_special_tokens=False)["input_ids"]
        assert ids[8:] == item["input_ids"].tolist()[-len(ids[8:]) :]  # chunks are tokenized as the whole


def test_no_name_is_special_before_the_question() -> None:
    samples = prompts(2500, 400, seed=3, keys=3, values=2)
    depths, last, first, order = [], 0, 0, Counter[int]()
    for index in range(len(samples)):
        task = samples.task(index)
        _, facts, queried = read(text_of(task.prompt))
        depths.append(1 - (task.distance or 0) / len(task.prompt))
        last, first = last + (facts[-1][0] == queried), first + (facts[0][0] == queried)
        order[sorted({name for name, _ in facts}).index(queried)] += 1
    assert kstest(depths, "uniform").pvalue > 0.001
    for count in (last, first, *order.values()):  # one of three names: 5 standard deviations
        assert abs(count - 400 / 3) < 5 * (400 * 2 / 9) ** 0.5


def test_lengths_are_drawn_from_the_range() -> None:
    samples = prompts((300, 304), 200)
    lengths = [len(item["input_ids"]) for item in samples]
    assert {*lengths} == {300, 301, 302, 303, 304}
    assert samples.item_lengths == lengths
    assert samples.resume_record != prompts((300, 305), 200).resume_record
    other = stream_of(*DOCUMENTS[1:])
    assert samples.resume_record != prompts((300, 304), 200, stream=other).resume_record


def test_training_and_evaluation_read_their_own_streams() -> None:
    train, held_out = (stream_of(f"{letter * 9}.\n" * 300) for letter in "pq")
    samples = prompts(300, stream=train)
    assert {*"".join(read(text_of(samples.task(i).prompt)).text for i in range(20))} - {"|"} == {*"p.\n"}
    grid = KeyGrid(byte_tokenizer(), held_out, [0, 0.5], 10)
    tasks = [task for row in range(2) for task in grid.tasks(row, 300)]
    assert {*"".join(read(text_of(task.prompt)).text for task in tasks)} - {"|"} == {*"q.\n"}
    assert len({tuple(task.answer.tolist()) for task in tasks}) == 20
    one, other = grid.tasks(0, 300)[0], grid.tasks(0, 900)[0]
    assert torch.equal(one.answer, other.answer)  # the same keys at all lengths
    assert read(text_of(one.prompt)).queried == read(text_of(other.prompt)).queried
    assert (grid.task, grid.style) == ("keys", "4 keys of 1 values")


def test_wrong_use_is_refused(merging_tokenizer: Any) -> None:
    longest = "ancient-compass"
    need = len(f" The code of {longest} is 12345.\nWhat is the code of {longest} now? The code of {longest} is 12345.")
    assert len(prompts(need, keys=1)[0]["input_ids"]) == need
    stream = stream_of(*DOCUMENTS)
    for options, complaint in (
        ({"length": need - 1, "keys": 1}, f"length is {need - 1}, but must be from {need}, for 1 keys of 1 values"),
        ({"length": (need - 1, 400), "keys": 1}, f"length is {need - 1}, but"),
        ({"length": len(stream) + 1}, f"to the {len(stream)} tokens of the text, which does not repeat"),
        ({"length": (400, 300)}, "keys: the length must be"),
        ({"length": 400, "keys": 0}, "0 keys of 1 values are not possible: there are 1056"),
        ({"length": 400, "keys": 1057}, "1057 keys of 1 values"),
        ({"length": 400, "values": 0}, "4 keys of 0 values are not possible"),
        ({"length": 400, "samples": 0}, "samples at least 1"),
        ({"length": 400, "stream": stream_of("no end here" * 99)}, "no place for a code; give other text"),
        ({"length": 400, "stream": stream.float()}, "must be one-dimensional and of integers"),
    ):
        with pytest.raises(ValueError, match=re.escape(complaint)):
            prompts(**options)
    with pytest.raises(ValueError, match="merges"):
        KeyPrompts(merging_tokenizer, torch.tensor([97, 46, 32, 98] * 200), 400, 1)
    words = models.WordLevel(
        {word: place for place, word in enumerate(["<other>", "a", "The", "code", "of", "is", "."])}, "<other>"
    )
    few_words = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words))
    few_words.backend_tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    with pytest.raises(ValueError, match="the same tokens for different names or digits"):
        KeyPrompts(few_words, torch.tensor([2, 3, 6] * 200), 400, 1)
    with pytest.raises(ValueError, match="depth is 2"):
        KeyGrid(byte_tokenizer(), stream, [2], 1)
