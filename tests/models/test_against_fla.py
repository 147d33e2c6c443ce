"""Our families against the models of others, whose results are stored in golden files: fla's, and the official RWKV-5.

Those of RWKV-5 were made with modeling_rwkv5.py and configuration_rwkv5.py, on Transformers 4.38.2, of
github.com/BBuf/RWKV-World-HF-Tokenizer, where the remote code of RWKV/rwkv-5-world-* comes from:

- rwkv5: folder rwkv5_model of commit 699270b (May 2024), which divides by head_size_divisor = 8.
- rwkv5_no_divisor: folder rwkv_world_v5_model_batch of commit c5ce9ce (December 2023), which does not divide, and
  where num_attention_heads is the size of a head; with another layer_norm_epsilon, which its ln_x and ln_out ignore.

Both ran their path without kernels in float32: plain, in two calls, and for gradients.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from hf_recurrent_lengthgen.models.modeling_stateful_delta_net import StatefulDeltaNetForCausalLM
from hf_recurrent_lengthgen.models.modeling_stateful_gated_deltanet import StatefulGatedDeltaNetForCausalLM
from hf_recurrent_lengthgen.models.modeling_stateful_gla import StatefulGLAForCausalLM
from hf_recurrent_lengthgen.models.modeling_stateful_hgrn2 import StatefulHGRN2ForCausalLM
from hf_recurrent_lengthgen.models.modeling_stateful_kda import StatefulKDAForCausalLM
from hf_recurrent_lengthgen.models.modeling_stateful_linear_attention import StatefulLinearAttentionForCausalLM
from hf_recurrent_lengthgen.models.modeling_stateful_rwkv5 import StatefulRWKV5ForCausalLM
from hf_recurrent_lengthgen.models.modeling_stateful_rwkv6 import StatefulRWKV6ForCausalLM
from hf_recurrent_lengthgen.models.modeling_stateful_rwkv7 import StatefulRWKV7ForCausalLM
from hf_recurrent_lengthgen.models.state_value import LayerState, RecurrentState

from .upstream_fixtures import NAMES, RWKV5_NAMES, Fixture, load_fixture

MODELS: dict[str, Any] = {
    "gla": StatefulGLAForCausalLM,
    "rwkv5": StatefulRWKV5ForCausalLM,
    "rwkv6": StatefulRWKV6ForCausalLM,
    "rwkv7": StatefulRWKV7ForCausalLM,
    "hgrn2": StatefulHGRN2ForCausalLM,
    "delta_net": StatefulDeltaNetForCausalLM,
    "gated_deltanet": StatefulGatedDeltaNetForCausalLM,
    "kda": StatefulKDAForCausalLM,
    "linear_attn": StatefulLinearAttentionForCausalLM,
}
# Relative to the largest entry, both in float32. Where outputs are nearly 0 before their norm, fla's gradients are
# 2e-4 away from those in float64.
TOLERANCE, GRADIENT_TOLERANCE = 1e-5, dict.fromkeys(NAMES, 4e-4) | dict.fromkeys(RWKV5_NAMES, 4e-5)
every_fixture = pytest.mark.parametrize("name", [*NAMES, *RWKV5_NAMES])


def build(fixture: Fixture) -> Any:
    """Our model from their configuration and weights as they are."""
    fields = {key: value for key, value in fixture.config.items() if key not in ("model_type", "transformers_version")}
    causal_lm = MODELS[fixture.config["model_type"]]
    model = causal_lm(causal_lm.config_class(**fields))
    model.load_state_dict(fixture.weights, strict=True)
    return model.eval()


def as_state(cache: dict[str, Tensor], config: dict[str, Any]) -> RecurrentState:
    """Their cache, as `Fixture` describes it, in our layout: values before keys, both token shifts together."""
    layers = []
    for index in range(config["num_hidden_layers"]):
        parts = {key.split(".", 1)[1]: value for key, value in cache.items() if key.startswith(f"{index}.")}
        conv = parts["recurrent_state" if "recurrent_state" in parts else "recurrent_state.0"].new_empty(2, 0)
        match config["model_type"]:
            case "gla" | "hgrn2" | "delta_net" | "gated_deltanet" | "kda":
                recurrent = parts["recurrent_state"]
                if config["model_type"] == "delta_net":
                    recurrent = recurrent.mT
                if config["use_short_conv"]:
                    conv = torch.cat([parts[f"conv_state.{part}"][..., 1:] for part in range(3)], dim=1)
            case "rwkv5" | "rwkv6" | "rwkv7":
                recurrent = parts["recurrent_state"].mT
                conv = torch.cat([parts["conv_state"], parts["ffn_state"]], dim=1)[..., None]
            case "linear_attn" if config["norm_feature_map"]:
                recurrent = torch.cat([parts["recurrent_state.0"].mT, parts["recurrent_state.1"].transpose(1, 2)], 2)
            case _:
                recurrent = parts["recurrent_state"].mT
        layers.append(LayerState(recurrent, conv))
    return tuple(layers)


def assert_close(name: str, actual: Tensor, expected: Tensor, tolerance: float = TOLERANCE) -> None:
    assert actual.shape == expected.shape, name
    if expected.numel():  # not a part that the layer lacks
        error = float((actual - expected).abs().max() / expected.abs().max())
        assert error <= tolerance, (name, error)


def assert_same_state(actual: RecurrentState, expected: RecurrentState) -> None:
    for index, layers in enumerate(zip(actual, expected, strict=True)):
        for part, ours, theirs in zip(LayerState._fields, *layers, strict=True):
            assert_close(f"{part} {index}", ours, theirs)


def test_there_are_golden_files_of_all_families() -> None:
    assert {load_fixture(name).config["model_type"] for name in (*NAMES, *RWKV5_NAMES)} == set(MODELS)
    assert [load_fixture(name).config["head_size_divisor"] for name in RWKV5_NAMES] == [8, 1]


@every_fixture
def test_logits_and_final_states_are_theirs(name: str) -> None:
    fixture = load_fixture(name)
    with torch.no_grad():
        output = build(fixture)(fixture.run["input_ids"])
    assert_close("logits", output.logits, fixture.run["logits"])
    assert_same_state(output.final_state, as_state(fixture.state, fixture.config))


@every_fixture
def test_their_cache_continues_as_our_initial_state(name: str) -> None:
    fixture = load_fixture(name)
    model, ids, split = build(fixture), fixture.run["input_ids"], fixture.split
    cache = as_state(fixture.state_at_split, fixture.config)
    with torch.no_grad():
        assert_same_state(model(ids[:, :split]).final_state, cache)
        output = model(ids[:, split:], initial_state=cache)
    assert_close("logits", output.logits, fixture.run["continued_logits"][:, split:])
    assert_same_state(output.final_state, as_state(fixture.state, fixture.config))


@every_fixture
def test_loss_and_gradients_are_theirs(name: str) -> None:
    fixture = load_fixture(name)
    model = build(fixture)
    loss = model(fixture.run["input_ids"], labels=fixture.run["input_ids"]).loss
    assert_close("loss", loss.detach(), fixture.run["loss"])
    parameters = dict(model.named_parameters())
    assert parameters.keys() == fixture.grad.keys()
    for key, gradient in zip(parameters, torch.autograd.grad(loss, list(parameters.values())), strict=True):
        assert_close(key, gradient, fixture.grad[key], GRADIENT_TOLERANCE[name])
