"""Mamba-2 language models that take an initial state and return the final state.

In a checkpoint this file is the entry: it imports every file the model needs by itself, because
Transformers before 5.6 copies only what the entry file imports. So it also re-exports the functions on
states for people who have the checkpoint and not the package.
"""

from torch import Tensor, nn

from .atomic_files import replacing
from .causal_conv import causal_conv
from .configuration_reference import ReferenceLayersConfigMixin
from .configuration_stateful import StatefulConfigMixin
from .configuration_stateful_mamba2 import StatefulMamba2Config
from .forgetting import Forgetting, forgetting
from .forgetting_scans import forgetful_scan
from .layers_block import MixerBlock
from .layers_mamba2 import StatefulMamba2Mixer, mamba2_layer_shape
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
from .scan_ssd import scan_ssd
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
    "StatefulMamba2Config",
    "StatefulMamba2ForCausalLM",
    "StatefulMamba2ForSequenceClassification",
    "StatefulMamba2Model",
    "causal_conv",
    "forgetful_scan",
    "forgetting",
    "load_state",
    "real_tokens",
    "replacing",
    "resolve_backend",
    "save_state",
    "scan_gla",
    "scan_ssd",
]


class StatefulMamba2PreTrainedModel(StatefulPreTrainedModel):
    """What backbone and language model share."""

    config_class = StatefulMamba2Config
    config: StatefulMamba2Config
    _no_split_modules = ["MixerBlock"]  # noqa: RUF012


class StatefulMamba2Model(StatefulMamba2PreTrainedModel, StatefulBackbone):
    """Mamba-2 without a head, on the parameter names of `transformers.Mamba2Model`."""

    def __init__(self, config: StatefulMamba2Config) -> None:
        super().__init__(config)
        self.embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            mixer_block(config, layer, StatefulMamba2Mixer, mamba2_layer_shape)
            for layer in range(config.num_hidden_layers)
        )
        self.norm_f = RMSNorm(config.hidden_size, config.layer_norm_epsilon)
        self.gradient_checkpointing = False
        self.post_init()

    def final_norm(self, hidden_states: Tensor) -> Tensor:
        """The norm after the last block."""
        return self.norm_f(hidden_states)


class StatefulMamba2ForCausalLM(StatefulMamba2PreTrainedModel, StatefulForCausalLM):
    """Mamba-2 language model, on the parameter names of `transformers.Mamba2ForCausalLM`."""

    backbone_class = StatefulMamba2Model
    _tied_weights_keys = {"lm_head.weight": "backbone.embeddings.weight"}  # noqa: RUF012


class StatefulMamba2ForSequenceClassification(StatefulMamba2PreTrainedModel, StatefulForSequenceClassification):
    """Mamba-2 with a classification head on the last token."""

    backbone_class = StatefulMamba2Model


StatefulMamba2Model.register_for_auto_class("AutoModel")
StatefulMamba2ForCausalLM.register_for_auto_class("AutoModelForCausalLM")
StatefulMamba2ForSequenceClassification.register_for_auto_class("AutoModelForSequenceClassification")
