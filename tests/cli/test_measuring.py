"""Any causal language model through one command; results that are kept; roles."""

import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
)

from hf_recurrent_lengthgen.cli.main import main
from hf_recurrent_lengthgen.cli.measuring import _training_length
from hf_recurrent_lengthgen.data import PackedBlocks, byte_tokenizer, evaluation_sequences, token_stream
from hf_recurrent_lengthgen.evaluation.files import read_result
from hf_recurrent_lengthgen.metrics.context_harm.result import Comparison
from hf_recurrent_lengthgen.models import StatefulMamba2ForCausalLM
from hf_recurrent_lengthgen.trainers import StatePassingConfig, StatePassingTrainer
from tests.cli.conftest import Evaluate
from tests.evaluation.test_stateful_models import plain_nll

SIZES = {"vocab_size": 384, "hidden_size": 8, "num_hidden_layers": 1}
ATTENTION = {**SIZES, "intermediate_size": 8, "num_attention_heads": 2}
STOCK = {
    "mamba": lambda: MambaForCausalLM(MambaConfig(**SIZES)),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**ATTENTION)),
    "gpt_neox": lambda: GPTNeoXForCausalLM(GPTNeoXConfig(**ATTENTION)),
}


@pytest.fixture
def tokens(text_file: Path) -> np.ndarray:
    stream = token_stream([text_file.read_text(encoding="utf-8")], byte_tokenizer())
    return evaluation_sequences(stream, 3, 65).numpy()


def found(folder: Path) -> Comparison:
    return read_result(folder / "out" / "result.json", Comparison)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("kind", STOCK)
def test_stock_models_evaluate(kind: str, evaluate: Evaluate, tokens: np.ndarray, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = STOCK[kind]()
    model.save_pretrained(tmp_path / kind)
    assert evaluate(tmp_path / kind, "--tokenizer", "bytes") == 0
    [evaluated] = found(tmp_path).models
    nll = plain_nll(model.eval(), tokens)
    curve = evaluated.evaluation.position_wise.fine
    expected = [nll[:, a:b].mean() for a, b in zip(curve.edges, curve.edges[1:], strict=False)]
    np.testing.assert_allclose(curve.mean, expected, atol=2e-5)


@pytest.mark.slow
def test_what_was_measured_is_not_measured_again(
    evaluate: Evaluate,
    checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert evaluate(checkpoint) == 0
    first = found(tmp_path).models[0].evaluation

    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError

    monkeypatch.setattr("hf_recurrent_lengthgen.metrics.context_harm.measure.stream_nll", never)
    assert "taken from the cache" not in capsys.readouterr().out
    assert evaluate(checkpoint, "--roles", "base") == 0
    assert re.search(r"Results taken from the cache in .*: 1\n", capsys.readouterr().out)
    again = found(tmp_path).models[0]
    assert again.role == "base"
    assert again.evaluation.command == f"{first.command} --roles base"
    assert replace(again.evaluation, command=first.command) == first
    with pytest.raises(AssertionError):
        evaluate(checkpoint, "--no-cache")
    with pytest.raises(AssertionError):
        evaluate(checkpoint, "--length", 63)


def test_a_checkpoint_of_a_script_of_ones_own_is_measured_by_its_lineage(
    checkpoint: Path, tmp_path: Path, text_file: Path
) -> None:
    config = StatefulMamba2ForCausalLM.from_pretrained(checkpoint).config
    config.training_length = None
    stock = shutil.copytree(checkpoint, tmp_path / "stock")
    config.save_pretrained(stock)
    arguments = StatePassingConfig(
        str(tmp_path / "trained"), max_steps=1, save_strategy="no", report_to="none", dataloader_pin_memory=False
    )
    blocks = PackedBlocks(torch.arange(120) % 50 + 3, length=11)
    trainer = StatePassingTrainer(str(stock), arguments, train_dataset=blocks)
    trainer.train()
    trainer.save_model()
    model = StatefulMamba2ForCausalLM.from_pretrained(tmp_path / "trained")
    assert model.config.training_length is None
    assert _training_length([str(tmp_path / "trained")], [model]) == 11


def test_data_that_a_model_was_trained_on_are_named(
    checkpoint: Path, tmp_path: Path, text_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, options = str(tmp_path / "out"), ["--data", str(text_file), "--tokenizer", "bytes"]
    training = ["--max-steps", "1", "--training-length", "8", "--save-strategy", "no", "--split", "train[:50%]"]
    assert main(["train", "--model", str(checkpoint), "--output", out, *options, *training]) == 0
    said = capsys.readouterr().out
    assert said.rstrip().endswith(f"--data {text_file} --split 'train[50%:]'")  # and no warning
    measure = ["evaluate", out, "--length", "16", "--sequences", "2", "--output", str(tmp_path), *options]
    for split, seen in (
        ("train[50%:]", ""),
        ("train[40%:]", ", the same name as the training data of out"),
        ("train", ", the same name as the training data of out"),
    ):
        assert main([*measure, "--split", split]) == 0
        assert f"Data: {text_file.name}, split {split}{seen}\n" in capsys.readouterr().out


def test_a_training_length_of_another_model_is_named_and_two_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    configs: list[Any] = [SimpleNamespace(training_length=8), SimpleNamespace(), SimpleNamespace(training_length=8)]
    models = [SimpleNamespace(config=config) for config in configs]
    assert _training_length(["a", "b", "c"], models) == 8
    assert "Taking 8 as the training length of all models (a: 8, b: unknown, c: 8)" in capsys.readouterr().out
    assert _training_length(["a", "c"], models[::2]) == 8
    assert capsys.readouterr().out == ""
    models[2].config.training_length = 16
    with pytest.raises(ValueError, match="different or unknown training lengths"):
        _training_length(["a", "b", "c"], models)
