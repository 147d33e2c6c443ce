"""RWKV-5 against the official code for Transformers, whose results are stored in golden files.

`make_rwkv5_fixture.py` made them with modeling_rwkv5.py and configuration_rwkv5.py, on Transformers 4.38.2, of
github.com/BBuf/RWKV-World-HF-Tokenizer, where the remote code of RWKV/rwkv-5-world-* comes from:

- rwkv5: folder rwkv5_model of commit 699270b (May 2024), which divides by head_size_divisor = 8.
- rwkv5_no_divisor: folder rwkv_world_v5_model_batch of commit c5ce9ce (December 2023), which does not divide, and
  where num_attention_heads is the size of a head; with another layer_norm_epsilon, which its ln_x and ln_out ignore.

Both ran their path without kernels in float32: plain, in two calls, and for gradients.
"""

import pytest
import torch
from torch import Tensor

from hf_recurrent_lengthgen.models.configuration_stateful_rwkv5 import StatefulRWKV5Config
from hf_recurrent_lengthgen.models.modeling_stateful_rwkv5 import StatefulRWKV5ForCausalLM
from hf_recurrent_lengthgen.models.state_value import LayerState, RecurrentState

from .test_against_fla import assert_close, assert_same_state
from .upstream_fixtures import RWKV5_NAMES, Fixture, load_fixture

GRADIENT_TOLERANCE = 4e-5  # relative to the largest entry, both in float32
every_fixture = pytest.mark.parametrize("name", RWKV5_NAMES)


def build(fixture: Fixture) -> StatefulRWKV5ForCausalLM:
    """Our model from the official configuration and weights as they are."""
    fields = {key: value for key, value in fixture.config.items() if key not in ("model_type", "transformers_version")}
    model = StatefulRWKV5ForCausalLM(StatefulRWKV5Config(**fields))
    model.load_state_dict(fixture.weights, strict=True)
    return model.eval()


def as_state(state: dict[str, Tensor]) -> RecurrentState:
    """The official state in our layout: values before keys, both token shifts together."""
    return tuple(
        LayerState(
            state[f"{index}.recurrent_state"].mT,
            torch.cat([state[f"{index}.conv_state"], state[f"{index}.ffn_state"]], dim=1)[..., None],
        )
        for index in range(len(state) // 3)
    )


def test_there_are_golden_files_of_both_variants() -> None:
    assert [load_fixture(name).config["head_size_divisor"] for name in RWKV5_NAMES] == [8, 1]


@every_fixture
def test_logits_and_final_states_are_the_official_ones(name: str) -> None:
    fixture = load_fixture(name)
    with torch.no_grad():
        output = build(fixture)(fixture.run["input_ids"])
    assert_close("logits", output.logits, fixture.run["logits"])
    assert_same_state(output.final_state, as_state(fixture.state))


@every_fixture
def test_an_official_state_continues_as_our_initial_state(name: str) -> None:
    fixture = load_fixture(name)
    model, ids, split = build(fixture), fixture.run["input_ids"], fixture.split
    state = as_state(fixture.state_at_split)
    with torch.no_grad():
        assert_same_state(model(ids[:, :split]).final_state, state)
        output = model(ids[:, split:], initial_state=state)
    assert_close("logits", output.logits, fixture.run["continued_logits"][:, split:])
    assert_same_state(output.final_state, as_state(fixture.state))


@every_fixture
def test_loss_and_gradients_are_the_official_ones(name: str) -> None:
    fixture = load_fixture(name)
    model = build(fixture)
    loss = model(fixture.run["input_ids"], labels=fixture.run["input_ids"]).loss
    assert_close("loss", loss.detach(), fixture.run["loss"])
    parameters = dict(model.named_parameters())
    assert parameters.keys() == fixture.grad.keys()
    for key, gradient in zip(parameters, torch.autograd.grad(loss, list(parameters.values())), strict=True):
        assert_close(key, gradient, fixture.grad[key], GRADIENT_TOLERANCE)
