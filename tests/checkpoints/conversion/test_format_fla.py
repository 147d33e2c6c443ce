"""Checkpoints that fla wrote: what they compute after conversion, and what comes back of them.

The folders of fla/ were written by `save_pretrained` of flash-linear-attention 0.6.0, with kernels in Triton's
interpreter, Mamba and Mamba-2 on fla's paths without kernels, and drawn weights. Fields that only choose an
implementation differ from fla's defaults in some, so that a loss of them is seen. golden.safetensors has
input ids, logits, and the cache after the last token. `make_fla_fixtures.py` made them.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedConfig

from hf_recurrent_lengthgen import load_model
from hf_recurrent_lengthgen.checkpoints.conversion.convert import convert_checkpoint
from hf_recurrent_lengthgen.checkpoints.conversion.export import export_checkpoint
from hf_recurrent_lengthgen.checkpoints.conversion.format_fla import FLA
from hf_recurrent_lengthgen.checkpoints.conversion.registry import detect
from hf_recurrent_lengthgen.surgery import expand_state
from tests.models.families import DELTA_NET, GATED_DELTANET, MAMBA, MAMBA3, RWKV7, Family, build, variant_id
from tests.models.tensor_groups import read_group

FIXTURES = Path(__file__).parent / "fla"
NAMES = [
    *("delta_net", "gated_deltanet", "kda", "gla", "rwkv6", "rwkv7", "hgrn2", "linear_attn"),
    *("mamba", "mamba_tied", "mamba2", "mamba2_limited"),
]
every_fixture = pytest.mark.parametrize("name", NAMES)


def final_state(golden: dict[str, Tensor], layer: int, name: str) -> tuple[Tensor, Tensor]:
    """fla's cache of one layer in our layout: recurrent (B, H, P, N) or (B, C, N), conv (B, channels, taps)."""
    parts = {key.split(".", 1)[1]: value for key, value in golden.items() if key.startswith(f"{layer}.")}
    recurrent = parts["recurrent_state"]
    if name in ("rwkv6", "rwkv7", "linear_attn", "delta_net"):  # keys come first there
        recurrent = recurrent.mT
    if name in ("rwkv6", "rwkv7"):
        return recurrent, torch.cat([parts["conv_state"], parts["ffn_state"]], dim=1)[..., None]
    if "mamba" in name:
        return recurrent, parts["conv_state"][..., 1:]
    if name in ("gla", "delta_net", "gated_deltanet", "kda"):
        return recurrent, torch.cat([parts[f"conv_state.{part}"][..., 1:] for part in range(3)], dim=1)
    return recurrent, recurrent.new_empty(2, 0)


def edited(folder: Path, name: str, leave_out: tuple[str, ...] = (), **changes: Any) -> Path:
    """A copy of a fixture with other entries in its config.json."""
    shutil.copytree(FIXTURES / name, folder)
    settings = json.loads((folder / "config.json").read_text())
    settings = {key: value for key, value in (settings | changes).items() if key not in leave_out}
    (folder / "config.json").write_text(json.dumps(settings))
    return folder


def assert_close(actual: Tensor, expected: Tensor) -> None:
    """Relative to the largest entry, both in float32."""
    assert actual.shape == expected.shape
    if expected.numel():
        assert float((actual - expected).abs().max()) <= 1e-5 * max(1.0, float(expected.abs().max()))


@pytest.mark.thinned(5)
@every_fixture
def test_logits_and_final_states_are_those_of_fla(name: str, tmp_path: Path) -> None:
    golden = read_group(FIXTURES / "golden.safetensors", name)
    convert_checkpoint(str(FIXTURES / name), tmp_path / "ours")
    model = load_model(str(tmp_path / "ours")).eval()
    with torch.no_grad():
        output = model(golden["input_ids"])
    assert_close(output.logits, golden["logits"])
    for layer, state in enumerate(output.final_state):
        recurrent, conv = final_state(golden, layer, name)
        assert_close(state.recurrent, recurrent)
        assert_close(state.conv, conv)


@pytest.mark.thinned(5)
@every_fixture
def test_the_way_back_changes_no_bit_and_no_setting(name: str, tmp_path: Path) -> None:
    convert_checkpoint(str(FIXTURES / name), tmp_path / "ours")
    export_checkpoint(str(tmp_path / "ours"), tmp_path / "back", "fla")
    before, after = (load_file(folder / "model.safetensors") for folder in (FIXTURES / name, tmp_path / "back"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) and before[key].dtype == after[key].dtype for key in before)
    assert json.loads((tmp_path / "back/config.json").read_text()) == json.loads(
        (FIXTURES / name / "config.json").read_text()
    )


