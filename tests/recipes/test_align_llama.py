"""The loss on a Llama with RoPE scaling and adapters."""

import logging
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Mamba2Config,
    TrainerCallback,
    TrainingArguments,
)

from hf_recurrent_lengthgen.data import byte_tokenizer
from hf_recurrent_lengthgen.recipes import RECIPES, align_llama

# the name that all supported versions of Transformers know
pytestmark = pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated:FutureWarning")

TINY = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2}
QUICK = {
    "training_length": 16,
    "max_steps": 2,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "warmup_steps": 0,
    "bf16": False,
    "use_cpu": True,
    "learning_rate": 1e-2,
    "logging_steps": 1,
    "save_strategy": "no",
    "disable_tqdm": True,
    "dataloader_pin_memory": False,
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(vocab_size=384, max_position_embeddings=8, **TINY)).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def flags(llama: Path, tmp_path: Path) -> list[str]:
    data = tmp_path / "text.txt"
    data.write_text(" ".join(str(number) for number in range(300)))
    options: dict[str, Any] = {"model": llama, "data": data, "output_dir": tmp_path / "out"} | QUICK
    return [part for name, value in options.items() for part in (f"--{name}", str(value))]


def test_a_recipe_trains_the_adapters_and_leaves_a_checkpoint_of_transformers(
    flags: list[str], llama: Path, tmp_path: Path
) -> None:
    trainer = align_llama.align(*align_llama.read([str(RECIPES / "alignment/llama_yarn.yaml"), *flags]))
    rows = trainer.train_dataset[0]["input_ids"]  # type: ignore[index]
    assert len(rows) == 16 + 7  # two crops of T = 16, at most T/2 - 1 apart
    assert any("misalignment" in key for log in trainer.state.log_history for key in log)
    before = dict(AutoModelForCausalLM.from_pretrained(llama).named_parameters())
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    after = dict(trained.named_parameters())
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    adapted = ("q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight")
    assert moved == {name for name in before if name.endswith(adapted)}
    assert trained.config.rope_parameters["rope_type"] == "yarn"


class InterruptedTrainer(align_llama.AlignmentTrainer):
    """Interrupted when its third step begins."""

    def __init__(self, *positional: Any, **keyword: Any) -> None:
        super().__init__(*positional, **keyword)
        self.add_callback(Interrupt())


class Interrupt(TrainerCallback):
    def on_step_begin(self, args: TrainingArguments, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 2:
            raise KeyboardInterrupt


@pytest.mark.slow
def test_an_interrupted_run_resumes_to_the_same_weights(
    flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    saves = ["--max_steps", "4", "--save_strategy", "steps", "--save_steps", "2"]
    arguments = [str(RECIPES / "alignment/llama_yarn.yaml"), *flags, *saves]
    assert align_llama.run([*arguments, "--output_dir", str(tmp_path / "whole")]) == 0
    broken = [*arguments, "--output_dir", str(tmp_path / "broken")]
    with monkeypatch.context() as patch:
        patch.setattr(align_llama, "AlignmentTrainer", InterruptedTrainer)
        assert align_llama.run(broken) == 130
    assert "To continue, repeat the command with --resume_from_checkpoint true" in capsys.readouterr().out
    for given in ([], ["--resume_from_checkpoint", "false"]):
        with pytest.raises(ValueError, match="holds checkpoints of an earlier run: continue it with --resume_from"):
            align_llama.run([*broken, *given])
    first = tmp_path / "broken/checkpoint-2/trainer_state.json"
    written = first.stat().st_mtime_ns
    assert align_llama.run([*broken, "--resume_from_checkpoint", "true"]) == 0
    assert first.stat().st_mtime_ns == written  # a run from the start would write it again
    whole, resumed = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "broken"))
    assert [name for name in whole if not torch.equal(whole[name], resumed[name])] == []


def test_transformers_agrees_with_the_yarn_factor(flags: list[str], tmp_path: Path) -> None:
    settings, _ = align_llama.read([str(RECIPES / "alignment/llama_yarn.yaml"), *flags])
    told: list[str] = []
    logger = logging.getLogger("transformers.modeling_rope_utils")
    logger.addFilter(listener := lambda record: told.append(record.getMessage()) is None)
    try:
        config = align_llama.scaled_config(settings)
        config.save_pretrained(tmp_path / "yarn")
        AutoConfig.from_pretrained(tmp_path / "yarn")
        assert told == []
        config.max_position_embeddings += 8
        config.save_pretrained(tmp_path / "yarn")
        AutoConfig.from_pretrained(tmp_path / "yarn")  # where 5.0 looks
        assert "does not match the ratio" in told[0]
    finally:
        logger.removeFilter(listener)
    settings.training_length = 65
    with pytest.raises(ValueError, match="rope_factor 8 extends 8 positions to 64, fewer than training_length 65"):
        align_llama.scaled_config(settings)


@pytest.mark.parametrize(
    ("file", "expected", "longest"),
    [
        ("llama_yarn", {"rope_type": "yarn", "factor": 8.0, "rope_theta": 10000.0}, 64),
        ("llama_interpolation", {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}, 16),
        ("llama_base", {"rope_type": "default", "rope_theta": 500000.0}, 16),
    ],
)
def test_the_recipes_scale_rope(file: str, expected: dict[str, Any], longest: int, flags: list[str]) -> None:
    settings, _ = align_llama.read([str(RECIPES / f"alignment/{file}.yaml"), *flags])
    config = align_llama.scaled_config(settings)
    assert expected.items() <= config.rope_parameters.items()
    assert config.max_position_embeddings == longest


def test_position_interpolation_divides_positions(flags: list[str], tmp_path: Path) -> None:
    settings, _ = align_llama.read([str(RECIPES / "alignment/llama_interpolation.yaml"), *flags])
    model = LlamaForCausalLM(align_llama.scaled_config(settings))
    _, sine = model.model.rotary_emb(torch.zeros(1, 3, 8), torch.tensor([[0, 1, 6]]))
    frequencies = 10000.0 ** -(torch.arange(0, 8, 2) / 8)
    torch.testing.assert_close(sine[0, :, :4], (torch.tensor([0, 0.5, 3])[:, None] * frequencies).sin())


def test_wrong_use_is_refused(
    flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(RECIPES / "alignment/llama_base.yaml")
    settings, _ = align_llama.read([file, *flags, "--rope_factor", "2"])
    with pytest.raises(ValueError, match="rope_factor goes with a rope_type other than default"):
        align_llama.scaled_config(settings)
    Mamba2Config().save_pretrained(tmp_path / "mamba2")
    settings, _ = align_llama.read([file, *flags, "--model", str(tmp_path / "mamba2")])
    with pytest.raises(ValueError, match="has no rope_parameters to scale"):
        align_llama.scaled_config(settings)
    (tmp_path / "list.yaml").write_text("- a")
    with pytest.raises(ValueError, match="must hold options"):
        align_llama.read([str(tmp_path / "list.yaml")])
    monkeypatch.setattr(sys, "argv", ["align_llama"])
    monkeypatch.delitem(sys.modules, "hf_recurrent_lengthgen.recipes.align_llama")
    with pytest.raises(SystemExit, match=r"usage: python -m hf_recurrent_lengthgen\.recipes\.align_llama CONFIG"):
        runpy.run_module("hf_recurrent_lengthgen.recipes.align_llama", run_name="__main__")
