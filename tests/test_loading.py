"""Checkpoints of any causal language model, to be evaluated."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MambaConfig, MambaForCausalLM, T5Config, T5Model

from hf_recurrent_lengthgen import StatefulMambaConfig, StatefulMambaForCausalLM, loading
from hf_recurrent_lengthgen.loading import differing_code, load_language_model, load_model

SIZES = {"vocab_size": 29, "hidden_size": 16, "num_hidden_layers": 1}


def test_models_without_states_load_as_they_are_where_they_may(tmp_path: Path) -> None:
    saved = LlamaForCausalLM(LlamaConfig(**SIZES, intermediate_size=16, num_attention_heads=2))
    saved.save_pretrained(tmp_path)
    model = load_language_model(str(tmp_path))
    assert type(model) is LlamaForCausalLM
    torch.testing.assert_close(model.state_dict(), saved.state_dict())
    with pytest.raises(ValueError, match="of type 'llama', which cannot be given states"):
        load_model(str(tmp_path))


def test_recurrent_models_load_with_states(tmp_path: Path) -> None:
    MambaForCausalLM(MambaConfig(**SIZES)).save_pretrained(tmp_path)
    assert type(load_language_model(str(tmp_path))) is StatefulMambaForCausalLM


def test_other_models_are_refused(tmp_path: Path) -> None:
    T5Model(T5Config(vocab_size=29, d_model=16, num_layers=1, d_kv=8, num_heads=2, d_ff=16)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="of type 't5', which is no causal language model"):
        load_language_model(str(tmp_path))


def test_weights_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    config = LlamaConfig(**SIZES, intermediate_size=16, num_attention_heads=2)
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    config.num_hidden_layers = 2
    config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"do not fit its config\.json, missing: .*layers\.1"):
        load_language_model(str(tmp_path))


def test_code_of_a_checkpoint_that_differs_from_the_installed_one_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    StatefulMambaForCausalLM(StatefulMambaConfig(**SIZES)).save_pretrained(tmp_path)
    load_model(str(tmp_path))
    assert differing_code(tmp_path) == []
    assert caplog.text == ""
    (tmp_path / "norms.py").write_text((tmp_path / "norms.py").read_text() + "\n")
    (tmp_path / "foreign.py").write_text("raise RuntimeError")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"code_format_version": 0}))
    assert differing_code(tmp_path) == ["foreign.py", "norms.py"]
    assert type(load_model(str(tmp_path))) is StatefulMambaForCausalLM
    assert "foreign.py, norms.py (code format version 0, installed 1)" in caplog.text


def test_code_on_the_hub_is_compared_where_it_can_be_had(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict[str, Any] = {"model_type": "stateful_mamba", "auto_map": {"AutoModel": "modeling.Model"}}
    (tmp_path / "norms.py").write_text("old")
    monkeypatch.setattr(loading, "snapshot_download", lambda name, allow_patterns: tmp_path)
    loading._tell_of_differing_code("user/name", settings)
    assert "user/name brings code that differs" in caplog.text
    caplog.clear()
    monkeypatch.undo()
    loading._tell_of_differing_code("user/name", settings)  # no network: nothing to say, and no error
    assert caplog.text == ""


def test_checkpoints_of_other_libraries_are_told_how_to_convert(tmp_path: Path) -> None:
    (tmp_path / "mamba").mkdir()
    (tmp_path / "mamba" / "config.json").write_text('{"d_model": 16, "n_layer": 1, "vocab_size": 29}')
    (tmp_path / "rwkv").mkdir()
    for path in (tmp_path / "mamba" / "pytorch_model.bin", tmp_path / "rwkv" / "RWKV-x060.pth"):
        torch.save({}, path)
    for name in ("mamba", "rwkv", "rwkv/RWKV-x060.pth"):
        for load in (load_model, load_language_model):
            with pytest.raises(ValueError, match=rf"lengthgen convert {tmp_path / name} --output_dir FOLDER"):
                load(str(tmp_path / name))
