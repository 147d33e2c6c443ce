"""State expansion (arXiv:2509.22630) against the paper's equations, and what it must leave alone."""

import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, silu

from hf_recurrent_lengthgen.surgery import expand_state
from hf_recurrent_lengthgen.surgery.expansion_plan import spread_layers
from hf_recurrent_lengthgen.surgery.state_expansion import expanded_parameters, recorded_expansions
from tests.models.families import (
    DECAYING,
    DELTA_FAMILIES,
    GLA,
    GROWING,
    MAMBA,
    MAMBA2,
    MAMBA3,
    Family,
    build,
    random_tokens,
    variant_id,
)
from tests.surgery.expansions import INITIALIZATIONS, every_expansion, every_family, every_initialization, grown


def same_as_loop(family: Family, model: Any) -> None:
    """Logits and states of a model are those of the family's equations, one token at a time."""
    tokens = random_tokens(2, 9)
    output = model(tokens)
    logits, state = family.loop(model, model.get_input_embeddings()(tokens), model.zero_state(2))
    torch.testing.assert_close(output.logits, logits, rtol=2e-4, atol=2e-5)
    for ours, theirs in zip(output.final_state, state, strict=True):
        torch.testing.assert_close(ours.recurrent, theirs.recurrent, rtol=2e-4, atol=2e-5)


def test_the_states_of_mamba_3_do_not_grow() -> None:
    with pytest.raises(ValueError, match="states of 'stateful_mamba3' cannot be expanded: B and C are normed over"):
        expand_state(build(MAMBA3), [1], state_size=12)


@pytest.mark.parametrize("family", DELTA_FAMILIES, ids=variant_id)
def test_the_delta_rule_does_not_inherit(family: Family) -> None:
    with pytest.raises(ValueError, match=r"\"inherit\" does not apply .* erases along keys of norm 1 .*: give"):
        expand_state(build(family), [1], num_heads=1, initialization="inherit")


@pytest.mark.thinned(3)
@torch.no_grad()
@every_expansion
def test_an_expanded_model_follows_the_equations_with_sizes_of_its_own(family: Family, initialization: str) -> None:
    model = build(family)
    expanded = expand_state(model, [1], **grown(family), initialization=initialization)  # type: ignore[arg-type]
    assert type(expanded) is type(model)
    before, after = model.state_shapes(), expanded.state_shapes()
    assert after[0] == before[0]
    assert torch.Size(after[1].recurrent).numel() > torch.Size(before[1].recurrent).numel()
    same_as_loop(family, expanded)


