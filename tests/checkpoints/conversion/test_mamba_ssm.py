"""Checkpoints that mamba-ssm wrote: what they compute after conversion, and what comes back of them.

The folders of mamba_ssm/ were written by `save_pretrained` of mamba-ssm 2.3.2.post1, with kernels in Triton's
interpreter and `selective_scan_ref` for Mamba-1; those of Mamba-3 by commit e9594ce, with the references of its tests
(`mamba3_siso_step_ref`, `rms_norm_ref`) in place of kernels. Weights were drawn, as fresh models have zero biases and
tiny weights, which would hide mistakes. golden.safetensors has input ids, logits and the cache after the last token.
`make_mamba_ssm_fixtures.py` and `make_mamba3_fixtures.py` made them.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hf_recurrent_lengthgen import load_model
from hf_recurrent_lengthgen.checkpoints.conversion.convert import convert_checkpoint
from hf_recurrent_lengthgen.checkpoints.conversion.export import export_checkpoint
from hf_recurrent_lengthgen.checkpoints.conversion.format_mamba_ssm import DEFAULTS, MAMBA_SSM
from hf_recurrent_lengthgen.checkpoints.conversion.tiny_random_models import write_tiny_random_model
from hf_recurrent_lengthgen.models.state_value import LayerState
from tests.cli.training import trained_config as read_config
from tests.models.tensor_groups import read_group

FIXTURES = Path(__file__).parent / "mamba_ssm"
NAMES = ["mamba1", "mamba1_untied", "mamba2", "mamba2_untied", "mamba3", "mamba3_untied"]


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    weights: dict[str, torch.Tensor] = torch.load(folder / "pytorch_model.bin", weights_only=True)
    return weights


def assert_same_weights(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert list(one) == list(other)
    for name, value in one.items():
        assert value.dtype == other[name].dtype, name
        assert (
            value.numpy(force=True).tobytes() == other[name].numpy(force=True).tobytes()
            if (value.dtype != torch.bfloat16)
            else torch.equal(value.view(torch.int16), other[name].view(torch.int16))
        ), name


def edited(folder: Path, name: str, **changes: Any) -> Path:
    """A copy of a fixture with other entries in its config.json."""
    shutil.copytree(FIXTURES / name, folder)
    (folder / "config.json").write_text(json.dumps(read_config(folder) | changes))
    return folder


def state_of(golden: dict[str, torch.Tensor], layer: int, model: Any) -> LayerState:
    """mamba-ssm's cache in our layout."""
    if f"{layer}.angle" not in golden:
        return LayerState(golden[f"{layer}.recurrent"], golden[f"{layer}.conv"][..., 1:])
    # turned back by its angles: the frame of the last token
    angle, ssm, k, v = (golden[f"{layer}.{part}"] for part in ("angle", "ssm", "k", "v"))

    def turned_back(x: torch.Tensor) -> torch.Tensor:
        turn = angle.reshape(*angle.shape[:2], *[1] * (x.ndim - 3), -1)
        still = turn.new_zeros(*turn.shape[:-1], x.shape[-1] // 2 - turn.shape[-1])
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * torch.exp(-1j * torch.cat([turn, still], -1))).flatten(-2)

    mixer = model.backbone.layers[layer].mixer
    B = turned_back(k[:, 0]) - mixer.B_bias[:, 0]  # of each head; heads of a group have the same
    B = B.unflatten(1, (model.config.n_groups, -1))
    torch.testing.assert_close(B, B[:, :, :1].expand_as(B), atol=1e-5, rtol=1e-5)
    return LayerState(turned_back(ssm), torch.cat([v.flatten(1), B[:, :, 0].flatten(1)], 1)[..., None].detach())


