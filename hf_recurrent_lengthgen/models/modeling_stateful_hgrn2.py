"""HGRN-2 language models that take an initial state and return the final state.

As the entry file of a checkpoint it imports every file the model needs; see modeling_stateful_mamba2.py.
"""

import torch
from torch import Tensor, nn
from transformers import initialization as init

from .atomic_files import replacing
from .causal_conv import causal_conv
from .configuration_fla import FlaConfigMixin
from .configuration_stateful import StatefulConfigMixin
from .configuration_stateful_hgrn2 import StatefulHGRN2Config
from .forgetting import Forgetting, forgetting
from .forgetting_scans import forgetful_scan
from .layers_fla import MixerMLPBlock
from .layers_hgrn2 import StatefulHGRN2Mixer
from .modeling_stateful import StatefulBackbone, StatefulForCausalLM, StatefulPreTrainedModel
from .norms import RMSNorm
from .packed_rows import Packing
from .padding import Padding
from .recurrent_cache import RecurrentCache
from .recurrent_generation import RecurrentGenerationMixin
from .recurrent_state import LayerState, RecurrentState, load_state, save_state, state_dtype
from .scan_backends import resolve_backend
from .scan_gla import scan_gla
from .sequence_classification import StatefulForSequenceClassification
from .token_inputs import real_tokens

__all__ = [
    "FlaConfigMixin",
    "Forgetting",
    "LayerState",
    "Packing",
    "Padding",
    "RecurrentCache",
    "RecurrentGenerationMixin",
    "RecurrentState",
    "StatefulConfigMixin",
    "StatefulHGRN2Config",
    "StatefulHGRN2ForCausalLM",
    "StatefulHGRN2ForSequenceClassification",
    "StatefulHGRN2Model",
    "causal_conv",
    "forgetful_scan",
    "forgetting",
    "load_state",
    "real_tokens",
    "replacing",
    "resolve_backend",
    "save_state",
    "scan_gla",
]


class StatefulHGRN2PreTrainedModel(StatefulPreTrainedModel):
    """What backbone and language model share."""

    config_class = StatefulHGRN2Config
    config: StatefulHGRN2Config
    base_model_prefix = "model"
    _no_split_modules = ["MixerMLPBlock"]  # noqa: RUF012


class StatefulHGRN2Model(StatefulHGRN2PreTrainedModel, StatefulBackbone):
    """HGRN-2 without a head, on the parameter names of fla's `HGRN2Model`."""

    def __init__(self, config: StatefulHGRN2Config) -> None:
        super().__init__(config)
        self.embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            MixerMLPBlock(config, StatefulHGRN2Mixer(config, layer)) for layer in range(config.num_hidden_layers)
        )
        if config.use_lower_bound:
            self.lower_bounds = nn.Parameter(torch.zeros(config.num_hidden_layers, config.hidden_size))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.gradient_checkpointing = False
        self.post_init()

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

    def final_norm(self, hidden_states: Tensor) -> Tensor:
        """The norm after the last block."""
        return self.norm(hidden_states)


class StatefulHGRN2ForCausalLM(StatefulHGRN2PreTrainedModel, StatefulForCausalLM):
    """HGRN-2 language model, on the parameter names of fla's `HGRN2ForCausalLM`."""

    backbone_class = StatefulHGRN2Model
    _tied_weights_keys = {"lm_head.weight": "model.embeddings.weight"}  # noqa: RUF012


class StatefulHGRN2ForSequenceClassification(StatefulHGRN2PreTrainedModel, StatefulForSequenceClassification):
    """HGRN-2 with a classification head on the last token."""

    backbone_class = StatefulHGRN2Model


StatefulHGRN2Model.register_for_auto_class("AutoModel")
StatefulHGRN2ForCausalLM.register_for_auto_class("AutoModelForCausalLM")
StatefulHGRN2ForSequenceClassification.register_for_auto_class("AutoModelForSequenceClassification")
