"""Mamba-2 against Transformers' own Mamba-2, on full passes, where the latter is right.

It is wrong, in some versions, in what is left out here: `n_groups` above 1 without a grouped norm (mamba-ssm
groups it; Transformers does from a 5.x release on), state and left padding together.
"""

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Mamba2Config, Mamba2ForCausalLM, Mamba2Model
from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated

from hf_recurrent_lengthgen.models.configuration_stateful_mamba2 import StatefulMamba2Config
from hf_recurrent_lengthgen.models.modeling_stateful_mamba2 import StatefulMamba2ForCausalLM, StatefulMamba2Model

from .families import mamba2_config, perturb, random_tokens

STOCK_GROUPS_ITS_NORM = "group_size" in inspect.signature(MambaRMSNormGated).parameters
groups = pytest.mark.parametrize(
    "n_groups",
    [
        1,
        pytest.param(
            2,
            marks=pytest.mark.skipif(
                not STOCK_GROUPS_ITS_NORM,
                reason="this Transformers norms all groups of Mamba-2 together, unlike mamba-ssm and the checkpoints",
            ),
        ),
    ],
)


def pair(**changes: Any) -> tuple[StatefulMamba2ForCausalLM, Mamba2ForCausalLM]:
    """Ours and theirs with the same weights."""
    config = mamba2_config(**changes)
    torch.manual_seed(0)
    theirs = perturb(Mamba2ForCausalLM(stock_config(config)))
    ours = StatefulMamba2ForCausalLM(config)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    return ours.eval(), theirs.eval()


def stock_config(config: StatefulMamba2Config) -> Mamba2Config:
    fields = config.to_dict()
    return Mamba2Config(
        **{name: fields[name] for name in Mamba2Config().to_dict() if name in fields and name != "model_type"}
    )


def stock_final_state(cache: Any, layer: int) -> tuple[Tensor, Tensor]:
    """Recurrent state and the K convolution columns."""
    return cache.layers[layer].recurrent_states, cache.layers[layer].conv_states


def first(value: Any) -> Tensor:
    return value[0] if isinstance(value, (list, tuple, dict)) else value


def assert_close(ours: Tensor, theirs: Tensor, tolerance: float = 2e-5) -> None:
    assert ours.shape == theirs.shape
    assert (ours - theirs).abs().max() <= tolerance * theirs.abs().max()


def test_the_parameters_have_the_names_and_shapes_of_transformers() -> None:
    ours, theirs = pair()
    shapes = [{name: value.shape for name, value in model.state_dict().items()} for model in (ours, theirs)]
    assert shapes[0] == shapes[1]


@pytest.mark.thinned(3)
@groups
@pytest.mark.parametrize("length", [1, 2, 3, 15, 16, 17, 100])
@pytest.mark.parametrize("limit", [(0.0, float("inf")), (0.1, 0.6)], ids=["no limit", "limit"])
def test_logits_loss_and_all_gradients_are_the_same(length: int, limit: tuple[float, float], n_groups: int) -> None:
    ours, theirs = pair(n_groups=n_groups, time_step_limit=limit)
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
        assert error < 1e-4 * gradients[name].norm() + 1e-6 * largest, name


@groups
@pytest.mark.parametrize("length", [1, 2, 3, 5, 100])
def test_the_final_state_is_that_of_the_cache(length: int, n_groups: int) -> None:
    ours, theirs = pair(n_groups=n_groups)
    tokens = random_tokens(2, length)
    cache = theirs(tokens, use_cache=True)
    cache = getattr(cache, "cache_params", None) or cache.past_key_values
    for index, layer in enumerate(ours(tokens).final_state):
        recurrent, conv = (first(part) for part in stock_final_state(cache, index))
        assert_close(layer.recurrent, recurrent)
        assert conv.shape[2] == layer.conv.shape[2] + 1  # theirs holds K columns, the oldest is never used
        assert_close(layer.conv, conv[..., 1:])