@pytest.mark.parametrize("name", NAMES)
def test_logits_and_final_states_are_those_of_upstream(name: str, tmp_path: Path) -> None:
    golden = read_group(FIXTURES / "golden.safetensors", name)
    convert_checkpoint(str(FIXTURES / name), tmp_path / "ours")
    model = load_model(str(tmp_path / "ours")).eval()
    with torch.no_grad():
        output = model(golden["input_ids"])
    torch.testing.assert_close(output.logits, golden["logits"], atol=1e-5, rtol=1e-5)
    for layer, state in enumerate(output.final_state):
        expected = state_of(golden, layer, model)
        torch.testing.assert_close(state.recurrent, expected.recurrent, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(state.conv, expected.conv, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", [*NAMES, "mamba1_bfloat16"])
def test_the_way_back_changes_no_bit(name: str, tmp_path: Path) -> None:
    convert_checkpoint(str(FIXTURES / name), tmp_path / "ours")
    export_checkpoint(str(tmp_path / "ours"), tmp_path / "back", "mamba-ssm")
    assert_same_weights(read_weights(FIXTURES / name), read_weights(tmp_path / "back"))
    assert read_config(tmp_path / "back") == read_config(FIXTURES / name)


def test_our_vocabulary_is_the_padded_one_and_tied_heads_share_their_bytes(tmp_path: Path) -> None:
    convert_checkpoint(str(FIXTURES / "mamba2"), tmp_path / "ours")
    config = read_config(tmp_path / "ours")
    assert (config["vocab_size"], config["tie_word_embeddings"]) == (48, True)
    assert config["source_config"]["config"]["vocab_size"] == 33
    export_checkpoint(str(tmp_path / "ours"), tmp_path / "back", "mamba-ssm")
    weights = read_weights(tmp_path / "back")
    assert weights["lm_head.weight"].data_ptr() == weights["backbone.embedding.weight"].data_ptr()


def test_each_dtype_is_kept_unless_another_is_requested(tmp_path: Path) -> None:
    for dtype in ("auto", "float16"):
        options = {} if dtype == "auto" else {"dtype": dtype}
        convert_checkpoint(str(FIXTURES / "mamba1_bfloat16"), tmp_path / dtype, **options)
    kept, half = (load_file(tmp_path / dtype / "model.safetensors") for dtype in ("auto", "float16"))
    assert kept["backbone.layers.0.mixer.A_log"].dtype == torch.float32
    assert kept["backbone.layers.0.mixer.in_proj.weight"].dtype == torch.bfloat16
    assert read_config(tmp_path / "auto")["dtype"] == "bfloat16"
    assert {value.dtype for value in half.values()} == {torch.float16}
    assert torch.equal(half["backbone.norm_f.weight"], kept["backbone.norm_f.weight"].half())


@pytest.mark.parametrize("family", ["mamba", "mamba2"])
def test_what_upstream_does_not_support_is_exported_from_our_fields(family: str, tmp_path: Path) -> None:
    """A checkpoint that never was one of mamba-ssm becomes one that converts to the same."""
    write_tiny_random_model("transformers", family, tmp_path / "stock")
    convert_checkpoint(str(tmp_path / "stock"), tmp_path / "ours")
    export_checkpoint(str(tmp_path / "ours"), tmp_path / "theirs", "mamba-ssm")
    convert_checkpoint(str(tmp_path / "theirs"), tmp_path / "again")
    assert read_config(tmp_path / "theirs").keys() == DEFAULTS.keys()
    for name, value in load_file(tmp_path / "ours" / "model.safetensors").items():
        assert torch.equal(value, load_file(tmp_path / "again" / "model.safetensors")[name]), name


def test_a_vocabulary_that_grew_is_exported_with_its_padding(tmp_path: Path) -> None:
    convert_checkpoint(str(FIXTURES / "mamba1"), tmp_path / "ours")
    model = load_model(str(tmp_path / "ours"))
    model.resize_token_embeddings(34)
    model.save_pretrained(tmp_path / "grown")
    export_checkpoint(str(tmp_path / "grown"), tmp_path / "back", "mamba-ssm")
    config = read_config(tmp_path / "back")
    assert -(-config["vocab_size"] // config["pad_vocab_size_multiple"]) * config["pad_vocab_size_multiple"] == 34


def test_whole_numbers_stand_for_floats(tmp_path: Path) -> None:
    limit = {"ssm_cfg": read_config(FIXTURES / "mamba2")["ssm_cfg"] | {"dt_limit": [0, 1]}}
    convert_checkpoint(str(edited(tmp_path / "theirs", "mamba2", **limit)), tmp_path / "ours")
    assert read_config(tmp_path / "ours")["time_step_limit"] == [0.0, 1.0]


def test_a_tied_head_may_be_missing_but_not_differ(tmp_path: Path) -> None:
    source = edited(tmp_path / "theirs", "mamba1")
    weights = read_weights(source)
    head = weights.pop("lm_head.weight")
    torch.save(weights, source / "pytorch_model.bin")
    convert_checkpoint(str(source), tmp_path / "ours")
    assert "backbone.embeddings.weight" in load_file(tmp_path / "ours" / "model.safetensors")
    torch.save(weights | {"lm_head.weight": head + 1}, source / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"lm_head.weight and backbone.embedding.weight in its weights differ"):
        convert_checkpoint(str(source), tmp_path / "new")


OFFICIAL = {  # config.json of state-spaces/mamba-130m and state-spaces/mamba2-130m
    "mamba-130m": (
        '{"d_model": 768, "n_layer": 24, "vocab_size": 50277, "ssm_cfg": {}, "rms_norm": true, '
        '"residual_in_fp32": true, "fused_add_norm": true, "pad_vocab_size_multiple": 8}'
    ),
    "mamba2-130m": (
        '{"d_model": 768, "d_intermediate": 0, "n_layer": 24, "vocab_size": 50277, "ssm_cfg": {"layer": "Mamba2"}, '
        '"attn_layer_idx": [], "attn_cfg": {}, "rms_norm": true, "residual_in_fp32": true, "fused_add_norm": true, '
        '"pad_vocab_size_multiple": 16, "tie_embeddings": true}'
    ),
}


@pytest.mark.parametrize(("name", "rows"), [("mamba-130m", 50280), ("mamba2-130m", 50288)])
def test_official_configs_become_ours(name: str, rows: int) -> None:
    settings = json.loads(OFFICIAL[name])
    assert MAMBA_SSM.recognizes(settings, {})
    config = MAMBA_SSM.to_config(settings, {})
    assert (config.vocab_size, config.hidden_size, config.num_hidden_layers) == (rows, 768, 24)
    assert (config.state_size, config.tie_word_embeddings) == ((16, True) if name == "mamba-130m" else (128, True))
    if name == "mamba2-130m":
        assert (config.num_heads, config.head_dim, config.n_groups) == (24, 64, 1)
    else:
        assert config.time_step_rank == 48
