"""Scales of steps and decays of each layer in every family: equations, law, padding, generation and files."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_recurrent_lengthgen import Forgetting, forgetting
from hf_recurrent_lengthgen.evaluation.recorded_scans import recorded_scans
from hf_recurrent_lengthgen.models.modeling_stateful_mamba2 import StatefulMamba2Model
from hf_recurrent_lengthgen.models.scan_forgetting import SCALED, in_words
from tests.without_package import clean_process

from .families import FAMILIES, MAMBA2, VARIANTS, Family, build, random_state, random_tokens, variant_id
from .family_delta import DELTA_NET
from .family_fla import GLA, LINEAR_ATTENTION
from .family_mamba import FALCON_MAMBA, MAMBA
from .family_mamba3 import MAMBA3
from .law import assert_equal_up_to, model_step, run_in_chunks
from .scan_definitions import (
    scan_delta_reference,
    scan_dplr_reference,
    scan_gla_reference,
    scan_rwkv6_reference,
    scan_trapezoid_reference,
)
from .test_generation import generate, greedy_by_hand

WITHOUT_DECAY = [LINEAR_ATTENTION, DELTA_NET]
SCALABLE = [family for family in FAMILIES if family not in WITHOUT_DECAY]
MAMBAS = [MAMBA, FALCON_MAMBA, MAMBA2, MAMBA3]
SCALES = [1.7, 0.4]
every_scalable = pytest.mark.parametrize("family", SCALABLE, ids=variant_id)


def powered_states(decays: list[Tensor], writes: list[Tensor], state: Tensor, power: float) -> list[Tensor]:
    """S_t = alpha_t^s S_{t-1} + what token t writes."""
    states = []
    for decay, write in zip(decays, writes, strict=True):
        state = decay**power * state + write
        states.append(state)
    return states


def powered_ssd(power: float, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, state: Tensor) -> Any:
    B, C = (part.repeat_interleave(x.shape[2] // B.shape[2], dim=2) for part in (B, C))
    decays = [(step * A).exp()[..., None, None] for step in dt.unbind(1)]
    writes = list(torch.einsum("bth,bthp,bthn->bthpn", dt, x, B).unbind(1))
    states = torch.stack(powered_states(decays, writes, state, power), 1)
    return torch.einsum("bthpn,bthn->bthp", states, C) + D[:, None] * x, states[:, -1]


def powered_selective(
    power: float, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, state: Tensor
) -> Any:
    decays = [(step[..., None] * A).exp() for step in dt.unbind(1)]
    writes = list(torch.einsum("btd,btd,btn->btdn", dt, x, B).unbind(1))
    states = torch.stack(powered_states(decays, writes, state, power), 1)
    return torch.einsum("btdn,btn->btd", states, C) + D * x, states[:, -1]


def of_gates(reference: Callable[..., Any], place: int) -> Callable[..., Any]:
    """A definition with the power s of its decays exp(g_t), where g is the input in this place."""

    def scan(power: float, *inputs: Tensor) -> Any:
        gates = inputs[place].exp().pow(power).log()
        return reference(*inputs[:place], gates, *inputs[place + 1 :])

    return scan


EQUATIONS = {
    "scan_ssd": powered_ssd,
    "scan_selective": powered_selective,
    "scan_trapezoid": of_gates(scan_trapezoid_reference, 1),
    "scan_gla": of_gates(scan_gla_reference, 3),
    "scan_rwkv6": of_gates(scan_rwkv6_reference, 3),
    "scan_delta": of_gates(scan_delta_reference, 3),
    "scan_dplr": of_gates(scan_dplr_reference, 3),
}


def with_powers(model: Any, powers: list[float]) -> None:
    """Let each layer run the equation of its family, with its power of alpha_t."""
    for layer, power in zip(model.base_model.layers, powers, strict=True):
        equation = EQUATIONS[layer.scan_mixer.scan.__name__]

        def scan(*inputs: Tensor, equation: Any = equation, power: float = power, **_: Any) -> Any:
            return equation(power, *inputs)

        layer.scan_mixer.scan = scan


def law(model: Any, cuts: list[int], length: int = 41) -> dict[str, Tensor]:
    embeds = model.get_input_embeddings()(random_tokens(2, length))
    return run_in_chunks(model_step(model), dict(model.named_parameters()), embeds, random_state(model, 2), cuts)


@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    ("family", "variant"), [case for case in VARIANTS if case[0] not in WITHOUT_DECAY], ids=variant_id
)
def test_a_scale_is_the_power_of_each_decay_in_outputs_states_and_gradients(family: Family, variant: str) -> None:
    """And any split, with the state carried, equals the whole."""
    model, plain = (build(family, torch.float64, **family.variants[variant]) for _ in range(2))
    scales = [*SCALES, 2.5][: model.config.num_hidden_layers]
    with_powers(plain, scales)
    expected = law(plain, [])
    with forgetting(model, decay_scale=scales):
        assert_equal_up_to(1e-10, law(model, []), expected)
        for cuts in ([1, 2, 9, 30], list(range(1, 41))):
            assert_equal_up_to(1e-10, law(model, cuts), expected)
    unscaled = law(model, [])["logits"]
    assert (unscaled - expected["logits"]).norm() > 1e-9 * unscaled.norm()  # strong gates forget all either way


@pytest.mark.parametrize("family", [family for family in FAMILIES if "retention" in family.config_class.forgets_by])
def test_retention_is_a_factor_on_each_decay_and_keeps_the_law(family: Family) -> None:
    if family is MAMBA2:
        return  # in test_forgetting.py
    model, plain = (build(family, torch.float64) for _ in range(2))
    for layer in plain.base_model.layers:
        scan = EQUATIONS[layer.scan_mixer.scan.__name__]
        place = 1 if family is MAMBA3 else 3

        def with_factor(*inputs: Tensor, scan: Any = scan, place: int = place, **_: Any) -> Any:
            gates = (0.9 * inputs[place].exp()).log()
            return scan(1, *inputs[:place], gates, *inputs[place + 1 :])

        layer.scan_mixer.scan = with_factor
    expected = law(plain, [])
    with forgetting(model, retention=0.9):
        assert_equal_up_to(1e-10, law(model, []), expected)
        assert_equal_up_to(1e-10, law(model, [1, 2, 30]), expected)


@pytest.mark.parametrize("family", MAMBAS, ids=variant_id)
def test_scales_of_steps_are_those_of_each_layer_and_keep_the_law(family: Family) -> None:
    model, plain = (build(family, torch.float64) for _ in range(2))
    for layer, scale in zip(plain.base_model.layers, SCALES, strict=True):
        scan = EQUATIONS[layer.scan_mixer.scan.__name__]

        def smaller(*inputs: Tensor, scan: Any = scan, scale: float = scale, **_: Any) -> Any:
            step = 0 if family is MAMBA3 else 1  # the log decays of Mamba-3 stand beside its steps
            power = scale if family is MAMBA3 else 1
            return scan(power, *inputs[:step], scale * inputs[step], *inputs[step + 1 :])

        layer.scan_mixer.scan = smaller
    with forgetting(model, delta_scale=SCALES):
        assert_equal_up_to(1e-10, law(model, [1, 2, 30]), law(plain, []))


@pytest.mark.parametrize("family", [MAMBA, FALCON_MAMBA, MAMBA3], ids=variant_id)
def test_insertion_is_a_factor_on_what_is_written(family: Family) -> None:
    """As half the skip, from half the zero state, with the outputs of the scan twice as large."""
    model, plain = (build(family, torch.float64) for _ in range(2))
    place = SCALED[plain.base_model.layers[0].scan_mixer.scan.__name__]["insertion"][0]
    for layer in plain.base_model.layers:
        mixer = layer.scan_mixer
        scan = type(mixer).scan

        def twice(*inputs: Tensor, scan: Any = scan, **options: Any) -> Any:
            *others, D, state = inputs
            y, after = scan(*others, D / 0.5, state / 0.5, **options)
            return 0.5 * y, 0.5 * after

        mixer.scan = twice
    assert place == {"mamba3": 5}.get(family.name, 3)
    with forgetting(model, insertion=0.5):
        assert_equal_up_to(1e-10, law(model, [1, 2, 30]), law(plain, []))


@every_scalable
@torch.no_grad()
def test_padding_is_neither_kept_nor_counted(family: Family) -> None:
    model, tokens = build(family, torch.float64), random_tokens(2, 20)
    mask = torch.ones_like(tokens)
    mask[0, :7] = mask[1, 5:9] = mask[1, -4:] = 0
    rule: dict[str, Any] = {"decay_scale": SCALES}
    if "retention" in model.config.forgets_by:
        rule["retention"] = 0.9
    with forgetting(model, **rule):
        found = model(tokens, attention_mask=mask)
        for row in range(2):
            alone = model(tokens[row, mask[row].bool()][None])
            assert (found.logits[row, mask[row].bool()] - alone.logits[0]).norm() < 1e-11 * alone.logits.norm()
            for layer, expected in zip(found.final_state, alone.final_state, strict=True):
                assert torch.allclose(layer.recurrent[row], expected.recurrent[0], rtol=1e-10, atol=1e-12)


@every_scalable
@torch.no_grad()
def test_generation_scales_too(family: Family) -> None:
    model, prompt = build(family, torch.float64), random_tokens(2, 12)
    with forgetting(model, decay_scale=SCALES):
        assert torch.equal(generate(model, prompt)[:, 12:], greedy_by_hand(model, prompt))


@every_scalable
@torch.no_grad()
def test_one_number_is_a_list_of_equal_numbers(family: Family) -> None:
    model, tokens = build(family), random_tokens(2, 20)
    with forgetting(model, decay_scale=0.7):
        expected, rule = model(tokens).logits, Forgetting.of(model.config)
    with forgetting(model, decay_scale=[0.7, 0.7]):
        assert torch.equal(model(tokens).logits, expected)
        assert Forgetting.of(model.config) == rule
    with forgetting(model, decay_scale=[1, 1.0]):
        assert torch.equal(model(tokens).logits, build(family)(tokens).logits)


def test_layers_are_numbered_however_a_family_makes_them() -> None:
    class Own(StatefulMamba2Model):
        def make_layers(self, config: Any) -> torch.nn.ModuleList:
            return torch.nn.ModuleList([self.make_layer(config, 0), self.make_layer(config, 1)])

    layers: Any = Own(MAMBA2.config()).layers
    assert [layer.scan_mixer.layer for layer in layers] == [0, 1]


@every_scalable
@torch.no_grad()
def test_recorded_scans_have_the_scaled_decays(family: Family) -> None:
    """Measurements of what a recurrence retains see what it does."""
    model, tokens, seen = build(family, torch.float64), random_tokens(1, 9), []
    place = SCALED[model.base_model.layers[0].scan_mixer.scan.__name__]["decay_scale"][0]
    readers = {name: lambda layer, *inputs: seen.append((layer, inputs[place])) for name in SCALED}
    with recorded_scans(model, readers):
        model(tokens)
        with forgetting(model, decay_scale=[0.5, 1.0]):
            model(tokens)
    assert [layer for layer, _ in seen] == [0, 1, 0, 1]
    assert torch.equal(seen[2][1], 0.5 * seen[0][1])  # of layer 1, the inputs differ


@pytest.mark.parametrize("family", WITHOUT_DECAY, ids=variant_id)
def test_families_without_decays_have_none_to_scale(family: Family) -> None:
    with pytest.raises(ValueError, match="takes no decay_scale; it is for families that decay, which linear"):
        family.config(forgetting={"decay_scale": 0.5})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"decay_scale": [0.5]}, "decay_scale must be one number, or one for each of the 2 layers, got 1 numbers"),
        ({"decay_scale": []}, "decay_scale must be one number, or one for each of the 2 layers, got 0 numbers"),
        ({"delta_scale": [1, 2, 3]}, "delta_scale must be one number, or one for each of the 2 layers, got 3"),
        ({"decay_scale": [0.5, 0]}, "decay_scale must be above 0 and finite, got 0"),
        ({"decay_scale": [0.5, math.inf]}, "decay_scale must be above 0 and finite, got inf"),
        ({"decay_scale": [0.5, "1"]}, "decay_scale must be above 0 and finite, got '1'"),
        ({"retention": [0.5, 1.5]}, "retention must be above 0 and at most 1, got 1.5"),
        ({"window": [3, 3]}, r"window must be None or a number of tokens, got \[3, 3\]"),
    ],
    ids=str,
)
def test_lists_are_checked(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MAMBA2.config(forgetting=fields)


def test_words_are_short() -> None:
    rule = Forgetting.of(GLA.config(forgetting={"decay_scale": (0.3125, 1.7), "retention": [0.9, 0.9]}))
    assert in_words(rule) == "retention 0.9, decay scale 0.312 to 1.7 by layer"


@torch.no_grad()
def test_each_layer_of_a_mamba_2_has_its_own_retention_and_insertion(tmp_path: Path) -> None:
    model, tokens = build(MAMBA2, torch.float64), random_tokens(2, 20)
    first, second = model.base_model.layers
    x, zero = model.get_input_embeddings()(tokens), model.zero_state(2)
    with forgetting(model, retention=0.9, insertion=0.5):
        x, _ = first(x, zero[0])
    x, _ = second(x, zero[1])
    expected = model.lm_head(model.base_model.norm_f(x))
    with forgetting(model, retention=[0.9, 1.0], insertion=[0.5, 1.0]):
        assert torch.equal(model(tokens).logits, expected)


@pytest.mark.parametrize("family", [MAMBA2, GLA], ids=variant_id)
@torch.no_grad()
def test_a_checkpoint_scales_by_itself_also_without_our_package(family: Family, tmp_path: Path) -> None:
    model, tokens = build(family), random_tokens(1, 12)
    with forgetting(model, decay_scale=SCALES):
        expected = model(tokens).logits
        model.save_pretrained(tmp_path / "model")
    assert json.loads((tmp_path / "model" / "config.json").read_text())["forgetting"] == {"decay_scale": SCALES}
    torch.save(tokens, tmp_path / "in.pt")
    code = """
model = AutoModelForCausalLM.from_pretrained(checkpoint, trust_remote_code=True)
torch.save(model(torch.load(data)).logits, sys.argv[3])
"""
    clean_process(tmp_path / "cwd", code, tmp_path / "model", tmp_path / "in.pt", tmp_path / "out.pt")
    assert torch.equal(torch.load(tmp_path / "out.pt"), expected)
