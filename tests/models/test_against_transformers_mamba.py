"""Mamba-1 and FalconMamba against Transformers' own, on full passes, where the latter are right.

With a state and more than one token they are not: they drop the recurrent part.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import softplus
from transformers import FalconMambaConfig, FalconMambaForCausalLM, MambaConfig, MambaForCausalLM

from hf_recurrent_lengthgen.models.configuration_stateful_mamba import StatefulMambaConfig
from hf_recurrent_lengthgen.models.modeling_stateful_mamba import StatefulMambaForCausalLM
from tests.versions import HAS_HYBRIDS, SINCE_5_23

from .families import perturb, random_tokens
from .family import TINY

STOCK = {"mamba": (MambaConfig, MambaForCausalLM), "falcon_mamba": (FalconMambaConfig, FalconMambaForCausalLM)}
every_kind = pytest.mark.parametrize("kind", STOCK)


def pair(kind: str, **changes: Any) -> tuple[StatefulMambaForCausalLM, Any]:
    """Ours from their configuration and with their weights, and theirs."""
    config_class, model_class = STOCK[kind]
    torch.manual_seed(0)
    theirs = perturb(model_class(config_class(**(TINY | {"state_size": 5} | changes))))
    ours = StatefulMambaForCausalLM(StatefulMambaConfig(**theirs.config.to_dict()))
    ours.load_state_dict(theirs.state_dict(), strict=True)
    return ours.eval(), theirs.eval()


def stock_logits(model: Any, tokens: Tensor, **options: Any) -> Tensor:
    return model(tokens, use_cache=False, **options).logits


def assert_close(ours: Tensor, theirs: Tensor, tolerance: float = 2e-5) -> None:
    assert ours.shape == theirs.shape
    assert (ours - theirs).abs().max() <= tolerance * theirs.abs().max()


@every_kind
def test_their_configuration_says_which_of_the_two_it_is(kind: str) -> None:
    ours, theirs = pair(kind, mixer_rms_eps=1e-3) if kind == "falcon_mamba" else pair(kind)
    assert ours.config.mixer_rms_eps == (1e-3 if kind == "falcon_mamba" else None)
    shapes = [{name: value.shape for name, value in model.state_dict().items()} for model in (ours, theirs)]
    assert shapes[0] == shapes[1]


@every_kind
@pytest.mark.parametrize("length", [1, 2, 3, 16, 17, 60])
def test_logits_loss_and_all_gradients_are_the_same(kind: str, length: int) -> None:
    ours, theirs = pair(kind)
    tokens = random_tokens(2, length)
    our_output = ours.train()(tokens, labels=tokens)
    their_output = theirs.train()(tokens, labels=tokens, use_cache=False)
    assert_close(our_output.logits, their_output.logits)
    if length == 1:
        return  # nothing to score: the loss of both is NaN
    assert_close(our_output.loss, their_output.loss)
    our_output.loss.backward()
    their_output.loss.backward()
    gradients = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    largest = max(gradient.abs().max() for gradient in gradients.values())
    for name, parameter in ours.named_parameters():
        assert parameter.grad is not None, name
        error = (parameter.grad - gradients[name]).norm()
        assert error < (1e-4 if SINCE_5_23 else 2e-4) * gradients[name].norm() + 1e-6 * largest, name


@every_kind
@pytest.mark.parametrize(
    "changes",
    [
        {"use_bias": True, "use_conv_bias": False, "conv_kernel": 2, "tie_word_embeddings": False},
        {"intermediate_size": 24, "expand": 16, "state_size": 1, "time_step_rank": 5},
        {"residual_in_fp32": False, "layer_norm_epsilon": 0.1},
    ],
    ids=["biases", "sizes", "norms"],
)
def test_every_field_of_the_configuration_is_honored(kind: str, changes: dict[str, Any]) -> None:
    ours, theirs = pair(kind, **changes)
    tokens = random_tokens(2, 20)
    assert_close(ours(tokens).logits, stock_logits(theirs, tokens))


def test_the_epsilon_of_the_mixer_norms_matters() -> None:
    tokens = random_tokens(2, 20)
    ours, theirs = pair("falcon_mamba", mixer_rms_eps=0.5)
    assert_close(ours(tokens).logits, stock_logits(theirs, tokens))
    ours.config.mixer_rms_eps = 1e-6
    assert (ours(tokens).logits - stock_logits(theirs, tokens)).abs().max() > 0.01


@every_kind
@pytest.mark.parametrize("cut", [1, 2, 3, 17])
def test_a_continuation_over_several_tokens_equals_their_full_pass(kind: str, cut: int) -> None:
    """Also from their cache, which they themselves do not read then."""
    ours, theirs = pair(kind)
    tokens = random_tokens(2, 24)
    whole = stock_logits(theirs, tokens)
    state = ours(tokens[:, :cut]).final_state
    assert_close(ours(tokens[:, cut:], initial_state=state).logits, whole[:, cut:])


@every_kind
@pytest.mark.skipif(not HAS_HYBRIDS, reason="an earlier cache")
def test_the_final_state_is_that_of_the_cache_which_they_drop(kind: str) -> None:
    ours, theirs = pair(kind)
    tokens = random_tokens(2, 24)
    output = theirs(tokens[:, :20], use_cache=True)
    name = next(name for name in ("cache", "cache_params") if name in output)
    cache = output[name]
    final = ours(tokens[:, :20]).final_state
    for layer, stock in zip(final, cache.layers, strict=True):
        recurrent, conv = (
            value[0] if isinstance(value, (list, tuple, dict)) else value
            for value in (stock.recurrent_states, stock.conv_states)
        )
        assert_close(layer.recurrent, recurrent)
        assert_close(layer.conv, conv[..., 1:])  # theirs holds K columns, the oldest is never used
    truth = stock_logits(theirs, tokens)[:, 20:]
    assert_close(ours(tokens[:, 20:], initial_state=final).logits, truth)
    continued = theirs(tokens[:, 20:], **{name: cache}).logits
    assert (continued - truth).abs().max() > 0.01 * truth.abs().max()


@every_kind
def test_greedy_generation_is_the_same(kind: str) -> None:
    ours, theirs = pair(kind)
    prompt, options = random_tokens(2, 7), {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    assert torch.equal(ours.generate(prompt, **options), theirs.generate(prompt, **options))


@every_kind
def test_bf16_models_agree_within_bf16_and_ours_is_closer_to_the_exact_one(kind: str) -> None:
    ours, theirs = pair(kind)
    tokens = random_tokens(2, 50)
    exact = ours(tokens).logits
    a, b = ours.bfloat16()(tokens).logits, stock_logits(theirs.bfloat16(), tokens).float()
    assert (a - b).norm() < 0.04 * b.norm()
    assert (a - exact).norm() < 1.2 * (b - exact).norm()


@every_kind
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_a_stock_checkpoint_loads_and_behaves_the_same(kind: str, tied: bool, tmp_path: Path) -> None:
    _, theirs = pair(kind, tie_word_embeddings=tied)
    theirs.save_pretrained(tmp_path)
    config = StatefulMambaConfig(**theirs.config.to_dict())
    ours, info = StatefulMambaForCausalLM.from_pretrained(tmp_path, config=config, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    tokens = random_tokens(2, 20)
    assert_close(ours.eval()(tokens).logits, stock_logits(theirs, tokens))


@every_kind
@pytest.mark.parametrize("scheme", ["random", "constant"])
def test_initial_weights_follow_the_same_distributions(kind: str, scheme: str) -> None:
    changes = {
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "time_step_init_scheme": scheme,
        "time_step_scale": 0.5,
        "rescale_prenorm_residual": True,
        "initializer_range": 0.3,
        "tie_word_embeddings": False,
    }
    config_class, model_class = STOCK[kind]
    torch.manual_seed(0)
    theirs = model_class(config_class(**(TINY | {"state_size": 5} | changes)))
    ours = StatefulMambaForCausalLM(StatefulMambaConfig(**theirs.config.to_dict()))
    for name, a in ours.state_dict().items():
        b = theirs.state_dict()[name]
        if "dt_proj.bias" in name:
            steps = softplus(a)
            assert bool(((steps > 0.99e-3) & (steps < 0.101)).all()), name
        elif a.unique().numel() < 50:  # constants
            torch.testing.assert_close(a, b, msg=name)
        else:
            assert abs(a.mean()) < 0.1 * a.std(), name
            assert a.std() == pytest.approx(float(b.std()), rel=0.12), name


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "relu"}, "hidden_act must be \"silu\", got 'relu'"),
        ({"time_step_init_scheme": "ones"}, 'must be "random" or "constant", got \'ones\''),
    ],
)
def test_what_is_not_honored_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StatefulMambaForCausalLM(StatefulMambaConfig(**(TINY | changes)))
