"""The passkey study runs in miniature; its tokenizer has all words."""

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from hf_recurrent_lengthgen.checkpoints.cards.card import own_words
from hf_recurrent_lengthgen.checkpoints.records import read_lineage
from hf_recurrent_lengthgen.data.tasks import PASSKEY_STYLES, passkey_prompt

RUN = Path(__file__).parents[1] / "examples/passkey/run.py"
ARMS = ("base", "fitted_noise")


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr(sys, "path", [*sys.path])
    return runpy.run_path(str(RUN))


@pytest.mark.slow
def test_arms_are_studied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    output, results = tmp_path / "out", tmp_path / "results"
    arguments = ["--tiny", "--seeds", "3", "--arms", *ARMS, "--output", output, "--results", results]
    monkeypatch.setattr(sys, "argv", ["run.py", *map(str, arguments)])
    monkeypatch.setattr(sys, "path", [*sys.path])
    runpy.run_path(str(RUN), run_name="__main__")
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
def test_the_pair_is_shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cards = tmp_path / "cards"
    arguments = ["--tiny", "--output", tmp_path / "out", "--ship", cards]
    monkeypatch.setattr(sys, "argv", ["run.py", *map(str, arguments)])
    monkeypatch.setattr(sys, "path", [*sys.path])
    runpy.run_path(str(RUN), run_name="__main__")
    assert {path.name for path in cards.iterdir()} == {"passkey-base", "passkey-far"}
    for folder in cards.iterdir():
        assert AutoTokenizer.from_pretrained(folder).tokenize("pass key 123") == ["pass", "key", "12", "3"]
    assert "answer = model.generate(**words" in own_words((cards / "passkey-far/README.md").read_text())
    lineage = read_lineage(cards / "passkey-far")
    assert lineage is not None
    assert [step.training.methods[0].name for step in lineage.steps if step.training] == ["none", "tbtt"]


def test_every_word_of_the_prompts_is_a_token_and_a_key_is_three(module: dict[str, Any]) -> None:
    tokenizer = module["word_tokenizer"]()
    for style in PASSKEY_STYLES:
        task = passkey_prompt(tokenizer, 100, 0.5, "12045", style)
        assert len(task.prompt) + len(task.answer) == 100
        assert 0 not in task.prompt
        assert tokenizer.convert_ids_to_tokens(task.answer.tolist()) == ["12", "04", "5", "."]
        assert task.scored == 3
    assert tokenizer("x").input_ids == [0]


@pytest.mark.slow
@pytest.mark.usefixtures("small_corpus")
def test_keys_in_text_are_studied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    places = ["--output", tmp_path / "out", "--results", tmp_path / "results"]
    arguments = ["--tiny", "--seeds", "3", "--kinds", "last", *places]
    monkeypatch.setattr(sys, "argv", ["keys.py", *map(str, arguments)])
    monkeypatch.setattr(sys, "path", [*sys.path])
    runpy.run_path(str(RUN.with_name("keys.py")), run_name="__main__")
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| one name with two codes")]
    assert [row.split(" | ")[1:3] for row in rows] == [
        ["base, not fine-tuned", "3"],
        ["plain fine-tuning", "3"],
        ["TBTT, prompts of 1 to 16 pieces", "3"],
    ]


def test_the_page_holds_the_keys_found_in_text() -> None:
    page = RUN.with_name("README.md").read_text().partition("<!-- keys -->")[2].partition("<!-- end -->")[0]
    results = [
        json.loads(line) for line in RUN.with_name("results").joinpath("keys/arms.jsonl").read_text().splitlines()
    ]
    assert page.count("| one name ") == len({result["arm"] for result in results})
    for result in results:
        shares = " | ".join(f"{100 * share:.0f}" for share in result["measured"]["accuracy"].values())
        assert f"| {result['seed']} | {shares} |" in page
