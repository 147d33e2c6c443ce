"""The weights of a mixer with a larger state, from its old weights and those of a new mixer.

Each function takes the named tensors of the old mixer and of a freshly initialized one of the new sizes, and returns
those of the expanded mixer. "inherit" keeps the trained weights. "reinit" initializes the recurrence anew, as Shen et
al., 2025 recommend ("StateX", arXiv:2509.22630, sections 4.3 and A.4). Their code (thunlp/StateX, commit 76d15ef)
differs from their text: "released" and "merge-copy" (`RELEASED`) do what it does.

Shapes: N state dim, G groups, H heads, K convolution taps, R rank of the steps.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hf_recurrent_lengthgen.models.layers_known import kind_of

Weights = dict[str, Tensor]

RELEASED = ("released", "merge-copy")
"""Those of the authors' code: its `drop_mode` "mamba4" and "merge_copy" (Mamba-2), "gla" and "merge" (GLA)."""

QUIET_ROWS = 1e-3
"""Scale of FalconMamba's new B rows relative to the old ones: the norm of B changes by half its square."""
STEP_RANGE = {"time_step_min": 0.001, "time_step_max": 0.1}
"""Step sizes of new heads, by the names in configs; the values where a config has none."""


@torch.no_grad()
def draw_as_mamba_ssm(mixer: Any, config: Any) -> None:
    """Draw new weights of a Mamba mixer, of this package or of Transformers, as the authors' package does.

    Linear layers and convolutions as in torch, without bias of linear layers; A ~ U(1, 16) in Mamba-2 and 1 to N in
    Mamba-1; step sizes log-uniform from 0.001 to 0.1. Transformers draws rows of B and C that are up to eight times
    larger, and its hybrids start with step sizes of softplus(1) = 1.3, which forget everything.
    """
    for linear in (mixer.in_proj, getattr(mixer, "x_proj", None)):
        if linear is not None:
            nn.Linear.reset_parameters(linear)
            if linear.bias is not None:
                linear.bias.zero_()
    nn.Conv1d.reset_parameters(mixer.conv1d)
    rates = torch.empty_like(mixer.A_log, dtype=torch.float32)
    mixer.A_log.copy_((rates.uniform_(1, 16) if rates.ndim == 1 else torch.arange(1.0, 1 + rates.shape[1])).log())
    low, high = (math.log(getattr(config, name, other)) for name, other in STEP_RANGE.items())
    bias = mixer.dt_bias if rates.ndim == 1 else mixer.dt_proj.bias
    steps = torch.empty_like(bias, dtype=torch.float32).uniform_(low, high).exp()
    steps = steps.clamp(min=getattr(config, "time_step_floor", 1e-4))
    bias.copy_(steps + torch.log(-torch.expm1(-steps)))  # inverse of softplus


@torch.no_grad()
def draw_as_released(mixer: Any) -> None:
    """Draw new weights of a Mamba-2 or GLA mixer as the authors' code does.

    Mamba-2 (`drop_layer` of modeling/mamba2/layer.py): linear layer and convolution as in torch, with their biases;
    A = 1 to H; dt_bias = 1, that is, step sizes around softplus(1) = 1.3. GLA (`drop_layers` of modeling/gla/model.py
    makes a new layer): linear layers xavier uniform with gain 2^-2.5, biases 0, convolutions as in torch. Norms: 1.
    """
    mamba = kind_of(mixer) == "Mamba-2"
    for module in mixer.modules():
        if isinstance(module, (nn.Linear, nn.Conv1d)):
            module.reset_parameters()
        if isinstance(module, nn.Linear) and not mamba:
            nn.init.xavier_uniform_(module.weight, gain=2**-2.5)
            if module.bias is not None:
                module.bias.zero_()
    for parameter in (parameter for name, parameter in mixer.named_parameters() if "norm" in name):
        parameter.fill_(1)
    if mamba:
        mixer.A_log.copy_(torch.arange(1.0, 1 + mixer.A_log.numel()).log())
        mixer.dt_bias.fill_(1)


def widened_mamba2(old: Weights, new: Weights, mixer: Any, how: str) -> Weights:
    """Mamba-2 with more rows of B and C (Eq. 5), which follow [z, x] in `in_proj` and x in `conv1d`, group by group.

    "reinit": A_log, dt_bias and the rows and channels of B and C are new; D and the rows of dt stay. "released":
    the norm of the outputs is new, too. "merge-copy": as "released", but rows and channels of B and C are N'/N copies
    of the old ones in each group (the authors' code knows one group), so that C . B grows by N'/N. Copies get equal
    gradients and stay equal. "inherit": the old rows stay, and the new rows of C are zero. So outputs do not change,
    and gradients reach C first, then B.
    """
    inner, groups = old["out_proj.weight"].shape[1], mixer.n_groups
    result = dict(old)
    for name, before in (("in_proj", 2 * inner), ("conv1d", inner)):
        for part in ("weight", "bias"):
            key = f"{name}.{part}"
            if key not in old:
                continue
            head, b, c, tail = _around_bc(old[key], old, before)
            _, new_b, new_c, _ = _around_bc(new[key], new, before)
            if how == "merge-copy":
                copies = len(new_b) // len(b)
                b, c = (torch.cat([rows.unflatten(0, (groups, -1))] * copies, 1).flatten(0, 1) for rows in (b, c))
            elif how.startswith("inherit"):
                silent = key != "conv1d.weight"  # its input is zero already; zero taps would stop the gradient
                b = _widened_groups(b, new_b, groups)
                c = _widened_groups(c, torch.zeros_like(new_c) if silent else new_c, groups)
            else:
                b, c = new_b, new_c
            result[key] = torch.cat([head, b, c, tail])
    if how.startswith("inherit"):
        return result
    norm = [name for name in old if name.startswith("norm.") and how in RELEASED]
    return result | {name: new[name] for name in ("A_log", "dt_bias", *norm)}


