"""bAbI files, and their facts hidden in other text."""

from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from hf_recurrent_lengthgen.data import byte_tokenizer
from hf_recurrent_lengthgen.data.tasks import BabilongPrompts, BabiQuestion, babi_files, read_babi
from hf_recurrent_lengthgen.data.tasks.babilong import sentences
from tests.data.tasks.conftest import text_of

QA1 = """\
1 Mary moved to the bathroom.
2 John went to the hallway.
3 Where is Mary? \tbathroom\t1
4 Mary got the milk there.
5 What is Mary carrying? \tmilk,football\t4 1
1 Sandra went to the office.
2 Is Sandra in the office? \tyes\t1
"""
BACKGROUND = ["It was a dark night. The rain fell in  torrents!\nNobody came? ", "A dog barked. The end."]
STORY = ("Mary moved to the bathroom.", "John went to the hallway.")


@pytest.fixture
def questions(tmp_path: Path) -> list[BabiQuestion]:
    (tmp_path / "qa.txt").write_text(QA1)
    return read_babi(tmp_path / "qa.txt")


def test_questions_have_the_facts_before_them(questions: list[BabiQuestion]) -> None:
    assert questions == [
        BabiQuestion(STORY, "Where is Mary?", "bathroom", (0,)),
        BabiQuestion((*STORY, "Mary got the milk there."), "What is Mary carrying?", "milk,football", (2, 0)),
        BabiQuestion(("Sandra went to the office.",), "Is Sandra in the office?", "yes", (0,)),
    ]


@pytest.mark.parametrize(
    "line", ["Mary moved.", "", "3 Where is Mary? \tbathroom", "3 Where is Mary? \tbathroom\t3", "3 Where? \ta\tone"]
)
def test_a_wrong_line_is_named(line: str, tmp_path: Path) -> None:
    path = tmp_path / "qa.txt"
    path.write_text("1 Mary moved to the bathroom.\n2 John went to the hallway.\n" + line + "\n3 Mary slept.\n")
    with pytest.raises(ValueError, match=r"qa\.txt, line 3: expected a fact"):
        read_babi(path)


def test_a_file_must_ask_something(tmp_path: Path) -> None:
    (tmp_path / "qa.txt").write_text("1 Mary slept.\n")
    with pytest.raises(ValueError, match="has no question"):
        read_babi(tmp_path / "qa.txt")


def test_files_of_the_archive_by_task(tmp_path: Path) -> None:
    for name in ("qa1_single-supporting-fact", "qa10_indefinite-knowledge", "qa2_two-supporting-facts"):
        for split in ("train", "test"):
            (tmp_path / f"{name}_{split}.txt").write_text(QA1)
    names = [path.name for path in babi_files(tmp_path, tasks=(1, 2, 10))]
    assert names == [
        "qa1_single-supporting-fact_train.txt",
        "qa2_two-supporting-facts_train.txt",
        "qa10_indefinite-knowledge_train.txt",
    ]
    with pytest.raises(ValueError, match=r"has 0 files qa3_\*_test.txt"):
        babi_files(tmp_path, "test", tasks=(1, 3))


def test_sentences() -> None:
    assert sentences(BACKGROUND) == [
        "It was a dark night.",
        "The rain fell in torrents!",
        "Nobody came?",
        "A dog barked.",
        "The end.",
    ]
    assert sentences(["w " * 90]) == [" ".join(["w"] * 40)] * 2 + [" ".join(["w"] * 10)]
    assert sentences([" \n "]) == []


def test_facts_stand_in_order_between_consecutive_sentences(questions: list[BabiQuestion]) -> None:
    prompts = BabilongPrompts(byte_tokenizer(), questions, BACKGROUND, 300, seed=1)
    firsts = set()
    for index in range(3):
        item = prompts[index]
        assert item["input_ids"].shape == item["labels"].shape == (300,)
        text = text_of(item["input_ids"])
        question = questions[index]
        ending = f"\nQuestion: {question.question}\nAnswer: {question.answer}."
        assert text.startswith("Text: ")
        assert text.endswith(ending)
        body = text.removeprefix("Text:").removesuffix(ending)
        for fact in question.facts:
            before, _, after = body.partition(f" {fact}")
            assert body == f"{before} {fact}{after}"
            body = before + after
        circle = " " + " ".join(sentences(BACKGROUND))
        assert (circle * 8).find(body) >= 0  # consecutive, the first text after the last, cut at the end
        firsts.add(text[:30])
        scored = item["labels"] != -100
        answer = f" {question.answer}."
        assert int(scored.sum()) == len(answer)
        assert text_of(item["labels"][scored]) == answer
    assert len(firsts) > 1