@torch.no_grad()
@pytest.mark.parametrize("heads", [1, 2])
def test_merged_heads_of_gla_are_those_of_the_paper(heads: int) -> None:
    """Eq. 2 and 9 with the heads of Eq. 4: H = 1, d_k' = H d_k, d_v' = H d_v, or two pairs of heads."""
    model = build(GLA, num_heads=4)
    expanded = expand_state(model, [0], num_heads=heads, initialization="inherit")
    x = torch.randn(2, 7, 16, generator=torch.Generator().manual_seed(5))
    W = {name: value for name, value in model.model.layers[0].attn.state_dict().items()}
    eps, tau = model.config.norm_eps, model.config.gate_logit_normalizer
    k_size, v_size = 8 // heads, 16 // heads  # of all keys, expand_k * 16, and values
    norm = W["g_norm_swish_gate.weight"].repeat(4 // heads)
    outputs = torch.zeros(2, 7, 16)
    for row in range(2):
        for h in range(heads):
            S = torch.zeros(k_size, v_size)
            keys, values = slice(h * k_size, (h + 1) * k_size), slice(h * v_size, (h + 1) * v_size)
            for t in range(7):
                x_t = x[row, t]
                q, k, v = (
                    W["q_proj.weight"][keys] @ x_t,
                    W["k_proj.weight"][keys] @ x_t,
                    W["v_proj.weight"][values] @ x_t,
                )
                gate = W["gk_proj.1.weight"] @ (W["gk_proj.0.weight"] @ x_t) + W["gk_proj.1.bias"]
                alpha = (logsigmoid(gate[keys]) / tau).exp()
                S = torch.diag(alpha) @ S + torch.outer(k, v)
                o = (q / k_size**0.5) @ S
                o = norm * o / (o.square().mean() + eps).sqrt()
                r = silu(W["g_proj.weight"][values] @ x_t)
                outputs[row, t] += W["o_proj.weight"][:, values] @ (r * o)
    mixer = expanded.model.layers[0].attn
    actual, _ = mixer(x, expanded.zero_state(2)[0])
    torch.testing.assert_close(actual, outputs, rtol=1e-4, atol=1e-5)


@pytest.mark.thinned(7)
@torch.no_grad()
@pytest.mark.parametrize("factor", [1.2, 2, 3, 4, 8])
@pytest.mark.parametrize(
    ("family", "changes"),
    [(MAMBA2, changes) for changes in MAMBA2.variants.values() if "layer_state_sizes" not in changes]
    + [(MAMBA, {}), (MAMBA, {"use_bias": True})],
    ids=variant_id,
)
def test_inheriting_leaves_the_logits_of_mamba_as_they_are(
    family: Family, changes: dict[str, Any], factor: float
) -> None:
    model = build(family, **changes)
    for layers in ([0], "all"):
        expanded = expand_state(model, layers, factor=factor, initialization="inherit")  # type: ignore[arg-type]
        assert expanded.config.layer_state_sizes == [int(5 * factor), 5 if layers == [0] else int(5 * factor)]
        tokens = random_tokens(2, 40)
        torch.testing.assert_close(expanded(tokens).logits, model(tokens).logits, rtol=0, atol=1e-5)
        state = expanded(tokens).final_state[0].recurrent
        assert (state == 0).sum() == 0  # the new part of the state is in use


@torch.no_grad()
@pytest.mark.parametrize("epsilon", [1e-6, 0.3])
def test_inheriting_makes_up_for_the_norms_of_falcon_mamba(epsilon: float) -> None:
    model = build(MAMBA, mixer_rms_eps=epsilon)
    tokens = random_tokens(2, 40)
    expanded = expand_state(model, "all", factor=3, initialization="inherit")
    torch.testing.assert_close(expanded(tokens).logits, model(tokens).logits, rtol=0, atol=1e-5)


def moved(before: dict[str, Tensor], after: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: before[name] != after[name] for name in before}


@pytest.mark.thinned(3)
@every_expansion
def test_every_new_weight_is_trained(family: Family, initialization: str) -> None:
    """Each element: with B and C both zero in the new rows, neither would ever move."""
    model = expand_state(build(family), "all", **grown(family), initialization=initialization)  # type: ignore[arg-type]
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    tokens = random_tokens(4, 20)
    for _ in range(4):
        model(tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    still = {name: int((~change).sum()) for name, change in moved(before, dict(model.named_parameters())).items()}
    still = {name: count for name, count in still.items() if count and "embeddings" not in name}
    assert still == {}


@pytest.mark.parametrize(
    ("family", "changes"),
    [(MAMBA, {}), (MAMBA, {"mixer_rms_eps": 1e-6}), (MAMBA2, {"use_bias": True})],
    ids=variant_id,
)
def test_new_weights_that_are_all_zero_never_get_a_gradient(family: Family, changes: dict[str, Any]) -> None:
    """The paper's "inherit" (5.5): the outputs of the old model, and the larger state stays out of use."""
    model, tokens = build(family, torch.float64, **changes), random_tokens(4, 20)
    expanded = expand_state(model, "all", state_size=8, initialization="inherit-zero")
    torch.testing.assert_close(expanded(tokens).logits, model(tokens).logits, rtol=0, atol=1e-5 if changes else 1e-12)
    old = dict(model.named_parameters())
    new = {n: p == 0 for n, p in expanded.named_parameters() if p.shape != old[n].shape and not n.endswith("A_log")}
    assert len(new) >= 2
    assert all(int(zero.sum()) == zero.numel() - old[name].numel() for name, zero in new.items())
    optimizer = torch.optim.AdamW(expanded.parameters(), lr=1e-2)
    for _ in range(3):
        optimizer.zero_grad()
        expanded(tokens, labels=tokens).loss.backward()
        assert not any(expanded.get_parameter(name).grad[zero].any() for name, zero in new.items())
        optimizer.step()
    assert not expanded(tokens).final_state[0].recurrent[..., 5:].any()


@torch.no_grad()
def test_reinit_of_mamba2_starts_only_the_recurrence_anew() -> None:
    """By the rows of in_proj, [z, x, B, C, dt], and the channels of conv1d, [x, B, C]."""
    model = build(MAMBA2, use_bias=True)
    new, old = (m.backbone.layers[1].mixer for m in (expand_state(model, [1], state_size=8), model))
    inner, heads, groups = 32, 4, 2
    for name, before in (("in_proj", 2 * inner), ("conv1d", inner)):
        for part in ("weight", "bias"):
            actual, kept = getattr(new, name).get_parameter(part), getattr(old, name).get_parameter(part)
            assert torch.equal(actual[:before], kept[:before])
            if name == "in_proj":
                assert torch.equal(actual[-heads:], kept[-heads:])
            rows = actual[before : before + 2 * groups * 8]
            assert not any(bool((row == kept_row).all()) for row in rows for kept_row in kept)
    assert bool(((new.A_log >= 0) & (new.A_log <= math.log(16))).all())
    steps = torch.nn.functional.softplus(new.dt_bias)
    assert bool(((steps > 0.9e-3) & (steps < 0.11)).all())
    assert not bool((new.dt_bias == old.dt_bias).any())
    for name in ("D", "norm.weight", "out_proj.weight", "out_proj.bias"):
        assert torch.equal(new.get_parameter(name), old.get_parameter(name))
    assert float(new.in_proj.weight[2 * inner : -heads].std()) == pytest.approx((3 * 16) ** -0.5, rel=0.2)
    assert bool((new.conv1d.bias[inner:] != 0).all())
    others = {name: value for name, value in model.state_dict().items() if ".layers.1.mixer." not in name}
    expanded = expand_state(model, [1], state_size=8).state_dict()
    assert all(torch.equal(expanded[name], value) for name, value in others.items())


@torch.no_grad()
def test_the_rows_of_each_group_stay_together() -> None:
    model = build(MAMBA2)  # two groups of 5
    mixer = expand_state(model, [0], state_size=7, initialization="inherit").backbone.layers[0].mixer
    old = model.backbone.layers[0].mixer.in_proj.weight
    for new_rows, kept in ((slice(64, 78), slice(64, 74)), (slice(78, 92), slice(74, 84))):  # B, C
        rows, old_rows = mixer.in_proj.weight[new_rows], old[kept]
        assert torch.equal(torch.cat([rows[:5], rows[7:12]]), old_rows)
    assert not mixer.in_proj.weight[[83, 84, 90, 91]].any()  # of C
    assert bool(mixer.in_proj.weight[[69, 70, 76, 77]].all())  # of B


@torch.no_grad()
def test_mamba1_goes_on_with_its_decays() -> None:
    model = build(MAMBA)
    for initialization in INITIALIZATIONS:
        mixer = expand_state(model, [0], state_size=8, initialization=initialization).backbone.layers[0].mixer  # type: ignore[arg-type]
        torch.testing.assert_close(mixer.A_log[:, 5:], torch.tensor([6.0, 7.0, 8.0]).log().expand(32, 3))
        kept = torch.equal(mixer.A_log[:, :5], model.backbone.layers[0].mixer.A_log)
        assert kept is (initialization == "inherit")
        old = model.backbone.layers[0].mixer
        assert torch.equal(mixer.dt_proj.bias, old.dt_proj.bias) is kept
        for name in ("in_proj.weight", "conv1d.weight", "dt_proj.weight", "out_proj.weight", "D"):
            assert torch.equal(mixer.get_parameter(name), old.get_parameter(name))
        assert torch.equal(mixer.x_proj.weight[:6], old.x_proj.weight[:6])  # rows of the steps


@torch.no_grad()
@pytest.mark.parametrize("family", [f for f in GROWING if "mamba" not in f.name], ids=variant_id)
def test_reinit_of_merged_heads_starts_the_whole_block_anew_and_nothing_else(family: Family) -> None:
    model = build(family)
    old, new = model.state_dict(), expand_state(model, [1], factor=2).state_dict()
    block = re.compile(r"\.(layers|blocks)\.1\.(attn|attention)\.")
    for name, value in old.items():
        assert (value.shape == new[name].shape and torch.equal(value, new[name])) is not bool(block.search(name)), name


@every_family
def test_the_model_and_its_config_stay_as_they_are(family: Family) -> None:
    model = build(family)
    config, weights = model.config.to_dict(), {k: v.clone() for k, v in model.state_dict().items()}
    other = family.causal_lm_class(model.config)  # shares the config
    torch.manual_seed(7)
    expected_draw = torch.rand(3)
    torch.manual_seed(7)
    how: Any = "inherit" if family in DECAYING else "reinit"
    expanded = expand_state(model, **grown(family), initialization=how)
    assert torch.equal(torch.rand(3), expected_draw)
    assert expanded.config is not model.config
    assert other.config is model.config
    assert model.config.to_dict() == config
    with torch.no_grad():
        for parameter in expanded.parameters():
            parameter.add_(1.0)
    assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items())
    assert expanded.config.interventions[-1].startswith("state expansion, ")
    assert all(module.config is expanded.config for module in expanded.modules() if hasattr(module, "config"))


@torch.no_grad()
@every_initialization
@pytest.mark.parametrize("family", [MAMBA2, GLA], ids=variant_id)
def test_dtype_tied_and_frozen_weights_and_mode_are_kept(family: Family, initialization: str) -> None:
    model = build(family, torch.bfloat16, tie_word_embeddings=True).train()
    model.generation_config.max_new_tokens = 3
    frozen = "embeddings.weight"
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.endswith(frozen))
    expanded = expand_state(model, **grown(family), initialization=initialization)  # type: ignore[arg-type]
    assert {p.dtype for p in expanded.parameters()} == {torch.bfloat16}
    assert expanded.get_output_embeddings().weight is expanded.get_input_embeddings().weight
    assert [name for name, p in expanded.named_parameters() if not p.requires_grad] == [
        name for name, _ in model.named_parameters() if name.endswith(frozen)
    ]
    assert expanded.training
    assert expanded.generation_config.max_new_tokens == 3
    tokens = random_tokens(2, 9)
    difference = (expanded(tokens).logits - model(tokens).logits).abs().max()
    assert (float(difference) < 1e-6) is (family is MAMBA2 and initialization == "inherit")