@pytest.mark.parametrize("name", ["mamba", "mamba2"])
def test_mamba_of_fla_is_distinguished_from_that_of_transformers(name: str) -> None:
    settings = PreTrainedConfig.get_config_dict(FIXTURES / name)[0]
    assert detect(settings, {}, "").name == "fla"
    stock = {"model_type": name, "layer_norm_epsilon": 1e-5, "time_step_rank": 3, "hidden_size": 16}
    assert detect(stock, {}, "").name == "transformers"


def test_a_trained_model_goes_back_with_what_was_changed(tmp_path: Path) -> None:
    """Of another dtype, with a new epsilon; all other entries stay."""
    convert_checkpoint(str(FIXTURES / "mamba"), tmp_path / "ours")
    model = load_model(str(tmp_path / "ours"), dtype=torch.bfloat16)
    model.config.layer_norm_epsilon = 1e-4
    model.save_pretrained(tmp_path / "trained")
    export_checkpoint(str(tmp_path / "trained"), tmp_path / "back", "fla")
    before = json.loads((FIXTURES / "mamba/config.json").read_text())
    after = json.loads((tmp_path / "back/config.json").read_text())
    assert after == before | {"norm_eps": 1e-4, "dtype": "bfloat16"}


@pytest.mark.parametrize("name", ["mamba", "mamba2"])
def test_names_of_fields_in_earlier_versions_mean_the_same(name: str, tmp_path: Path) -> None:
    """fla 0.5 and before named the steps of the Mamba classes as Transformers does."""
    settings = PreTrainedConfig.get_config_dict(FIXTURES / name)[0]
    settings.pop("_commit_hash", None)
    now = FLA.to_config(settings, {})
    earlier = {
        "norm_eps": "layer_norm_epsilon",
        "dt_min": "time_step_min",
        "dt_max": "time_step_max",
        "dt_limit": "time_step_limit",
        "dt_init_floor": "time_step_floor",
        "dt_rank": "time_step_rank",
        "dt_scale": "time_step_scale",
        "dt_init_scheme": "time_step_init_scheme",
    }
    changed = settings | {"dt_max": 0.2, "dt_min": 0.01}
    again = FLA.to_config({earlier.get(key, key): value for key, value in changed.items()}, {})
    assert (again.time_step_max, again.time_step_min) == (0.2, 0.01)
    different = {key for key, value in now.to_dict().items() if again.to_dict()[key] != value}
    assert different == {"time_step_max", "time_step_min"}


def test_what_fla_calls_the_step_of_mamba_is_read_without_a_conversion(tmp_path: Path) -> None:
    model, tokens = build(MAMBA, time_step_rank=5), torch.arange(3, 12)[None]
    model.save_pretrained(tmp_path / "ours")
    export_checkpoint(str(tmp_path / "ours"), tmp_path / "theirs", "fla")
    logits = load_model(str(tmp_path / "theirs"))(input_ids=tokens).logits
    torch.testing.assert_close(logits, model(input_ids=tokens).logits, rtol=0, atol=1e-6)


def joined_gate_and_up(weights: dict[str, Tensor], layer: str) -> None:
    """As in checkpoints from before February 2025: gate above up."""
    parts = [weights.pop(f"{layer}mlp.{part}_proj.weight") for part in ("gate", "up")]
    weights[f"{layer}mlp.gate_proj.weight"] = torch.cat(parts)


def stacked_shifts(weights: dict[str, Tensor], layer: str) -> None:
    """As in the first checkpoints of fla: x_x of r, w, k, v, a and g, (6, D)."""
    parts = [weights.pop(f"{layer}attn.x_{part}") for part in "rwkvag"]
    weights[f"{layer}attn.x_x"] = torch.stack([part.flatten() for part in parts])


