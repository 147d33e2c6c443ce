"""Linear attention language models that take an initial state and return the final state.

As the entry file of a checkpoint it imports every file the model needs; see modeling_stateful_mamba2.py.
"""

from torch import Tensor, nn

from .atomic_files import replacing
from .causal_conv import causal_conv
from .configuration_fla import FlaConfigMixin
from .configuration_stateful import StatefulConfigMixin
from .configuration_stateful_linear_attention import StatefulLinearAttentionConfig
from .forgetting import Forgetting, forgetting
from .forgetting_scans import forgetful_scan
from .layers_fla import MixerMLPBlock
from .layers_linear_attention import StatefulLinearAttentionMixer
from .modeling_stateful import StatefulBackbone, StatefulForCausalLM, StatefulPreTrainedModel
from .norms import RMSNorm
from .packed_rows import Packing
from .padding import Padding
from .recurrent_cache import RecurrentCache
from .recurrent_generation import RecurrentGenerationMixin
from .recurrent_state import LayerState, RecurrentState, load_state, save_state
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
    "StatefulLinearAttentionConfig",
    "StatefulLinearAttentionForCausalLM",
    "StatefulLinearAttentionForSequenceClassification",
    "StatefulLinearAttentionModel",
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


class StatefulLinearAttentionPreTrainedModel(StatefulPreTrainedModel):
    """What backbone and language model share."""

    config_class = StatefulLinearAttentionConfig
    config: StatefulLinearAttentionConfig
    base_model_prefix = "model"
    _no_split_modules = ["MixerMLPBlock"]  # noqa: RUF012


class StatefulLinearAttentionModel(StatefulLinearAttentionPreTrainedModel, StatefulBackbone):
    """Linear attention without a head, on the parameter names of fla's `LinearAttentionModel`."""

    def __init__(self, config: StatefulLinearAttentionConfig) -> None:
        super().__init__(config)
        self.embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            MixerMLPBlock(config, StatefulLinearAttentionMixer(config, layer))
            for layer in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.gradient_checkpointing = False
        self.post_init()

    def final_norm(self, hidden_states: Tensor) -> Tensor:
        """The norm after the last block."""
        return self.norm(hidden_states)


class StatefulLinearAttentionForCausalLM(StatefulLinearAttentionPreTrainedModel, StatefulForCausalLM):
    """Linear attention language model, on the parameter names of fla's `LinearAttentionForCausalLM`."""

    backbone_class = StatefulLinearAttentionModel
    _tied_weights_keys = {"lm_head.weight": "model.embeddings.weight"}  # noqa: RUF012


class StatefulLinearAttentionForSequenceClassification(
    StatefulLinearAttentionPreTrainedModel, StatefulForSequenceClassification
):
    """Linear attention with a classification head on the last token."""

    backbone_class = StatefulLinearAttentionModel


StatefulLinearAttentionModel.register_for_auto_class("AutoModel")
StatefulLinearAttentionForCausalLM.register_for_auto_class("AutoModelForCausalLM")
StatefulLinearAttentionForSequenceClassification.register_for_auto_class("AutoModelForSequenceClassification")
