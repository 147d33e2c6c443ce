"""Mamba with attention in some layers, the reference models of arXiv:2410.11135."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_recurrent_lengthgen.evaluation.streaming import stream_nll
from hf_recurrent_lengthgen.models.modeling_generation import RecurrentCache
from hf_recurrent_lengthgen.models.state_value import LayerShape, RecurrentState
from hf_recurrent_lengthgen.trainers import (
    InitialStateConfig,
    StatePassingConfig,
    StatePassingTrainer,
    ZeroStateTrainer,
)

from .families import MAMBA, MAMBA2, Family, build, random_state, random_tokens, variant_id
from .law import assert_equal_up_to, checkpointed, model_step, run_in_chunks

both_families = pytest.mark.parametrize("family", [MAMBA, MAMBA2], ids=variant_id)
LINEAR = {"attention_layers": [1], "attention_kind": "linear", "attention_head_dim": 3}
SOFTMAX = {"attention_layers": [1], "attention_head_dim": 6}


def model_of(family: Family, dtype: torch.dtype = torch.float64, **changes: Any) -> Any:
    return build(family, dtype, num_hidden_layers=3, **changes)


def ran(model: Any, **inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    """What the mixer of layer 1 read and gave, (T, D) each, and its state before, in row 0."""
    seen: list[Any] = []
    hook = model.backbone.layers[1].mixer.register_forward_hook(lambda _, args, out: seen.extend([args, out[0]]))
    model(**inputs)
    hook.remove()
    (x, state, *_), y = seen
    return x[0], y[0], state.recurrent[0]


@both_families
def test_softmax_attention_equals_a_loop(family: Family) -> None:
    model = model_of(family, **SOFTMAX)
    x, y, _ = ran(model, input_ids=random_tokens(2, 9))
    mixer = model.backbone.layers[1].mixer
    for t in range(9):
        q = mixer.q_proj(x[t])
        weights = torch.stack([(q @ mixer.k_proj(x[j]) / math.sqrt(6)).exp() for j in range(t + 1)])
        values = torch.stack([mixer.v_proj(x[j]) for j in range(t + 1)])
        expected = mixer.o_proj((weights / weights.sum()) @ values)
        torch.testing.assert_close(y[t], expected)


@both_families
def test_linear_attention_equals_a_loop_from_a_state(family: Family) -> None:
    model = model_of(family, **LINEAR)
    x, y, state = ran(model, input_ids=random_tokens(2, 70), initial_state=random_state(model, 2))
    mixer, D = model.backbone.layers[1].mixer, x.shape[1]
    assert state.shape == (1, D, 3)
    for t in range(70):
        q = mixer.q_proj(x[t]) / math.sqrt(3)
        mixed = sum((q @ mixer.k_proj(x[j]) * mixer.v_proj(x[j]) for j in range(t + 1)), state[0] @ q)
        torch.testing.assert_close(y[t], mixer.o_proj(mixed))


@both_families
def test_head_dims_by_default(family: Family) -> None:
    softmax = build(family, attention_layers=[0]).backbone.layers[0].mixer
    linear = build(family, attention_layers=[0], attention_kind="linear").backbone.layers[0].mixer
    assert {tuple(p.shape) for p in softmax.parameters()} == {(16, 16)}
    assert linear.k_proj.weight.shape == (5, 16)  # state_size
    assert linear.v_proj.weight.shape == (16, 16)


@pytest.mark.thinned(3)
@both_families
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("padding", [False, True])
def test_with_linear_attention_the_chunks_equal_the_whole(family: Family, checkpointing: bool, padding: bool) -> None:
    model = model_of(family, use_bias=True, **LINEAR)  # with biases, padding does not stay 0
    mask = torch.ones(2, 65, dtype=torch.long)
    mask[0, :7], mask[1, 20:31], mask[1, 60:] = 0, 0, 0

    def law(cuts: list[int]) -> dict[str, Tensor]:
        embeds = model.get_input_embeddings()(random_tokens(2, 65))
        state = random_state(model, 2)
        parameters = dict(model.named_parameters())
        return run_in_chunks(model_step(model), parameters, embeds, state, cuts, mask if padding else None)

    whole = law([])
    if checkpointing:
        checkpointed(model)
    assert_equal_up_to(1e-10, law([1, 2, 30, 64]), whole)


@both_families
def test_softmax_attention_never_sees_padding(family: Family) -> None:
    model = model_of(family, **SOFTMAX)
    tokens = random_tokens(1, 12)
    alone = model(tokens).logits[0]
    for real in ([*range(5, 17)], [*range(12)], [0, 1, 2, 5, 6, 7, 8, 11, 12, 14, 15, 19]):
        mask = torch.zeros(2, 20, dtype=torch.long)
        mask[0, real], mask[1] = 1, 1
        padded = random_tokens(2, 20, seed=5)
        padded[0, real] = tokens[0]
        torch.testing.assert_close(model(padded, attention_mask=mask).logits[0, real], alone)


def test_a_model_with_softmax_attention_refuses_states_and_caches() -> None:
    model = model_of(MAMBA2, **SOFTMAX)
    tokens = random_tokens(2, 6)
    output = model(tokens)
    assert model.state_shapes()[1] == LayerShape((0,), (0,))
    assert output.final_state[1].recurrent.shape == (2, 0)
    state: RecurrentState = output.final_state
    reason = r"layers \[1\] of this model are softmax attention, which has no state of fixed size"
    for arguments in ({"initial_state": state}, {"past_key_values": RecurrentCache()}, {"use_cache": True}):
        with pytest.raises(ValueError, match=reason):
            model(tokens, **arguments)
        with pytest.raises(ValueError, match=reason):
            model.backbone(tokens, **arguments)
    options = {
        "max_new_tokens": 3,
        "do_sample": False,
        "attention_mask": torch.ones_like(tokens),
        "eos_token_id": None,
    }
    with pytest.raises(ValueError, match=reason):
        model.generate(tokens, **options)
    with pytest.raises(ValueError, match=reason):
        model.generate(tokens, initial_state=state, **options)
    generated = model.generate(tokens, use_cache=False, **options)
    expected = tokens
    for _ in range(3):
        expected = torch.cat([expected, model(expected).logits[:, -1:].argmax(-1)], 1)
    assert torch.equal(generated, expected)


def test_streams_are_read_at_once_whatever_the_chunk() -> None:
    """Softmax attention has no state to carry from chunk to chunk, so that chunks would change what it predicts."""
    model, tokens = model_of(MAMBA2, torch.float32, **SOFTMAX), random_tokens(1, 12)
    whole = stream_nll(model, tokens, progress=False)
    chunked = stream_nll(model, tokens, chunk_length=5, progress=False)
    assert (chunked.nll == whole.nll).all()
    with torch.no_grad():
        log_probabilities = model(input_ids=tokens[:, :-1]).logits.log_softmax(-1)
    expected = -log_probabilities.gather(-1, tokens[:, 1:, None])[..., 0]
    torch.testing.assert_close(torch.from_numpy(whole.nll), expected, atol=1e-5, rtol=1e-5)
    with pytest.raises(ValueError, match="softmax attention, which has no state"):
        stream_nll(model, tokens, initial_state=model.zero_state(1), progress=False)


def test_trainers_of_states_refuse_softmax_attention_and_plain_training_works(tmp_path: Path) -> None:
    model = model_of(MAMBA2, torch.float32, **SOFTMAX)
    rows = [{"input_ids": row, "labels": row} for row in random_tokens(4, 10)]
    quiet: dict[str, Any] = {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "max_steps": 2}
    quiet["per_device_train_batch_size"] = 4
    with pytest.raises(ValueError, match="softmax attention, which has no state"):
        StatePassingTrainer(model, StatePassingConfig(str(tmp_path), **quiet), train_dataset=rows)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    ZeroStateTrainer(model, InitialStateConfig(str(tmp_path), **quiet), train_dataset=rows).train()
    assert all(not torch.equal(p, before[name]) for name, p in model.named_parameters() if "mixer" in name)


@both_families
@pytest.mark.parametrize("rescale", [False, True])
def test_weights_start_as_those_of_the_mixers(family: Family, rescale: bool) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_hidden_layers": 4} | ({"num_heads": 16} if family is MAMBA2 else {})
    config = family.config(**sizes, attention_layers=[1], rescale_prenorm_residual=rescale)
    mixer = family.causal_lm_class(config).backbone.layers[1].mixer
    bound = 1 / math.sqrt(64)  # of Kaiming's uniform distribution
    for projection in (mixer.q_proj, mixer.k_proj, mixer.v_proj, mixer.o_proj):
        largest = bound / 2 if rescale and projection is mixer.o_proj else bound
        weight = projection.weight.detach()
        assert 0.99 * largest < float(weight.abs().max()) <= largest
        assert float(weight.std()) == pytest.approx(largest / math.sqrt(3), rel=0.05)


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"attention_layers": [2]}, "different numbers from 0 to 1"),
        ({"attention_layers": [-1]}, "different numbers from 0 to 1"),
        ({"attention_layers": [1, 1]}, "different numbers from 0 to 1"),
        (
            {"attention_layers": [0], "attention_kind": "flash"},
            "attention_kind must be 'softmax' or 'linear'",
        ),
        ({"attention_kind": "linear"}, "do nothing without attention_layers"),
        ({"attention_head_dim": 8}, "do nothing without attention_layers"),
        ({"attention_layers": [0], "forgetting": {"delta_scale": 0.9}}, "would go on keeping all tokens"),
    ],
    ids=str,
)
@both_families
def test_fields_that_cannot_be_honored_are_refused(family: Family, fields: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        family.causal_lm_class(family.config(**fields))
