"""State expansion (arXiv:2509.22630) against the paper's equations, and what it must leave alone."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, silu
from transformers import AutoConfig, AutoModelForCausalLM, Mamba2Config
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from hf_recurrent_lengthgen import load_model, stateful
from hf_recurrent_lengthgen.evaluation.streaming import stream_nll
from hf_recurrent_lengthgen.hybrids.registry import SUPPORTED
from hf_recurrent_lengthgen.models import StatefulGLAConfig, StatefulMamba2Config
from hf_recurrent_lengthgen.surgery import expand_state, expansion_report
from hf_recurrent_lengthgen.surgery.expansion_plan import spread_layers
from hf_recurrent_lengthgen.surgery.state_expansion import (
    expanded_parameters,
    recorded_expansions,
)
from tests.hybrids.tiny_models import SUPPORTED_TYPES, tiny_model
from tests.models.families import (
    DECAYING,
    DELTA_FAMILIES,
    DELTA_NET,
    GATED_DELTANET,
    GLA,
    GROWING,
    KDA,
    MAMBA,
    MAMBA2,
    MAMBA3,
    RWKV6,
    RWKV7,
    SHELL_FAMILIES,
    Family,
    build,
    random_tokens,
    variant_id,
)
from tests.versions import needs_hybrids
from tests.without_package import clean_process

RECIPES = Path(__file__).parents[2] / "hf_recurrent_lengthgen" / "recipes" / "models"
INITIALIZATIONS = ("reinit", "inherit")
every_family = pytest.mark.parametrize("family", GROWING, ids=variant_id)
every_initialization = pytest.mark.parametrize("initialization", INITIALIZATIONS)
# the delta rule cannot inherit
every_expansion = pytest.mark.parametrize(
    ("family", "initialization"),
    [(f, how) for f in GROWING for how in INITIALIZATIONS if how == "reinit" or f in DECAYING],
    ids=variant_id,
)


def grown(family: Family) -> dict[str, Any]:
    return {"state_size": 12} if "mamba" in family.name else {"num_heads": 1}


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
    with pytest.raises(ValueError, match=r"cannot \"inherit\" .* erases along keys of norm 1 .*: give \"reinit\""):
        expand_state(build(family), [1], num_heads=1, initialization="inherit")


@torch.no_grad()
@pytest.mark.parametrize(
    ("family", "before", "after"),
    [
        (DELTA_NET, (2, 8, 8), (1, 16, 16)),
        (GATED_DELTANET, (2, 12, 6), (1, 24, 12)),
        (KDA, (2, 6, 6), (1, 12, 12)),
        (RWKV7, (2, 8, 8), (1, 16, 16)),
    ],
    ids=variant_id,
)
def test_merged_heads_of_the_delta_rule(
    family: Family, before: tuple[int, ...], after: tuple[int, ...], tmp_path: Path
) -> None:
    """(H, P, N) as in Eq. 4: one head with the keys and values of all; the checkpoint says so."""
    model = build(family, **({"expand_v": 2.0} if family is GATED_DELTANET else {}))
    expand_state(model, [1]).save_pretrained(tmp_path)
    loaded = family.causal_lm_class.from_pretrained(tmp_path)
    assert [shape.recurrent for shape in loaded.state_shapes()] == [before, after]
    assert loaded.config.layer_num_heads == [before[0], 1]
    assert recorded_expansions(loaded.config) == {1: "reinit"}
    sizes = [sum(p.numel() for p in m.parameters()) for m in (model, loaded)]
    assert sizes[1] < 1.01 * sizes[0]
    same_as_loop(family, loaded)


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
    given, _ = mixer(x, expanded.zero_state(2)[0])
    torch.testing.assert_close(given, outputs, rtol=1e-4, atol=1e-5)


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


@torch.no_grad()
def test_reinit_of_mamba2_starts_only_the_recurrence_anew() -> None:
    """By the rows of in_proj, [z, x, B, C, dt], and the channels of conv1d, [x, B, C]."""
    model = build(MAMBA2, use_bias=True)
    new, old = (m.backbone.layers[1].mixer for m in (expand_state(model, [1], state_size=8), model))
    inner, heads, groups = 32, 4, 2
    for name, before in (("in_proj", 2 * inner), ("conv1d", inner)):
        for part in ("weight", "bias"):
            given, kept = getattr(new, name).get_parameter(part), getattr(old, name).get_parameter(part)
            assert torch.equal(given[:before], kept[:before])
            if name == "in_proj":
                assert torch.equal(given[-heads:], kept[-heads:])
            rows = given[before : before + 2 * groups * 8]
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
    for given, kept in ((slice(64, 78), slice(64, 74)), (slice(78, 92), slice(74, 84))):  # B, C
        rows, old_rows = mixer.in_proj.weight[given], old[kept]
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
def test_model_and_config_given_stay_as_they_are(family: Family) -> None:
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


def test_new_weights_depend_on_the_seed() -> None:
    model = build(MAMBA2)
    first, again, other = (expand_state(model, seed=seed).state_dict() for seed in (3, 3, 4))
    name = "backbone.layers.0.mixer.in_proj.weight"
    assert torch.equal(first[name], again[name])
    assert not torch.equal(first[name], other[name])


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


@pytest.mark.parametrize(
    ("total", "count", "layers"),
    [
        (48, 4, [0, 12, 24, 36]),
        (24, 4, [0, 6, 12, 18]),
        (10, 4, [0, 2, 4, 6]),
        (3, 4, [0, 1, 2]),
        (5, 1, [0]),
        (6, 2, [0, 3]),
    ],
)
def test_one_layer_in_every_m_is_expanded(total: int, count: int, layers: list[int]) -> None:
    assert spread_layers(total, count) == layers


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


def recipe(name: str) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((RECIPES / name).read_text())
    return {key: value for key, value in values.items() if key not in ("model_type", "architectures")}


def test_the_report_of_mamba2_has_the_figures_computed_for_the_paper() -> None:
    """48 layers of 64 heads of 64 x 128: 25.17 M; four times that in 4 or 8 of them."""
    config = StatefulMamba2Config(**recipe("mamba2-1.3b.json"))
    four, eight = expansion_report(config), expansion_report(config, count=8)
    assert [layer.layer for layer in four.layers] == [0, 12, 24, 36]
    state = 64 * 64 * 128
    assert (four.state_before, four.state_after) == (48 * state, (44 + 16) * state)
    assert four.state_before == pytest.approx(25.17e6, rel=2e-4)
    assert four.state_after == pytest.approx(31.46e6, rel=2e-4)
    assert eight.state_after == pytest.approx(37.75e6, rel=2e-4)
    assert four.parameters_before == pytest.approx(1.343e9, abs=1e6)  # 1.343 B in Table 6
    assert four.parameters_after == pytest.approx(1.350e9, abs=0.5e6)
    assert eight.parameters_after == pytest.approx(1.356e9, abs=0.5e6)
    assert four.parameters_after - four.parameters_before == 4 * 2 * 384 * (2048 + 4 + 1)  # rows, taps and biases
    assert four.parameters_after / four.parameters_before < 1.01
    assert config.layer_state_sizes is None
    assert "128 -> 512" in str(four)
    assert "25,165,824 -> 31,457,280 (1.25x)" in str(four)


def test_the_report_of_gla_has_the_figures_of_the_paper() -> None:
    """The defaults of fla are GLA-1.3B: 24 layers of 4 heads of 256 x 512, 12.58 M; four times that in 4 of them."""
    report = expansion_report(StatefulGLAConfig())
    assert (report.state_before, report.state_after) == (24 * 4 * 256 * 512, (20 + 16) * 4 * 256 * 512)
    assert report.state_before == pytest.approx(12.58e6, rel=3e-4)
    assert report.state_after == pytest.approx(18.87e6, rel=3e-4)
    assert report.parameters_before == pytest.approx(1.365e9, abs=1e6)  # as Table 6
    assert report.parameters_after - report.parameters_before == 4 * (2048 - 512)  # the norms alone


@every_family
def test_the_report_is_what_the_expansion_does(family: Family) -> None:
    model = build(family, tie_word_embeddings=True)
    report = expansion_report(model.config, [1], **grown(family))
    expanded = expand_state(model, [1], **grown(family))

    def state(of: Any) -> int:
        return sum(torch.Size(shape.recurrent).numel() for shape in of.state_shapes())

    assert (report.state_before, report.state_after) == (state(model), state(expanded))
    counts = (sum(p.numel() for p in of.parameters()) for of in (model, expanded))
    assert (report.parameters_before, report.parameters_after) == tuple(counts)
    (layer,) = report.layers
    assert layer.state_after - layer.state_before == report.state_after - report.state_before
    assert layer.parameters_after - layer.parameters_before == report.parameters_after - report.parameters_before


@pytest.mark.thinned(3)
@every_expansion
def test_an_expanded_checkpoint_describes_itself_and_streams(
    family: Family, initialization: str, tmp_path: Path
) -> None:
    expanded = expand_state(build(family), [1], **grown(family), initialization=initialization)  # type: ignore[arg-type]
    expanded.save_pretrained(tmp_path)
    loaded = load_model(str(tmp_path)).eval()
    tokens = random_tokens(2, 50)
    with torch.no_grad():
        logits = expanded(tokens).logits
    assert torch.equal(loaded(tokens).logits, logits)
    assert loaded.config.interventions == expanded.config.interventions
    whole = -logits[:, :-1].log_softmax(-1).gather(2, tokens[:, 1:, None])[..., 0]
    streamed = stream_nll(loaded, tokens, chunk_length=7).nll
    torch.testing.assert_close(torch.as_tensor(streamed).float(), whole, rtol=1e-4, atol=1e-4)


def test_a_process_without_our_package_gets_the_same_models(tmp_path: Path) -> None:
    """In one process, which takes long to start."""
    tokens, expected = random_tokens(2, 9), {}
    for family in SHELL_FAMILIES:
        expanded = expand_state(build(family), [1], **grown(family), initialization="inherit")
        expanded.save_pretrained(tmp_path / "all" / family.name)
        with torch.no_grad():
            expected[family.name] = expanded(tokens).logits
    torch.save(tokens, tmp_path / "tokens.pt")
    code = """
