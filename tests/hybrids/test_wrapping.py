"""What `stateful` keeps of the stock model, adds to it, and refuses."""

import copy
import inspect
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModel, AutoModelForCausalLM, LlamaForCausalLM
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils.generic import find_labels

from hf_recurrent_lengthgen.hybrids import stateful
from hf_recurrent_lengthgen.hybrids.mixers import DeltaMixer, call_of
from hf_recurrent_lengthgen.models import StatefulMamba2Config, StatefulMamba2ForCausalLM
from hf_recurrent_lengthgen.models.state_value import LayerState, map_state
from tests.hybrids.measures import parts, random_state, random_tokens, relative_error, with_checkpointing
from tests.hybrids.tiny_models import SUPPORTED_TYPES, tiny_model
from tests.llamas import tiny_llama

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
    own = ["initial_state", "output_final_state", "attention_cache", "sequence_group", "seq_idx"]
    assert [name for name in after if name not in before] == own
    assert [name for name in after if name in before] == before
    assert find_labels(type(model)) == ["labels"]  # or Trainer, and so its evaluation loss, would expect others, too


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
def test_models_of_recurrent_layers_only_need_no_attention_cache() -> None:
    model: Any = stateful(tiny_model("granitemoehybrid", layer_types=["linear_attention"] * 3))
    assert not model.attends
    assert model.new_attention_cache() is None
    first = model(input_ids=TOKENS[:, :4], output_final_state=True)
    second = model(input_ids=TOKENS[:, 4:], initial_state=first.final_state)
    expected = model(input_ids=TOKENS, use_cache=False).logits
    assert relative_error([torch.cat([first.logits, second.logits], 1)], [expected]) < 1e-5
    with pytest.raises(ValueError, match="must be made by new_attention_cache"):
        model(TOKENS, attention_cache=stateful(tiny_model("bamba")).new_attention_cache())


@torch.no_grad()
@pytest.mark.parametrize("model_type", ["bamba", "lfm2", "qwen3_next", "zaya"])
def test_without_keys_each_call_is_a_text_of_its_own_to_attention(model_type: str) -> None:
    stock = tiny_model(model_type)
    model: Any = stateful(copy.deepcopy(stock))
    lengths, state, outputs = (3, 1, 5), model.zero_state(2), []
    for piece in TOKENS.split(lengths, dim=1):
        output = model(input_ids=piece, initial_state=state)
        state = output.final_state
        outputs.append(output.logits)
    # Transformers takes positions that restart for packed sequences, whose attention it keeps apart
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    expected = stock(input_ids=TOKENS, use_cache=False, position_ids=positions).logits
    assert relative_error([torch.cat(outputs, 1)], [expected]) < 1e-5


@torch.no_grad()
def test_no_state_is_the_zero_state_and_nothing_given_changes(model: Any) -> None:
    for tokens in (TOKENS, TOKENS[:, :1]):
        zero = model.zero_state(2)
        output = model(tokens, output_final_state=True)
        from_zero = model(tokens, initial_state=zero, output_final_state=True)
        assert torch.equal(output.logits, from_zero.logits)
        assert all(map(torch.equal, parts(output.final_state), parts(from_zero.final_state)))
        assert not any(bool(part.any()) for part in parts(zero))
        given = random_state(model, 2)
        before = map_state(torch.clone, given)
        model(tokens, initial_state=given, output_final_state=True)
        assert all(map(torch.equal, parts(given), parts(before)))


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


@torch.no_grad()
def test_a_model_without_head_takes_states_too() -> None:
    stock = AutoModel.from_config(STOCK.config).eval()
    model = stateful(copy.deepcopy(stock))
    first = model(TOKENS[:, :4], output_final_state=True)
    output = model(TOKENS[:, 4:], initial_state=first.final_state, output_final_state=True)
    assert output.last_hidden_state.shape == (2, 5, STOCK.config.hidden_size)
    assert relative_error([first.last_hidden_state], [stock(TOKENS[:, :4]).last_hidden_state]) < 1e-5


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
        layer.mamba.register_forward_hook(lambda *given: calls.append(call_of((), given[2])), with_kwargs=True)
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


