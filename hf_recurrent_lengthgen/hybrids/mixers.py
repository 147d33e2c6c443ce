"""The recurrent mixers of Transformers, by the names of their classes (`MIXERS`), and what takes them over.

Shapes: B rows, T tokens, D hidden size, I inner channels, H heads, P value dim, N state (key) dim, K taps, G groups.
"""

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, softplus
from transformers.cache_utils import Cache
from transformers.utils import is_kernels_available

from hf_recurrent_lengthgen.hybrids.mixer_base import StateMixer
from hf_recurrent_lengthgen.models.layers_conv import causal_conv1d_fn
from hf_recurrent_lengthgen.models.layers_delta import l2_norm
from hf_recurrent_lengthgen.models.layers_mamba2_kernel import Mamba2Sizes
from hf_recurrent_lengthgen.models.modeling_stateful_mamba import StepProjection, convolved_and_scanned, gated_scan
from hf_recurrent_lengthgen.models.modeling_stateful_mamba2 import after_input_projection
from hf_recurrent_lengthgen.models.rows import Rows
from hf_recurrent_lengthgen.models.rows_moved import zero_past_end
from hf_recurrent_lengthgen.models.scan_delta import chunk_gated_delta_rule, kernel_limit_of, scan_delta
from hf_recurrent_lengthgen.models.scan_gla import chunk_gla, scan_gla
from hf_recurrent_lengthgen.models.scan_selective import scan_selective, selective_scan
from hf_recurrent_lengthgen.models.scan_ssd import mamba_chunk_scan_combined, scan_ssd
from hf_recurrent_lengthgen.models.state_value import LayerShape, LayerState, state_dtype


