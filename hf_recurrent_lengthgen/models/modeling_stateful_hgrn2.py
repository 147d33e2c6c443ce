"""HGRN-2 language models that take an initial state and return the final state."""

import torch
from torch import Tensor, nn
from transformers import initialization as init

from .causal_lm import StatefulForCausalLM
from .configuration_stateful_hgrn2 import StatefulHGRN2Config
from .layers_fla import MixerMLPBackbone
from .layers_hgrn2 import StatefulHGRN2Mixer

# for people who have a checkpoint and not the package
from .recurrent_state import load_state as load_state
from .recurrent_state import save_state as save_state
from .recurrent_state import state_dtype
from .sequence_classification import StatefulForSequenceClassification


class StatefulHGRN2Model(MixerMLPBackbone):
    """HGRN-2 without a head, on the parameter names of fla's `HGRN2Model`."""

    config_class = StatefulHGRN2Config
    mixer_class = StatefulHGRN2Mixer

    def make_layers(self, config: StatefulHGRN2Config) -> nn.ModuleList:
        """Also the lower bounds of the forget gates."""
        if config.use_lower_bound:
            self.lower_bounds = nn.Parameter(torch.zeros(config.num_hidden_layers, config.hidden_size))
        return super().make_layers(config)

    def layer_inputs(self) -> list[tuple[Tensor, ...]]:
        """The lower bounds of each layer's forget gates, (D,); none in the first layer (arXiv:2404.07904, Eq. 7)."""
        if not self.config.use_lower_bound:
            return super().layer_inputs()
        shares = self.lower_bounds.to(state_dtype(self.lower_bounds.dtype)).softmax(0)
        limits = torch.finfo(shares.dtype)  # rounding reaches 0 and 1, where the layer's logarithms have no gradient
        return [(), *((bound.clamp(limits.tiny, 1 - limits.eps),) for bound in shares[1:].cumsum(0))]

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if module is self and self.config.use_lower_bound:
            init.zeros_(self.lower_bounds)


class StatefulHGRN2ForCausalLM(StatefulForCausalLM):
    """HGRN-2 language model, on the parameter names of fla's `HGRN2ForCausalLM`."""

    backbone_class = StatefulHGRN2Model


class StatefulHGRN2ForSequenceClassification(StatefulForSequenceClassification):
    """HGRN-2 with a classification head on the last token."""

    backbone_class = StatefulHGRN2Model
