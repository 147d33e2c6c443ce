"""The passkey study runs in miniature; its tokenizer has all words."""

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from hf_recurrent_lengthgen.checkpoints.cards.card import own_words
from hf_recurrent_lengthgen.checkpoints.records import read_lineage
from hf_recurrent_lengthgen.data.tasks import PASSKEY_STYLES, passkey_prompt

FOLDER = Path(__file__).parents[1] / "examples/passkey"
ARMS = ("base", "fitted_noise")


@pytest.mark.slow
def test_arms_are_studied(example: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output, results = tmp_path / "out", tmp_path / "results"
    example("passkey/run.py", "--tiny", "--seeds", 3, "--arms", *ARMS, "--output", output, "--results", results)
    printed = capsys.readouterr().out
    assert [line.partition(":")[0] for line in printed.splitlines() if line.startswith("seed")] == [
        f"seed 3 {name}" for name in ARMS
    ]
    base = json.loads((results / "running/base/seed3.json").read_text())
    assert [name for name in base if name.startswith("after")] == ["after 1 steps", "after 2 steps"]
    assert list(base["measured"]["accuracy"]) == ["64", "128", "256"]
    tables = printed[printed.index("| fine-tuned") :]
    words = [line.split(" | ")[0] for line in tables.partition("| words read")[2].splitlines()[2:] if line]
    assert words == ["| 512", "| 1,024", "| 2,048"]  # 4 rows of 128 words a step
    assert (results / "passkey.png").read_bytes().startswith(b"\x89PNG")


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
        task = passkey_prompt(tokenizer, 100, 0.5, "12045", style)
        assert len(task.prompt) + len(task.answer) == 100
        assert 0 not in task.prompt
        assert tokenizer.convert_ids_to_tokens(task.answer.tolist()) == ["12", "04", "5", "."]
        assert task.scored == 3
    assert tokenizer("x").input_ids == [0]


@pytest.mark.slow
def test_families_are_studied(example: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    places = ["--output", tmp_path / "out", "--results", tmp_path / "results"]
    chosen = ["--families", "gla", "bamba", "--arms", "base", "tbtt_16"]
    example("passkey/other_families.py", "--tiny", "--seeds", 3, *chosen, *places)
    table = capsys.readouterr().out.partition("| family | ")[2].splitlines()[2:]
    assert [row.split(" | ")[:3] for row in table if row] == [
        row
        for label in ("GLA", "Bamba, window of 4")
        for row in ([f"| {label}", "base, not fine-tuned", "3"], ["| ", "TBTT, prompts of 1 to 16 pieces", "3"])
    ]
    assert (tmp_path / "results/families.png").read_bytes().startswith(b"\x89PNG")


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


@pytest.mark.slow
def test_windows_are_studied(example: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    places = ["--output", tmp_path / "out", "--results", tmp_path / "results"]
    example("passkey/windows.py", "--tiny", "--seeds", 3, "--arms", "base", "tbtt_16_drawn", *places)
    table = capsys.readouterr().out.partition("| model | ")[2].splitlines()
    assert table[0] == "read with | 10 of 128 | 79 of 128 |"
    assert [row.split(" | ")[:2] for row in table[2:] if row] == [
        [f"| {model}" if window == "all keys" else "| ", window]
        for model in ("base (seeds 3)", "TBTT, drawn windows (seeds 3)")
        for window in ("all keys", *(f"window of {words}" for words in (128, 64, 32, 4)))
    ]
    assert (tmp_path / "results/windows.png").read_bytes().startswith(b"\x89PNG")


def test_keys_stand_where_the_study_of_windows_says(example: Any) -> None:
    names = example("passkey/windows.py")
    study = names["WindowsStudy"](Namespace(tiny=False, output="o", results="r", report=False))
    for length, given in names["BETWEEN"].items():
        grid = study.grid([1 - between / (length - names["SHORTEST"]) for between in given], 1)
        for row, between in enumerate(given):
            (task,) = grid.tasks(row, length)
            assert task.distance == between + names["QUESTION"]
            assert len(task.prompt) + len(task.answer) == length


@pytest.mark.slow
@pytest.mark.usefixtures("small_corpus")
def test_keys_in_text_are_studied(example: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    places = ["--output", tmp_path / "out", "--results", tmp_path / "results"]
    example("passkey/keys.py", "--tiny", "--seeds", 3, "--kinds", "last", *places)
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| last of two codes")]
    assert [row.split(" | ")[1:3] for row in rows] == [
        ["base, not fine-tuned", "3"],
        ["plain fine-tuning", "3"],
        ["fitted noise", "3"],
        ["state passing", "3"],
        ["TBTT, prompts of 1 to 16 pieces", "3"],
    ]


@pytest.mark.slow
@pytest.mark.usefixtures("small_corpus")
def test_a_task_that_is_new_is_studied(example: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    places = ["--output", tmp_path / "out", "--results", tmp_path / "results"]
    example("passkey/new_task.py", "--tiny", "--seeds", 3, *places)
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| 3 | ")]
    assert [row.split(" | ")[1] for row in rows] == ["base, not fine-tuned", "plain fine-tuning", "fitted noise"]


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


@pytest.mark.parametrize(
    ("page", "part", "results"), [("README.md", "keys", "keys"), ("FAMILIES.md", "families", "families")]
)
def test_the_page_holds_the_keys_found(page: str, part: str, results: str) -> None:
    table = (FOLDER / page).read_text().partition(f"<!-- {part} -->")[2].partition("<!-- end -->")[0]
    found: dict[str, list[Any]] = {}
    for result in map(json.loads, (FOLDER / "results" / results / "arms.jsonl").read_text().splitlines()):
        found.setdefault(result["arm"], []).append(result["measured"]["accuracy"])
    rows = [[cell.split(" (")[0] for cell in row.strip(" |").split(" | ")[-8:]] for row in table.splitlines()[3:]]
    means = [
        [f"{sum(100 * share[length] for share in arm) / len(arm):.0f}" for length in arm[0]] for arm in found.values()
    ]
    assert sorted(means) == sorted(rows)


def test_the_page_holds_the_keys_found_of_a_task_that_is_new() -> None:
    page = (FOLDER / "README.md").read_text().partition("<!-- new task -->")[2].partition("<!-- end -->")[0]
    results = [json.loads(line) for line in (FOLDER / "results/new_task/arms.jsonl").read_text().splitlines()]
    assert page.count(" |\n") == 2 + len(results)
    for result in results:
        assert f"| {100 * result['measured']['recalled']:.0f} | {shares_of(result)} |" in page


def test_the_page_holds_the_keys_found_by_window() -> None:
    page = (FOLDER / "WINDOWS.md").read_text().partition("<!-- windows -->")[2].partition("<!-- end -->")[0]
    results: dict[str, list[Any]] = {}
    for result in map(json.loads, (FOLDER / "results/windows/arms.jsonl").read_text().splitlines()):
        results.setdefault(result["arm"], []).append(result["measured"]["found"])
    rows = [row.strip(" |").split(" | ")[-11:] for row in page.splitlines()[3:]]
    shares = [
        [[f"{100 * seed[window][n][words]:.0f}" for seed in arm] for n, at in of.items() for words in at]
        for arm in results.values()
        for window, of in arm[0].items()
    ]
    expected = [["/".join(at if len(set(at)) > 1 else at[:1]) for at in row] for row in shares]
    assert sorted(rows) == sorted(expected)


def shares_of(result: Any) -> str:
    return " | ".join(f"{100 * share:.0f}" for share in result["measured"]["accuracy"].values())