def _around_bc(rows: Tensor, mixer: Weights, before: int) -> tuple[Tensor, ...]:
    """The rows before B, of B, of C, and after C, where B and C have G*N rows each."""
    bc = (mixer["conv1d.weight"].shape[0] - mixer["out_proj.weight"].shape[1]) // 2
    return rows.split([before, bc, bc, rows.shape[0] - before - 2 * bc])


def _widened_groups(old: Tensor, new: Tensor, groups: int) -> Tensor:
    """(G*N, ...) and (G*N', ...): the rows of each group in `old`, then the last N' - N of those in `new`."""
    old, new = old.unflatten(0, (groups, -1)), new.unflatten(0, (groups, -1))
    return torch.cat([old, new[:, old.shape[1] :]], dim=1).flatten(0, 1)


def widened_mamba(old: Weights, new: Weights, mixer: Any, how: str) -> Weights:
    """Mamba-1 with more rows of B and C, which follow those of the step sizes in `x_proj`, and more decays in `A_log`.

    "reinit": A_log, the bias of the step sizes and the rows of B and C are new. "inherit": the new decays continue the
    initialization log n, n > N, and the rows are as in `widened_mamba2`. FalconMamba divides B and C by their root
    mean square over N. N' - N values near zero make the results grow by s = sqrt(N'/N), and C . B by s^2, so D is
    multiplied and out_proj divided by s^2.
    """
    rank, size, new_size = old["dt_proj.weight"].shape[1], old["A_log"].shape[1], new["A_log"].shape[1]
    dt, b, c = old["x_proj.weight"].split([rank, size, size])
    _, new_b, new_c = new["x_proj.weight"].split([rank, new_size, new_size])
    if how == "reinit":
        redrawn = {name: new[name] for name in ("A_log", "dt_proj.bias")}
        return old | redrawn | {"x_proj.weight": torch.cat([dt, new_b, new_c])}
    result = old | {"A_log": torch.cat([old["A_log"], new["A_log"][:, size:]], dim=1)}
    b_rows, c_rows = new_b[size:], torch.zeros_like(new_c[size:])
    if getattr(mixer.config, "mixer_rms_eps", None) is not None:  # FalconMamba
        gain = new_size / size
        b_rows = b_rows * (QUIET_ROWS * _rms(b) / _rms(b_rows).clamp(min=1e-30))
        b, c = b * gain**0.5, c * gain**0.5
        result |= {"D": old["D"] * gain, "out_proj.weight": old["out_proj.weight"] / gain}
    result["x_proj.weight"] = torch.cat([dt, b, b_rows, c, c_rows])
    return result


def _rms(x: Tensor) -> Tensor:
    return x.float().square().mean().sqrt()


def merged_heads(old: Weights, new: Weights, _: Any, how: str) -> Weights:
    """GLA, HGRN-2, linear attention and RWKV with fewer and larger heads (Eq. 4); g old heads become one new head.

    "reinit", "released": all weights are new. "inherit", "merge-copy": weights of single heads stay, (H, N) as
    (H/g, g*N). Weights that all heads share (norms, feature maps) are repeated for the merged heads, matrices along
    the diagonal.
    """
    if how in ("reinit", "released"):
        return dict(new)
    return {name: _repeated(value, new[name].shape) for name, value in old.items()}


def _repeated(value: Tensor, shape: torch.Size) -> Tensor:
    if value.numel() == shape.numel():
        return value.reshape(shape)
    copies = shape[0] // value.shape[0]
    return value.repeat(copies) if value.ndim == 1 else torch.block_diag(*[value] * copies)


class Expansion(NamedTuple):
    """How one kind of mixer is expanded.

    Attributes:
        weights: The expanded weights, from old ones, those of a new mixer, that mixer and the initialization.
        new_values: What the names of the parameters that then hold new values begin with, after the mixer's name.
        of_reinit: Further ones, unless weights are inherited.
        of_released: Further ones in `RELEASED`.
    """

    weights: Callable[[Weights, Weights, Any, str], Weights]
    new_values: tuple[str, ...]
    of_reinit: tuple[str, ...] = ()
    of_released: tuple[str, ...] = ()

    def changed(self, how: str) -> tuple[str, ...]:
        """What the names of the parameters that hold new values begin with after an initialization."""
        reinit = () if how.startswith("inherit") else self.of_reinit
        return self.new_values + reinit + (self.of_released if how in RELEASED else ())


EXPANSIONS = {
    "heads": Expansion(merged_heads, (".",), (), ("_norm.",)),
    "Mamba-1": Expansion(widened_mamba, (".A_log", ".x_proj."), (".dt_proj.bias",)),
    "Mamba-2": Expansion(widened_mamba2, (".in_proj.", ".conv1d."), (".A_log", ".dt_bias"), (".norm.",)),
}


def expansion_of(mixer: Any) -> Expansion:
    kind = "heads" if getattr(mixer, "grows", None) == "num_heads" else str(kind_of(mixer))
    return EXPANSIONS[kind]
