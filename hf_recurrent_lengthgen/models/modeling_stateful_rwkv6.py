"""RWKV-6 language models that take an initial state and return the final state.

As the entry file of a checkpoint it imports every file the model needs; see modeling_stateful_mamba2.py.
"""

from torch import Tensor, nn

from .atomic_files import replacing
from .causal_conv import causal_conv
from .configuration_fla import FlaConfigMixin
from .configuration_stateful import StatefulConfigMixin
from .configuration_stateful_rwkv6 import StatefulRWKV6Config
from .forgetting import Forgetting, forgetting
from .forgetting_scans import forgetful_scan
from .layers_fla import choose_backend
from .layers_rwkv6 import StatefulRWKV6Block
from .modeling_stateful import StatefulBackbone, StatefulForCausalLM, StatefulPreTrainedModel
from .norms import RMSNorm
from .packed_rows import Packing
from .padding import Padding
from .recurrent_cache import RecurrentCache
from .recurrent_generation import RecurrentGenerationMixin
from .recurrent_state import LayerState, RecurrentState, load_state, save_state
from .scan_backends import resolve_backend
from .scan_gla import scan_gla
from .scan_rwkv6 import scan_rwkv6
from .sequence_classification import StatefulForSequenceClassification
from .token_inputs import real_tokens

__all__ = [
    "FlaConfigMixin",
    "Forgetting",
    "LayerState",
    "Packing",
    "Padding",
    "RMSNorm",
    "RecurrentCache",
    "RecurrentGenerationMixin",
    "RecurrentState",
    "StatefulConfigMixin",
    "StatefulRWKV6Config",
    "StatefulRWKV6ForCausalLM",
    "StatefulRWKV6ForSequenceClassification",
    "StatefulRWKV6Model",
    "causal_conv",
    "choose_backend",
    "forgetful_scan",
    "forgetting",
    "load_state",
    "real_tokens",
    "replacing",
    "resolve_backend",
    "save_state",
    "scan_gla",
    "scan_rwkv6",
]


class StatefulRWKV6PreTrainedModel(StatefulPreTrainedModel):
    """What backbone and language model share."""

    config_class = StatefulRWKV6Config
    config: StatefulRWKV6Config
    base_model_prefix = "model"
    _no_split_modules = ["StatefulRWKV6Block"]  # noqa: RUF012


class StatefulRWKV6Model(StatefulRWKV6PreTrainedModel, StatefulBackbone):
    """RWKV-6 without a head, on the parameter names of fla's `RWKV6Model`."""

    def __init__(self, config: StatefulRWKV6Config) -> None:
        super().__init__(config)
        self.embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(StatefulRWKV6Block(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = nn.LayerNorm(config.hidden_size, config.norm_eps, bias=config.norm_bias)
        self.gradient_checkpointing = False
        self.post_init()

    def final_norm(self, hidden_states: Tensor) -> Tensor:
        """The norm after the last block."""
        return self.norm(hidden_states)


class StatefulRWKV6ForCausalLM(StatefulRWKV6PreTrainedModel, StatefulForCausalLM):
    """RWKV-6 language model, on the parameter names of fla's `RWKV6ForCausalLM`."""

    backbone_class = StatefulRWKV6Model
    _tied_weights_keys = {"lm_head.weight": "model.embeddings.weight"}  # noqa: RUF012


class StatefulRWKV6ForSequenceClassification(StatefulRWKV6PreTrainedModel, StatefulForSequenceClassification):
    """RWKV-6 with a classification head on the last token."""

    backbone_class = StatefulRWKV6Model


StatefulRWKV6Model.register_for_auto_class("AutoModel")
StatefulRWKV6ForCausalLM.register_for_auto_class("AutoModelForCausalLM")
StatefulRWKV6ForSequenceClassification.register_for_auto_class("AutoModelForSequenceClassification")
