"""MRCR and OOLONG: conversations and lines of the asked lengths, answers that hold, and the published scores."""

import json
import random
import re
from collections import Counter
from collections.abc import Callable
from datetime import datetime
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

import pytest
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.tasks import TaskManager

from hf_recurrent_lengthgen.data import byte_tokenizer
from hf_recurrent_lengthgen.harness import mrcr, oolong
from hf_recurrent_lengthgen.harness.oolong_questions import LABELS, items
from tests.harness.test_lm import bos_tokenizer
from tests.harness.test_tasks import evaluate, write

Manager = Callable[..., TaskManager]


class Oracle(LM):
    """Answers each prompt with a function of it."""

    def __init__(self, answer: Callable[[str], str]) -> None:
        super().__init__()
        self.answer = answer

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        raise NotImplementedError

    def loglikelihood_rolling(self, requests: list[Instance]) -> list[float]:
        raise NotImplementedError

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        return [self.answer(str(request.args[0])) for request in requests]


def written(prompt: str, shift: int = 0) -> str:
    """What the conversation asks for, found by reading it; with a shift, the answer to another of the requests."""
    found = re.search(r"User: Prepend (\w{10}) to the (\d)\w\w \(1 indexed\) (.+) about (\w+)\. Do not", prompt)
    assert found is not None
    code, number, form, topic = found.groups()
    article = "an" if form.startswith(("a", "e", "i", "o", "u")) else "a"
    turns = re.findall(r"User: (Write .+)\nAssistant: ((?:.+\n)+?)(?=User: )", prompt)
    equal = [text.rstrip("\n") for request, text in turns if request == f"Write {article} {form} about {topic}"]
    return code + equal[(int(number) - 1 + shift) % len(equal)]


@pytest.mark.parametrize("needles", [2, 4, 8])
def test_the_right_piece_of_writing_scores_one(needles: int, task_manager: Manager) -> None:
    metadata = {"tokenizer": "bytes", "max_seq_lengths": [4096], "samples": 2}
    name = f"lengthgen_mrcr_{needles}"

    def scored(answer: Callable[[str], str]) -> float:
        return float(evaluate(Oracle(answer), task_manager(**metadata), name)[name]["4096"])

    assert scored(written) == 1
    assert scored(lambda prompt: " " + written(prompt)) == 1  # base models begin with a blank
    assert scored(lambda prompt: written(prompt)[10:]) == 0  # without the code
    assert scored(lambda prompt: "") == 0
    assert 0.2 < scored(lambda prompt: written(prompt)[:70]) < 0.9  # a part of it
    # the texts of the other requests are alike, but not the same
    assert 0.05 < scored(lambda prompt: written(prompt, shift=1)) < 0.95


def test_the_score_is_the_published_one() -> None:
    doc = {"code": "aB3", "answer": "aB3O tapirs, sing", "length": 1024}
    for response, expected in (
        ("aB3O tapirs, sing", 1.0),
        ("aB3O tapirs, sung", SequenceMatcher(None, "O tapirs, sung", "O tapirs, sing").ratio()),
        ("aB3", 0.0),
        ("O tapirs, sing", 0.0),
        ("Sure: aB3O tapirs, sing", 0.0),
    ):
        assert mrcr.similarity(doc, [response]) == {"1024": expected}


@pytest.mark.parametrize("length", [2048, 4096])
@pytest.mark.parametrize("kind", ["bytes", "words"])
def test_conversations_have_the_asked_length(length: int, kind: str) -> None:
    tokenizer = byte_tokenizer() if kind == "bytes" else bos_tokenizer()
    options = {"max_seq_lengths": [length], "samples": 4, "tokenizer": tokenizer}
    rows = mrcr.rows(2, **options)["test"]
    for row in rows:
        tokens = sum(len(tokenizer.encode(row[name], add_special_tokens=False)) for name in ("prompt", "answer"))
        turn = max(len(tokenizer.encode(turn)) for turn in row["prompt"].split("User: "))
        assert length - 2 * turn < tokens <= length
    assert len(set(rows["prompt"])) == 4
    assert mrcr.rows(2, **options)["test"]["prompt"] == rows["prompt"]
    assert mrcr.rows(2, seed=1, **options)["test"]["prompt"] != rows["prompt"]


