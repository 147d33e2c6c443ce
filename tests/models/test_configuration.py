"""Configurations, Auto classes and types: Transformers' own everywhere, nothing of theirs replaced."""

import importlib
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    FalconMambaConfig,
    FalconMambaForCausalLM,
    Mamba2Config,
    Mamba2ForCausalLM,
    Mamba2Model,
    MambaConfig,
)

from hf_recurrent_lengthgen.models import STATEFUL_CLASSES, StatefulMambaConfig, StatefulMambaForCausalLM
from hf_recurrent_lengthgen.models.configuration_stateful_mamba2 import StatefulMamba2Config
from hf_recurrent_lengthgen.models.modeling_stateful_mamba2 import StatefulMamba2ForCausalLM

from .families import (
    DELTA_NET,
    FAMILIES,
    GATED_DELTANET,
    GROWING,
    KDA,
    MAMBA,
    MAMBA2,
    MAMBA3,
    RWKV7,
    VOCABULARY,
    Family,
    build,
    random_tokens,
    variant_id,
)
from .family import TINY

every_family = pytest.mark.parametrize("family", FAMILIES, ids=variant_id)
growing_families = pytest.mark.parametrize("family", GROWING, ids=variant_id)


@every_family
def test_the_auto_classes_support_our_model_type(family: Family) -> None:
    config = family.config()
    assert type(AutoConfig.for_model(family.config_class.model_type)) is family.config_class
    assert type(AutoModel.from_config(config)) is family.causal_lm_class.backbone_class
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


