"""Linear attention with a state as argument and result, on the parameter names of fla.

Katharopoulos et al. 2020 (arXiv:2006.16236, Eq. 18 to 20): S_t = S_{t-1} + v_t phi(k_t)^T, y_t = S_t phi(q_t), that
is GLA without decay. A normalizer is a further row of the state, the sum of the keys.

Different from fla's layer, in addition to the state and right-padded rows: the recurrence is in full precision.

Shapes: B batch, T tokens, H heads, N mapped key dim, P value dim.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import elu, relu, softmax

from .configuration_stateful_linear_attention import StatefulLinearAttentionConfig
from .layers_fla import MixerMLPBackbone, RMSNorm
from .layers_mixer import ScanMixer
from .modeling_heads import StatefulForCausalLM
from .rows import Rows
from .rows_moved import zero_past_end
from .scan_backends import repeat_heads
from .scan_gla import chunk_gla, scan_gla
from .state_value import LayerShape, LayerState


class Hedgehog(nn.Module):
    """softmax over (2z, -2z) with z = layer(x) (arXiv:2402.04347); twice as many features."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.layer = nn.Linear(size, size)

    def forward(self, x: Tensor) -> Tensor:
        x = 2 * self.layer(x)
        return softmax(torch.cat([x, -x], dim=-1), dim=-1)


class TransformerToRNN(nn.Module):
    """relu(layer(x)) (T2R, arXiv:2103.13076)."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.layer = nn.Linear(size, size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return relu(self.layer(x))


class ElementwiseProduct(nn.Module):
    """layer1(x) * layer2(x)."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.layer1 = nn.Linear(size, size)
        self.layer2 = nn.Linear(size, size)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer1(x) * self.layer2(x)


class Fixed(nn.Module):
    """A feature map without weights."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, x: Tensor) -> Tensor:
        if self.name == "dpfp":  # arXiv:2102.11174, nu = 4
            x = torch.cat([relu(x), relu(-x)], dim=-1)
            return torch.cat([x * x.roll(shift, dims=-1) for shift in range(1, 5)], dim=-1)
        return {"elu": lambda: elu(x) + 1, "relu": lambda: relu(x), "identity": lambda: x}[self.name]()


LEARNED = {"hedgehog": Hedgehog, "t2r": TransformerToRNN, "elementwise_product": ElementwiseProduct}
WIDENING = {"hedgehog": 2, "dpfp": 8}


class StatefulLinearAttentionMixer(ScanMixer):
    """Projections, feature maps, recurrence without decay, norm per head."""

    scan = staticmethod(scan_gla)
    grows = "num_heads"

    def __init__(self, config: StatefulLinearAttentionConfig, layer: int) -> None:
        super().__init__(config, chunk_gla is not None)
        self.heads, key_dim, self.value_dim = config.heads_of(layer)
        self.kv_heads = config.num_kv_heads or self.heads
        self.features = key_dim * WIDENING.get(config.feature_map, 1)
        D, name = config.hidden_size, config.feature_map
        self.q_proj = nn.Linear(D, self.heads * key_dim, bias=False)
        self.k_proj = nn.Linear(D, self.kv_heads * key_dim, bias=False)
        self.v_proj = nn.Linear(D, self.kv_heads * self.value_dim, bias=False)
        self.feature_map_q = LEARNED[name](key_dim) if name in LEARNED else Fixed(name)
        self.feature_map_k = LEARNED[name](key_dim) if name in LEARNED else Fixed(name)
        self.norm = RMSNorm(self.value_dim, config.norm_eps, affine=config.elementwise_affine)
        self.o_proj = nn.Linear(self.heads * self.value_dim, D, bias=False)

    @property
    def state_shape(self) -> LayerShape:
        """(H, P, N), with P + 1 rows for `norm_feature_map`; no convolution."""
        return LayerShape((self.heads, self.value_dim + self.config.norm_feature_map, self.features), (0,))

    def forward(self, hidden_states: Tensor, state: LayerState, rows: Rows | None = None) -> tuple[Tensor, LayerState]:
        config = self.config
        backend = self.backend_for(hidden_states)
        q = self.feature_map_q(self.q_proj(hidden_states).unflatten(-1, (self.heads, -1)))
        k = self.feature_map_k(self.k_proj(hidden_states).unflatten(-1, (self.kv_heads, -1)))
        v = self.v_proj(hidden_states).unflatten(-1, (self.kv_heads, -1))
        if config.norm_feature_map or q.dtype == torch.float16:
            # in float16, sums without decay overflow, and 1e-10 is 0; outputs have the dtype of q
            q, k = q.to(state.recurrent.dtype), k.to(state.recurrent.dtype)
        if config.norm_q:
            q = q / (q.sum(-1, keepdim=True) + 1e-4)
        if config.norm_k:
            k = k / (k.sum(-1, keepdim=True) + 1e-4)
        if config.norm_feature_map:
            v = torch.cat([v, torch.ones_like(v[..., :1])], dim=-1)
        k, v = repeat_heads(zero_past_end(k, rows), self.heads), repeat_heads(v, self.heads)
        q, no_decay = q * self.features**-0.5, torch.zeros_like(k)
        y, state = self.advance(q, k, v, no_decay, state=state, rows=rows, backend=backend)
        if config.norm_feature_map:
            y = y[..., :-1] / (y[..., -1:] + 1e-10)
        return self.o_proj(self.norm(y).flatten(2).to(v.dtype)), state


class StatefulLinearAttentionModel(MixerMLPBackbone):
    config_class = StatefulLinearAttentionConfig
    mixer_class = StatefulLinearAttentionMixer


class StatefulLinearAttentionForCausalLM(StatefulForCausalLM):
    backbone_class = StatefulLinearAttentionModel
