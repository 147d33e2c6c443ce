"""Configurations, Auto classes and types: Transformers' own everywhere, nothing of theirs replaced."""

import importlib
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, Mamba2Config, Mamba2ForCausalLM, Mamba2Model

from hf_recurrent_lengthgen.models.configuration_stateful_mamba2 import StatefulMamba2Config
from hf_recurrent_lengthgen.models.modeling_stateful_mamba2 import StatefulMamba2ForCausalLM

from .families import (
    DELTA_NET,
    FAMILIES,
    GATED_DELTANET,
    GROWING,
    KDA,
    MAMBA,
    MAMBA3,
    RWKV7,
    VOCABULARY,
    Family,
    build,
    mamba2_config,
    random_tokens,
    variant_id,
)

every_family = pytest.mark.parametrize("family", FAMILIES, ids=variant_id)
growing_families = pytest.mark.parametrize("family", GROWING, ids=variant_id)


@every_family
def test_the_auto_classes_know_our_model_type(family: Family) -> None:
    config = family.config()
    assert type(AutoConfig.for_model(family.config_class.model_type)) is family.config_class
    assert type(AutoModel.from_config(config)) is family.backbone_class
    assert type(AutoModelForCausalLM.from_config(config)) is family.causal_lm_class


def test_the_native_mamba2_stays_the_native_one() -> None:
    small = {"num_heads": 2, "head_dim": 8, "hidden_size": 8, "state_size": 4, "num_hidden_layers": 1, "vocab_size": 9}
    assert StatefulMamba2Config.model_type == "stateful_mamba2"
    assert issubclass(StatefulMamba2Config, Mamba2Config)
    assert type(AutoConfig.for_model("mamba2")) is Mamba2Config
    assert type(AutoModelForCausalLM.from_config(Mamba2Config(**small))) is Mamba2ForCausalLM
    assert type(AutoModel.from_config(Mamba2Config(**small))) is Mamba2Model


def test_a_native_configuration_is_refused_with_the_way_to_convert_it() -> None:
    with pytest.raises(ValueError, match=r"needs a StatefulMamba2Config, got Mamba2Config: make one with"):
        StatefulMamba2ForCausalLM(Mamba2Config())  # type: ignore[arg-type]


def test_a_configuration_made_from_a_native_one_is_saved_as_ours(tmp_path: Path) -> None:
    native = Mamba2Config(num_heads=4, n_groups=2, head_dim=8, hidden_size=16, state_size=5, vocab_size=9)
    config = StatefulMamba2Config(**native.to_dict())
    config.save_pretrained(tmp_path)
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert type(loaded) is StatefulMamba2Config
    assert loaded.model_type == "stateful_mamba2"
    assert (loaded.head_dim, loaded.scan_backend, loaded.code_format_version) == (8, "auto", 1)


@every_family
def test_configurations_survive_saving(family: Family, tmp_path: Path) -> None:
    config = family.config(scan_backend="torch", training_length=77)
    config.save_pretrained(tmp_path)
    loaded = family.config_class.from_pretrained(tmp_path)
    assert (loaded.scan_backend, loaded.training_length) == ("torch", 77)
    tokens = random_tokens(1, 4)
    model = build(family)
    again = family.causal_lm_class(loaded)
    again.load_state_dict(model.state_dict())
    assert torch.equal(again.eval()(tokens).logits, model(tokens).logits)


def test_infinite_step_limits_survive_saving(tmp_path: Path) -> None:
    mamba2_config(time_step_limit=(0.0, float("inf"))).save_pretrained(tmp_path)
    assert tuple(StatefulMamba2Config.from_pretrained(tmp_path).time_step_limit) == (0.0, float("inf"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"code_format_version": 2}, "code format version 2, this code reads up to 1: update"),
        ({"layer_norm_epsilon": -1e-5}, "layer_norm_epsilon must be at least 0, got -1e-05"),
        ({"layer_norm_epsilon": math.nan}, "layer_norm_epsilon must be at least 0, got nan"),
        ({"chunk_size": 0}, "chunk_size must be at least 1, got 0"),
        ({"scan_backend": "triton"}, "scan_backend must be one of ('auto', 'torch', 'kernel'), got 'triton'"),
        ({"hidden_act": "gelu"}, "hidden_act must be \"silu\", got 'gelu'"),
        ({"n_groups": 3}, "num_heads (4) must be a multiple of n_groups (3)"),
        ({"training_length": 0}, "training_length must be a number of tokens of at least 1, or None, got 0"),
    ],
)
def test_a_configuration_that_cannot_be_honored_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        StatefulMamba2ForCausalLM(mamba2_config(**changes))


@pytest.mark.parametrize("sizes", [[4], [4, 0]], ids=str)
@growing_families
def test_sizes_of_layers_must_be_one_integer_each(family: Family, sizes: list[int]) -> None:
    name = "layer_state_sizes" if "mamba" in family.name else "layer_num_heads"
    with pytest.raises(ValueError, match=f"{name}.*must be None or hold one integer above 0 for each"):
        family.causal_lm_class(family.config(**{name: sizes}))