logits = {}
for name in os.listdir(checkpoint):
    model = AutoModelForCausalLM.from_pretrained(os.path.join(checkpoint, name), trust_remote_code=True).eval()
    assert type(model).__module__.startswith("transformers_modules."), type(model)
    logits[name] = model(torch.load(data)).logits.detach()
torch.save(logits, sys.argv[3])
"""
    clean_process(tmp_path / "cwd", code, tmp_path / "all", tmp_path / "tokens.pt", tmp_path / "logits.pt")
    given = torch.load(tmp_path / "logits.pt")
    assert set(given) == set(expected)
    assert all(torch.equal(given[name], logits) for name, logits in expected.items())


@torch.no_grad()
def test_models_whose_code_came_with_a_checkpoint_are_expanded(tmp_path: Path) -> None:
    build(MAMBA2).save_pretrained(tmp_path / "checkpoint")
    remote: Any = get_class_from_dynamic_module(
        "modeling_stateful_mamba2.StatefulMamba2ForCausalLM", str(tmp_path / "checkpoint")
    )
    config = remote.config_class.from_pretrained(tmp_path / "checkpoint")
    model = remote.from_pretrained(tmp_path / "checkpoint", config=config)
    assert type(model).__module__.startswith("transformers_modules")
    expanded = expand_state(model, [0], factor=2, initialization="inherit")
    assert type(expanded) is type(model)
    tokens = random_tokens(2, 9)
    torch.testing.assert_close(expanded(tokens).logits, model(tokens).logits, rtol=0, atol=1e-6)
    assert expansion_report(config, [0], factor=2, model_class=remote).state_after > 0


HYBRIDS = ["bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "mamba", "mamba2", "nemotron_h", "zamba2"]


@pytest.mark.thinned(3)
@needs_hybrids
@torch.no_grad()
@pytest.mark.parametrize("model_type", HYBRIDS)
def test_hybrids_are_expanded_in_all_layers_and_load_in_plain_transformers(model_type: str, tmp_path: Path) -> None:
    tokens = random_tokens(2, 20)
    stock = tiny_model(model_type)
    expected = stock(tokens).logits
    expanded = expand_state(stock, "all", factor=2, initialization="inherit")
    torch.testing.assert_close(expanded(tokens).logits, expected, rtol=0, atol=1e-5)
    expanded.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert type(loaded) is type(stock)
    torch.testing.assert_close(loaded(tokens).logits, expected, rtol=0, atol=1e-5)
    config = AutoConfig.from_pretrained(tmp_path)
    assert 12 in (getattr(config, SUPPORTED[model_type].state_field),)
    assert loaded.config.interventions == expanded.config.interventions
    report = expansion_report(stock.config, "all", factor=2)
    assert report.state_after == 2 * report.state_before
    carried = stateful(tiny_model(model_type))
    wrapped = expand_state(carried, "all", factor=2, initialization="inherit")
    assert type(wrapped) is type(carried)
    first = wrapped(tokens[:, :9], output_final_state=True)
    shapes = [shape.recurrent for shape in carried.state_shapes() if shape.recurrent != (0,)]
    grown_shapes = [shape.recurrent for shape in wrapped.state_shapes() if shape.recurrent != (0,)]
    assert [(*shape[:-1], 2 * shape[-1]) for shape in shapes] == grown_shapes
    assert report.state_after == sum(torch.Size(shape).numel() for shape in grown_shapes)
    assert first.final_state is not None


@pytest.mark.thinned(3)
@needs_hybrids
@pytest.mark.parametrize("model_type", ["bamba", "granitemoehybrid", "nemotron_h", "zamba2"])
def test_one_layer_of_a_hybrid_is_expanded_alone(model_type: str, tmp_path: Path) -> None:
    """Its outputs stay, its states can be carried, and its config holds the size, which stock classes refuse."""
    tokens = random_tokens(2, 20)
    stock = tiny_model(model_type)
    expanded = expand_state(stock, [1], factor=2, initialization="inherit")
    assert type(expanded) is type(stock)
    with torch.no_grad():
        torch.testing.assert_close(expanded(tokens).logits, stock(tokens).logits, rtol=0, atol=1e-5)
    wrapped, carried = stateful(expanded), stateful(stock)  # reads a text in pieces
    shapes, old = ([s.recurrent for s in model.state_shapes() if s.recurrent != (0,)] for model in (wrapped, carried))
    assert shapes == [(*shape[:-1], shape[-1] * (1 + (layer == 1))) for layer, shape in enumerate(old)]
    report = expansion_report(stock.config, [1], factor=2)
    assert (report.state_before, report.state_after) == tuple(sum(map(math.prod, of)) for of in (old, shapes))
    assert report.parameters_after == sum(p.numel() for p in expanded.parameters())
    wrapped.save_pretrained(tmp_path)
    with pytest.raises(RuntimeError, match="is a per-layer attribute"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
    loaded = load_model(str(tmp_path))
    assert type(loaded) is type(wrapped)
    with torch.no_grad():
        torch.testing.assert_close(loaded(tokens).logits, wrapped(tokens).logits)
    twice = expand_state(expand_state(loaded, [0], state_size=7), "all", factor=2)
    assert [layer.size_after for layer in expansion_report(twice.config, "all", factor=2).layers][:2] == [28, 48]


@needs_hybrids
def test_every_recurrent_type_of_transformers_is_expanded_or_refused_with_the_reason() -> None:
    assert all(bool(stock.state_field) is not bool(stock.no_expansion) for stock in SUPPORTED.values())
    for model_type in (name for name in SUPPORTED_TYPES if SUPPORTED[name].no_expansion):
        config = AutoConfig.for_model(model_type)
        with pytest.raises(ValueError, match=f"'{model_type}' cannot be expanded: its? .*|learned"):
            expansion_report(config)
    with pytest.raises(ValueError, match=r"has one mamba_d_state for all layers.*give layers=\"all\", and so have"):
        expand_state(tiny_model("falcon_h1"), [0])
    with pytest.raises(ValueError, match=r'one mamba_d_state in all layers only: give layers="all", or layers or'):
        expand_state(tiny_model("bamba"))
    with pytest.raises(ValueError, match=r"one state_size for all layers.*load_model, whose class"):
        expansion_report(Mamba2Config())


@pytest.mark.parametrize(
    ("family", "changes", "arguments", "message"),
    [
        (MAMBA2, {}, {"factor": 1}, "state_size of layer 0 is 5 and would become 5"),
        (MAMBA2, {}, {"factor": 1.5}, "would become 7.5: give a larger integer"),
        (MAMBA2, {}, {"factor": float("inf")}, "factor must be a finite number above 1, got inf"),
        (MAMBA2, {}, {"factor": float("nan")}, "factor must be a finite number above 1, got nan"),
        (MAMBA2, {}, {"state_size": float("inf")}, "would become inf: give a larger integer"),
        (MAMBA2, {}, {"state_size": 4}, "is 5 and would become 4"),
        (MAMBA2, {}, {"num_heads": 1}, "num_heads does not apply to stateful_mamba2: its state grows by state_size"),
        (MAMBA2, {}, {"state_size": 9, "factor": 2}, "Give one of factor, state_size and num_heads"),
        (MAMBA2, {}, {"layers": [2]}, r"layers must be some of the recurrent layers, 0, 1, got \[2\]"),
        (MAMBA2, {}, {"layers": []}, r"layers must be some of the recurrent layers, 0, 1, got \[\]"),
        (MAMBA2, {}, {"layers": [1.0]}, r'layers must be "all" or integers from 0, got \[1\.0\]'),
        (MAMBA2, {}, {"layers": [True]}, r'layers must be "all" or integers from 0, got \[True\]'),
        (MAMBA2, {}, {"layers": 0}, 'layers must be "all" or integers from 0, got 0'),
        (MAMBA2, {}, {"layers": [0], "count": 1}, "Give layers or count, not both"),
        (MAMBA2, {}, {"count": 0}, "At least one layer must be expanded, got 0"),
        (MAMBA2, {}, {"initialization": "zero"}, "initialization must be one of .*, got 'zero'"),
        (GLA, {}, {"state_size": 9}, "state_size does not apply to stateful_gla: its state grows by num_heads"),
        (GLA, {"num_heads": 4}, {"num_heads": 3}, "num_heads of layer 0 is 4 and would become 3: give a smaller"),
        (GLA, {"num_heads": 4}, {"factor": 3}, "is 4 and would become 1.33333"),
        (GLA, {"num_heads": 4}, {"factor": 0}, "factor must be a finite number above 1, got 0"),
        (GLA, {"num_heads": 4}, {"factor": 8}, "is 4 and would become 0.5"),
        (GLA, {"num_heads": 1}, {}, "Layer 0 has one head already"),
        (GATED_DELTANET, {"num_v_heads": 4}, {}, "num_v_heads is 4 and num_heads 2, so that heads share keys"),
        (GLA, {"num_heads": 4, "num_kv_heads": 2}, {}, "num_kv_heads is 2 and num_heads 4, so that heads share"),
    ],
)
def test_what_cannot_be_done_is_refused(
    family: Family, changes: dict[str, Any], arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        expand_state(build(family, **changes), **arguments)


def test_only_the_mamba_layers_of_a_reference_model_are_expanded() -> None:
    model = build(MAMBA2, num_hidden_layers=3, attention_layers=[1], attention_kind="linear")
    assert expand_state(model).config.layer_state_sizes == [20, 5, 20]
    with pytest.raises(ValueError, match="recurrent layers, 0, 2, got"):
        expand_state(model, [1])


def test_adapters_quantized_and_changed_models_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(build(MAMBA2), peft.LoraConfig(target_modules=["in_proj"]))
    with pytest.raises(ValueError, match=r"has adapters.*merge_and_unload"):
        expand_state(adapted)
    merged = adapted.merge_and_unload()
    assert expand_state(merged).config.layer_state_sizes == [20, 20]
    packed = build(RWKV6)
    packed.model.layers[0].attn.o_proj.weight = torch.nn.Parameter(torch.zeros(9, dtype=torch.uint8), False)
    with pytest.raises(ValueError, match="is quantized: expand it in full precision"):
        expand_state(packed)
    changed = build(MAMBA2)
    changed.learned_state = torch.nn.Linear(1, 1)
    with pytest.raises(ValueError, match=r"no plain StatefulMamba2ForCausalLM: learned_state\.bias, learned_state"):
        expand_state(changed)
    with torch.device("meta"):
        empty = MAMBA2.causal_lm_class(MAMBA2.config())
    with pytest.raises(ValueError, match="load the model on one device"):
        expand_state(empty)
    with pytest.raises(ValueError, match="takes a model of Transformers"):
        expand_state(torch.nn.Linear(1, 1))  # type: ignore[arg-type]
