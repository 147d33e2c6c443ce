"""Any causal language model through one command; results that are kept; roles."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
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
from hf_recurrent_lengthgen.evaluation import streaming
from hf_recurrent_lengthgen.evaluation.files import read_result
from hf_recurrent_lengthgen.metrics.context_harm import windows as context_harm
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
REMOTE_CODE = """
import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput


class BagConfig(PreTrainedConfig):
    model_type = "bag_of_tokens"

    def __init__(self, vocab_size=384, **kwargs):
        self.vocab_size = vocab_size
        super().__init__(**kwargs)


class BagForCausalLM(PreTrainedModel):
    config_class = BagConfig

    def __init__(self, config):
        super().__init__(config)
        self.table = torch.nn.Embedding(config.vocab_size, config.vocab_size)
        self.post_init()

    def forward(self, input_ids):
        return CausalLMOutput(logits=self.table(input_ids).cumsum(1))
"""


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
def test_remote_code_evaluates_if_it_may_run(
    evaluate: Evaluate, tokens: np.ndarray, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "remote"
    folder.mkdir()
    (folder / "modeling_bag.py").write_text(REMOTE_CODE)
    auto_map = {"AutoConfig": "modeling_bag.BagConfig", "AutoModelForCausalLM": "modeling_bag.BagForCausalLM"}
    config = {"model_type": "bag_of_tokens", "vocab_size": 384, "auto_map": auto_map}
    (folder / "config.json").write_text(json.dumps(config))
    table = torch.randn(384, 384, generator=torch.Generator().manual_seed(0))
    save_file({"table.weight": table}, folder / "model.safetensors", {"format": "pt"})
    byte_tokenizer().save_pretrained(folder)
    assert evaluate(folder) == 1
    assert "trust_remote_code" in capsys.readouterr().err
    assert evaluate(folder, "--trust-remote-code", "--tokenizer", "bytes") == 0
    nll = -table[torch.from_numpy(tokens[:, :-1]).long()].cumsum(1).log_softmax(-1)
    expected = nll.gather(-1, torch.from_numpy(tokens[:, 1:, None]).long()).mean(0)[:8, 0]
    [model] = found(tmp_path).models
    np.testing.assert_allclose(model.evaluation.position_wise.fine.mean[:8], expected, atol=1e-4)


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


@pytest.mark.slow
def test_an_interrupted_command_goes_on(
    evaluate: Evaluate,
    checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert evaluate(checkpoint, "--no-cache") == 0
    expected = found(tmp_path).models[0].evaluation

    def interrupt(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("hf_recurrent_lengthgen.evaluation.result_cache.SECONDS_BETWEEN_SAVES", 0.0)
        patched.setattr("hf_recurrent_lengthgen.evaluation.result_cache.MOST_TIME_SAVING", float("inf"))
        patched.setattr("hf_recurrent_lengthgen.metrics.context_harm.measure.window_nll", interrupt)
        assert evaluate(checkpoint, "--cache", tmp_path / "kept") == 130
    assert "the same command continues" in capsys.readouterr().err
    seen = []
    chunks = streaming.stream_chunks
    for module in (streaming, context_harm):
        monkeypatch.setattr(
            module, "stream_chunks", lambda *given, name=module.__name__: seen.append(name) or chunks(*given)
        )
    assert evaluate(checkpoint, "--cache", tmp_path / "kept") == 0
    assert set(seen) == {"hf_recurrent_lengthgen.metrics.context_harm.windows"}
    result = found(tmp_path).models[0].evaluation
    assert (result.position_wise, result.harm) == (expected.position_wise, expected.harm)
    assert [path.suffix for path in (tmp_path / "kept").iterdir()] == [".json"]


def test_models_of_different_training_lengths_need_the_option(
    checkpoint: Path, tmp_path: Path, text_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = StatefulMamba2ForCausalLM.from_pretrained(checkpoint)
    other.config.training_length = 16
    other.save_pretrained(tmp_path / "other")
    given = ["--data", str(text_file), "--split", "train", "--tokenizer", "bytes", "--output", str(tmp_path / "out")]
    assert main(["evaluate", str(checkpoint), str(tmp_path / "other"), *given]) == 1
    assert "different training lengths" in capsys.readouterr().err


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


def test_a_training_length_from_another_model_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    configs = [SimpleNamespace(training_length=8), SimpleNamespace(), SimpleNamespace(training_length=8)]
    models = [SimpleNamespace(config=config) for config in configs]
    assert _training_length(["a", "b", "c"], models) == 8
    assert "The config of b names no training length: taking 8, as in a, c" in capsys.readouterr().out
    assert _training_length(["a", "c"], models[::2]) == 8
    assert capsys.readouterr().out == ""


@pytest.mark.slow
def test_pieces_are_those_asked_for(
    evaluate: Evaluate, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    chunks = streaming.stream_chunks

    def watched(reader: Any, rows: np.ndarray, chunk: int, *given: Any) -> Any:
        seen.append((len(rows), chunk))
        return chunks(reader, rows, chunk, *given)

    monkeypatch.setattr(streaming, "stream_chunks", watched)
    assert evaluate(checkpoint, "--batch-size", 2, "--chunk-length", 10) == 0
    assert seen == [(2, 10), (1, 10)]
