"""What `stateful` keeps of the stock model, adds to it, and refuses."""

import copy
import inspect
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils.generic import find_labels

from hf_recurrent_lengthgen.hybrids import stateful
from hf_recurrent_lengthgen.hybrids.mixer_base import call_of
from hf_recurrent_lengthgen.hybrids.mixers import DeltaMixer
from hf_recurrent_lengthgen.models import StatefulMamba2Config, StatefulMamba2ForCausalLM
from tests.hybrids.measures import parts, random_state, random_tokens, relative_error, with_checkpointing
from tests.hybrids.tiny_models import SUPPORTED_TYPES, tiny_model

STOCK = tiny_model("falcon_h1")
TOKENS = random_tokens(2, 9, seed=7)


@pytest.fixture
def model() -> Any:
    return stateful(copy.deepcopy(STOCK))


def test_object_class_and_signature_stay(model: Any) -> None:
    stock = type(STOCK)
    assert isinstance(model, stock)
    assert (type(model).__name__, type(model).__module__) == (stock.__name__, stock.__module__)
    assert str(type(model)) == str(stock)
    assert stateful(model) is model
    before, after = (list(inspect.signature(x.forward).parameters) for x in (STOCK, model))
    own = ["initial_state", "output_final_state", "attention_cache", "seq_idx"]
    assert [name for name in after if name not in before] == own
    assert [name for name in after if name in before] == before
    assert find_labels(type(model)) == ["labels"]  # or Trainer, and so its evaluation loss, would expect others, too


@pytest.mark.thinned(5)
@torch.no_grad()
@pytest.mark.parametrize("model_type", SUPPORTED_TYPES)
def test_calls_without_states_are_stock_and_copies_keep_their_mixers(model_type: str) -> None:
    """The delta rule alone has another scan. Models that are not wrapped, of the same class, stay as they are."""
    stock = tiny_model(model_type)
    expected, classes = stock(TOKENS, labels=TOKENS, use_cache=False), [type(x) for x in stock.modules()]
    model: Any = stateful(copy.deepcopy(stock))
    exact = not any(isinstance(x, DeltaMixer) for x in model.modules())
    state = model(TOKENS, output_final_state=True)
    for each in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        output = each(TOKENS, labels=TOKENS, use_cache=False)
        assert type(output) is type(expected)
        found, wanted = [output.logits, output.loss], [expected.logits, expected.loss]
        assert all(map(torch.equal, found, wanted)) if exact else relative_error(found, wanted) < 1e-5
        assert list(map(type, each.modules())) == list(map(type, model.modules()))
        again = each(TOKENS, output_final_state=True)
        assert all(map(torch.equal, parts(again.final_state), parts(state.final_state)))
    assert [type(x) for x in stock.modules()] == classes
    assert torch.equal(stock(TOKENS, use_cache=False).logits, expected.logits)


@torch.no_grad()
@pytest.mark.parametrize("model_type", ["bamba", "lfm2", "qwen3_next"])
def test_without_keys_each_call_is_a_text_of_its_own_to_attention(model_type: str) -> None:
    stock = tiny_model(model_type)
    model: Any = stateful(copy.deepcopy(stock))
    lengths, state, outputs = (3, 1, 5), model.zero_state(2), []
    for chunk in TOKENS.split(lengths, dim=1):
        output = model(input_ids=chunk, initial_state=state)
        state = output.final_state
        outputs.append(output.logits)
    # Transformers takes positions that restart for packed sequences, whose attention it keeps apart
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    expected = stock(input_ids=TOKENS, use_cache=False, position_ids=positions).logits
    assert relative_error([torch.cat(outputs, 1)], [expected]) < 1e-5


def test_outputs_have_the_loss_and_the_state_and_no_cache(model: Any) -> None:
    output = model(TOKENS, labels=TOKENS, attention_mask=torch.ones_like(TOKENS), output_final_state=True)
    assert relative_error([output.loss], [STOCK(TOKENS, labels=TOKENS).loss]) < 1e-5
    assert output["final_state"] is output.final_state
    assert output.past_key_values is None
    state = model.zero_state(2)
    assert model(TOKENS, initial_state=state).final_state is not None
    assert model(TOKENS, initial_state=state, output_final_state=False).final_state is None
    as_tuple = model(TOKENS, output_final_state=True, return_dict=False)
    assert torch.equal(as_tuple[0], output.logits)
    assert all(map(torch.equal, parts(as_tuple[-1]), parts(output.final_state)))
    assert [part.shape[1:] for part in parts(output.final_state)] == [
        shape for layer in model.state_shapes() for shape in layer
    ]


def test_the_checkpoint_is_the_stock_one(model: Any, tmp_path: Path) -> None:
    STOCK.save_pretrained(tmp_path / "stock")
    model.save_pretrained(tmp_path / "wrapped")
    files = sorted(path.name for path in (tmp_path / "stock").iterdir())
    assert sorted(path.name for path in (tmp_path / "wrapped").iterdir()) == files
    for name in files:
        assert (tmp_path / "wrapped" / name).read_bytes() == (tmp_path / "stock" / name).read_bytes(), name
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "wrapped")
    assert type(loaded) is type(STOCK)
    again = type(model).from_pretrained(tmp_path / "wrapped").eval()
    assert torch.equal(again(TOKENS).logits, model(TOKENS).logits)
    assert again.base_model(TOKENS, output_final_state=True).final_state is not None


@torch.no_grad()
def test_the_backbone_of_a_wrapped_model_takes_states_too(model: Any) -> None:
    state = random_state(model, 2)
    output = model.model(TOKENS, initial_state=state, output_final_state=True)
    expected = model(TOKENS, initial_state=state, output_final_state=True)
    scaled = model.lm_head(output.last_hidden_state) * model.model.lm_head_multiplier
    assert relative_error([scaled], [expected.logits]) < 1e-6
    assert all(map(torch.equal, parts(output.final_state), parts(expected.final_state)))


def test_checkpointing_recomputes_every_layer(model: Any) -> None:
    with_checkpointing(model)
    calls: list[Any] = []
    for layer in model.model.layers:
        layer.mamba.register_forward_hook(lambda *args: calls.append(call_of((), args[2])), with_kwargs=True)
    state = random_state(model, 2)
    calls.clear()
    output = model(TOKENS, initial_state=state, output_final_state=True)
    assert len(calls) == 3
    sum(part.sum() for part in parts(output.final_state)).backward()
    assert len(calls) == 6
    assert not any(call.after or call.new_keys for call in calls)  # what is computed again is let go
    layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    assert all(layer.gradient_checkpointing for layer in layers)
    assert all(bool(part.grad.any()) for part in parts(state))


def test_final_states_hold_no_more_memory_than_themselves(model: Any) -> None:
    for part in parts(model(TOKENS, output_final_state=True).final_state):
        assert part.untyped_storage().nbytes() == part.numel() * part.element_size()


def test_our_own_models_have_the_contract_already() -> None:
    sizes = {"hidden_size": 8, "num_heads": 2, "head_dim": 8, "state_size": 4, "n_groups": 1}
    model = StatefulMamba2ForCausalLM(StatefulMamba2Config(vocab_size=8, num_hidden_layers=1, **sizes))
    assert stateful(model) is model
