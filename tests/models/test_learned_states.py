"""Learned states of a model: what starts from them, in every family, and how they are switched, combined and kept."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from hf_recurrent_lengthgen.checkpoints.loading import load_model
from hf_recurrent_lengthgen.models.scan_forgetting import forgetting
from hf_recurrent_lengthgen.models.state_learned_files import CONFIG_FILE, STATE_FILE, fingerprint
from hf_recurrent_lengthgen.models.state_on_disk import load_state
from hf_recurrent_lengthgen.models.state_value import LayerState, RecurrentState, map_state

from .families import FAMILIES, MAMBA2, Family, build, random_state, random_tokens, variant_id

every_family = pytest.mark.parametrize("family", FAMILIES, ids=variant_id)
GENERATION = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None}


def rows_of(state: RecurrentState, rows: int) -> RecurrentState:
    return map_state(lambda part: part.expand(rows, *part.shape[1:]), state)


def learned(model: Any, name: str = "default", seed: int = 0) -> RecurrentState:
    """A random state of one row, added under a name."""
    state = map_state(lambda part: part * (seed + 1), random_state(model, 1))
    model.add_learned_state(name, state)
    return state


def exactly(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


@every_family
def test_a_call_without_a_state_starts_from_the_active_one(family: Family) -> None:
    model, tokens = build(family).eval(), random_tokens(3, 11)
    zero, state = model(tokens), learned(model)
    expected = model(tokens, initial_state=rows_of(state, 3))
    exactly(model(tokens).logits, expected.logits)
    exactly(model(tokens).final_state, expected.final_state)
    exactly(model.base_model(tokens).last_hidden_state, model.base_model(tokens, initial_state=rows_of(state, 3))[0])
    assert not torch.equal(zero.logits, expected.logits)
    exactly(model(tokens, initial_state=model.zero_state(3)).logits, zero.logits)  # an initial state takes its place
    with model.learned_states.disable_adapter():
        exactly(model(tokens).logits, zero.logits)
    exactly(model(tokens).logits, expected.logits)


@pytest.mark.thinned(5)
@every_family
@pytest.mark.parametrize("how", [{}, {"num_beams": 3}, {"num_return_sequences": 2, "num_beams": 2}], ids=str)
def test_generation_starts_from_it(family: Family, how: dict[str, Any]) -> None:
    model, prompt = build(family).eval(), random_tokens(2, 4)
    state = learned(model)
    expected = model.generate(prompt, initial_state=rows_of(state, 2), **GENERATION, **how)
    assert model.generate(prompt, **GENERATION, **how).tolist() == expected.tolist()
    if not how:
        assert model.generate(prompt, use_cache=False, **GENERATION).tolist() == expected.tolist()
        embeds = model.get_input_embeddings()(prompt)
        assert model.generate(inputs_embeds=embeds, **GENERATION).tolist() == expected[:, 4:].tolist()


@every_family
def test_padded_and_packed_sequences_each_start_from_it(family: Family) -> None:
    model = build(family).eval()
    one, two = random_tokens(1, 5), random_tokens(1, 4)
    learned(model)
    alone = [model(ids).logits for ids in (one, two)]
    packed = model(torch.cat([one, two], 1), position_ids=torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3]]))
    torch.testing.assert_close(packed.logits, torch.cat(alone, 1), rtol=1e-5, atol=1e-5)
    padded = model(F.pad(two, (3, 0)), attention_mask=torch.tensor([[0, 0, 0, 1, 1, 1, 1]]))
    torch.testing.assert_close(padded.logits[:, 3:], alone[1], rtol=1e-5, atol=1e-5)


def test_an_initial_state_is_that_of_the_first_packed_sequence_only() -> None:
    model, tokens = build(MAMBA2).eval(), random_tokens(1, 6)
    learned(model)
    packed = model(tokens, initial_state=model.zero_state(1), position_ids=torch.tensor([[0, 1, 2, 0, 1, 2]]))
    first, second = model(tokens[:, :3], initial_state=model.zero_state(1)), model(tokens[:, 3:])
    torch.testing.assert_close(packed.logits, torch.cat([first.logits, second.logits], 1), rtol=1e-5, atol=1e-5)


@pytest.mark.thinned(5)
@every_family
def test_its_gradient_is_that_of_a_parameter_as_the_initial_state(family: Family) -> None:
    """Against a plain loop of gradient descent on a state that is an argument, in float64."""
    model, tokens = build(family, torch.float64), random_tokens(2, 9)
    twin, other = copy.deepcopy(model), random_tokens(2, 9)
    states = model.add_learned_state()
    optimizer = torch.optim.SGD(states.parameters(), lr=0.5)
    own = tuple(LayerState(*(part.clone().requires_grad_() for part in layer)) for layer in twin.zero_state(1))
    for batch in (tokens, other, tokens):
        optimizer.zero_grad()
        model(batch, labels=batch).loss.backward()
        optimizer.step()
        parts = [part for layer in own for part in layer if part.numel()]
        loss = twin(batch, labels=batch, initial_state=rows_of(own, 2)).loss
        with torch.no_grad():
            for part, gradient in zip(parts, torch.autograd.grad(loss, parts), strict=True):
                part -= 0.5 * gradient
    assert all(bool(layer.recurrent.any()) for layer in own)
    torch.testing.assert_close(model.first_state(1), own, rtol=1e-10, atol=1e-12)


@pytest.mark.thinned(5)
@every_family
def test_sequences_start_from_the_scale_times_the_parameters(family: Family, tmp_path: Path) -> None:
    """Loss, tokens, checkpoints and folders are those of the scaled state as the initial state, in float64."""
    model, tokens = build(family, torch.float64).eval(), random_tokens(2, 7)
    base = copy.deepcopy(model)
    parameters = learned(model)
    state = rows_of(map_state(lambda part: 0.3 * part, parameters), 2)
    expected = base(tokens, initial_state=state)
    loss = base(tokens, labels=tokens, initial_state=state).loss
    unscaled = model(tokens).logits
    model.learned_states.set_scale("default", 0.3)
    assert not torch.allclose(unscaled, expected.logits)
    exactly(model(tokens).logits, expected.logits)
    exactly(model(tokens, labels=tokens).loss, loss)
    generated = base.generate(tokens, initial_state=state, **GENERATION)
    assert model.generate(tokens, **GENERATION).tolist() == generated.tolist()
    model.save_pretrained(tmp_path / "checkpoint")
    loaded = load_model(str(tmp_path / "checkpoint"), dtype=torch.float64).eval()
    exactly(loaded.first_state(2), state)
    torch.testing.assert_close(loaded(tokens).logits, expected.logits)  # weights in a file may be aligned otherwise
    model.save_learned_state(tmp_path / "folder")
    exactly(load_state(tmp_path / "folder" / STATE_FILE)[0], parameters)
    states = base.load_learned_state(tmp_path / "folder", "again")
    exactly(base(tokens).logits, expected.logits)
    states.set_scale("again", 1)
    exactly(base(tokens).logits, unscaled)


def test_a_folder_from_before_scales_has_the_scale_1(tmp_path: Path) -> None:
    model, tokens = build(MAMBA2).eval(), random_tokens(2, 7)
    learned(model)
    base, expected = build(MAMBA2).eval(), model(tokens).logits
    model.save_learned_state(tmp_path)
    about = json.loads((tmp_path / CONFIG_FILE).read_text())
    assert (about.pop("scale"), about["format_version"]) == (1.0, 1)  # which older code reads
    (tmp_path / CONFIG_FILE).write_text(json.dumps(about))
    exactly(base.load_learned_state(tmp_path)["default"](), model.learned_states["default"]())
    exactly(base(tokens).logits, expected)
    model.learned_states.set_scale("default", 0.5)
    model.save_learned_state(tmp_path)
    assert json.loads((tmp_path / CONFIG_FILE).read_text())["format_version"] == 2  # which older code refuses


def test_each_state_has_its_scale_and_takes_it_along() -> None:
    model, tokens = build(MAMBA2).eval(), random_tokens(1, 5)
    one, two = learned(model, "one"), learned(model, "two", 3)
    states = model.learned_states
    states.set_scale("one", 0.25)
    exactly(model.first_state(1), two)
    states.set_adapter("one")
    exactly(model.first_state(1), map_state(lambda part: 0.25 * part, one))
    with states.disable_adapter():
        exactly(model(tokens).logits, model(tokens, initial_state=model.zero_state(1)).logits)
    assert model.config.learned_states["scales"] == {"one": 0.25}
    states.set_adapter("two")
    states.delete_adapter("one")
    model.add_learned_state("one", one)
    exactly(model.first_state(1), one)
    assert model.config.learned_states["scales"] == {}
    for scale in (float("nan"), float("inf"), "1", None, True):
        with pytest.raises(ValueError, match="scale of a learned state must be a finite number, got"):
            states.set_scale("one", scale)
    with pytest.raises(ValueError, match="no learned state 'gone'"):
        states.set_scale("gone", 1.0)
    exactly(model.first_state(1), one)


def test_switching_and_deleting_leave_the_others_alone() -> None:
    model, tokens = build(MAMBA2).eval(), random_tokens(1, 5)
    one, two = learned(model, "one"), learned(model, "two", 3)
    states = model.learned_states
    assert (states.names, states.active_adapter) == (["one", "two"], "two")
    states.set_adapter("one")
    exactly(model(tokens).logits, model(tokens, initial_state=one).logits)
    states.delete_adapter("one")
    exactly(model(tokens).logits, model(tokens, initial_state=model.zero_state(1)).logits)
    states.set_adapter("two")
    exactly(model.first_state(1), two)
    states.delete_adapter("two")
    assert model.config.learned_states is None
    exactly(model.first_state(1), model.zero_state(1))


@pytest.mark.thinned(5)
@every_family
def test_a_checkpoint_keeps_them_bit_for_bit(family: Family, tmp_path: Path) -> None:
    model, tokens = build(family).eval(), random_tokens(2, 7)
    learned(model, "one")
    learned(model, "two", 1)
    model.learned_states.set_adapter("one")
    model.save_pretrained(tmp_path)
    loaded = load_model(str(tmp_path)).eval()
    exactly(loaded(tokens).logits, model(tokens).logits)
    for name in ("one", "two"):
        exactly(loaded.learned_states[name](), model.learned_states[name]())
    half = load_model(str(tmp_path), dtype=torch.bfloat16)
    assert half.dtype == torch.bfloat16
    exactly(half.learned_states["two"](), model.learned_states["two"]())


@every_family
def test_a_folder_loads_onto_its_base_bit_for_bit_and_onto_no_other(family: Family, tmp_path: Path) -> None:
    model, tokens = build(family).eval(), random_tokens(2, 7)
    base = copy.deepcopy(model)
    state = learned(model)
    model.save_learned_state(tmp_path)
    exactly(load_state(tmp_path / STATE_FILE)[0], state)
    base.load_learned_state(tmp_path, "again")
    exactly(base(tokens).logits, model(tokens).logits)
    assert not any(parameter.requires_grad for parameter in base.learned_states.parameters())
    half = copy.deepcopy(base).to(torch.bfloat16)
    half.load_learned_state(tmp_path, "in bfloat16".replace(" ", "-"))
    exactly(half.first_state(1), state)
    with torch.no_grad():
        next(iter(base.parameters())).mul_(1.01)
    with pytest.raises(ValueError, match=r"whose weights are not those of this .*: load the base that it was trained"):
        base.load_learned_state(tmp_path, "other")


def test_load_model_loads_the_base_too(tmp_path: Path) -> None:
    build(MAMBA2).save_pretrained(tmp_path / "base")
    model, tokens = load_model(str(tmp_path / "base")).eval(), random_tokens(2, 7)
    learned(model)
    model.save_learned_state(tmp_path / "state")
    about = json.loads((tmp_path / "state" / CONFIG_FILE).read_text())
    assert about["base_model_name_or_path"] == str(tmp_path / "base")
    assert about["layers"] == [0, 1]
    exactly(load_model(str(tmp_path / "state")).eval()(tokens).logits, model(tokens).logits)
    (tmp_path / "base").rename(tmp_path / "moved")
    with pytest.raises(ValueError, match=rf"does not exist any more: .* base_model_name_or_path in {CONFIG_FILE}"):
        load_model(str(tmp_path / "state"))
    exactly(load_model(str(tmp_path / "state"), base=str(tmp_path / "moved")).first_state(1), model.first_state(1))
    with pytest.raises(ValueError, match="holds a checkpoint, which the learned state would be confused with"):
        model.save_learned_state(tmp_path / "moved")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda about, folder: about.update(format_version=3),
            "must describe a learned state, .* a format version up to 2",
        ),
        (lambda about, folder: about.update(format="other"), "must describe a learned state, with the format"),
        (lambda about, folder: (folder / STATE_FILE).write_bytes(b"\0" * 64), "is not what learned_state_config.json"),
        (lambda about, folder: (folder / STATE_FILE).unlink(), "holds no learned_state.safetensors"),
        (lambda about, folder: about.update(base_fingerprint="0"), "whose weights are not those of this"),
        (lambda about, folder: about.update(scale="much"), "must be a finite number, got 'much'"),
    ],
    ids=["newer", "format", "cut", "missing", "base", "scale"],
)
def test_damaged_and_foreign_files_are_refused(change: Any, message: str, tmp_path: Path) -> None:
    model = build(MAMBA2)
    learned(model)
    model.save_learned_state(tmp_path)
    about = json.loads((tmp_path / CONFIG_FILE).read_text())
    change(about, tmp_path)
    (tmp_path / CONFIG_FILE).write_text(json.dumps(about))
    with pytest.raises(ValueError, match=message):
        model.load_learned_state(tmp_path, "other")
    assert model.learned_states.names == ["default"]


def test_what_cannot_be_meant_is_refused() -> None:
    model = build(MAMBA2)
    state = learned(model)
    for name in ("default", "state", "a.b", "names", "half", ""):
        with pytest.raises(ValueError, match="cannot be named"):
            model.add_learned_state(name)
    with pytest.raises(ValueError, match=r"no learned state 'other': give one of \['default'\]"):
        model.learned_states.set_adapter("other")
    with pytest.raises(ValueError, match="state has 1 layers, the model has 2"):
        model.add_learned_state("short", state[:1])
    with pytest.raises(ValueError, match="NaN or infinite"):
        model.add_learned_state("broken", map_state(lambda part: part * float("nan"), state))
    model.config.learned_states = {"names": ["default", "gone"], "active": "gone", "shapes": []}
    with pytest.raises(ValueError, match=r"names the learned states .*'gone'.*, but the model has \['default'\]"):
        model(random_tokens(1, 3))


def test_a_fingerprint_sees_every_parameter_and_no_learned_state() -> None:
    model = build(MAMBA2)
    before = fingerprint(model)
    learned(model)
    assert fingerprint(model) == before
    for name, parameter in model.base_model.named_parameters():
        if name.startswith("learned_states"):
            continue
        with torch.no_grad():
            kept = parameter.clone()
            parameter.add_(parameter.abs() * 0.02 + 0.01)
        assert fingerprint(model) != before, name
        with torch.no_grad():
            parameter.copy_(kept)
    assert fingerprint(model) == before


def test_they_are_switched_while_the_model_forgets() -> None:
    model, tokens = build(MAMBA2).eval(), random_tokens(1, 6)
    with forgetting(model, retention=0.5):
        zero = model(tokens).logits
    model.add_learned_state("one", random_state(model, 1))
    with forgetting(model, retention=0.5):
        one = model(tokens).logits
        with model.learned_states.disable_adapter():
            torch.testing.assert_close(model(tokens).logits, zero, rtol=0, atol=0)
        assert not torch.allclose(one, zero)
        model.learned_states.set_adapter(None)
    assert model.learned_states.active_adapter is None
    with forgetting(model, retention=0.5):
        model.learned_states.set_adapter("one")
        torch.testing.assert_close(model(tokens).logits, one, rtol=0, atol=0)
        model.add_learned_state("two")
    assert model.config.learned_states["names"] == model.learned_states.names == ["one", "two"]
    assert model.learned_states.active_adapter == "two"
    with forgetting(model, window=3), pytest.raises(ValueError, match=r"with a window .* takes no learned state"):
        model.add_learned_state("three")