def test_one_layer_in_every_m_is_expanded() -> None:
    assert [spread_layers(total, 4) for total in (48, 10, 3)] == [[0, 12, 24, 36], [0, 2, 4, 6], [0, 1, 2]]


def test_new_weights_depend_on_the_seed() -> None:
    model, name = build(MAMBA2), "backbone.layers.0.mixer.in_proj.weight"
    first, again, other = (expand_state(model, seed=seed).state_dict()[name] for seed in (3, 3, 4))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_layers_may_be_chosen_and_expanded_twice() -> None:
    model = build(MAMBA2, num_hidden_layers=6)
    assert expand_state(model, count=2).config.layer_state_sizes == [20, 5, 5, 20, 5, 5]
    once = expand_state(model, [5, 1], state_size=9)
    assert once.config.layer_state_sizes == [5, 9, 5, 5, 5, 9]
    assert expand_state(once, [1], factor=2).config.layer_state_sizes == [5, 18, 5, 5, 5, 9]
    assert expand_state(once, [1], factor=2).config.interventions == [
        "state expansion, state_size 5 -> 9 in layers 1, 5, reinit",
        "state expansion, state_size 9 -> 18 in layer 1, reinit",
    ]
    gla = build(GLA, num_heads=4, num_kv_heads=4)
    expanded = expand_state(gla, [1], factor=2)
    assert (expanded.config.layer_num_heads, expanded.config.num_kv_heads) == ([4, 2], None)