class Mamba2Mixer(StateMixer):
    """Mamba-2: `in_proj` rows are [z, x, B, C, dt]."""

    scan = staticmethod(scan_ssd)
    kernels = (mamba_chunk_scan_combined, causal_conv1d_fn)

    @property
    def state_shape(self: Any) -> LayerShape:
        """(H, P, N) and (I + 2 G N, K-1)."""
        return LayerShape(
            (self.num_heads, self.head_dim, self.ssm_state_size), (self.conv_dim, self.conv_kernel_size - 1)
        )

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Also without a cache on kernels: the stock class has no guard for rows beyond their 32-bit addresses."""
        others = [x for x in (*args, *kwargs.values()) if isinstance(x, (Cache, Tensor))]
        if others or self.backend_for(hidden_states) == "torch":
            return super().forward(hidden_states, *args, **kwargs)
        return self.read(hidden_states, self.state_before(None, hidden_states), None)[0]

    def read(self: Any, x: Tensor, state: LayerState, rows: Rows | None) -> tuple[Tensor, LayerState]:
        norm = None if isinstance(self.norm, nn.Identity) else self.norm  # Falcon-H1 may have none
        eps, before = getattr(norm, "variance_epsilon", 0.0), getattr(norm, "norm_before_gate", False)
        # without either, as of Bamba before Transformers 5.24, it goes over all channels
        group = getattr(norm, "group_size", self.intermediate_size // getattr(norm, "n_groups", 1))
        least, largest = self.time_step_limit
        of_scan = self.n_groups, self.ssm_state_size, self.chunk_size, least, largest
        sizes = Mamba2Sizes(self.num_heads, self.head_dim, *of_scan, group, eps, before)
        backend = self.backend_for(x)
        return after_input_projection(self, self.project(x), self.convolve, norm, sizes, state, rows, backend)

    @property
    def scans_unwatched(self: Any) -> bool:
        return super().scans_unwatched and self.activation in ("silu", "swish")

    def project(self: Any, x: Tensor) -> Tensor:
        return self.in_proj(x)


class FalconH1Mixer(Mamba2Mixer):
    """Mamba-2 with multipliers."""

    def project(self: Any, x: Tensor) -> Tensor:
        return self.in_proj(x * self.ssm_in_multiplier) * self.mup_vector


class MambaMixer(StateMixer):
    """Mamba-1, FalconMamba and Jamba: the last two norm dt, B and C."""

    scan = staticmethod(scan_selective)
    kernels = (selective_scan,)
    read_directly = ("conv1d", "dt_proj")

    @property
    def state_shape(self: Any) -> LayerShape:
        """(I, N) and (I, K-1)."""
        inner = self.intermediate_size
        return LayerShape((inner, self.ssm_state_size), (inner, self.conv_kernel_size - 1))

    def take_over(self: Any) -> None:
        super().take_over()
        if type(self.dt_proj) is nn.Linear:
            self.dt_proj.__class__ = StepProjection

    def read(self: Any, x: Tensor, state: LayerState, rows: Rows | None) -> tuple[Tensor, LayerState]:
        backend, wide = self.backend_for(x), state.recurrent.dtype
        conv_input, gate = self.in_proj(x).chunk(2, -1)
        norms = [self.dt_layernorm, self.b_layernorm, self.c_layernorm] if hasattr(self, "dt_layernorm") else []

        def read(x: Tensor, conv: Tensor) -> tuple[Tensor, ...]:
            x, conv = self.convolve(x, conv, rows, backend)
            parts = self.x_proj(x).split([self.time_step_rank, self.ssm_state_size, self.ssm_state_size], -1)
            dt, B, C = (norm(part) for norm, part in zip(norms, parts, strict=True)) if norms else parts
            return x, self.dt_proj(dt).to(wide), B, C, conv

        modules = self.conv1d, self.x_proj, self.dt_proj, *norms
        y, state = convolved_and_scanned(self, read, modules, conv_input, gate, state, rows, backend)
        return self.out_proj(y.to(x.dtype)), state


class ZambaMixer(StateMixer):
    """Zamba: Mamba-1 whose heads have projections to dt, B and C of their own, and one convolution."""

    scan = staticmethod(scan_selective)
    kernels = MambaMixer.kernels
    one_scan = False  # but one for each head

    @property
    def state_shape(self: Any) -> LayerShape:
        """(H, P, N) and (I, K-1)."""
        heads = self.n_mamba_heads, self.mamba_head_dim, self.ssm_state_size
        return LayerShape(heads, (self.intermediate_size, self.conv_kernel_size - 1))

    def read(self: Any, x: Tensor, state: LayerState, rows: Rows | None) -> tuple[Tensor, LayerState]:
        backend, wide = self.backend_for(x), state.recurrent.dtype
        conv_input, gate = self.in_proj(x).unflatten(-1, (-1, 2)).unbind(-1)
        h, conv = self.convolve(conv_input, state.conv, rows, backend)
        sizes, outputs, states = [self.time_step_rank, self.ssm_state_size, self.ssm_state_size], [], []
        of_heads = (part.unflatten(-1, (self.n_mamba_heads, -1)).unbind(2) for part in (h, gate))
        for head, (part, part_gate) in enumerate(zip(*of_heads, strict=True)):
            dt, B, C = linear(part, self.x_proj_weight[head]).split(sizes, -1)
            bias = None if self.dt_proj_bias is None else self.dt_proj_bias[head].to(wide)
            raw = linear(dt.to(wide), self.dt_proj_weight[head].to(wide), bias)
            inputs = part, raw, -self.A_log[head].to(wide).exp(), B, C, self.D[head].to(wide), part_gate
            own = state._replace(recurrent=state.recurrent[:, head])
            y, own = gated_scan(self, *inputs, own, rows, backend)
            outputs.append(y)
            states.append(own.recurrent)
        return self.out_proj(torch.cat(outputs, -1).to(x.dtype)), LayerState(torch.stack(states, 1), conv)


class DeltaMixer(StateMixer):
    """The delta rule. Its state is (H, N, P) in Transformers. A subclass gives `parts` and names norm and output."""

    scan = staticmethod(scan_delta)
    kernels = (chunk_gated_delta_rule, causal_conv1d_fn)
    norm_name, output_name = "norm", "out_proj"

    @property
    def state_shape(self: Any) -> LayerShape:
        """(H, N, P) and (2 G N + H P, K-1)."""
        heads = self.value_dim // self.head_v_dim, self.head_k_dim, self.head_v_dim
        return LayerShape(heads, (self.conv_dim, self.conv_kernel_size - 1))

    def parts(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """[q, k, v] before the convolution, log decays (B, T, H) or (B, T, H, N), rates (B, T, H), and the gate."""
        raise NotImplementedError

    def kernel_limit(self: Any, dtype: torch.dtype) -> str:
        return super().kernel_limit(dtype) or kernel_limit_of(self.head_k_dim)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Also without a cache where the stock class has no kernel: its functions keep all that they compute."""
        others = [x for x in (*args, *kwargs.values()) if isinstance(x, (Cache, Tensor))]
        kernels = hidden_states.device.type != "cpu" and (self.kernel_available or is_kernels_available())
        if others or kernels or hidden_states.is_meta:
            return super().forward(hidden_states, *args, **kwargs)
        return self.read(hidden_states, self.state_before(None, hidden_states), None)[0]

    def read(self: Any, x: Tensor, state: LayerState, rows: Rows | None) -> tuple[Tensor, LayerState]:
        backend, wide = self.backend_for(x), state.recurrent.dtype
        qkv, g, beta, gate = self.parts(x)
        qkv, conv = self.convolve(qkv, state.conv, rows, backend)
        q, k, v = qkv.split([self.key_dim, self.key_dim, self.value_dim], -1)
        q, k = (l2_norm(part.unflatten(-1, (-1, self.head_k_dim)).to(wide), backend) for part in (q, k))
        g, beta = (zero_past_end(part.to(wide), rows) for part in (g if g.ndim == 4 else g[..., None], beta))
        inputs = q * self.head_k_dim**-0.5, k, v.unflatten(-1, (-1, self.head_v_dim)), g, beta
        start = LayerState(state.recurrent.mT, conv)
        y, after = self.advance(*inputs, state=start, rows=rows, backend=backend)
        norm, output = getattr(self, self.norm_name), getattr(self, self.output_name)
        y = norm(y.to(x.dtype).flatten(0, 2), gate.reshape(-1, self.head_v_dim)).view(*x.shape[:2], -1)
        return output(y), after._replace(recurrent=after.recurrent.mT.contiguous())

    def decays(self: Any, a: Tensor) -> Tensor:
        """Log decays of Gated DeltaNet, (B, T, H)."""
        wide = state_dtype(a.dtype)
        return -self.A_log.to(wide).exp() * softplus(a.to(wide) + self.dt_bias.to(wide))


