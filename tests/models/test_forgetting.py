"""Models that forget at inference: states, padding, generation, configuration, files."""

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_recurrent_lengthgen import Forgetting, forgetting
from hf_recurrent_lengthgen.models.layers_known import key_and_query_weights, known_mixers
from hf_recurrent_lengthgen.models.state_on_disk import load_state, save_state
from hf_recurrent_lengthgen.models.state_value import RecurrentState, take_rows, zero_conv

from .families import FAMILIES, MAMBA2, Family, build, random_tokens, variant_id
from .law import assert_equal_up_to, weights_like
from .test_generation import generate, greedy_by_hand

window_variants = pytest.mark.parametrize("variant", MAMBA2.variants)
ALL = {"window": 6, "retention": 0.97, "insertion": 0.75}
MULTIPLIERS = {"retention": 0.9, "insertion": 1.5}


def error(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())


def in_chunks(model: Any, tokens: Tensor, sizes: int | list[int]) -> tuple[Tensor, RecurrentState]:
    """Logits of all tokens, read in chunks of these sizes with the state carried, and the state after them."""
    outputs, state = [], None
    for chunk in tokens.split(sizes, dim=1):
        output = model(chunk, initial_state=state)
        state = output.final_state
        outputs.append(output.logits)
    return torch.cat(outputs, dim=1), state


def inputs_of_layers(model: Any, tokens: Tensor) -> tuple[list[tuple[Any, ...]], RecurrentState]:
    """What every layer reads in one pass over the tokens, beside state and lengths; and the final state."""
    caught: list[tuple[Any, ...]] = []
    hooks = [
        layer.register_forward_pre_hook(lambda _, args: caught.append((args[0], args[3:])))
        for layer in model.base_model.layers
    ]
    state = model(tokens).final_state
    for hook in hooks:
        hook.remove()
    return caught, state


@pytest.mark.parametrize("family", [family for family in FAMILIES if family is not MAMBA2], ids=variant_id)
@pytest.mark.parametrize("setting", Forgetting._fields)
def test_what_a_family_cannot_do_is_refused_with_the_families_that_can(family: Family, setting: str) -> None:
    model, fields = build(family), {setting: 3 if setting == "window" else 0.5}
    if setting in model.config.forgets_by:
        with forgetting(model, **fields):
            return
    message = f"takes no {setting}; it is for .*{'decay' if setting == 'decay_scale' else 'Mamba-'}.*. Set "
    with pytest.raises(ValueError, match=message), forgetting(model, **fields):
        pass
    with pytest.raises(ValueError, match=message):
        family.config(forgetting=fields)
    assert model.config.forgetting is None


def test_the_settings_of_each_family() -> None:
    taken = {family.name: set(family.config_class.forgets_by) for family in FAMILIES}
    mamba = {"insertion", "delta_scale", "decay_scale"}
    assert taken.pop("mamba2") == {*Forgetting._fields}
    assert taken.pop("mamba") == taken.pop("falcon_mamba") == mamba
    assert taken.pop("mamba3") == mamba | {"retention"}
    assert taken.pop("delta_net") == taken.pop("linear_attention") == {"retention"}
    assert all(settings == {"retention", "decay_scale"} for settings in taken.values())


@pytest.mark.thinned(5)
@window_variants
@pytest.mark.parametrize("window", [1, 7, 30])
@torch.no_grad()
def test_a_window_restarts_each_layer_on_its_last_inputs(variant: str, window: int) -> None:
    model, tokens = build(MAMBA2, torch.float64, **MAMBA2.variants[variant]), random_tokens(2, 50)
    with forgetting(model, window=window):
        inputs, state = inputs_of_layers(model, tokens)
    zero = model.zero_state(2)
    for layer, before, (x, extra), found in zip(model.base_model.layers, zero, inputs, state, strict=True):
        _, earlier = layer(x[:, :-window], before, None, *extra)
        # what the window forgets is the recurrent part; the short convolution goes on
        _, restarted = layer(x[:, -window:], before._replace(conv=earlier.conv), None, *extra)
        assert error(found.recurrent, restarted.recurrent) < 1e-12