def test_reentrant_checkpointing_is_refused(model: Any) -> None:
    with_checkpointing(model, reentrant=True)
    with pytest.raises(ValueError, match="use_reentrant"):
        model(TOKENS, output_final_state=True)
    model(TOKENS)  # the stock call stays possible


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"use_cache": True}, "use_cache and (cache|past_key_values) cannot be used with states"),
        ({"past_key_values": Cache(layers=[])}, "use_cache and (cache|past_key_values) cannot be used with states"),
        ({"position_ids": torch.arange(3, 12)[None]}, "position_ids must count the real tokens"),
        ({"position_ids": torch.arange(9).flip(0)[None]}, "position_ids goes from 8 to 7"),
        ({"cu_seq_lens_q": torch.tensor([0, 8, 18])}, "must count up from 0 to 18, the number of tokens"),
        ({"cu_seq_lens_k": torch.tensor([0, 9])}, "must count up from 0 to 18, the number of tokens"),
        ({"input_ids": None}, "exactly one of input_ids"),
        ({"input_ids": TOKENS[:, :0]}, "give at least one of each"),
    ],
)
def test_what_does_not_go_with_states_is_refused(model: Any, arguments: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        model(**{"input_ids": TOKENS, "output_final_state": True} | arguments)


def test_a_cache_has_one_name(model: Any) -> None:
    caches = {"past_key_values": Cache(layers=[]), "cache_params": Cache(layers=[])}
    for run in (model, model.generate):
        with pytest.raises(ValueError, match="past_key_values and cache_params are names of one argument"):
            run(input_ids=TOKENS, **caches)


def test_states_that_do_not_fit_are_refused(model: Any) -> None:
    state = model.zero_state(2)
    first = state[0]

    def refused(complaint: str, *layers: Any) -> None:
        with pytest.raises(ValueError, match=complaint):
            model(TOKENS, initial_state=layers)

    refused("2 layers, the model has 3", *state[:2])
    refused(r"layer 0, part 'recurrent' has shape", LayerState(first.recurrent[:, :1], first.conv), *state[1:])
    refused(r"layer 0, part 'conv' has dtype", LayerState(first.recurrent, first.conv.double()), *state[1:])
    refused(r"layer 0, part 'conv' is on meta", LayerState(first.recurrent, first.conv.to("meta")), *state[1:])
    refused(r"layer 1, part 'recurrent' has NaN", first, LayerState(first.recurrent * torch.nan, first.conv), state[2])
    refused(r"batch of 2 rows", *model.zero_state(3))


def test_attention_caches_that_do_not_fit_are_refused(model: Any) -> None:
    cache = model.new_attention_cache()
    state = model(TOKENS, output_final_state=True, attention_cache=cache).final_state
    with pytest.raises(ValueError, match="holds 9 tokens, but there is no initial_state"):
        model(TOKENS, attention_cache=cache)
    with pytest.raises(ValueError, match=r"made by new_attention_cache\(\) of this model"):
        model(TOKENS, attention_cache=stateful(tiny_model("nemotron_h")).new_attention_cache(), initial_state=state)
    with pytest.raises(ValueError, match="needs the initial_state after the same text"):
        model.generate(TOKENS, attention_cache=cache)


def test_a_model_that_starts_from_something_else_than_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="starts from a state that is not zero"):
        stateful(tiny_model("zaya", attention_bias=True))


def test_final_states_hold_no_more_memory_than_themselves(model: Any) -> None:
    for part in parts(model(TOKENS, output_final_state=True).final_state):
        assert part.untyped_storage().nbytes() == part.numel() * part.element_size()


def test_models_without_states_and_other_objects_are_refused() -> None:
    llama = tiny_llama()
    with pytest.raises(ValueError, match="LlamaForCausalLM is of type 'llama', which is no recurrent type"):
        stateful(llama)
    assert type(llama) is LlamaForCausalLM
    with pytest.raises(ValueError, match="takes a model of Transformers, got Linear"):
        stateful(torch.nn.Linear(1, 1))  # type: ignore[arg-type]
    adapted = get_peft_model(copy.deepcopy(STOCK), LoraConfig(target_modules=["in_proj"]))
    with pytest.raises(ValueError, match="before get_peft_model"):
        stateful(adapted)  # type: ignore[arg-type]


def test_our_own_models_have_the_contract_already() -> None:
    sizes = {"hidden_size": 8, "num_heads": 2, "head_dim": 8, "state_size": 4, "n_groups": 1}
    model = StatefulMamba2ForCausalLM(StatefulMamba2Config(vocab_size=8, num_hidden_layers=1, **sizes))
    assert stateful(model) is model