class QwenMixer(DeltaMixer):
    """Gated DeltaNet of Qwen3.5 and LaraMini."""

    def parts(self: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.in_proj_qkv(x), self.decays(self.in_proj_a(x)), self.in_proj_b(x).sigmoid(), self.in_proj_z(x)


class QwenNextMixer(DeltaMixer):
    """Gated DeltaNet of Qwen3-Next, whose projections are interleaved by key head."""

    def parts(self: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        q, k, v, z, b, a = self.fix_query_key_value_ordering(self.in_proj_qkvz(x), self.in_proj_ba(x))
        return torch.cat([part.flatten(2) for part in (q, k, v)], -1), self.decays(a), b.sigmoid(), z


class OlmoMixer(DeltaMixer):
    """Gated DeltaNet of OLMo Hybrid, whose rates may go up to 2."""

    norm_name, output_name = "o_norm", "o_proj"

    def parts(self: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        beta = self.b_proj(x).sigmoid() * (2 if self.allow_neg_eigval else 1)
        return _qkv(self, x), self.decays(self.a_proj(x)), beta, self.g_proj(x)


class KimiMixer(DeltaMixer):
    """Kimi Delta Attention, with a decay for each channel."""

    norm_name, output_name = "o_norm", "o_proj"

    def take_over(self: Any) -> None:
        super().take_over()
        self.key_dim = self.value_dim = self.qkv_dim
        self.head_k_dim = self.head_v_dim = self.head_dim

    def parts(self: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return _qkv(self, x), self.forget_gate(x), self.b_proj(x).sigmoid(), self.g_b_proj(self.g_a_proj(x))


class BailingMixer(KimiMixer):
    """The same with one projection to the gate."""

    def parts(self: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return _qkv(self, x), self.forget_gate(x), self.b_proj(x).sigmoid(), self.g_proj(x)


def _qkv(mixer: Any, x: Tensor) -> Tensor:
    return torch.cat([mixer.q_proj(x), mixer.k_proj(x), mixer.v_proj(x)], -1)


class LightningMixer(StateMixer):
    """Lightning attention of MiniMax: linear attention with a fixed decay for each head. Its state is (H, N, P)."""

    scan = staticmethod(scan_gla)
    kernels = (chunk_gla,)

    @property
    def state_shape(self: Any) -> LayerShape:
        return LayerShape((self.num_attention_heads, self.head_dim, self.head_dim), (0,))

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(hidden_states, *args, **kwargs)
        return output if isinstance(output, tuple) else (output, None)

    def read(self: Any, x: Tensor, state: LayerState, rows: Rows | None) -> tuple[Tensor, LayerState]:
        qkv = self.act_fn(self.qkv_proj(x)).unflatten(-1, (self.num_attention_heads, -1))
        q, k, v = qkv.split(self.head_dim, dim=-1)
        g = -self.slope_rate.view(-1, 1).to(state.recurrent.dtype).expand(*q.shape)
        g, k = zero_past_end(g, rows), zero_past_end(k, rows)
        start = state._replace(recurrent=state.recurrent.mT)
        y, after = self.advance(q, k, v, g, state=start, rows=rows, backend=self.backend_for(x))
        y = self.norm(y.flatten(2)) * self.output_gate(x).sigmoid()
        return self.out_proj(y), after._replace(recurrent=after.recurrent.mT.contiguous())


class XlstmBackend:
    """The recurrence of xLSTM. One tensor (B, H, N P + N + 1) holds memory, normalizer and stabilizer.

    The layer passes (call, layer), in place of the memory, on without looking at it.
    """

    def forward(self: Any, *args: Any, c_initial: Any = None, **inputs: Any) -> Any:
        if not isinstance(c_initial, tuple):
            return super().forward(*args, c_initial=c_initial, **inputs)  # type: ignore[misc]
        (call, layer), N = c_initial, inputs["query"].shape[3]
        # in evaluation, Transformers reads long rows in chunks, and carries nothing between them
        state = (None if self.training else call.after.get(layer)) or call.before_layer(layer)
        c_initial = None
        if state is not None:
            memory, n, m = state.recurrent.split([state.recurrent.shape[-1] - N - 1, N, 1], -1)
            c_initial, inputs["n_initial"], inputs["m_initial"] = memory.unflatten(-1, (N, -1)), n, m
        if call.rows is not None:  # forget gates that keep everything, input gates that write nothing
            begin = 0 if self.training else call.columns.get(layer, 0)
            call.columns[layer] = end = begin + inputs["query"].shape[2]
            past_end = ~call.rows.real[:, None, begin:end]
            largest = torch.finfo(inputs["fgate"].dtype).max
            inputs["fgate"] = inputs["fgate"].masked_fill(past_end, min(1e6, largest))
            inputs["igate"] = inputs["igate"].masked_fill(past_end, -min(1e30, largest))
        h, (memory, n, m) = super().forward(*args, c_initial=c_initial, **inputs)  # type: ignore[misc]
        recurrent = torch.cat([memory.flatten(2), n, m], -1)
        call.keep(layer, LayerState(recurrent, recurrent.new_empty(len(recurrent), 0)))
        return h, (memory, n, m)


MIXERS: dict[str, Any] = {
    "BailingHybridDeltaAttention": BailingMixer,
    "BambaMixer": Mamba2Mixer,
    "FalconH1Mixer": FalconH1Mixer,
    "FalconMambaMixer": MambaMixer,
    "GraniteMoeHybridMambaLayer": Mamba2Mixer,
    "JambaMambaMixer": MambaMixer,
    "KimiLinearDeltaAttention": KimiMixer,
    "LaraMiniGatedDeltaNet": QwenMixer,
    "Mamba2Mixer": Mamba2Mixer,
    "MambaMixer": MambaMixer,
    "MiniMaxLightningAttention": LightningMixer,
    "NemotronHMamba2Mixer": Mamba2Mixer,
    "OlmoHybridGatedDeltaNet": OlmoMixer,
    "Qwen3NextGatedDeltaNet": QwenNextMixer,
    "Qwen3_5GatedDeltaNet": QwenMixer,
    "Qwen3_5MoeGatedDeltaNet": QwenMixer,
    "Zamba2MambaMixer": Mamba2Mixer,
    "ZambaMambaMixer": ZambaMixer,
    "xLSTMBackend": XlstmBackend,
}
"""What is mixed into a class of Transformers, by its name."""


def take_mixers_over(model: nn.Module) -> None:
    """Give the mixers of a model the subclasses of their classes that read from a `CallCache`."""
    for module in model.modules():
        stock: Any = type(module)
        if stock.__name__ in MIXERS and not issubclass(stock, MIXERS[stock.__name__]):
            module.__class__ = _taken_over(stock)
            if isinstance(module, StateMixer):
                module.take_over()


@functools.cache
def _taken_over(stock: Any) -> Any:
    return under_its_name(stock, _taken_over, MIXERS[stock.__name__], {})


def under_its_name(stock: Any, make: Any, mixin: type, namespace: dict[str, Any]) -> Any:
    """A subclass of a stock class under its name, by which pickle would find the stock one: it gets `make(stock)`."""

    def reduced(self: Any, protocol: Any) -> Any:
        _, _, *contents = stock.__reduce_ex__(self, protocol)
        return _empty, (make, stock), *contents

    names = {"__module__": stock.__module__, "__qualname__": stock.__qualname__, "__doc__": stock.__doc__}
    return type(stock.__name__, (mixin, stock), names | namespace | {"__reduce_ex__": reduced})


def _empty(make: Any, stock: Any) -> Any:
    made = make(stock)
    return made.__new__(made)