def test_equal_requests_stand_anywhere_and_each_is_asked_for() -> None:
    rows = mrcr.rows(4, [4096], samples=40, tokenizer=byte_tokenizer())["test"]
    asked = Counter(re.search(r"to the (\d)", row["prompt"].rpartition("User:")[2])[1] for row in rows)
    assert set(asked) == {"1", "2", "3", "4"}
    places = [row["prompt"].index(row["answer"][10:]) / len(row["prompt"]) for row in rows]
    assert min(places) < 0.2 < 0.7 < max(places)


def test_published_conversations_are_read(task_manager: Manager, tmp_path: Path) -> None:
    messages = [
        {"role": "user", "content": "Examples."},
        {"role": "user", "content": "write a poem about tapirs"},
        {"role": "assistant", "content": "One."},
        {"role": "user", "content": "write a poem about tapirs"},
        {"role": "assistant", "content": "Two."},
        {"role": "user", "content": "Prepend x9 to the 2nd (1 indexed) poem about tapirs."},
    ]
    row = {"prompt": json.dumps(messages), "answer": "x9Two.", "random_string_to_prepend": "x9", "n_needles": 2}
    longer = row | {"prompt": json.dumps([{"role": "user", "content": "a" * 3000}])}
    folder = write(
        tmp_path, {"lengthgen_openai_mrcr_2": [row, longer, longer | {"prompt": "[]", "answer": "a" * 2**18}]}
    )
    prompts: list[str] = []

    def answer(prompt: str) -> str:
        prompts.append(prompt)
        return "x9Two."

    manager = task_manager(data_dir=folder, tokenizer="bytes")
    found = evaluate(Oracle(answer), manager, "lengthgen_openai_mrcr_2")["lengthgen_openai_mrcr_2"]
    assert (found["1024"], found["4096"], len(prompts)) == (1, 1, 2)
    assert prompts[0].startswith("User: Examples.\nUser: write a poem about tapirs\nAssistant: One.\nUser: write")
    assert prompts[0].endswith("User: Prepend x9 to the 2nd (1 indexed) poem about tapirs.\nAssistant:")


def counted(prompt: str) -> str:
    """The answer to a question about the lines of a prompt, worked out from its text."""
    lines = re.findall(r"^Date: (.+) \|\| User: (\d+) \|\| Instance: (.+)$", prompt, re.MULTILINE)
    subjects = {word: label for label, words in LABELS.items() for word in words}
    known = []
    for day, user, text in lines:
        [label] = {subjects[word] for word in re.findall(r"\w+", text) if word in subjects}
        known.append((datetime.strptime(day, "%b %d, %Y"), user, label))
    question = prompt.strip().splitlines()[-2]
    if found := re.search(r"lines of the users ([\d, ]+)\. Among", question):
        known = [line for line in known if line[1] in found[1].split(", ")]
    elif found := re.search(r"date in (\w+) of any year", question):
        known = [line for line in known if line[0].strftime("%B") == found[1]]
    elif found := re.search(r"with a date before (.+ \d{4})\. Among", question):
        known = [line for line in known if line[0] < datetime.strptime(found[1], "%b %d, %Y")]
    labels = Counter(label for _, _, label in known)
    if "the most common?" in question:
        return labels.most_common()[0][0]
    if "the least common?" in question:
        return labels.most_common()[-1][0]
    if found := re.search(r"how many lines have the label '(\w+)'", question):
        return str(labels[found[1]])
    if found := re.search(r"is the label '(\w+)' more common .* as the label '(\w+)'\?", question):
        one, other = (labels[name] for name in found.groups())
        relation = "same frequency as" if one == other else "more common than" if one > other else "less common than"
        return f"{found[1]} is {relation} {found[2]}"
    if "which user has the most lines" in question:
        return Counter(user for _, user, _ in known).most_common()[0][0]
    if "which date has the most lines" in question:
        return f"{Counter(day for day, _, _ in known).most_common()[0][0]:%b %d, %Y}"
    found = re.search(r"how many dates have exactly (\d) line", question)
    assert found is not None
    return str(sum(count == int(found[1]) for count in Counter(day for day, _, _ in known).values()))


