"""The loss on a Llama with RoPE scaling and adapters."""

import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Mamba2Config

from hf_recurrent_lengthgen.data import byte_tokenizer
from hf_recurrent_lengthgen.recipes import RECIPES, align_llama

# the name that all supported versions of Transformers know
pytestmark = pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated:FutureWarning")

TINY = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2}
QUICK = {
    "block_length": 16,
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


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ("llama_yarn", {"rope_type": "yarn", "factor": 8.0, "rope_theta": 10000.0}),
        ("llama_interpolation", {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}),
        ("llama_base", {"rope_type": "default", "rope_theta": 500000.0}),
    ],
)
def test_the_recipes_scale_rope(file: str, expected: dict[str, Any], flags: list[str]) -> None:
    settings, _ = align_llama.read([str(RECIPES / f"alignment/{file}.yaml"), *flags])
    config = align_llama.scaled_config(settings)
    assert expected.items() <= config.rope_parameters.items()
    assert config.max_position_embeddings == 16


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
