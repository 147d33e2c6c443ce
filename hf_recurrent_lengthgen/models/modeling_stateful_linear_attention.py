"""Linear attention language models that take an initial state and return the final state."""

from .causal_lm import StatefulForCausalLM
from .configuration_stateful_linear_attention import StatefulLinearAttentionConfig
from .layers_fla import MixerMLPBackbone
from .layers_linear_attention import StatefulLinearAttentionMixer

# for people who have a checkpoint and not the package
from .recurrent_state import load_state as load_state
from .recurrent_state import save_state as save_state
from .sequence_classification import StatefulForSequenceClassification


class StatefulLinearAttentionModel(MixerMLPBackbone):
    """Linear attention without a head, on the parameter names of fla's `LinearAttentionModel`."""

    config_class = StatefulLinearAttentionConfig
    mixer_class = StatefulLinearAttentionMixer


class StatefulLinearAttentionForCausalLM(StatefulForCausalLM):
    """Linear attention language model, on the parameter names of fla's `LinearAttentionForCausalLM`."""

    backbone_class = StatefulLinearAttentionModel


class StatefulLinearAttentionForSequenceClassification(StatefulForSequenceClassification):
    """Linear attention with a classification head on the last token."""

    backbone_class = StatefulLinearAttentionModel