def test_counting_answers_every_question(task_manager: Manager) -> None:
    metadata = {"tokenizer": "bytes", "max_seq_lengths": [4096, 16384], "contexts": 2}

    def scored(answer: Callable[[str], str]) -> dict[str, Any]:
        found = evaluate(Oracle(answer), task_manager(**metadata), "lengthgen_oolong")["lengthgen_oolong"]
        return {name: found[name] for name in ("4096", "16384", "counting", "user", "timeline")}

    right = scored(lambda prompt: f" {counted(prompt)}")
    assert right == {"4096": 1, "16384": 1, "counting": 1, "user": 1, "timeline": 1}
    assert right == scored(lambda prompt: f" I count.\n**{prompt.splitlines()[-1]} [{counted(prompt)}]**")
    wrong = scored(lambda prompt: " nothing")
    assert set(wrong.values()) == {0}


def test_questions_of_all_kinds_are_asked() -> None:
    rows = oolong.rows([16384], contexts=4, tokenizer=byte_tokenizer())["test"]
    assert set(rows["answer_type"]) == {"LABEL", "NUMERIC", "COMPARISON", "USER", "DATE"}
    assert Counter(rows["group"])["counting"] >= 25
    for start in range(0, 100, 25):  # the questions about the same lines share them
        prompts = rows["prompt"][start : start + 25]
        assert len(set(prompts)) == 25
        assert len({prompt.partition("Above are")[0] for prompt in prompts}) == 1
    assert (
        oolong.rows([4096], contexts=1, tokenizer=byte_tokenizer())["test"]["prompt"]
        == (oolong.rows([4096], contexts=1, tokenizer=byte_tokenizer())["test"]["prompt"])
    )


@pytest.mark.parametrize("length", [2048, 8192])
@pytest.mark.parametrize("kind", ["bytes", "words"])
def test_lines_fill_the_asked_length(length: int, kind: str) -> None:
    tokenizer = byte_tokenizer() if kind == "bytes" else bos_tokenizer()
    rows = oolong.rows([length], contexts=2, questions=5, tokenizer=tokenizer)["test"]
    sizes = [len(tokenizer.encode(prompt, add_special_tokens=False)) for prompt in rows["prompt"]]
    assert max(sizes) <= length - 32
    assert min(sizes) > length - 32 - 700


def test_few_users_write_most_lines() -> None:
    lines = items(2000, random.Random(0))
    counts = sorted(Counter(line.user for line in lines).values(), reverse=True)
    assert 0.75 < sum(counts[:40]) / 2000 < 0.85  # of 200 users


@pytest.mark.parametrize(
    ("answer", "answer_type", "response", "expected"),
    [
        ("['ham']", "LABEL", "Label: ham", 1),
        ("['ham']", "LABEL", "Label: spam", 0),
        ("['ham']", "LABEL", "ham", 1),
        ("['ham', 'spam']", "LABEL", "Label: spam", 0),  # the first counts
        ("['ham']", "LABEL", "The label that is most frequent is ham", 1),
        ("['ham']", "LABEL", "I think:\n**Label: [ham]**", 1),
        ("[7]", "NUMERIC", "Answer: 7", 1),
        ("[7]", "NUMERIC", "Answer: 9", 0.75**2),
        ("[7]", "NUMERIC", "Answer: 6", 0.75),
        ("[7]", "NUMERIC", "Answer: many", 0),
        ("[7]", "NUMERIC", "", 0),
        ("['more common than']", "COMPARISON", "Answer: ham is more common than spam", 1),
        ("['more common than']", "COMPARISON", "Answer: ham is less common than spam", 0),
        ("['same frequency as']", "COMPARISON", "Answer: same frequency as", 1),
        ("['same frequency as']", "COMPARISON", "Answer: ham has the same frequency as spam", 1),
        ("[81306]", "USER", "User: 81306", 1),
        ("[81306]", "USER", "User: 81307", 0),
        ("[datetime.date(2023, 5, 30)]", "DATE", "Date: May 30, 2023", 1),
        ("[datetime.date(2023, 5, 30)]", "DATE", "Date: 2023-05-30", 1),
        ("[datetime.date(2023, 5, 30)]", "DATE", "Date: May 31, 2023", 0),
        ("[datetime.date(2023, 5, 30)]", "DATE", "Date: never", 0),
    ],
)
def test_answers_get_the_published_points(answer: str, answer_type: str, response: str, expected: float) -> None:
    assert oolong.points(answer, answer_type, response) == expected