@every_family
def test_fields_of_layers_that_a_family_lacks_are_refused(family: Family) -> None:
    fields: dict[str, list[int]] = {"layer_num_heads": [4, 1], "layer_state_sizes": [4, 1], "attention_layers": [0]}
    lacking = {name: value for name, value in fields.items() if not hasattr(family.config_class, name)}
    assert lacking
    for name, value in lacking.items():
        with pytest.raises(ValueError, match=rf"{family.config_class.__name__} has no {name}, got .*: leave it out"):
            family.causal_lm_class(family.config(**{name: value}))
        family.config(**{name: None})


@pytest.mark.parametrize("family", [family for family in FAMILIES if "mamba" not in family.name], ids=variant_id)
def test_heads_of_a_layer_must_divide_its_channels(family: Family) -> None:
    with pytest.raises(ValueError, match=r"5 heads cannot share evenly|must be a multiple of every entry"):
        family.causal_lm_class(family.config(layer_num_heads=[2, 5]))


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        (GATED_DELTANET, {"layer_num_heads": [2, 1], "num_v_heads": 4}, "layer_num_heads and num_v_heads exclude"),
        (DELTA_NET, {"qk_norm": "l1"}, r"qk_norm must be one of \('l2', 'sum'\), got 'l1'"),
        (DELTA_NET, {"qk_activation": "gelu"}, "qk_activation must be one of .* got 'gelu'"),
        (DELTA_NET, {"use_output_norm": False}, "use_output_norm must be True"),
        (DELTA_NET, {"num_heads": 3}, "expand_k .* 3 heads cannot share evenly"),
        (GATED_DELTANET, {"num_v_heads": 3}, "num_v_heads must be a multiple of 2 heads, got 3"),
        (GATED_DELTANET, {"expand_v": 0.3}, r"expand_v \* head_dim must be an integer above 0, got 1.8"),
        (GATED_DELTANET, {"output_gate_activation": "tanh"}, "output_gate_activation must be one of .* got 'tanh'"),
        (KDA, {"lower_bound": 0.5}, "lower_bound bounds log decays and must be below 0, got 0.5"),
        (KDA, {"safe_gate": True}, "safe_gate needs a lower_bound"),
        (RWKV7, {"num_heads": 4}, r"num_heads \* head_dim must be hidden_size \(16\), got .* leave one of them None"),
        (RWKV7, {"head_dim": 3}, r"num_heads or head_dim must divide hidden_size \(16\), got .*3"),
        (RWKV7, {"head_dim": None}, "num_heads or head_dim must divide hidden_size"),
        (RWKV7, {"value_dim": 24}, r"value_dim must be a multiple of hidden_size \(16\).*got 24"),
        (RWKV7, {"value_dim": [16, 32]}, r"value_dim must be .*got \[16, 32\]"),
        (RWKV7, {"value_dim": [16]}, r"for each of the num_hidden_layers \(2\) layers, got \[16\]"),
        (MAMBA3, {"is_mimo": True}, r"is_mimo must be False, got True: .* \(MIMO\) is not supported"),
        (MAMBA3, {"decay_activation": "relu"}, "decay_activation must be one of .*'heavy_tail'.*, got 'relu'"),
        (MAMBA3, {"rope_fraction": 0.25}, "rope_fraction must be 0.5 or 1, got 0.25"),
        (MAMBA3, {"state_size": 3}, r"state_size \(3\) times rope_fraction \(0.5\) must be at least 2"),
        (MAMBA3, {"dt_min": 1.0}, r"dt_max must be at least dt_min \(1.0\), got 0.1"),
        (MAMBA3, {"num_heads": 3}, r"num_heads \* head_dim \(3 \* 8\) must be hidden_size \* expand \(16 \* 2\)"),
        (MAMBA3, {"n_groups": 3}, r"num_heads \(4\) must be a multiple of n_groups \(3\)"),
    ],
    ids=variant_id,
)
def test_settings_of_the_delta_rule_are_refused_by_name(family: Family, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        family.config(**change)


def test_sizes_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match=r"num_heads \* head_dim|hidden_size \* expand|Inconsistent configuration"):
        StatefulMamba2ForCausalLM(mamba2_config(head_dim=9))


def test_an_automatic_rank_of_steps_may_be_set_after_creation() -> None:
    config = MAMBA.config(hidden_size=40, time_step_rank=6)
    config.time_step_rank = "auto"
    model = MAMBA.causal_lm_class(config)
    assert model.config.time_step_rank == 3  # 40 / 16, rounded up
    assert model.backbone.layers[0].mixer.dt_proj.in_features == 3


@every_family
def test_the_kernel_backend_is_refused_where_it_cannot_run(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    file, name = family.kernel
    layers = importlib.import_module(f"hf_recurrent_lengthgen.models.{file}")
    monkeypatch.setattr(layers, name, None)
    with pytest.raises(ValueError, match=r'not installed: pip install "hf_recurrent_lengthgen\[kernels\]"'):
        build(family, scan_backend="kernel")
    monkeypatch.setattr(layers, name, True)
    with pytest.raises(ValueError, match="runs on CUDA devices only, the inputs are on 'cpu'"):
        build(family, scan_backend="kernel")(random_tokens(1, 2))
    assert build(family, scan_backend="auto")(random_tokens(1, 2)).logits.shape == (1, 2, VOCABULARY)


def test_a_whole_number_is_a_number_in_every_family() -> None:
    for family in FAMILIES:
        assert family.config(initializer_range=0).initializer_range == 0.0
    with pytest.raises(ValueError, match="time_step_limit must be two ascending"):
        mamba2_config(time_step_limit=(0.7, 0.2))
