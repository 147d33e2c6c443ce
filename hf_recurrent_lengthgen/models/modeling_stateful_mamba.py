"""Mamba-1 and FalconMamba language models that take an initial state and return the final state.

One family: the configuration's `mixer_rms_eps` tells them apart, parameters have the same names and shapes in both.

In a checkpoint this file is the entry: it imports every file the model needs by itself, because
Transformers before 5.6 copies only what the entry file imports. So it also re-exports the functions on
states for people who have the checkpoint and not the package.
"""

from torch import Tensor, nn

from .atomic_files import replacing
from .causal_conv import causal_conv
from .configuration_reference import ReferenceLayersConfigMixin
from .configuration_stateful import StatefulConfigMixin
from .configuration_stateful_mamba import StatefulMambaConfig
from .forgetting import Forgetting, forgetting
from .forgetting_scans import forgetful_scan
from .layers_block import MixerBlock
from .layers_mamba import StatefulMambaMixer, mamba_layer_shape
from .layers_reference import mixer_block
from .modeling_stateful import StatefulBackbone, StatefulForCausalLM, StatefulPreTrainedModel
from .norms import RMSNorm
from .packed_rows import Packing
from .padding import Padding
from .recurrent_cache import RecurrentCache
from .recurrent_generation import RecurrentGenerationMixin
from .recurrent_state import LayerState, RecurrentState, load_state, save_state
from .scan_backends import resolve_backend
from .scan_gla import scan_gla
from .scan_selective import scan_selective
from .sequence_classification import StatefulForSequenceClassification
from .token_inputs import real_tokens

__all__ = [
    "Forgetting",
    "LayerState",
    "MixerBlock",
    "Packing",
    "Padding",
    "RecurrentCache",
    "RecurrentGenerationMixin",
    "RecurrentState",
    "ReferenceLayersConfigMixin",
    "StatefulConfigMixin",
    "StatefulMambaConfig",
    "StatefulMambaForCausalLM",
    "StatefulMambaForSequenceClassification",
    "StatefulMambaModel",
    "causal_conv",
    "forgetful_scan",
    "forgetting",
    "load_state",
    "real_tokens",
    "replacing",
    "resolve_backend",
    "save_state",
    "scan_gla",
    "scan_selective",
]


class StatefulMambaPreTrainedModel(StatefulPreTrainedModel):
    """What backbone and language model share."""

    config_class = StatefulMambaConfig
    config: StatefulMambaConfig
    _no_split_modules = ["MixerBlock"]  # noqa: RUF012


class StatefulMambaModel(StatefulMambaPreTrainedModel, StatefulBackbone):
    """Mamba-1 or FalconMamba without a head, on the parameter names of `transformers.MambaModel`."""

    def __init__(self, config: StatefulMambaConfig) -> None:
        super().__init__(config)
        self.embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            mixer_block(config, layer, StatefulMambaMixer, mamba_layer_shape)
            for layer in range(config.num_hidden_layers)
        )
        self.norm_f = RMSNorm(config.hidden_size, config.layer_norm_epsilon)
        self.gradient_checkpointing = False
        self.post_init()

    def final_norm(self, hidden_states: Tensor) -> Tensor:
        """The norm after the last block."""
        return self.norm_f(hidden_states)


class StatefulMambaForCausalLM(StatefulMambaPreTrainedModel, StatefulForCausalLM):
    """Mamba-1 or FalconMamba language model, on the parameter names of `transformers.MambaForCausalLM`."""

    backbone_class = StatefulMambaModel
    _tied_weights_keys = {"lm_head.weight": "backbone.embeddings.weight"}  # noqa: RUF012


class StatefulMambaForSequenceClassification(StatefulMambaPreTrainedModel, StatefulForSequenceClassification):
    """Mamba-1 or FalconMamba with a classification head on the last token."""

    backbone_class = StatefulMambaModel


StatefulMambaModel.register_for_auto_class("AutoModel")
StatefulMambaForCausalLM.register_for_auto_class("AutoModelForCausalLM")
StatefulMambaForSequenceClassification.register_for_auto_class("AutoModelForSequenceClassification")
