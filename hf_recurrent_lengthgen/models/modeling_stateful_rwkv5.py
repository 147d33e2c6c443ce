"""RWKV-5 language models that take an initial state and return the final state.

As the entry file of a checkpoint it imports every file the model needs; see modeling_stateful_mamba2.py.
"""

from torch import Tensor, nn

from .atomic_files import replacing
from .causal_conv import causal_conv
from .configuration_fla import FlaConfigMixin
from .configuration_stateful import StatefulConfigMixin
from .configuration_stateful_rwkv5 import StatefulRWKV5Config
from .configuration_stateful_rwkv6 import StatefulRWKV6Config
from .forgetting import Forgetting, forgetting
from .forgetting_scans import forgetful_scan
from .layers_fla import choose_backend
from .layers_rwkv5 import StatefulRWKV5Block
from .layers_rwkv6 import HeadNorm
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
    "HeadNorm",
    "LayerState",
    "Packing",
    "Padding",
    "RMSNorm",
    "RecurrentCache",
    "RecurrentGenerationMixin",
    "RecurrentState",
    "StatefulConfigMixin",
    "StatefulRWKV5Config",
    "StatefulRWKV5ForCausalLM",
    "StatefulRWKV5ForSequenceClassification",
    "StatefulRWKV5Model",
    "StatefulRWKV6Config",
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


class StatefulRWKV5PreTrainedModel(StatefulPreTrainedModel):
    """What backbone and language model share."""

    config_class = StatefulRWKV5Config
    config: StatefulRWKV5Config
    base_model_prefix = "rwkv"
    _no_split_modules = ["StatefulRWKV5Block"]  # noqa: RUF012


class StatefulRWKV5Model(StatefulRWKV5PreTrainedModel, StatefulBackbone):
    """RWKV-5 without a head, on the parameter names of the official checkpoints."""

    def __init__(self, config: StatefulRWKV5Config) -> None:
        super().__init__(config)
        self.embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.blocks = nn.ModuleList(StatefulRWKV5Block(config, layer) for layer in range(config.num_hidden_layers))
        self.ln_out = nn.LayerNorm(config.hidden_size)  # official code: 1e-5, whatever layer_norm_epsilon
        self.gradient_checkpointing = False
        self.post_init()

    @property
    def layers(self) -> nn.ModuleList:  # type: ignore[override]
        """The blocks."""
        return self.blocks

    def final_norm(self, hidden_states: Tensor) -> Tensor:
        """The norm after the last block."""
        return self.ln_out(hidden_states)


class StatefulRWKV5ForCausalLM(StatefulRWKV5PreTrainedModel, StatefulForCausalLM):
    """RWKV-5 language model, on the parameter names of the official checkpoints."""

    backbone_class = StatefulRWKV5Model
    head_name = "head"
    _tied_weights_keys = {"head.weight": "rwkv.embeddings.weight"}  # noqa: RUF012


class StatefulRWKV5ForSequenceClassification(StatefulRWKV5PreTrainedModel, StatefulForSequenceClassification):
    """RWKV-5 with a classification head on the last token."""

    backbone_class = StatefulRWKV5Model


StatefulRWKV5Model.register_for_auto_class("AutoModel")
StatefulRWKV5ForCausalLM.register_for_auto_class("AutoModelForCausalLM")
StatefulRWKV5ForSequenceClassification.register_for_auto_class("AutoModelForSequenceClassification")
