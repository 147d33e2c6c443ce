"""State expansion as in StateX's released code (thunlp/StateX, commit 76d15ef), by numbers read from that code."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, silu, softplus

from hf_recurrent_lengthgen import load_model
from hf_recurrent_lengthgen.cli.main import main
from hf_recurrent_lengthgen.models.layers_known import known_mixers
from hf_recurrent_lengthgen.surgery import expand_state
from hf_recurrent_lengthgen.surgery.state_expansion import expanded_parameters
from hf_recurrent_lengthgen.trainers import StateXConfig, StateXTrainer
from tests.hybrids.tiny_models import tiny_model
from tests.models.families import DECAYING, DELTA_FAMILIES, GLA, MAMBA2, Family, build, random_tokens, variant_id
from tests.surgery.expansions import grown
from tests.trainers import toys

every_released = pytest.mark.parametrize("how", ["released", "merge-copy"])
every_kind = pytest.mark.parametrize("family", [MAMBA2, GLA], ids=variant_id)


def uniform_within(values: Tensor, bound: float) -> None:
    """Values of U(-bound, bound): none beyond, some near the ends, and the standard deviation bound / sqrt(3)."""
    assert float(values.abs().max()) <= bound
    assert float(values.abs().max()) > 0.9 * bound
    assert float(values.std()) == pytest.approx(bound / 3**0.5, rel=0.15)


@torch.no_grad()
def test_mamba2_as_released_has_the_decays_steps_norm_and_draws_of_the_code() -> None:
    """`drop_layer(4)`: A = 1..H, dt_bias = 1, a new gated norm; rows of nn.Linear and taps of nn.Conv1d, with bias."""
    model = build(MAMBA2, use_bias=True, num_hidden_layers=3)
    expanded = expand_state(model, [1], factor=4, initialization="released")
    new, old = (m.backbone.layers[1].mixer for m in (expanded, model))
    torch.testing.assert_close(new.A_log, torch.tensor([0.0, math.log(2), math.log(3), math.log(4)]))
    assert torch.equal(new.dt_bias, torch.ones(4))
    assert torch.equal(new.norm.weight, torch.ones(32))
    inner, bc, heads, width, taps = 32, 2 * 2 * 20, 4, 16, 4  # 2 groups of N = 20
    z_x, of_bc = slice(0, 2 * inner), slice(2 * inner, 2 * inner + bc)
    for part in ("weight", "bias"):
        rows, old_rows = new.in_proj.get_parameter(part), old.in_proj.get_parameter(part)
        assert torch.equal(rows[z_x], old_rows[z_x])
        assert torch.equal(rows[-heads:], old_rows[-heads:])
        uniform_within(rows[of_bc], width**-0.5)  # kaiming_uniform_(a=sqrt(5))
        channels = new.conv1d.get_parameter(part)
        assert torch.equal(channels[:inner], old.conv1d.get_parameter(part)[:inner])
        uniform_within(channels[inner:], taps**-0.5)
    kept = {name: value for name, value in model.state_dict().items() if ".layers.1.mixer." not in name}
    kept |= {f"backbone.layers.1.mixer.{name}": old.get_parameter(name) for name in ("D", "out_proj.weight")}
    assert all(torch.equal(expanded.state_dict()[name], value) for name, value in kept.items())


@torch.no_grad()
def test_gla_as_released_is_a_new_layer_behind_a_new_norm() -> None:
    """`drop_layers(6, "gla")`: xavier uniform with gain 2^-2.5, that is, within 2^-2.5 sqrt(6 / (in + out))."""
    model = build(GLA, use_short_conv=True, hidden_size=64, num_heads=4, gate_low_rank_dim=16)
    expanded = expand_state(model, [1], num_heads=1, initialization="released")
    mixer = expanded.model.layers[1].attn
    sizes = {"q_proj": (64, 32), "k_proj": (64, 32), "v_proj": (64, 64), "g_proj": (64, 64), "o_proj": (64, 64)}
    for name, (read, written) in (sizes | {"gk_proj.0": (64, 16), "gk_proj.1": (16, 32)}).items():
        weight = mixer.get_submodule(name).weight
        assert weight.shape == (written, read)
        uniform_within(weight, 0.1767767 * math.sqrt(6 / (read + written)))
    assert not mixer.gk_proj[1].bias.any()
    for name in "qkv":
        uniform_within(mixer.get_submodule(f"{name}_conv1d").weight, 4**-0.5)
    assert torch.equal(mixer.g_norm_swish_gate.weight, torch.ones(64))
    assert torch.equal(expanded.model.layers[1].attn_norm.weight, torch.ones(64))
    kept = {name: value for name, value in model.state_dict().items() if ".layers.1.attn" not in name}
    assert any(".layers.1.mlp_norm." in name for name in kept)
    assert all(torch.equal(expanded.state_dict()[name], value) for name, value in kept.items())


@torch.no_grad()
@pytest.mark.parametrize("groups", [1, 2])
def test_copied_rows_read_and_write_the_old_state_as_many_times(groups: int) -> None:
    """merge_copy: the equations of the old layer with A = 1..H, dt_bias = 1, norm 1, and N'/N times C h."""
    model = build(MAMBA2, n_groups=groups)
    m, H, P, N, copies = model.backbone.layers[0].mixer, 4, 8, 5, 3
    new = expand_state(model, [0], factor=copies, initialization="merge-copy").backbone.layers[0].mixer
    x = torch.randn(2, 9, 16, generator=torch.Generator().manual_seed(3))
    state = model.zero_state(2)[0]
    h, columns = state.recurrent, state.conv
    for t in range(9):
        z, x_b_c, dt = m.in_proj(x[:, t]).split([H * P, H * P + 2 * groups * N, H], -1)
        window = torch.cat([columns, x_b_c[..., None]], -1)
        u, B, C = silu((window * m.conv1d.weight[:, 0]).sum(-1) + m.conv1d.bias).split([H * P, *[groups * N] * 2], -1)
        u, columns = u.unflatten(-1, (H, P)), window[..., 1:]
        B, C = (v.unflatten(-1, (groups, N)).repeat_interleave(H // groups, 1) for v in (B, C))
        step = softplus(dt + 1)
        decay = (-step * torch.arange(1.0, 5.0)).exp()
        h = decay[..., None, None] * h + torch.einsum("bh,bhp,bhn->bhpn", step, u, B)
        y = copies * torch.einsum("bhpn,bhn->bhp", h, C) + m.D[:, None] * u
        y = (y.flatten(1) * silu(z)).unflatten(-1, (groups, -1))
        y = y / (y.square().mean(-1, keepdim=True) + model.config.layer_norm_epsilon).sqrt()
        expected = m.out_proj(y.flatten(1))
    actual, _ = new(x, expand_state(model, [0], factor=copies).zero_state(2)[0])
    torch.testing.assert_close(actual[:, -1], expected, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_merged_heads_of_the_released_baseline_keep_their_weights_behind_a_new_norm() -> None:
    """`drop_layers(6, "merge")`: one head of all keys and values, queries over sqrt(H d_k), norms repeated."""
    model = build(GLA, num_heads=4)
    expanded = expand_state(model, [0], num_heads=1, initialization="merge-copy")
    block, m = expanded.model.layers[0], model.model.layers[0].attn
    x = torch.randn(7, 16, generator=torch.Generator().manual_seed(5))
    normed = x / (x.square().mean(-1, keepdim=True) + model.config.norm_eps).sqrt()  # attn_norm, weight 1
    S, outputs = torch.zeros(8, 16), []
    for x_t in normed:
        alpha = (logsigmoid(m.gk_proj(x_t)) / model.config.gate_logit_normalizer).exp()
        S = alpha[:, None] * S + torch.outer(m.k_proj(x_t), m.v_proj(x_t))
        o = m.q_proj(x_t) / 8**0.5 @ S
        o = m.g_norm_swish_gate.weight.repeat(4) * o / (o.square().mean() + model.config.norm_eps).sqrt()
        outputs.append(m.o_proj(o * silu(m.g_proj(x_t))))
    actual, _ = block.attn(block.attn_norm(x[None]), expanded.zero_state(1)[0])
    torch.testing.assert_close(actual[0], torch.stack(outputs), rtol=1e-4, atol=1e-5)


def test_copies_stay_copies_in_training() -> None:
    """Their gradients are the same, so the larger state holds the old one several times."""
    model = expand_state(build(MAMBA2), "all", factor=3, initialization="merge-copy")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tokens = random_tokens(4, 20)
    for _ in range(4):
        model(tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    for block in model.backbone.layers:
        groups = block.mixer.in_proj.weight[64:-4].unflatten(0, (2, 2, 3, 5))  # B and C, groups, copies, N
        torch.testing.assert_close(groups, groups[:, :, :1].expand_as(groups), rtol=0, atol=1e-5)
    state = model(tokens).final_state[0].recurrent.unflatten(-1, (3, 5))
    torch.testing.assert_close(state, state[..., :1, :].expand_as(state), rtol=1e-3, atol=1e-4)


@every_released
@every_kind
def test_seeds_records_and_checkpoints(family: Family, how: Any, tmp_path: Path) -> None:
    model = build(family, num_hidden_layers=3)
    sizes: dict[str, Any] = {"state_size": 15} if family is MAMBA2 else {"num_heads": 1}
    expanded, again, other = (
        expand_state(model, [0, 2], **sizes, initialization=how, seed=seed) for seed in (1, 1, 2)
    )
    toys.assert_same_weights(toys.weights(expanded), toys.weights(again))
    differ = [n for n, p in expanded.named_parameters() if not torch.equal(p, other.get_parameter(n))]
    assert bool(differ) is (how == "released")
    old = dict(model.named_parameters())
    new = dict(expanded.named_parameters())
    changed = {name for name in new if new[name].shape != old[name].shape or not torch.equal(new[name], old[name])}
    found = expanded_parameters(expanded)
    assert changed <= set(found)
    if family is GLA:  # the whole block and the norm before it, as in "reinit"
        found = {name for name in found if ".attn." not in name or name in changed}
        assert {n for n in found if ".attn_norm." in n} == {f"model.layers.{n}.attn_norm.weight" for n in (0, 2)}
    assert set(found) == changed
    expanded.save_pretrained(tmp_path)
    loaded = load_model(str(tmp_path))
    assert loaded.config.interventions[-1].endswith(f"in layers 0, 2, {how}")
    tokens = random_tokens(2, 9)
    assert torch.equal(loaded(tokens).logits, expanded(tokens).logits)


@torch.no_grad()
@pytest.mark.parametrize("model_type", ["bamba", "nemotron_h", "zamba2"])
def test_mamba2_layers_of_hybrids_are_expanded_alike(model_type: str) -> None:
    stock = tiny_model(model_type)
    for parameter in stock.parameters():
        parameter.add_(0.1)
    expanded = expand_state(stock, "all", factor=2, initialization="released")
    for mixer in (each.module for each in known_mixers(expanded)):
        torch.testing.assert_close(mixer.A_log.exp(), torch.arange(1.0, 1 + mixer.A_log.numel()))
        assert torch.equal(mixer.dt_bias, torch.ones_like(mixer.dt_bias))
        assert torch.equal(mixer.norm.weight, torch.ones_like(mixer.norm.weight))
    assert bool(expanded(random_tokens(1, 9)).logits.isfinite().all())


@every_released
@pytest.mark.parametrize("family", [f for f in (*DECAYING, *DELTA_FAMILIES) if f not in (MAMBA2, GLA)], ids=variant_id)
def test_other_families_are_refused(family: Family, how: Any) -> None:
    message = f'"{how}" does not apply to .*the code of the paper\'s authors has Mamba-2 and GLA only: give "reinit"'
    with pytest.raises(ValueError, match=message):
        expand_state(build(family), [1], **grown(family), initialization=how)


def test_rows_are_copied_a_whole_number_of_times() -> None:
    with pytest.raises(ValueError, match=r"copies all rows of B and C, and 12 is no multiple of 5: give \"reinit\""):
        expand_state(build(MAMBA2), [1], state_size=12, initialization="merge-copy")
    with pytest.raises(ValueError, match=r"initialization must be one of .*'released', 'merge-copy'"):
        expand_state(build(MAMBA2), initialization="copy")  # type: ignore[arg-type]


@every_released
def test_the_command_and_the_trainer_take_them(how: Any, tmp_path: Path) -> None:
    base, out = toys.tiny_model(), str(tmp_path / "expanded")
    base.save_pretrained(tmp_path / "base")
    options = ["--output", out, "--layers", "all", "--initialization", how]
    assert main(["expand", str(tmp_path / "base"), *options]) == 0
    by_command = load_model(out)
    assert by_command.config.expanded_layers == {"0": how, "1": how}
    settings = toys.QUIET | {"expand_layers": "all", "expand_initialization": how, "max_steps": 1, "seed": 0}
    arguments = StateXConfig(str(tmp_path / "trained"), save_strategy="no", **settings)
    trainer = StateXTrainer(base, arguments, train_dataset=toys.sequences(16))
    toys.assert_same_weights(toys.weights(trainer.model), toys.weights(by_command))