def test_facts_go_everywhere() -> None:
    question = BabiQuestion(("F1.", "F2."), "Q?", "a", (0,))
    prompts = BabilongPrompts(byte_tokenizer(), [question] * 400, ["B."], 60)
    # 60 - 5 - 2 * 4 - 21 - 3 = 23 bytes of background are 8 sentences, the last without period: 9 places
    counts = torch.zeros(9, 9)
    for index in range(400):
        text = text_of(prompts.task(index).prompt)
        first, second = text.index("F1."), text.index("F2.")
        assert first < second
        counts[text[:first].count("B"), text[:second].count("B")] += 1
    assert bool((counts.triu() == counts).all())
    # two independent uniform places, sorted: 1/81 on the diagonal and 2/81 above it
    expected = (torch.ones(9, 9).triu() + torch.ones(9, 9).triu(1)) * 400 / 81
    chi_squared = ((counts - expected) ** 2 / expected)[expected > 0].sum()
    assert chi_squared < 78.7  # 44 degrees of freedom, p = 0.001


def test_solved_examples_stand_first(questions: list[BabiQuestion]) -> None:
    prompts = BabilongPrompts(byte_tokenizer(), questions[2:], BACKGROUND, 300, shots=questions[:1])
    task = prompts.task(0)
    assert len(task.prompt) + len(task.answer) == 300
    expected = f"Text: {STORY[0]} {STORY[1]}\nQuestion: Where is Mary?\nAnswer: bathroom.\n\nText: "
    assert text_of(task.prompt).startswith(expected)
    assert task.scored == len(" yes")


def test_questions_that_do_not_fit_are_counted(questions: list[BabiQuestion]) -> None:
    shortest = len("Text: Sandra went to the office.\nQuestion: Is Sandra in the office?\nAnswer: yes.")
    prompts = BabilongPrompts(byte_tokenizer(), questions, BACKGROUND, shortest)
    assert (len(prompts), prompts.left_out) == (1, 2)
    assert len(prompts[0]["input_ids"]) == shortest
    with pytest.raises(ValueError, match=f"none of 3 questions fits into {shortest - 1} tokens, .* needs {shortest}"):
        BabilongPrompts(byte_tokenizer(), questions, BACKGROUND, shortest - 1)
    with pytest.raises(ValueError, match="none of 0 questions"):
        BabilongPrompts(byte_tokenizer(), [], BACKGROUND, 300)


def test_lengths_are_drawn_from_what_the_facts_need(questions: list[BabiQuestion]) -> None:
    long = BabiQuestion(("A long fact. " * 30,), "Q?", "yes", (0,))
    needed = len("Text: Question: Q?\nAnswer: yes.") + len(long.facts[0]) + 1
    prompts = BabilongPrompts(byte_tokenizer(), [*questions[2:], long] * 300, BACKGROUND, (120, 500))
    short, rest = ([len(prompts[index]["input_ids"]) for index in range(start, 600, 2)] for start in (0, 1))
    for sizes, least in ((short, 120), (rest, needed)):
        assert least <= min(sizes) <= max(sizes) <= prompts.longest == 500
        assert chisquare(np.histogram(sizes, 4, (least, 501))[0]).pvalue > 0.001
    assert prompts.item_lengths[::2] == short
    assert prompts.item_lengths[1::2] == rest
    few = BabilongPrompts(byte_tokenizer(), [*questions[2:], long], BACKGROUND, (120, 500))
    assert torch.equal(few[1]["input_ids"], prompts[1]["input_ids"])
    assert BabilongPrompts(byte_tokenizer(), [*questions[2:], long], BACKGROUND, (120, needed - 1)).left_out == 1
