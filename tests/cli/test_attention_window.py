"""--attention-window of the commands that load models."""

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from hf_recurrent_lengthgen import load_model
from hf_recurrent_lengthgen.checkpoints.cards import build_card
from hf_recurrent_lengthgen.checkpoints.methods import ATTENTION_WINDOWS
from hf_recurrent_lengthgen.checkpoints.records import read_lineage
from hf_recurrent_lengthgen.cli.main import main
from hf_recurrent_lengthgen.cli.measuring import model_label
from hf_recurrent_lengthgen.data import byte_tokenizer
from hf_recurrent_lengthgen.evaluation.files import read_result
from hf_recurrent_lengthgen.hybrids import stateful
from hf_recurrent_lengthgen.metrics.context_harm.result import Comparison
from hf_recurrent_lengthgen.metrics.diagnosis.result import Diagnosis
from hf_recurrent_lengthgen.metrics.states import attention_windows
from hf_recurrent_lengthgen.metrics.states.result import StateDiagnosis
from tests.cli.conftest import Evaluate
from tests.cli.training import Train, trained_config
from tests.hybrids.tiny_models import tiny_composite, tiny_model


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hybrid") / "bamba"
    tiny_model("bamba", vocab_size=384, training_length=8).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_maps_show_no_weight_beyond_the_window(hybrid: Path, tmp_path: Path) -> None:
    reach = {}
    for window in ("3", "none"):
        output = tmp_path / window
        options = "--attention-window", window, "--text", "abcdefgh", "--output", str(output)
        assert main(["maps", str(hybrid), *options]) == 0
        average = torch.from_numpy(np.load(output / "maps.npz")["average"][1])  # of the layer with attention
        reach[window] = int((average[-1] > 0).sum())
    assert reach == {"3": 3, "none": 8}


@pytest.mark.parametrize("intervention", ["state_passing", "tbtt"])
def test_training_keeps_the_window_in_the_checkpoint(
    intervention: str, hybrid: Path, train: Train, tmp_path: Path
) -> None:
    assert train(model=hybrid, intervention=intervention, attention_window=3) == 0
    assert trained_config(tmp_path / "out")["attention_window"] == 3
    assert load_model(str(tmp_path / "out")).config.attention_window == 3


def test_a_resume_with_another_window_is_refused(
    hybrid: Path, train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    often = {"model": hybrid, "save_strategy": "steps", "save_steps": 1}
    assert train(**often, max_steps=1, attention_window=3) == 0
    for window in ("5", "none"):
        assert train("--resume", **often, attention_window=window) == 1
        assert "attention_window was 3 and is" in capsys.readouterr().err
    assert train("--resume", **often, attention_window=3) == 0


def test_a_window_for_each_step_is_recorded_and_a_resume_keeps_it(
    hybrid: Path, train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    often = {"model": hybrid, "save_strategy": "steps", "save_steps": 1}
    assert train("--attention-windows", "2", "5", **often, max_steps=1) == 0
    config = trained_config(tmp_path / "out")
    assert "attention_window" not in config
    assert config["interventions"] == ["state_passing with attention windows 2 5, 1 steps"]
    lineage: Any = read_lineage(tmp_path / "out")
    training: Any = lineage.steps[-1].training
    assert training.methods[1] == ATTENTION_WINDOWS
    assert training.settings[0].method["attention_windows"] == (2, 5)
    card = str(build_card(tmp_path / "out"))
    assert "whose size was drawn for each step ([Cabannes et al., 2025](https://arxiv.org/abs/2509.24552))" in card
    assert train("--attention-windows", "2", "6", "--resume", **often) == 1
    assert "attention_windows was [2, 5] and is [2, 6]" in capsys.readouterr().err
    assert train("--attention-windows", "2", "5", "--resume", **often) == 0


@pytest.mark.slow
def test_a_card_takes_results_with_its_window_and_says_it(hybrid: Path, evaluate: Evaluate, tmp_path: Path) -> None:
    windowed, results = tmp_path / "windowed", {}
    load_model(str(hybrid), attention_window=3).save_pretrained(windowed)
    for window in ("3", "none"):
        assert evaluate(hybrid, "--attention-window", window) == 0
        results[window] = (tmp_path / "out" / "result.json").rename(tmp_path / f"{window}.json")
    card = str(build_card(windowed, [results["3"]]))
    assert "Its attention is limited to a window of the last 3 tokens" in card
    assert "attention sees" not in str(build_card(hybrid, [results["none"]]))
    for folder, other, words in ((hybrid, "3", "all"), (windowed, "none", "the last 3")):
        with pytest.raises(ValueError, match=f"needs results with no forgetting, and attention to {words} tokens"):
            build_card(folder, [results[other]])


def test_what_would_lose_the_window_or_has_no_attention_is_refused(
    hybrid: Path, checkpoint: Path, train: Train, evaluate: Evaluate, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(model=hybrid, attention_window=3, lora_r=2) == 1
    assert "does not store attention_window: put it into a checkpoint first" in capsys.readouterr().err
    assert evaluate(checkpoint, "--attention-window", "3") == 1
    assert "StatefulMamba2ForCausalLM does not take attention_window" in capsys.readouterr().err
    assert evaluate(hybrid, "--attention-window", "k") == 1
    assert "attention_window must be a number of tokens of at least 1" in capsys.readouterr().err


@pytest.mark.slow
def test_several_windows_are_compared(hybrid: Path, evaluate: Evaluate, tmp_path: Path) -> None:
    def measured(*options: str) -> dict[str, float]:
        assert evaluate(hybrid, *options) == 0
        models = read_result(tmp_path / "out" / "result.json", Comparison).models
        return {model.evaluation.model: model.evaluation.position_wise.coarse.mean[-1] for model in models}

    alone: dict[str, float] = {}
    for window in ("2", "none"):
        alone |= measured("--attention-window", window)
    assert measured("--attention-window", "2, none") == alone
    assert list(alone) == ["bamba (window of 2)", "bamba (full attention)"]
    assert len({*alone.values()}) == 2


@pytest.mark.slow
def test_a_diagnosis_of_several_windows_reads_the_texts_once_for_each(
    hybrid: Path, diagnose: Evaluate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = Mock(side_effect=attention_windows.stream_nll)
    monkeypatch.setattr(attention_windows, "stream_nll", reads)
    options = "--attention-window", "3,none", "--parts", "states", "--cache", tmp_path / "cache", "--patched-heads", 0
    assert diagnose(hybrid, *options) == 0
    states: Any = [m.part(StateDiagnosis) for m in read_result(tmp_path / "out" / "result.json", Diagnosis).models]
    one, other = (each.attention for each in states)
    assert one.windows.windows == (2, 3, 4, 8, 16, 32, None)
    assert reads.call_count == 7
    assert one.windows == other.windows
    assert one.both != other.both  # what else is measured has the window of the model


def test_the_window_of_a_model_of_images_and_text_is_in_its_name() -> None:
    model = stateful(tiny_composite("qwen3_5"), attention_window=3)
    assert model_label("m", model) == "m (window of 3)"
    assert model_label("m", stateful(model, attention_window="none"), "none") == "m (full attention)"