def test_published_lines_are_read(task_manager: Manager, tmp_path: Path) -> None:
    row = {
        "context_len": 1024,
        "context_window_text": "Date: May 30, 2023 || User: 81306 || Instance: See the sun\n\n",
        "question": "Which user is represented most often? Give your final answer in the form 'User: [X]', where ...",
        "answer": "[81306]",
        "answer_type": "ANSWER_TYPE.USER",
        "task_group": "user",
        "task": "TASK_TYPE.MOST_FREQ",
    }
    rows = [row, row | {"answer": "[5]"}, row | {"context_len": 4096}, row | {"context_len": 2**22}]
    folder = write(tmp_path, {"lengthgen_oolong_synth": rows})
    prompts: list[str] = []

    def answer(prompt: str) -> str:
        prompts.append(prompt)
        return " 81306"

    found = evaluate(Oracle(answer), task_manager(data_dir=folder), "lengthgen_oolong_synth")["lengthgen_oolong_synth"]
    assert (found["1024"], found["4096"], found["user"]) == (0.5, 1, pytest.approx(2 / 3))
    assert prompts[0] == f"{row['context_window_text'].rstrip()}\n\n{row['question']}\nUser:"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda folder: mrcr.rows(2), "filling conversations up to a number of tokens needs a tokenizer"),
        (lambda folder: mrcr.rows(2, [1000], tokenizer="bytes"), r"max_seq_lengths must be some of .* got \[1000\]"),
        (lambda folder: mrcr.rows(2, samples=0, tokenizer="bytes"), "samples must be at least 1, got 0"),
        (lambda folder: mrcr.rows(9, tokenizer="bytes"), "needles must be from 1 to 8, got 9"),
        (
            lambda folder: mrcr.rows(8, [1024], tokenizer="bytes"),
            "1024 tokens of this tokenizer do not hold 8 requests",
        ),
        (
            lambda folder: mrcr.published_rows(str(folder / "a.yaml"), 2, str(folder), tokenizer="bytes"),
            "has no t.jsonl",
        ),
        (
            lambda folder: mrcr.published_rows(str(folder / "b.yaml"), 2, str(folder), tokenizer="bytes"),
            "Row 0 is none",
        ),
        (lambda folder: oolong.rows(), "filling a context up to a number of tokens needs a tokenizer"),
        (lambda folder: oolong.rows(contexts=0, tokenizer="bytes"), "contexts must be at least 1, got 0"),
        (lambda folder: oolong.rows(questions=0, tokenizer="bytes"), "questions must be at least 1, got 0"),
        (
            lambda folder: oolong.published_rows(str(folder / "b.yaml"), str(folder)),
            "Row 0 is none.*lacks context_len",
        ),
        (
            lambda folder: oolong.published_rows(str(folder / "c.yaml"), str(folder), [2048]),
            "No row has one of .*2048",
        ),
    ],
)
def test_what_cannot_be_made_or_read_is_told(call: Callable[[Path], object], message: str, tmp_path: Path) -> None:
    for name, task in (("a", "t"), ("b", "broken"), ("c", "lines")):
        (tmp_path / f"{name}.yaml").write_text(f"task: {task}\n")
    write(tmp_path, {"broken": [{"a": 1}], "lines": [{name: 1024 for name in oolong.COLUMNS}]})
    with pytest.raises(ValueError, match=message):
        call(tmp_path)
