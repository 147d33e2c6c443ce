"""Mamba-2 language models that take an initial state and return the final state.

In a checkpoint this file is the entry: it imports every file the model needs by itself, because
Transformers before 5.6 copies only what the entry file imports. So it also re-exports the functions on
states for people who have the checkpoint and not the package.
"""

import torch
from torch import Tensor, nn

from .atomic_files import replacing
from .causal_conv import causal_conv
from .configuration_stateful_mamba2 import StatefulMamba2Config
from .layers_mamba2 import (
    Mamba2RMSNorm,
    StatefulMamba2Block,
    StatefulMamba2Mixer,
    init_mamba2_mixer,
    mamba2_layer_shape,
)
from .modeling_stateful import StatefulBackbone, StatefulForCausalLM, StatefulPreTrainedModel
from .recurrent_cache import RecurrentCache
from .recurrent_state import LayerShape, LayerState, RecurrentState, load_state, save_state
from .scan_backends import resolve_backend
from .scan_ssd import scan_ssd

__all__ = [
    "LayerState",
    "RecurrentCache",
    "RecurrentState",
    "StatefulMamba2Config",
    "StatefulMamba2ForCausalLM",
    "StatefulMamba2Model",
    "causal_conv",
    "load_state",
    "replacing",
    "resolve_backend",
    "save_state",
    "scan_ssd",
]


class StatefulMamba2PreTrainedModel(StatefulPreTrainedModel):
    """Configuration, initialization and code files of the family."""

    config_class = StatefulMamba2Config
    config: StatefulMamba2Config
    _no_split_modules = ["StatefulMamba2Block"]  # noqa: RUF012

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, StatefulMamba2Mixer):
            init_mamba2_mixer(module, self.config)

    @classmethod
    def code_map(cls) -> dict[str, str]:
        """`auto_map` of a checkpoint: from Auto class to `file.Class`."""
        return {
            "AutoConfig": "configuration_stateful_mamba2.StatefulMamba2Config",
            "AutoModel": "modeling_stateful_mamba2.StatefulMamba2Model",
            "AutoModelForCausalLM": "modeling_stateful_mamba2.StatefulMamba2ForCausalLM",
        }


class StatefulMamba2Model(StatefulMamba2PreTrainedModel, StatefulBackbone):
    """Mamba-2 without a head, on the parameter names of `transformers.Mamba2Model`."""

    def __init__(self, config: StatefulMamba2Config) -> None:
        super().__init__(config)
        self.embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(StatefulMamba2Block(config) for _ in range(config.num_hidden_layers))
        self.norm_f = Mamba2RMSNorm(config.hidden_size, config.layer_norm_epsilon)
        self.gradient_checkpointing = False
        self.post_init()

    def final_norm(self, hidden_states: Tensor) -> Tensor:
        """The norm after the last block."""
        return self.norm_f(hidden_states)

    def state_shapes(self) -> tuple[LayerShape, ...]:
        """One (H, P, N) and (H*P + 2*G*N, K-1) per layer."""
        return (mamba2_layer_shape(self.config),) * self.config.num_hidden_layers


class StatefulMamba2ForCausalLM(StatefulMamba2PreTrainedModel, StatefulForCausalLM):
    """Mamba-2 language model, on the parameter names of `transformers.Mamba2ForCausalLM`."""

    _tied_weights_keys = {"lm_head.weight": "backbone.embeddings.weight"}  # noqa: RUF012

    def __init__(self, config: StatefulMamba2Config) -> None:
        super().__init__(config)
        self.backbone = StatefulMamba2Model(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()


StatefulMamba2Model.register_for_auto_class("AutoModel")
StatefulMamba2ForCausalLM.register_for_auto_class("AutoModelForCausalLM")
