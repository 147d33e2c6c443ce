"""Mamba-1 and FalconMamba with a state as argument and result, on the parameter names of Transformers.

They are one family: `mixer_rms_eps` in the configuration tells them apart, and all parameters are alike.

Glossary (Gu & Dao 2023, arXiv:2312.00752 -> here): Delta -> dt, A -> -exp(A_log), h -> state.recurrent, D channels ->
intermediate_size, N -> state_size, R -> time_step_rank. FalconMamba (arXiv:2410.05355) norms dt, B and C first.

Different from `transformers.models.mamba` and `falcon_mamba`: the mixer takes and returns a `LayerState`, also over
several tokens, where theirs drops the recurrent part. It takes right-padded rows, calls `dt_proj` as
a module, so that adapters on it train, and computes convolution, steps and recurrence in full precision (the kernel of
the convolution in its own).
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, silu, softplus
from transformers import initialization as init

from .configuration_stateful_mamba import StatefulMambaConfig
from .layers_conv import CausalConv1d
from .layers_mamba import MixerBackbone, init_mamba_mixer
from .layers_mixer import ScanMixer, is_plain, rms_normalize
from .modeling_heads import StatefulForCausalLM
from .rows import Rows
from .rows_moved import zero_past_end
from .scan_backends import ScanBackend
from .scan_selective import ScanOfModules, scan_selective, selective_scan, without_padding
from .state_value import LayerShape, LayerState, state_dtype

KERNEL_AVAILABLE = selective_scan is not None


class StepProjection(nn.Linear):
    """A linear layer that computes in float32 or better: rounding a -5 to bf16 would change exp(-5) by 2 %."""

    def forward(self, x: Tensor) -> Tensor:
        wide = state_dtype(x.dtype)
        with torch.autocast(x.device.type, enabled=False):
            return linear(x.to(wide), self.weight.to(wide), None if self.bias is None else self.bias.to(wide))


def gated_scan(
    mixer: Any,
    x: Tensor,
    raw: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    gate: Tensor,
    state: LayerState,
    rows: Rows | None,
    backend: ScanBackend,
) -> tuple[Tensor, LayerState]:
    """Selective scan times silu(gate), (B, T, D), and the state with the recurrent part after it.

    Args:
        mixer: The `ScanMixer`.
        raw: Step sizes before softplus, (B, T, D).
        x, A, B, C, D: As `scan_selective` takes them.
        gate: (B, T, D).
        state: Before the first token.
        rows: As layers get them.
        backend: Of the scan.
    """
    if _with_all_inside(mixer, x, rows, backend):
        raw = without_padding(raw, None if rows is None else rows.real)
        y, recurrent = selective_scan(x, raw, A, B, C, D, state.recurrent, gate, softplus=True)
        return y, LayerState(recurrent, state.conv)
    dt = zero_past_end(softplus(raw), rows)
    y, state = mixer.advance(x, dt, A, B, C, D, state=state, rows=rows, backend=backend)
    return y * silu(gate), state


def _with_all_inside(mixer: Any, x: Tensor, rows: Rows | None, backend: ScanBackend) -> bool:
    """Whether the kernel takes softplus and gate inside, since nothing acts on the inputs of the scan."""
    shared = rows is not None and rows.group is not None
    unwatched = mixer.scans_unwatched and mixer.scan is scan_selective
    return backend == "kernel" and x.shape[1] > 1 and unwatched and not shared


def convolved_and_scanned(
    mixer: Any,
    read: Callable[[Tensor, Tensor], tuple[Tensor, ...]],
    modules: Sequence[nn.Module],
    x: Tensor,
    gate: Tensor,
    state: LayerState,
    rows: Rows | None,
    backend: ScanBackend,
) -> tuple[Tensor, LayerState]:
    """What is between the projections of a mixer: outputs (B, T, D), and the state after the tokens.

    In training on the kernel it keeps x and the gate, and computes all else again, as mamba-ssm does.

    Args:
        mixer: With A_log and D.
        read: From x and the state of the convolution to the inputs of the scan, as `ScanOfModules` has it.
        modules: The modules that `read` calls.
        x: Before the convolution, (B, T, D).
        gate: (B, T, D).
        state: Before the first token.
        rows: As layers get them.
        backend: Of scan and convolution.
    """
    wide = state.recurrent.dtype
    A, D = -mixer.A_log.to(wide).exp(), mixer.D.to(wide)
    inside = _with_all_inside(mixer, x, rows, backend) and not torch.compiler.is_compiling()
    if inside and torch.is_grad_enabled() and all(is_plain(module) and _trained_once(module) for module in modules):
        real = None if rows is None else rows.real

        def read_real(x: Tensor, conv: Tensor) -> tuple[Tensor, ...]:
            x, raw, *others = read(x, conv)
            return x, without_padding(raw, real), *others

        weights = [weight for module in modules for weight in module.parameters()]
        y, *after = ScanOfModules.apply(read_real, gate, A, D, state.recurrent, x, state.conv, *weights)
        return y, LayerState(*after)
    x, raw, B, C, conv = read(x, state.conv)
    y, after = gated_scan(mixer, x, raw, A, B, C, D, gate, state, rows, backend)
    return y, after._replace(conv=conv)


def _trained_once(module: nn.Module) -> bool:
    """Whether the backward pass finds the weights of a module where they were, and may compute their gradients apart:
    parameters that are not gathered for one call, as by FSDP, and without hooks, which would run twice. Replicas of
    DataParallel and flat parameters of FSDP have tensors in their place."""
    apart = any(isinstance(value, Tensor) and value.requires_grad for value in vars(module).values())
    return not apart and all(type(x) is nn.Parameter and not x._backward_hooks for x in module.parameters())


class StatefulMambaMixer(ScanMixer):
    """Projections, short convolution, selective recurrence, gate.

    Parameters are named and laid out as in `transformers` and mamba-ssm: `in_proj` rows are [x, z], those of `x_proj`
    [dt, B, C].
    """

    scan = staticmethod(scan_selective)
    grows = "state_size"

    def __init__(self, config: StatefulMambaConfig, layer: int) -> None:
        super().__init__(config, KERNEL_AVAILABLE)
        inner, self.state_size = config.intermediate_size, config.state_size_of(layer)
        self.time_step_rank = int(config.time_step_rank)
        self.in_proj = nn.Linear(config.hidden_size, 2 * inner, bias=config.use_bias)
        self.conv1d = CausalConv1d.depthwise(inner, config.conv_kernel, config.use_conv_bias)
        self.x_proj = nn.Linear(inner, self.time_step_rank + 2 * self.state_size, bias=False)
        self.dt_proj = StepProjection(self.time_step_rank, inner, bias=True)
        self.A_log = nn.Parameter(torch.empty(inner, self.state_size))
        self.D = nn.Parameter(torch.empty(inner))
        self.out_proj = nn.Linear(inner, config.hidden_size, bias=config.use_bias)

    @property
    def state_shape(self) -> LayerShape:
        """(D, N) and (D, K-1)."""
        inner = self.config.intermediate_size
        return LayerShape((inner, self.state_size), (inner, self.config.conv_kernel - 1))

    def kernel_limit(self, dtype: torch.dtype) -> str:
        if self.state_size > 256:
            return f"a state_size of at most 256, got {self.state_size}"
        return super().kernel_limit(dtype)

    def forward(self, hidden_states: Tensor, state: LayerState, rows: Rows | None = None) -> tuple[Tensor, LayerState]:
        backend = self.backend_for(hidden_states)
        conv_input, gate = self.in_proj(hidden_states).chunk(2, -1)

        def read(x: Tensor, conv: Tensor) -> tuple[Tensor, ...]:
            x, conv = self.conv1d(x, conv, rows, backend)
            dt, B, C = self.x_proj(x).split([self.time_step_rank, self.state_size, self.state_size], -1)
            if self.config.mixer_rms_eps is not None:
                dt, B, C = (rms_normalize(v.to(wide), self.config.mixer_rms_eps) for v in (dt, B, C))
            return x, self.dt_proj(dt).to(wide), B, C, conv

        wide, modules = state.recurrent.dtype, (self.conv1d, self.x_proj, self.dt_proj)
        y, state = convolved_and_scanned(self, read, modules, conv_input, gate, state, rows, backend)
        return self.out_proj(y.to(hidden_states.dtype)), state

    @torch.no_grad()
    def init_weights(self) -> None:
        """A = -(1..N) in both initializations; and see `init_mamba_mixer`."""
        config = self.config
        rates = torch.arange(1, self.state_size + 1, device=self.A_log.device, dtype=torch.float32)
        init.copy_(self.A_log, rates.log().expand_as(self.A_log))
        spread = self.time_step_rank**-0.5 * config.time_step_scale
        if config.time_step_init_scheme == "constant":
            init.constant_(self.dt_proj.weight, spread)
        else:
            init.uniform_(self.dt_proj.weight, -spread, spread)
        init_mamba_mixer(self, config, self.dt_proj.bias)


class StatefulMambaModel(MixerBackbone):
    config_class = StatefulMambaConfig
    mixer_class = StatefulMambaMixer


class StatefulMambaForCausalLM(StatefulForCausalLM):
    backbone_class = StatefulMambaModel