@pytest.mark.thinned(3)
@every_expansion
def test_the_parameters_that_hold_new_values_are_found_from_the_record(family: Family, initialization: str) -> None:
    """They are those whose values or shapes differ, and where heads are merged the whole block."""
    model = build(family, num_hidden_layers=3)
    assert recorded_expansions(model.config) == {}
    assert expanded_parameters(model) == {}
    expanded = expand_state(model, [0, 2], **grown(family), initialization=initialization)  # type: ignore[arg-type]
    assert recorded_expansions(expanded.config) == dict.fromkeys((0, 2), initialization)
    found, old = expanded_parameters(expanded), dict(model.named_parameters())
    if "mamba" in family.name:
        changed = {
            name
            for name, p in expanded.named_parameters()
            if p.shape != old[name].shape or not torch.equal(p, old[name])
        }
        if family.name == "falcon_mamba" and initialization == "inherit":  # scaled, not new
            changed -= {
                f"backbone.layers.{layer}.mixer.{name}" for layer in (0, 2) for name in ("D", "out_proj.weight")
            }
        assert set(found) == changed
    else:
        block = re.compile(r"\.(layers|blocks)\.[02]\.(attn|attention)\.")
        assert set(found) == {name for name in old if block.search(name)}
    assert all(found[name] is parameter for name, parameter in expanded.named_parameters() if name in found)