@pytest.mark.parametrize("family", FAMILIES, ids=variant_id)
@torch.no_grad()
def test_multipliers_of_one_are_the_identity(family: Family) -> None:
    model, tokens = build(family), random_tokens(2, 50)
    expected = model(tokens)
    with forgetting(model, retention=1.0, insertion=1.0, window=None, delta_scale=1.0):
        output = model(tokens)
    assert torch.equal(output.logits, expected.logits)


@pytest.mark.parametrize("settings", [MULTIPLIERS, ALL], ids=str)
def test_in_any_chunks_as_at_once_with_all_gradients(settings: dict[str, Any]) -> None:
    model, tokens = build(MAMBA2, torch.float64), random_tokens(2, 41)

    def run(sizes: list[int]) -> dict[str, Tensor]:
        logits, state = in_chunks(model, tokens, sizes)
        objective = (logits * weights_like(logits, 0)).sum()
        for index, layer in enumerate(state):
            objective = objective + (layer.recurrent * weights_like(layer.recurrent, 1 + index)).sum()
        gradients = torch.autograd.grad(objective, list(model.parameters()))
        named = {name: gradient for (name, _), gradient in zip(model.named_parameters(), gradients, strict=True)}
        named |= {"logits": logits.detach()}
        return named | {f"state {i}": layer.recurrent.detach() for i, layer in enumerate(state)}

    with forgetting(model, **settings):
        whole = run([41])
        for sizes in ([1, 1, 7, 21, 1, 10], [1] * 41):
            assert_equal_up_to(1e-9, run(sizes), whole)


@torch.no_grad()
def test_padding_is_neither_kept_nor_counted() -> None:
    model, tokens = build(MAMBA2, torch.float64), random_tokens(3, 30)
    mask = torch.ones_like(tokens)
    mask[0, :13] = mask[1, 5:9] = mask[1, -4:] = mask[2, :29] = 0
    with forgetting(model, **ALL):
        first = model(tokens[:, :17], attention_mask=mask[:, :17])
        second = model(tokens[:, 17:], attention_mask=mask[:, 17:], initial_state=first.final_state)
        logits = torch.cat([first.logits, second.logits], dim=1)
        for row in range(3):
            real = mask[row].bool()
            alone = model(tokens[row, real][None])
            assert error(logits[row, real], alone.logits[0]) < 1e-11
            for found, expected in zip(
                take_rows(second.final_state, slice(row, row + 1)), alone.final_state, strict=True
            ):
                assert error(found.recurrent, expected.recurrent) < 1e-11
                assert torch.allclose(found.window[:, 1:], expected.window[:, 1:], rtol=1e-11, atol=1e-13)


@torch.no_grad()
def test_generation_forgets_too() -> None:
    model, prompt = build(MAMBA2, torch.float64), random_tokens(2, 12)
    plain = model(prompt).logits
    with forgetting(model, retention=0.5, window=2):
        expected = greedy_by_hand(model, prompt)
        assert torch.equal(generate(model, prompt)[:, 12:], expected)
        state = model(prompt[:, :-4]).final_state
        assert torch.equal(generate(model, prompt[:, -4:], initial_state=state)[:, 4:], expected)
        beams = generate(model, prompt, num_beams=3)
        assert torch.equal(generate(model, prompt[:, -4:], initial_state=state, num_beams=3)[:, 4:], beams[:, 12:])
        assert error(model(prompt).logits, plain) > 1e-3


@pytest.mark.parametrize("name", ["mamba", "mamba2"])
@torch.no_grad()
def test_delta_scale_shrinks_the_steps(name: str) -> None:
    """Half the step is half the rate of decay and half the insertion."""
    family = next(family for family in FAMILIES if family.name == name)
    model, tokens = build(family, torch.float64), random_tokens(2, 40)
    plain = model(tokens).logits
    with forgetting(model, delta_scale=0.5):
        found = model(tokens).logits
    for layer in model.base_model.layers:
        layer.mixer.A_log -= math.log(2)
    for mixer in known_mixers(model) if family is not MAMBA2 else []:
        key_and_query_weights(mixer)[0].mul_(0.5)
    with forgetting(model, **({"insertion": 0.5} if family is MAMBA2 else {})):
        expected = model(tokens).logits
    assert error(found, expected) < 1e-12
    assert error(found, plain) > 1e-3