@groups
def test_left_padding_without_a_state_is_the_same(n_groups: int) -> None:
    ours, theirs = pair(n_groups=n_groups)
    tokens = random_tokens(2, 12)
    mask = torch.ones(2, 12).long()
    mask[0, :5] = 0
    real = mask.bool()
    assert_close(
        ours(tokens, attention_mask=mask).logits[real],
        theirs(tokens, attention_mask=mask, use_cache=False).logits[real],
    )


@groups
def test_greedy_generation_is_the_same(n_groups: int) -> None:
    ours, theirs = pair(n_groups=n_groups)
    prompt, options = random_tokens(2, 7), {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    assert torch.equal(ours.generate(prompt, **options), theirs.generate(prompt, **options))


def test_bf16_models_agree_within_bf16() -> None:
    ours, theirs = (model.bfloat16() for model in pair(n_groups=1, residual_in_fp32=True))
    tokens = random_tokens(2, 50)
    a, b = ours(tokens).logits, theirs(tokens, use_cache=False).logits.float()
    assert (a - b).norm() < 0.02 * b.norm()


@pytest.mark.parametrize(("in_fp32", "dtype"), [(True, torch.float32), (False, torch.bfloat16)])
def test_the_residual_stream_of_a_bf16_model_is_float32_where_asked_for(in_fp32: bool, dtype: torch.dtype) -> None:
    ours, theirs = (model.bfloat16() for model in pair(n_groups=1, residual_in_fp32=in_fp32))
    tokens = random_tokens(2, 5)
    assert ours.backbone(tokens, output_hidden_states=True).hidden_states[1].dtype == dtype
    assert ours(tokens).logits.dtype == torch.float32
    assert theirs.backbone.layers[0](theirs.backbone.embeddings(tokens)).dtype == dtype


@pytest.mark.parametrize("tied", [False, True])
def test_a_stock_checkpoint_loads_and_behaves_the_same(tmp_path: Path, tied: bool) -> None:
    _, theirs = pair(n_groups=1, tie_word_embeddings=tied)
    theirs.save_pretrained(tmp_path)
    config = StatefulMamba2Config(**{k: v for k, v in theirs.config.to_dict().items() if k != "model_type"})
    ours, info = StatefulMamba2ForCausalLM.from_pretrained(tmp_path, config=config, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    tokens = random_tokens(2, 20)
    assert_close(ours.eval()(tokens).logits, theirs(tokens, use_cache=False).logits)


def test_the_backbone_is_the_same() -> None:
    ours, theirs = pair(n_groups=1)
    tokens = random_tokens(2, 9)
    assert isinstance(ours.backbone, StatefulMamba2Model)
    assert isinstance(theirs.backbone, Mamba2Model)
    a, b = ours.backbone(tokens), theirs.backbone(tokens, use_cache=False)
    assert_close(a.last_hidden_state, b.last_hidden_state)


def test_initial_weights_follow_the_same_distributions() -> None:
    changes = {"hidden_size": 64, "num_heads": 16, "num_hidden_layers": 3, "n_groups": 1}
    torch.manual_seed(0)
    ours = StatefulMamba2ForCausalLM(mamba2_config(**changes))
    theirs = Mamba2ForCausalLM(stock_config(mamba2_config(**changes)))
    for name, a in ours.state_dict().items():
        b = theirs.state_dict()[name]
        if "embeddings" in name or "proj" in name or "conv1d.weight" in name or "lm_head" in name:
            assert abs(a.mean()) < 0.1 * a.std(), name
            assert a.std() == pytest.approx(float(b.std()), rel=0.12), name
        elif "dt_bias" in name:
            steps = torch.nn.functional.softplus(a)
            assert bool(((steps > 0.99e-3) & (steps < 0.101)).all()), name
        else:
            torch.testing.assert_close(a, b, msg=name)
