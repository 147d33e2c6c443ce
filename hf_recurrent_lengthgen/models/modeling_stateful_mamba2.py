"""Mamba-2 language models that take an initial state and return the final state."""

from .causal_lm import StatefulForCausalLM
from .configuration_stateful_mamba2 import StatefulMamba2Config
from .layers_mamba2 import StatefulMamba2Mixer
from .layers_reference import MixerBackbone

# for people who have a checkpoint and not the package
from .recurrent_state import load_state as load_state
from .recurrent_state import save_state as save_state
from .sequence_classification import StatefulForSequenceClassification


class StatefulMamba2Model(MixerBackbone):
    """Mamba-2 without a head, on the parameter names of `transformers.Mamba2Model`."""

    config_class = StatefulMamba2Config
    mixer_class = StatefulMamba2Mixer


class StatefulMamba2ForCausalLM(StatefulForCausalLM):
    """Mamba-2 language model, on the parameter names of `transformers.Mamba2ForCausalLM`."""

    backbone_class = StatefulMamba2Model


class StatefulMamba2ForSequenceClassification(StatefulForSequenceClassification):
    """Mamba-2 with a classification head on the last token."""

    backbone_class = StatefulMamba2Model