WRONG: dict[str, tuple[Any, str]] = {
    "no mapping": (["window"], "forgetting must be None or a mapping with some of"),
    "unknown key": ({"size": 3}, "forgetting must be None or a mapping with some of"),
    "window of zero": ({"window": 0}, "window must be None or a number of tokens, got 0"),
    "window that is no number": ({"window": True}, "window must be None or a number of tokens, got True"),
    "half a token": ({"window": 2.5}, "window must be None or a number of tokens, got 2.5"),
    "growing state": ({"retention": 1.01}, "retention must be above 0 and at most 1, got 1.01"),
    "retention of zero": ({"retention": 0}, "retention must be above 0 and at most 1, got 0"),
    "nan": ({"insertion": float("nan")}, "insertion must be above 0 and finite, got nan"),
    "text": ({"insertion": "0.5"}, "insertion must be above 0 and finite, got '0.5'"),
    "negative step": ({"delta_scale": -1}, "delta_scale must be above 0 and finite, got -1"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_settings_are_refused(name: str) -> None:
    setting, message = WRONG[name]
    with pytest.raises(ValueError, match=message):
        FAMILIES[0].config(forgetting=setting)


def test_the_context_ends_and_leaves_shared_configurations_alone() -> None:
    family = MAMBA2
    config = family.config()
    model, other = family.causal_lm_class(config), family.causal_lm_class(config)

    def fail() -> None:
        with forgetting(model, window=4):
            assert Forgetting.of(other.config) == Forgetting()
            assert len(model.zero_state(1)[0]) == 3
            assert len(other.zero_state(1)[0]) == 2
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert model.config is config
    assert all(getattr(module, "config", config) is config for module in model.modules())
    assert config.forgetting is None


@torch.no_grad()
def test_a_checkpoint_says_what_it_forgets(tmp_path: Path) -> None:
    model, tokens = build(MAMBA2), random_tokens(1, 30)
    with forgetting(model, **ALL):
        expected = model(tokens).logits
        model.save_pretrained(tmp_path)
    loaded = MAMBA2.causal_lm_class.from_pretrained(tmp_path)
    assert loaded.config.forgetting == ALL
    assert torch.equal(loaded(tokens).logits, expected)
    with forgetting(loaded):
        assert torch.equal(loaded(tokens).logits, model(tokens).logits)


@torch.no_grad()
def test_states_with_and_without_a_window_are_not_mixed_up(tmp_path: Path) -> None:
    model, tokens = build(FAMILIES[0]), random_tokens(2, 20)
    plain = model(tokens).final_state
    with forgetting(model, window=4):
        state = model(tokens).final_state
        with pytest.raises(ValueError, match="does not fit a model with a window"):
            model(tokens, initial_state=plain)
        save_state(tmp_path / "state.safetensors", state)
        loaded, _ = load_state(tmp_path / "state.safetensors")
        assert all(torch.equal(a, b) for x, y in zip(loaded, state, strict=True) for a, b in zip(x, y, strict=True))
        assert len(zero_conv(loaded)[0]) == 3
        model(tokens, initial_state=loaded)
    with pytest.raises(ValueError, match="does not fit a model without a window"):
        model(tokens, initial_state=state)
    with (
        forgetting(model, window=5),
        pytest.raises(ValueError, match=r"part 'window' must be a tensor \(2, 6, .*got \(2, 5, "),
    ):
        model(tokens, initial_state=state)
    broken = copy.deepcopy(list(state))
    broken[1].window[1, 2, 3] = float("nan")
    with forgetting(model, window=4), pytest.raises(ValueError, match="layer 1, part 'window' has NaN"):
        model(tokens, initial_state=tuple(broken))


def test_models_that_cannot_forget_are_refused() -> None:
    with (
        pytest.raises(ValueError, match="Linear cannot be made to forget"),
        forgetting(torch.nn.Linear(2, 2), window=3),
    ):
        pass


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the compiler, about its own internals
@torch.no_grad()
def test_compiled_models_forget_the_same() -> None:
    model, tokens = build(FAMILIES[0], num_hidden_layers=1), random_tokens(2, 40)
    with forgetting(model, **ALL):
        expected = model(tokens)
        compiled = torch.compile(model, backend="aot_eager")
        first = compiled(tokens[:, :20])
        second = compiled(tokens[:, 20:], initial_state=first.final_state)
    assert error(torch.cat([first.logits, second.logits], dim=1), expected.logits) < 1e-5
