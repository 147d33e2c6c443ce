"""Mamba-1 and FalconMamba language models that take an initial state and return the final state.

One family: the configuration's `mixer_rms_eps` tells them apart, parameters have the same names and shapes in both.
"""

from .causal_lm import StatefulForCausalLM
from .configuration_stateful_mamba import StatefulMambaConfig
from .layers_mamba import StatefulMambaMixer
from .layers_reference import MixerBackbone

# for people who have a checkpoint and not the package
from .recurrent_state import load_state as load_state
from .recurrent_state import save_state as save_state
from .sequence_classification import StatefulForSequenceClassification


class StatefulMambaModel(MixerBackbone):
    """Mamba-1 or FalconMamba without a head, on the parameter names of `transformers.MambaModel`."""

    config_class = StatefulMambaConfig
    mixer_class = StatefulMambaMixer


class StatefulMambaForCausalLM(StatefulForCausalLM):
    """Mamba-1 or FalconMamba language model, on the parameter names of `transformers.MambaForCausalLM`."""

    backbone_class = StatefulMambaModel


class StatefulMambaForSequenceClassification(StatefulForSequenceClassification):
    """Mamba-1 or FalconMamba with a classification head on the last token."""

    backbone_class = StatefulMambaModel
