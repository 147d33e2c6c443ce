"""Checkpoints that Transformers wrote: what they compute after conversion, and what comes back of them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    FalconMambaConfig,
    FalconMambaForCausalLM,
    Mamba2Config,
    Mamba2ForCausalLM,
    MambaConfig,
    MambaForCausalLM,
)

from hf_recurrent_lengthgen import load_model
from hf_recurrent_lengthgen.checkpoints.conversion.convert import convert_checkpoint
from hf_recurrent_lengthgen.checkpoints.conversion.export import export_checkpoint
from hf_recurrent_lengthgen.checkpoints.tensor_files import TensorFiles, same_bits
from hf_recurrent_lengthgen.models import STATEFUL_CLASSES, StatefulMamba2Config, StatefulMambaConfig
from hf_recurrent_lengthgen.models.configuration_stateful import OLD_CACHE_NAMES
from tests.cli.training import trained_config as read_config

SIZES = {"vocab_size": 29, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4}
MAMBA2 = {"num_heads": 4, "head_dim": 8, "n_groups": 1}  # versions before 5.23 are wrong with several groups
MODELS: dict[str, tuple[Any, Any]] = {
    "mamba": (MambaForCausalLM, MambaConfig(**SIZES)),
    "mamba_bias_untied": (MambaForCausalLM, MambaConfig(**SIZES, use_bias=True, tie_word_embeddings=False)),
    "mamba2": (Mamba2ForCausalLM, Mamba2Config(**SIZES, **MAMBA2)),
    "mamba2_tied": (Mamba2ForCausalLM, Mamba2Config(**SIZES, **MAMBA2, tie_word_embeddings=True, use_bias=True)),
    "mamba2_limits": (Mamba2ForCausalLM, Mamba2Config(**SIZES, **MAMBA2, time_step_limit=(0.1, 0.6))),
    "falcon_mamba": (FalconMambaForCausalLM, FalconMambaConfig(**SIZES, mixer_rms_eps=1e-3)),
}


def theirs(name: str) -> Any:
    """A model of Transformers with weights that show mistakes: no biases of zero, no norms of one."""
    model_class, config = MODELS[name]
    model = model_class(config).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim == 1:
                parameter.add_(0.3 * noise)
            else:
                parameter.add_(noise / parameter[0].numel() ** 0.5)
    return model


def assert_same_files(one: Path, other: Path) -> None:
    left, right = TensorFiles(one), TensorFiles(other)
    assert left.metas
    assert set(left.metas) == set(right.metas)
    assert [name for name in left.metas if not same_bits(left.tensor(name), right.tensor(name))] == []


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_states_are_those_of_upstream(name: str, tmp_path: Path) -> None:
    model = theirs(name)
    model.save_pretrained(tmp_path / "theirs")
    convert_checkpoint(str(tmp_path / "theirs"), tmp_path / "ours")
    ids = torch.randint(29, (2, 23))
    with torch.no_grad():
        ours = load_model(str(tmp_path / "ours")).eval()(ids, output_final_state=True)
        output = model(ids, use_cache=True)
    torch.testing.assert_close(ours.logits, output.logits, atol=1e-5, rtol=1e-5)
    cache = next(output[name] for name in ("cache", *OLD_CACHE_NAMES) if name in output)
    for layer, state in zip(cache.layers, ours.final_state, strict=True):
        torch.testing.assert_close(state.recurrent, layer.recurrent_states[0], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(state.conv, layer.conv_states[0][..., 1:], atol=1e-5, rtol=1e-5)


@pytest.mark.thinned(5)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_the_way_back_changes_no_bit_and_loads_upstream(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = theirs(name).to(dtype)
    model.save_pretrained(tmp_path / "theirs")
    convert_checkpoint(str(tmp_path / "theirs"), tmp_path / "ours")
    export_checkpoint(str(tmp_path / "ours"), tmp_path / "back", "transformers")
    assert_same_files(tmp_path / "theirs", tmp_path / "back")
    exported, original = (read_config(tmp_path / folder) for folder in ("back", "theirs"))
    if name.startswith("mamba2"):
        assert exported.pop("rms_norm") is True  # both for servers
        assert exported.pop("intermediate_size") == exported["num_heads"] * exported["head_dim"]
    assert exported == original
    loaded, found = AutoModelForCausalLM.from_pretrained(tmp_path / "back", output_loading_info=True)
    assert type(loaded) is type(model)
    assert not any(found[f"{what}_keys"] for what in ("missing", "unexpected", "mismatched"))
    for key, value in model.state_dict().items():
        assert same_bits(loaded.state_dict()[key].to(dtype), value), key


@pytest.mark.parametrize("family", [StatefulMambaConfig, StatefulMamba2Config])
def test_weights_that_were_rescaled_at_initialization_load_upstream_as_they_are(family: Any, tmp_path: Path) -> None:
    sizes = SIZES | (MAMBA2 if family is StatefulMamba2Config else {})
    model = STATEFUL_CLASSES[family.model_type.removeprefix("stateful_")](family(**sizes, initialization="mamba-ssm"))
    model.save_pretrained(tmp_path / "ours")
    export_checkpoint(str(tmp_path / "ours"), tmp_path / "back", "transformers")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    for key, value in model.state_dict().items():
        assert same_bits(loaded.state_dict()[key], value), key


def test_shards_are_read_and_written(tmp_path: Path) -> None:
    model = theirs("mamba2")
    model.save_pretrained(tmp_path / "theirs", max_shard_size="4KB")
    assert len(list((tmp_path / "theirs").glob("model-*.safetensors"))) > 2
    convert_checkpoint(str(tmp_path / "theirs"), tmp_path / "ours", max_shard_size="3KB")
    files = TensorFiles(tmp_path / "ours")
    assert len(files.paths) > 3
    for path in files.paths:
        values = load_file(path)
        assert len(values) == 1 or sum(value.nbytes for value in values.values()) <= 3000
    assert_same_files(tmp_path / "theirs", tmp_path / "ours")
    export_checkpoint(str(tmp_path / "ours"), tmp_path / "back", "transformers", max_shard_size="5KB")
    assert len(TensorFiles(tmp_path / "back").paths) > 2
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    for key, value in model.state_dict().items():
        assert same_bits(loaded.state_dict()[key], value), key


def test_a_checkpoint_in_the_middle_of_training_is_exported(tmp_path: Path) -> None:
    theirs("mamba").save_pretrained(tmp_path / "theirs")
    convert_checkpoint(str(tmp_path / "theirs"), tmp_path / "ours")
    for name in ("optimizer.pt", "scheduler.pt", "training_args.bin", "rng_state.pth", "trainer_state.json"):
        (tmp_path / "ours" / name).write_bytes(b"not to be read")
    export_checkpoint(str(tmp_path / "ours"), tmp_path / "back", "transformers")
    assert sorted(path.name for path in (tmp_path / "back").iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
    ]


def changed(folder: Path, **changes: Any) -> str:
    """A converted Mamba with other entries in its config.json."""
    theirs("mamba").save_pretrained(folder / "theirs")
    convert_checkpoint(str(folder / "theirs"), folder / "ours")
    (folder / "ours" / "config.json").write_text(json.dumps(read_config(folder / "ours") | changes))
    return str(folder / "ours")


def test_layers_that_were_all_expanded_alike_are_exported(tmp_path: Path) -> None:
    source = changed(tmp_path, layer_state_sizes=[4, 4], state_size=2)
    export_checkpoint(source, tmp_path / "back", "transformers")
    assert read_config(tmp_path / "back")["state_size"] == 4
    AutoModelForCausalLM.from_pretrained(tmp_path / "back")


def test_neutral_forgetting_is_exported(tmp_path: Path) -> None:
    export_checkpoint(changed(tmp_path, forgetting={"delta_scale": 1.0}), tmp_path / "back", "transformers")
    assert "forgetting" not in read_config(tmp_path / "back")
