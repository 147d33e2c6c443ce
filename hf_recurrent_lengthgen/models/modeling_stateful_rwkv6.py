"""RWKV-6 language models that take an initial state and return the final state."""

from torch import nn

from .causal_lm import StatefulForCausalLM
from .configuration_stateful_rwkv6 import StatefulRWKV6Config
from .layers_rwkv6 import StatefulRWKV6Block
from .modeling_stateful import StatefulBackbone

# for people who have a checkpoint and not the package
from .recurrent_state import load_state as load_state
from .recurrent_state import save_state as save_state
from .sequence_classification import StatefulForSequenceClassification


class StatefulRWKV6Model(StatefulBackbone):
    """RWKV-6 without a head, on the parameter names of fla's `RWKV6Model`."""

    config_class = StatefulRWKV6Config
    base_model_prefix = "model"
    _no_split_modules = ["StatefulRWKV6Block"]  # noqa: RUF012

    def make_layer(self, config: StatefulRWKV6Config, layer: int) -> StatefulRWKV6Block:
        return StatefulRWKV6Block(config, layer)

    def make_norm(self, config: StatefulRWKV6Config) -> nn.Module:
        return nn.LayerNorm(config.hidden_size, config.norm_eps, bias=config.norm_bias)


class StatefulRWKV6ForCausalLM(StatefulForCausalLM):
    """RWKV-6 language model, on the parameter names of fla's `RWKV6ForCausalLM`."""

    backbone_class = StatefulRWKV6Model


class StatefulRWKV6ForSequenceClassification(StatefulForSequenceClassification):
    """RWKV-6 with a classification head on the last token."""

    backbone_class = StatefulRWKV6Model
