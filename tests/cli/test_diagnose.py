"""Diagnosis of checkpoints by the command, also of models that have no states."""

import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from hf_recurrent_lengthgen.checkpoints.loading import load_language_model
from hf_recurrent_lengthgen.cli import diagnose as command
from hf_recurrent_lengthgen.evaluation.files import read_result
from hf_recurrent_lengthgen.evaluation.provenance import weights_digest
from hf_recurrent_lengthgen.metrics.diagnosis.page import diagnosis_page
from hf_recurrent_lengthgen.metrics.diagnosis.result import DiagnosedModel, Diagnosis
from hf_recurrent_lengthgen.metrics.remembrance.measure import Remembrance
from hf_recurrent_lengthgen.metrics.repeated_token import ConstantPrompt
from hf_recurrent_lengthgen.metrics.states.result import StateDiagnosis
from tests.cli.training import train_briefly
from tests.llamas import tiny_llama

Diagnose = Callable[..., int]


def states_of(model: DiagnosedModel) -> StateDiagnosis | None:
    return model.part(StateDiagnosis)


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    tiny_llama().save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


@pytest.mark.slow
def test_a_diagnosis_of_all_parts(
    diagnose: Diagnose, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert diagnose(checkpoint, "--roles", "base", "--remembrance-distances", "jensen_shannon, cosine") == 0
    found = read_result(tmp_path / "out" / "result.json", Diagnosis)
    [model] = found.models
    assert model.role == "base"
    assert model.evaluation.weights == weights_digest(load_language_model(str(checkpoint)))
    states, remembrance, prompt = (model.part(kind) for kind in (StateDiagnosis, Remembrance, ConstantPrompt))
    assert isinstance(states, StateDiagnosis)
    assert len(states.ranking) == len(states.ranks) == 2 * 2
    assert isinstance(remembrance, Remembrance)
    assert (remembrance.length, list(remembrance.others)) == (32, ["jensen_shannon", "cosine"])
    assert isinstance(prompt, ConstantPrompt)
    assert prompt.token == 13  # ByT5's bytes begin at 3
    shown = capsys.readouterr().out
    assert f"Diagnosing {checkpoint.name} on 3 sequences of 64 bytes" in shown
    share = "Share of the excess loss from heads that drift"
    names = "Heads that drift", "Effective rank", share, "Effective Remembrance", "Misalignment", "Constant prompt"
    assert re.search(rf"model +{' +'.join(names)}\n", shown)
    rank = r"\d\S*, at the end \d\S*, of \d+"
    numbers = rf"{rank} +no excess loss shown +0\.\d+ \(.+\) +\d+\.\d+ \(.+\) nats +(passes|fails at)"
    assert re.search(rf"{checkpoint.name} +unknown from 3 sequences +{numbers}", shown)
    assert f"Report: {tmp_path / 'out' / 'index.html'}" in shown
    files = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"index.html", "result.json", "context_harm.png", "context_harm.svg", "state_rank.png"} <= files
    page = (tmp_path / "out" / "index.html").read_text(encoding="utf-8")
    assert "Change of the prediction (Jensen-Shannon)" in page
    assert "the cosine similarity of the probabilities is taken from 1" in page
    HTMLParser().feed(page)


@pytest.mark.slow
def test_another_token_can_be_repeated(
    diagnose: Diagnose,
    checkpoint: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prompt = ("--parts", "constant prompt", "--repeated-text")
    monkeypatch.setattr("hf_recurrent_lengthgen.metrics.diagnosis.page.diagnosis_figures", None)  # drawn once, below
    assert diagnose(checkpoint, *prompt, ",") == 0
    found: Any = read_result(tmp_path / "out" / "result.json", Diagnosis).models[0].part(ConstantPrompt)
    assert found.token == ord(",") + 3
    assert found.states is not None
    assert (tmp_path / "out" / "constant_prompt_mean.png").is_file()
    monkeypatch.undo()
    page = diagnosis_page(read_result(tmp_path / "out" / "result.json", Diagnosis))
    assert (tmp_path / "out" / "index.html").read_text(encoding="utf-8") == page
    assert diagnose(checkpoint, *prompt, "ab") != 0
    message = "must be one token of the tokenizer, got 'ab', which it reads as 2 tokens"
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_models_of_all_kinds_side_by_side(
    diagnose: Diagnose,
    checkpoint: Path,
    stock_checkpoint: Path,
    llama: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    few = ("--tokenizer", "bytes", "--patched-heads", 0, "--parts", "states,misalignment")
    assert diagnose(checkpoint, stock_checkpoint, llama, *few) == 0
    found = read_result(tmp_path / "out" / "result.json", Diagnosis)
    assert ["states" in model.parts for model in found.models] == [True, True, False]
    assert all(states is None or states.patching is None for states in map(states_of, found.models))
    reason = found.models[2].refused["states"]
    assert "LlamaForCausalLM does not carry a recurrent state by value" in reason
    assert f"{llama.parent.name}/{llama.name}, states: {reason}" in capsys.readouterr().out
    assert "LlamaForCausalLM does not carry a recurrent state" in (tmp_path / "out" / "index.html").read_text(
        encoding="utf-8"
    )


def test_of_a_learned_state_alone_the_base_is_trained_next(checkpoint: Path, tmp_path: Path, text_file: Path) -> None:
    alone, beside = tmp_path / "alone", tmp_path / "beside"
    learned = ("--intervention", "learned")
    assert train_briefly(checkpoint, alone, text_file, *learned) == 0
    assert train_briefly(checkpoint, beside, text_file, *learned, "--train-model", "--lora-r", 2) == 0
    recipes = [command._recipe(str(folder), "") for folder in (alone, beside)]
    assert [recipe and recipe.base for recipe in recipes] == [str(checkpoint), None]


def test_an_interrupt_says_how_to_go_on(
    diagnose: Diagnose,
    checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def interrupt(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr("hf_recurrent_lengthgen.metrics.remembrance.summary.effective_remembrance", interrupt)
    assert diagnose(checkpoint, "--cache", tmp_path / "kept") == 130
    assert "the same command continues" in capsys.readouterr().err
    assert list((tmp_path / "kept").glob("*.json"))  # the states and the evaluation