@pytest.mark.parametrize(("family", "join"), [("gla", joined_gate_and_up), ("rwkv7", stacked_shifts)])
def test_tensors_that_stood_for_several_are_parted(family: str, join: Any, tmp_path: Path) -> None:
    folder = edited(tmp_path / "old", family)
    weights = load_file(folder / "model.safetensors")
    for layer in range(2):
        join(weights, f"model.layers.{layer}.")
    save_file(weights, folder / "model.safetensors")
    convert_checkpoint(str(folder), tmp_path / "ours")
    before, after = (load_file(path / "model.safetensors") for path in (FIXTURES / family, tmp_path / "ours"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)


@pytest.mark.parametrize("family", [DELTA_NET, GATED_DELTANET, RWKV7], ids=variant_id)
def test_heads_that_were_all_merged_alike_are_exported(family: Family, tmp_path: Path) -> None:
    model = expand_state(build(family), "all")
    model.save_pretrained(tmp_path / "ours")
    export_checkpoint(str(tmp_path / "ours"), tmp_path / "fla", "fla")
    config = json.loads((tmp_path / "fla/config.json").read_text())
    assert (config["model_type"], config["num_heads"]) == (family.name, 1)
    assert "layer_num_heads" not in config
    tokens = torch.arange(3, 15)[None]
    torch.testing.assert_close(load_model(str(tmp_path / "fla")).eval()(tokens).logits, model(tokens).logits)


MAMBA3_OF_FLA = {  # what `save_pretrained` writes for fla's `Mamba3Config`, whose layer runs on a GPU only
    "A_floor": 0.0001,
    "architectures": ["Mamba3ForCausalLM"],
    "bos_token_id": 1,
    "chunk_size": 64,
    "dt_init_floor": 0.0001,
    "dt_max": 0.1,
    "dt_min": 0.001,
    "dtype": "float32",
    "eos_token_id": 2,
    "expand": 2,
    "fuse_cross_entropy": True,
    "fuse_linear_cross_entropy": False,
    "fuse_norm": True,
    "head_dim": 8,
    "hidden_act": "silu",
    "hidden_size": 16,
    "initializer_range": 0.02,
    "is_mimo": False,
    "is_outproj_norm": True,
    "mimo_rank": 4,
    "model_type": "mamba3",
    "n_groups": 2,
    "norm_eps": 1e-05,
    "num_heads": 4,
    "num_hidden_layers": 2,
    "pad_token_id": 0,
    "rescale_prenorm_residual": True,
    "residual_in_fp32": True,
    "rope_fraction": 0.5,
    "state_size": 8,
    "tie_word_embeddings": False,
    "transformers_version": "5.0.0",
    "use_bias": False,
    "use_cache": True,
    "use_l2warp": False,
    "vocab_size": 29,
}
MAMBA3_LAYER = (  # names of the parameters of fla's `Mamba3Block`
    *("norm.weight", "mixer.dt_bias", "mixer.B_bias", "mixer.C_bias", "mixer.D", "mixer.in_proj.weight"),
    *("mixer.B_norm.weight", "mixer.C_norm.weight", "mixer.norm.weight", "mixer.out_proj.weight"),
)


def test_mamba_3_in_the_layout_of_fla_comes_back_bit_for_bit(tmp_path: Path) -> None:
    """Its rates are softplus there; the same mixers against mamba-ssm's code are in test_mamba_ssm.py."""
    model = build(MAMBA3, is_outproj_norm=True, residual_in_fp32=True)
    weights = {name: value.detach() for name, value in model.state_dict().items()}
    names = {f"backbone.layers.{layer}.{name}" for layer in range(2) for name in MAMBA3_LAYER}
    assert set(weights) == names | {"backbone.embeddings.weight", "backbone.norm_f.weight", "lm_head.weight"}
    (tmp_path / "fla").mkdir()
    (tmp_path / "fla/config.json").write_text(json.dumps(MAMBA3_OF_FLA))
    save_file(weights, tmp_path / "fla/model.safetensors", {"format": "pt"})
    convert_checkpoint(str(tmp_path / "fla"), tmp_path / "ours")
    export_checkpoint(str(tmp_path / "ours"), tmp_path / "back", "fla")
    assert json.loads((tmp_path / "back/config.json").read_text()) == MAMBA3_OF_FLA
    after = load_file(tmp_path / "back/model.safetensors")
    assert all(torch.equal(after[name], value) for name, value in weights.items())
    tokens = torch.arange(3, 15)[None]
    for folder in ("fla", "ours"):
        assert torch.equal(load_model(str(tmp_path / folder)).eval()(tokens).logits, model(tokens).logits)
