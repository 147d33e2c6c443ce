"""Checkpoints of any causal language model, to be evaluated."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, LlamaForCausalLM

from hf_recurrent_lengthgen.checkpoints.loading import differing_code, load_language_model, load_model
from hf_recurrent_lengthgen.models import StatefulMambaConfig, StatefulMambaForCausalLM
from tests.llamas import tiny_llama

SIZES = {"vocab_size": 29, "hidden_size": 16, "num_hidden_layers": 1}


def test_models_without_states_load_as_they_are_where_they_may(tmp_path: Path) -> None:
    saved = tiny_llama()
    saved.save_pretrained(tmp_path)
    model = load_language_model(str(tmp_path))
    assert type(model) is LlamaForCausalLM
    torch.testing.assert_close(model.state_dict(), saved.state_dict())
    with pytest.raises(ValueError, match="of type 'llama', which accepts no initial state"):
        load_model(str(tmp_path))
    saved.config.num_hidden_layers = 2
    saved.config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"do not fit its config\.json, missing: .*layers\.1"):
        load_language_model(str(tmp_path))


def test_weights_that_are_integers_are_refused(tmp_path: Path) -> None:
    StatefulMambaForCausalLM(StatefulMambaConfig(**SIZES)).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    name = "backbone.layers.0.mixer.out_proj.weight"
    save_file(weights | {name: weights[name].to(torch.int8)}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"out_proj.weight as torch.int8, but weights must be floating-point"):
        load_model(str(tmp_path))


def test_masks_among_the_weights_are_passed_over(tmp_path: Path) -> None:
    sizes = SIZES | {"intermediate_size": 16, "num_attention_heads": 2}
    GPTNeoXForCausalLM(GPTNeoXConfig(**sizes)).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["gpt_neox.layers.0.attention.bias"] = torch.ones(1, 1, 8, 8, dtype=torch.bool)  # as Pythia's files have it
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    assert type(load_language_model(str(tmp_path))) is GPTNeoXForCausalLM


def test_code_of_a_checkpoint_that_differs_from_the_installed_one_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    StatefulMambaForCausalLM(StatefulMambaConfig(**SIZES)).save_pretrained(tmp_path)
    load_model(str(tmp_path))
    assert differing_code(tmp_path) == []
    assert caplog.text == ""
    (tmp_path / "layers_mixer.py").write_text((tmp_path / "layers_mixer.py").read_text() + "\n")
    (tmp_path / "foreign.py").write_text("raise RuntimeError")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"code_format_version": 0}))
    assert differing_code(tmp_path) == ["foreign.py", "layers_mixer.py"]
    assert type(load_model(str(tmp_path))) is StatefulMambaForCausalLM
    assert "foreign.py, layers_mixer.py (code format version 0, installed 1)" in caplog.text


@pytest.mark.parametrize("sizes", [("1GB", "2KB"), ("2KB", "1GB")], ids=["shards after one file", "one file after"])
def test_weights_saved_before_in_the_folder_make_way(sizes: tuple[str, str], tmp_path: Path) -> None:
    models = [StatefulMambaForCausalLM(StatefulMambaConfig(**SIZES)) for _ in sizes]
    for model, size in zip(models, sizes, strict=True):
        model.save_pretrained(tmp_path, max_shard_size=size)
        kept = [tmp_path / name for name in ("model.safetensors", "model.safetensors.index.json")]
        assert [path.exists() for path in kept] == [size == "1GB", size == "2KB"]
        torch.testing.assert_close(load_model(str(tmp_path)).state_dict(), model.state_dict(), rtol=0, atol=0)


def test_missing_files_of_weights_are_named(tmp_path: Path) -> None:
    StatefulMambaForCausalLM(StatefulMambaConfig(**SIZES)).save_pretrained(tmp_path, max_shard_size="2KB")
    next(tmp_path.glob("model-00002-of-*.safetensors")).unlink()
    with pytest.raises(ValueError, match=r"cannot be read .*model-00002-of-"):
        load_model(str(tmp_path))
    for file in tmp_path.glob("model*.safetensors*"):
        file.unlink()
    with pytest.raises(ValueError, match=r"cannot be read .*no file named model\.safetensors"):
        load_model(str(tmp_path))
