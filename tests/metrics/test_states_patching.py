"""Exchanges of heads, on a model of which one head is broken, and against plain forward passes."""

import copy
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from hf_recurrent_lengthgen.hybrids import stateful
from hf_recurrent_lengthgen.metrics.states.patching import Heads, exchange, patch_heads
from hf_recurrent_lengthgen.models.state_value import LayerState, RecurrentState
from tests.hybrids.tiny_models import tiny_model
from tests.models.families import GLA, MAMBA, MAMBA2, RWKV6, Family, build, random_state, random_tokens, variant_id

T, VOCABULARY = 16, 7


class OneBrokenHead(nn.Module):
    """Two layers of three heads that all count tokens; once head 2 of layer 1 has counted more than T, the model
    prefers a token that never comes, by 4 nats. Until then all tokens are equally likely."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.config = SimpleNamespace(vocab_size=VOCABULARY, model_type="toy")

    def zero_state(self, rows: int) -> RecurrentState:
        return tuple(LayerState(torch.zeros(rows, 3, 2, 2), torch.zeros(rows, 0)) for _ in range(2))

    def forward(
        self, input_ids: Tensor, initial_state: RecurrentState | None = None, output_final_state: bool = True
    ) -> SimpleNamespace:
        rows, length = input_ids.shape
        state = initial_state or self.zero_state(rows)
        count = state[1].recurrent[:, 2, 0, 0][:, None] + torch.arange(1, length + 1)
        logits = torch.zeros(rows, length, VOCABULARY)
        logits[..., 0] = torch.where(count > T, 4.0, 0.0) * self.scale
        final = tuple(LayerState(layer.recurrent + length, layer.conv) for layer in state)
        return SimpleNamespace(logits=logits, final_state=final)


def test_the_broken_head_alone_makes_up_the_harm() -> None:
    tokens = np.random.default_rng(0).integers(1, VOCABULARY, (5, 101))
    heads = [(layer, head) for layer in range(2) for head in range(3)]
    groups = [*([head] for head in heads), [(1, 2), (0, 0)], [(1, 0), (1, 1)]]
    found = patch_heads(OneBrokenHead(), tokens, T, groups, batch_size=2, progress=False)
    assert (found.position, found.kept, found.width) == (92, 8, 8)
    broken = math.log(math.exp(4) + VOCABULARY - 1)
    np.testing.assert_allclose(found.full, broken, rtol=1e-6)
    np.testing.assert_allclose(found.short, math.log(VOCABULARY), rtol=1e-6)
    harm = broken - math.log(VOCABULARY)
    np.testing.assert_allclose(found.harm, harm, rtol=1e-6)
    expected = np.array([harm if (1, 2) in group else 0 for group in groups])[:, None]
    np.testing.assert_allclose(found.restored, np.broadcast_to(expected, (8, 5)), atol=1e-6)
    np.testing.assert_allclose(found.broken, np.broadcast_to(expected, (8, 5)), atol=1e-6)


@pytest.mark.parametrize("family", [MAMBA2, GLA, RWKV6], ids=variant_id)
def test_each_exchange_equals_plain_forward_passes(family: Family) -> None:
    model, tokens = build(family, torch.float64), random_tokens(3, 34)
    with torch.no_grad():
        full = model(tokens[:, :30]).final_state
        short = model(tokens[:, 27:30]).final_state

        def nll(state: RecurrentState) -> np.ndarray:
            logits = model(tokens[:, 30:33], initial_state=state).logits
            return np.asarray(cross_entropy(logits.mT, tokens[:, 31:34], reduction="none").mean(1))

        def mixed(state: RecurrentState, other: RecurrentState) -> RecurrentState:
            part = state[1].recurrent.clone()
            part[:, 1] = other[1].recurrent[:, 1]
            return (state[0], state[1]._replace(recurrent=part))

        found = patch_heads(model, tokens, 6, [[(1, 1)]], batch_size=2, progress=False)
        np.testing.assert_allclose(found.full, nll(full), atol=1e-6)
        np.testing.assert_allclose(found.short, nll(short), atol=1e-6)
        np.testing.assert_allclose(found.restored[0], nll(full) - nll(mixed(full, short)), atol=1e-6)
        np.testing.assert_allclose(found.broken[0], nll(mixed(short, full)) - nll(short), atol=1e-6)
    assert np.abs(found.restored).max() > 1e-4


@pytest.mark.parametrize("model_type", ["bamba", "olmo_hybrid", "zamba"])
def test_each_exchange_in_a_hybrid_equals_plain_forward_passes(model_type: str) -> None:
    """Heads, keys and both, with batches of rows that carry their keys."""
    model = stateful(tiny_model(model_type).double())
    tokens = random_tokens(3, 34)
    layer = next(index for index, part in enumerate(model.state_shapes()) if index and part.recurrent != (0,))
    groups: list[Heads] = [[(layer, 1)], ["attention"], [(layer, 1), "attention"]]
    with torch.no_grad():

        def read(start: int, keys: Any) -> RecurrentState:
            state: RecurrentState = model(tokens[:, start:30], attention_cache=keys).final_state
            return state

        keys, short_keys = model.new_attention_cache(), model.new_attention_cache()
        full, short = read(0, keys), read(27, short_keys)

        def nll(state: RecurrentState, cache: Any) -> np.ndarray:
            logits = model(tokens[:, 30:33], initial_state=state, attention_cache=copy.deepcopy(cache)).logits
            return np.asarray(cross_entropy(logits.mT, tokens[:, 31:34], reduction="none").mean(1))

        def mixed(state: RecurrentState, other: RecurrentState) -> RecurrentState:
            part = state[layer].recurrent.clone()
            rows = slice(1, 2) if part.ndim == 4 else slice(part.shape[1] // 16, part.shape[1] // 8)  # 16 groups
            part[:, rows] = other[layer].recurrent[:, rows]
            return (*state[:layer], state[layer]._replace(recurrent=part), *state[layer + 1 :])

        found = patch_heads(model, tokens, 6, groups, batch_size=2, progress=False)
        with_short, with_full = mixed(full, short), mixed(short, full)
        expected_full, expected_short = nll(full, keys), nll(short, short_keys)
        np.testing.assert_allclose(found.full, expected_full, atol=1e-6)
        np.testing.assert_allclose(found.short, expected_short, atol=1e-6)
        restored = [nll(with_short, keys), nll(full, short_keys), nll(with_short, short_keys)]
        broken = [nll(with_full, short_keys), nll(short, keys), nll(with_full, keys)]
    np.testing.assert_allclose(found.restored, expected_full - restored, atol=1e-6)
    np.testing.assert_allclose(found.broken, np.array(broken) - expected_short, atol=1e-6)
    assert np.abs(found.restored).max(1).min() > 2e-6


def test_channels_are_exchanged_in_groups_and_no_argument_changes() -> None:
    model = build(MAMBA)
    one, other = random_state(model, 2), random_state(model, 2, seed=9)
    before = one[0].recurrent.clone()
    found = exchange(one, other, [(0, 3), (0, 15)])
    channels = [6, 7, 30, 31]  # 32 channels in 16 groups
    assert torch.equal(found[0].recurrent[:, channels], other[0].recurrent[:, channels])
    rest = [channel for channel in range(32) if channel not in channels]
    assert torch.equal(found[0].recurrent[:, rest], one[0].recurrent[:, rest])
    assert torch.equal(one[0].recurrent, before)
    assert torch.equal(found[1].recurrent, one[1].recurrent)
    assert torch.equal(found[0].conv, one[0].conv)


@pytest.mark.parametrize(
    ("model_type", "groups", "training_length", "message"),
    [
        ("", [[(2, 0)]], 16, r"got \{\(2, 0\)\}"),
        ("", [[(0, 4)]], 16, r"layers of StatefulMamba2ForCausalLM have \[4, 4\].*got \{\(0, 4\)\}"),
        ("", [[(0, -1)]], 16, r"got \{\(0, -1\)\}"),
        ("", [["attention"]], 16, "got {'attention'}"),
        ("bamba", [["attention", "keys"]], 16, "of BambaForCausalLM have .*got {'keys'}"),
        ("bamba", [["attention", (1, 0)]], 16, r"\[8, 0, 8\].*got \{\(1, 0\)\}"),
        ("", [[(0, 0)]], 3, "training_length must be at least 4"),
        ("", [[(0, 0)]], 60, "too few"),
    ],
)
def test_what_cannot_be_exchanged_is_refused(model_type: str, groups: Any, training_length: int, message: str) -> None:
    model = stateful(tiny_model(model_type)) if model_type else build(MAMBA2)
    with pytest.raises(ValueError, match=message):
        patch_heads(model, random_tokens(2, 41), training_length, groups, progress=False)
