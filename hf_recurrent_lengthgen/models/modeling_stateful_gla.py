"""GLA language models that take an initial state and return the final state."""

from .causal_lm import StatefulForCausalLM
from .configuration_stateful_gla import StatefulGLAConfig
from .layers_fla import MixerMLPBackbone
from .layers_gla import StatefulGLAMixer

# for people who have a checkpoint and not the package
from .recurrent_state import load_state as load_state
from .recurrent_state import save_state as save_state
from .sequence_classification import StatefulForSequenceClassification


class StatefulGLAModel(MixerMLPBackbone):
    """GLA without a head, on the parameter names of fla's `GLAModel`."""

    config_class = StatefulGLAConfig
    mixer_class = StatefulGLAMixer


class StatefulGLAForCausalLM(StatefulForCausalLM):
    """GLA language model, on the parameter names of fla's `GLAForCausalLM`."""

    backbone_class = StatefulGLAModel


class StatefulGLAForSequenceClassification(StatefulForSequenceClassification):
    """GLA with a classification head on the last token."""

    backbone_class = StatefulGLAModel
