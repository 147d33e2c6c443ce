"""RWKV-5 language models that take an initial state and return the final state."""

from torch import nn

from .causal_lm import StatefulForCausalLM
from .configuration_stateful_rwkv5 import StatefulRWKV5Config
from .layers_rwkv5 import StatefulRWKV5Block
from .modeling_stateful import StatefulBackbone

# for people who have a checkpoint and not the package
from .recurrent_state import load_state as load_state
from .recurrent_state import save_state as save_state
from .sequence_classification import StatefulForSequenceClassification


class StatefulRWKV5Model(StatefulBackbone):
    """RWKV-5 without a head, on the parameter names of the official checkpoints."""

    config_class = StatefulRWKV5Config
    base_model_prefix = "rwkv"
    _no_split_modules = ["StatefulRWKV5Block"]  # noqa: RUF012
    layers_name = "blocks"
    norm_name = "ln_out"
    blocks: nn.ModuleList

    def make_layer(self, config: StatefulRWKV5Config, layer: int) -> StatefulRWKV5Block:
        return StatefulRWKV5Block(config, layer)

    def make_norm(self, config: StatefulRWKV5Config) -> nn.Module:
        return nn.LayerNorm(config.hidden_size)  # official code: 1e-5, whatever layer_norm_epsilon

    @property
    def layers(self) -> nn.ModuleList:  # type: ignore[override]
        return self.blocks


class StatefulRWKV5ForCausalLM(StatefulForCausalLM):
    """RWKV-5 language model, on the parameter names of the official checkpoints."""

    backbone_class = StatefulRWKV5Model
    head_name = "head"


class StatefulRWKV5ForSequenceClassification(StatefulForSequenceClassification):
    """RWKV-5 with a classification head on the last token."""

    backbone_class = StatefulRWKV5Model
