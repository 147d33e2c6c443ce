"""The passkey study runs in miniature; its tokenizer has all words."""

import re
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from hf_recurrent_lengthgen.checkpoints.cards.card import own_words
from hf_recurrent_lengthgen.checkpoints.records import read_lineage
from hf_recurrent_lengthgen.data.tasks import PASSKEY_STYLES, PasskeyTemplate


@pytest.mark.slow
def test_the_pair_is_shipped(example: Any, tmp_path: Path) -> None:
    cards = tmp_path / "cards"
    example("passkey/run.py", "--tiny", "--output", tmp_path / "out", "--ship", cards)
    assert {path.name for path in cards.iterdir()} == {"passkey-base", "passkey-far"}
    for folder in cards.iterdir():
        assert AutoTokenizer.from_pretrained(folder).tokenize("pass key 123") == ["pass", "key", "12", "3"]
    assert "answer = model.generate(**words" in own_words((cards / "passkey-far/README.md").read_text())
    lineage = read_lineage(cards / "passkey-far")
    assert lineage is not None
    assert [step.training.methods[0].name for step in lineage.steps if step.training] == ["none", "tbtt"]


def test_every_word_of_the_prompts_is_a_token_and_a_key_is_three(example: Any) -> None:
    tokenizer = example("passkey/run.py")["word_tokenizer"]()
    for style in PASSKEY_STYLES:
        task = PasskeyTemplate(tokenizer, 100, style).fill(0.5, "12045")
        assert len(task.prompt) + len(task.answer) == 100
        assert 0 not in task.prompt
        assert tokenizer.convert_ids_to_tokens(task.answer.tolist()) == ["12", "04", "5", "."]
        assert task.scored == 3
    assert tokenizer("x").input_ids == [0]


def test_the_second_mention_of_a_key_has_labels_too(example: Any) -> None:
    names = example("passkey/other_families.py")
    study = names["FamiliesStudy"](Namespace(tiny=True, output="o", results="r", report=False))
    study.base = True
    for place in range(5):
        row = study.prompts(128, 5, 0)[place]
        plain = names["PasskeyStudy"].prompts(study, 128, 5, 0)[place]
        assert (row["input_ids"] == plain["input_ids"]).all()
        words = study.tokenizer.convert_ids_to_tokens(row["input_ids"].tolist())
        scored = [spot for spot, label in enumerate(row["labels"].tolist()) if label >= 0]
        assert [words[spot] for spot in scored] == [words[spot] for spot in scored[-4:-1]] + words[-4:]
        assert words[scored[0] - 3 : scored[0]] == ["Remember", "it", "."]
        assert (row["labels"][scored] == row["input_ids"][scored]).all()


def test_keys_stand_where_the_study_of_windows_says(example: Any) -> None:
    names = example("passkey/windows.py")
    study = names["WindowsStudy"](Namespace(tiny=False, output="o", results="r", report=False))
    for length, distances in names["BETWEEN"].items():
        grid = study.grid([1 - between / (length - names["SHORTEST"]) for between in distances], 1)
        for row, between in enumerate(distances):
            (task,) = grid.tasks(row, length)
            assert task.distance == between + names["QUESTION"]
            assert len(task.prompt) + len(task.answer) == length


def test_chunks_of_the_study_are_prompts_of_the_training_length(example: Any) -> None:
    names = example("passkey/chunks.py")
    study = names["ChunksStudy"](Namespace(tiny=True, output="o", results="r", report=False))
    (task,) = study.grid([0.5], 1).tasks(0, 400)
    whole = task.prompt.tolist()
    prompts = names["chunk_prompts"](whole, study.chunk, study.after, study.before)
    words = [study.tokenizer.convert_ids_to_tokens(prompt) for prompt in prompts]
    assert {len(prompt) + len(task.answer) for prompt in prompts} == {128}
    assert {(" ".join(of_one[:4]), " ".join(of_one[-5:])) for of_one in words} == {
        ("There is an important", "? The pass key is")
    }
    with_key = [names["holds"](prompt, task) for prompt in prompts]
    assert names["holds"](whole, task)
    assert 1 <= sum(with_key) <= 2 < len(prompts)