def test_infinite_step_limits_survive_saving(tmp_path: Path) -> None:
    MAMBA2.config(time_step_limit=(0.0, float("inf"))).save_pretrained(tmp_path)
    assert tuple(StatefulMamba2Config.from_pretrained(tmp_path).time_step_limit) == (0.0, float("inf"))


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
    with pytest.raises(ValueError, match=r"must be a multiple of 5"):
        family.causal_lm_class(family.config(layer_num_heads=[2, 5]))


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        (MAMBA, {"hidden_act": "relu"}, "hidden_act must be 'silu' or 'swish', got 'relu'"),
        (MAMBA, {"time_step_init_scheme": "ones"}, "must be 'random' or 'constant', got 'ones'"),
        (MAMBA, {"initialization": "fla"}, "initialization must be 'transformers' or 'mamba-ssm', got 'fla'"),
        (MAMBA2, {"initialization": "fla"}, "initialization must be 'transformers' or 'mamba-ssm', got 'fla'"),
        (MAMBA2, {"layer_norm_epsilon": -1e-5}, "layer_norm_epsilon must be from 0 to inf, got -1e-05"),
        (MAMBA2, {"layer_norm_epsilon": math.nan}, "layer_norm_epsilon must be from 0 to inf, got nan"),
        (MAMBA2, {"scan_backend": "triton"}, "scan_backend must be 'auto' or 'torch' or 'kernel', got 'triton'"),
        (MAMBA2, {"hidden_act": "gelu"}, "hidden_act must be 'silu' or 'swish', got 'gelu'"),
        (MAMBA2, {"n_groups": 3}, r"num_heads \(4\) must be a multiple of 3"),
        (MAMBA2, {"training_length": 0}, "training_length must be from 1 to inf, got 0"),
        (GATED_DELTANET, {"layer_num_heads": [2, 1], "num_v_heads": 4}, "layer_num_heads and num_v_heads exclude"),
        (DELTA_NET, {"qk_norm": "l1"}, "qk_norm must be 'l2' or 'sum', got 'l1'"),
        (DELTA_NET, {"qk_activation": "gelu"}, "qk_activation must be 'silu' or .* got 'gelu'"),
        (DELTA_NET, {"use_output_norm": False}, "use_output_norm must be True"),
        (DELTA_NET, {"num_heads": 3}, r"expand_k \* hidden_size \(16\) must be a multiple of 3"),
        (GATED_DELTANET, {"num_v_heads": 3}, r"num_v_heads \(3\) must be a multiple of 2"),
        (GATED_DELTANET, {"expand_v": 0.3}, r"expand_v \* head_dim \(1.8\) must be a multiple of 1"),
        (GATED_DELTANET, {"output_gate_activation": "tanh"}, "output_gate_activation must be .* got 'tanh'"),
        (KDA, {"lower_bound": 0.5}, "lower_bound must be from -inf to 0, got 0.5"),
        (RWKV7, {"num_heads": 4}, r"num_heads \* head_dim must be hidden_size \(16\), got"),
        (RWKV7, {"head_dim": 3}, r"num_heads \* head_dim must be hidden_size \(16\), got .*3"),
        (RWKV7, {"head_dim": None}, r"num_heads \* head_dim must be hidden_size"),
        (RWKV7, {"value_dim": 24}, r"value_dim must be a multiple of hidden_size \(16\).*got 24"),
        (RWKV7, {"value_dim": [16, 32]}, r"value_dim must be .*got \[16, 32\]"),
        (RWKV7, {"value_dim": [16]}, r"for each of the num_hidden_layers \(2\) layers, got \[16\]"),
        (MAMBA3, {"is_mimo": True}, "is_mimo must be False, got True"),
        (MAMBA3, {"decay_activation": "relu"}, "decay_activation must be .*'heavy_tail', got 'relu'"),
        (MAMBA3, {"rope_fraction": 0.25}, "rope_fraction must be 0.5 or 1.0, got 0.25"),
        (MAMBA3, {"num_heads": 3}, r"num_heads \* head_dim \(3 \* 8\) must be hidden_size \* expand \(16 \* 2\)"),
        (MAMBA3, {"n_groups": 3}, r"num_heads \(4\) must be a multiple of 3"),
    ],
    ids=variant_id,
)
def test_settings_that_cannot_be_honored_are_refused(family: Family, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        family.causal_lm_class(family.config(**change))


@every_family
def test_the_kernel_backend_is_refused_where_it_cannot_run(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    file, name = family.kernel
    layers = importlib.import_module(f"hf_recurrent_lengthgen.models.{file}")
    for available, message in (
        (None, r"to be installed \(pip install"),
        (True, "a CUDA device, the inputs are on 'cpu'"),
    ):
        monkeypatch.setattr(layers, name, available)
        with pytest.raises(ValueError, match=message):
            build(family, scan_backend="kernel")(random_tokens(1, 2))
    assert build(family, scan_backend="auto")(random_tokens(1, 2)).logits.shape == (1, 2, VOCABULARY)


def test_a_whole_number_is_a_number_in_every_family() -> None:
    for family in FAMILIES:
        assert family.config(initializer_range=0).initializer_range == 0.0


def test_a_falcon_mamba_file_without_epsilon_has_its_norms(tmp_path: Path) -> None:
    stock = FalconMambaForCausalLM(FalconMambaConfig(**TINY, state_size=4)).eval()
    stock.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({k: v for k, v in json.loads(file.read_text()).items() if k != "mixer_rms_eps"}))
    config = StatefulMambaConfig.from_pretrained(tmp_path)
    tokens = torch.arange(9)[None]
    logits = StatefulMambaForCausalLM.from_pretrained(tmp_path, config=config)(tokens).logits
    torch.testing.assert_close(logits, stock(tokens).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", sorted(STATEFUL_CLASSES))
def test_a_config_from_an_upstream_file_has_our_type(name: str) -> None:
    config_class: Any = STATEFUL_CLASSES[name].config_class
    assert config_class.from_dict({"model_type": name}).model_type == config_class.model_type


def test_a_config_from_upstream_fields_has_our_type() -> None:
    config = StatefulMambaConfig(**MambaConfig(**TINY).to_dict())
    assert config.model_type == "stateful_mamba"  # as "mamba", PEFT refuses adapters on out_proj