@pytest.mark.slow
def test_the_base_of_a_new_task_reads_text_and_codes_and_no_passkey(example: Any, tmp_path: Path) -> None:
    names = example("passkey/new_task.py")
    options = Namespace(tiny=True, output=tmp_path, results=tmp_path, report=False)
    study = names["NewTaskStudy"](options)
    study.kind = "base"
    rows = study.prompts(128, 1, 0)
    of_text, of_codes = rows.datasets
    assert len(of_codes) == 7 * len(of_text)
    assert {len(rows[place]["input_ids"]) for place in (0, len(rows) - 1)} == {128}
    assert (rows[0]["labels"] == rows[0]["input_ids"]).all()
    question = study.tokenizer.decode(rows[len(rows) - 1]["input_ids"])
    assert "What is the code of" in question
    assert "pass key" not in question
    study.kind = "plain"
    passkeys = study.prompts(128, 1, 0)[0]["input_ids"]
    assert "What is the pass key" in study.tokenizer.decode(passkeys)
    assert 0 not in passkeys  # each of its words has a token


@pytest.mark.parametrize("task", ["qa1", "qa2"])
def test_stories_determine_where_people_and_things_are(task: str, example: Any) -> None:
    names = example("passkey/questions.py")
    answers = []
    for number, drawn in enumerate(names["drawn_questions"](task, 300, seed=3)):
        at: dict[str, str] = {}
        lines: dict[str, int] = {}
        held_by: dict[str, str] = {}
        for line, fact in enumerate(drawn.facts):
            person, *_, last = words = fact.removesuffix(".").split()
            if last == "there":
                thing = words[-2]
                if words[-4] in ("dropped", "left", "discarded", "down") or words[1] == "put":
                    assert held_by.pop(thing) == person
                else:
                    assert thing not in held_by
                    assert at.get(thing, at[person]) == at[person]
                    held_by[thing], at[thing], lines[thing] = person, at[person], line
            else:
                assert at.get(person) != last
                for name in (person, *(thing for thing, by in held_by.items() if by == person)):
                    at[name], lines[name] = last, line
        queried = drawn.question.removesuffix("?").split()[-1]
        assert (drawn.answer, drawn.supporting) == (at[queried], (lines[queried],)), number
        assert len(drawn.facts) >= 4
        answers.append(drawn.answer)
    assert {answers.count(place) > 25 for place in set(answers)} == {True}
    assert len(set(answers)) == 6


def test_rows_of_questions_have_tokens_for_all_their_words(example: Any, tmp_path: Path) -> None:
    names = example("passkey/questions.py")
    study = names["QuestionsStudy"](Namespace(tiny=True, output=tmp_path, results=tmp_path, report=False))
    row = study.questions(2, seed=0)[0]
    (facts,) = (question.facts for question in study.questions(2, seed=0).questions[:1])
    ids = row["input_ids"].tolist()
    for sentence in (*facts, "Question: Where is Answer:"):
        assert 0 not in study.tokenizer(sentence).input_ids
    assert len(ids) == 128
    assert study.tokenizer.decode(row["labels"][row["labels"] >= 0]).split()[0] in names["PLACES"]
    both = study.text_and_questions(5, seed=0)
    assert {len(both[index]["input_ids"]) for index in range(len(both))} == {128}


def test_answers_within_a_story_are_the_places_of_the_last_facts(example: Any, tmp_path: Path) -> None:
    names = example("passkey/questions.py")
    study = names["QuestionsStudy"](Namespace(tiny=True, output=tmp_path, results=tmp_path, report=False))
    place, person = "|".join(names["PLACES"]), "|".join(names["PEOPLE"])
    moved = "|".join(f"{act} the" for act in names["MOVES"])
    fact, question = rf"({person}) (?:{moved}) ({place})", rf"Where is ({person}) \? \s*Answer: ({place})"
    checked = 0
    for row in (study.many_questions(60, seed=0)[index] for index in range(0, 60, 2)):  # qa1
        text = study.tokenizer.decode(row["input_ids"])
        assert len(row["input_ids"]) == 128
        at: dict[str, str] = {}
        answers = []
        for match in re.finditer(rf"{fact}|{question}", text):
            who, where, queried, answer = match.groups()
            at |= {who: where} if who else {}
            if queried:
                assert answer == at[queried]
                answers.append(answer)
        words = study.tokenizer.decode(row["labels"][row["labels"] >= 0]).split()
        labelled = [word for word in words if word in names["PLACES"]]
        assert labelled[: len(answers)] == answers
        checked += len(answers)
    assert checked > 60
