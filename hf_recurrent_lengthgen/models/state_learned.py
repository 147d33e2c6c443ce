"""Learned initial states as adapters of a model: several by name, one of which may be active.

A sequence without an initial state starts from the active learned state instead of the zero state: in training,
evaluation and generation, with padding, and every sequence of packed rows. An initial state or a cache takes its
place, because it is the state after earlier text. (State tuning of the RWKV community; "S0 Tuning", arXiv:2604.01168.)

The parameters are a submodule `learned_states` of the backbone, and `config.learned_states` has names, shapes, scales
and the active one, so a checkpoint that is saved with learned states has them when it is loaded. By themselves they
are folders (state_learned_files.py). Methods have the names that they have in PEFT.
"""

import math
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import initialization as init

from .state_value import (
    LayerShape,
    LayerState,
    RecurrentState,
    check_finite_state,
    check_state,
    map_state,
    state_dtype,
    zero_state,
)


class LearnedState(nn.Module):
    """One row of a recurrent state as parameters, zero at first, and the scale with which sequences start from them.

    Args:
        shapes: Shapes of the model's state.
        dtype: Dtype of the state: float32, or float64 in a float64 model.
        learn_conv: Whether the states of short convolutions and token shifts are learned, too, or stay as they are.

    Attributes:
        scale: Sequences start from scale times the parameters (alpha in arXiv:2604.01168, section 3.1); 1 at first.
            `LearnedStates.set_scale` changes it.
    """

    scale: float = 1.0

    def __init__(self, shapes: Sequence[LayerShape], dtype: torch.dtype, learn_conv: bool = True) -> None:
        super().__init__()
        zero = zero_state(shapes, 1, dtype=dtype)
        self.recurrent = nn.ParameterList(layer.recurrent for layer in zero)
        self.conv = nn.ParameterList(layer.conv for layer in zero)
        self.learn(learn_conv)

    def init_weights(self) -> None:
        """Zero, if a checkpoint lacks the parameters."""
        for parameter in self.parameters():
            init.zeros_(parameter)

    def learn(self, conv: bool) -> None:
        """Train the recurrent parts, and the convolution parts if `conv`; parts that a layer lacks never are."""
        for parameters, trained in ((self.recurrent, True), (self.conv, conv)):
            for parameter in parameters:
                parameter.requires_grad_(trained and parameter.numel() > 0)

    def forward(self) -> RecurrentState:
        """What sequences start from: the scale times the parameters, one row, in full precision also where the model
        was cast to less (`bf16_full_eval`)."""
        state = tuple(LayerState(*parts) for parts in zip(self.recurrent, self.conv, strict=True))
        state = map_state(lambda part: part.to(state_dtype(part.dtype)), state)
        return state if self.scale == 1 else map_state(lambda part: self.scale * part, state)

    @contextmanager
    def unscaled(self) -> Iterator[None]:
        """Within the `with` block, sequences start from the parameters themselves."""
        scale, self.scale = self.scale, 1.0
        try:
            yield
        finally:
            self.scale = scale

    @torch.no_grad()
    def set(self, state: RecurrentState) -> None:
        """Copy values with one row into the parameters."""
        for own, new in zip((self.recurrent, self.conv), zip(*state, strict=True), strict=True):
            for parameter, value in zip(own, new, strict=True):
                parameter.copy_(value)


class LearnedStates(nn.Module):
    """The learned states of a model by name; methods have the names that they have in PEFT.

    Args:
        config: Config of the model, whose `learned_states` names them: {"names": [...], "active": name or None,
            "shapes": [[recurrent, conv] of each layer], "scales": {name: scale if it is not 1}}. It follows all
            changes.

    Raises:
        ValueError: for an entry of the config that is damaged.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        self._config = config
        self._added: set[str] = set()  # since the model was made, so that its checkpoint may lack them
        record = recorded(config)
        shapes = [LayerShape(*map(tuple, layer)) for layer in record["shapes"]]
        for name in record["names"]:
            self.add_module(name, LearnedState(shapes, state_dtype(torch.get_default_dtype())))
            self[name].scale = checked_scale(record.get("scales", {}).get(name, 1.0))

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As in torch; says that PEFT, which asks for it when it saves, leaves a state out that no checkpoint has."""
        if kwargs.get("prefix", "").startswith("base_model.") and self.active_adapter in self._added:
            warnings.warn(
                f"PEFT saves adapters without the learned state {self.active_adapter!r}: write it next to them, "
                "model.get_base_model().save_learned_state(FOLDER), for load_model(FOLDER).",
                stacklevel=2,
            )
        return super().state_dict(*args, **kwargs)

    @property
    def names(self) -> list[str]:
        """The names, in the order in which they were added."""
        return [name for name, _ in self.named_children()]

    @property
    def active_adapter(self) -> str | None:
        """Name of the state that sequences start from; None for the zero state."""
        return recorded(self._config)["active"]

    def __getitem__(self, adapter_name: str) -> LearnedState:
        if adapter_name not in self._modules:
            raise ValueError(f"There is no learned state {adapter_name!r}: give one of {self.names}.")
        state: Any = self._modules[adapter_name]
        return state

    def state(self) -> RecurrentState | None:
        """The active state, one row with gradients; None if none is active."""
        return None if self.active_adapter is None else self[self.active_adapter]()

    def set_adapter(self, adapter_name: str | None) -> None:
        """Let sequences start from this state, or from zero if it is None."""
        if adapter_name is not None:
            self[adapter_name]
        self._config.learned_states = recorded(self._config) | {"active": adapter_name}

    def set_scale(self, adapter_name: str, scale: float) -> None:
        """Let sequences start from `scale` times the parameters of this state; it is saved with the state.

        Raises:
            ValueError: for an unknown name, and a scale that is no finite number.
        """
        self[adapter_name].scale = checked_scale(scale)
        self._record()

    def _record(self, **changes: Any) -> None:
        """Write what the modules hold into the config, and what is changed there."""
        scales = {name: self[name].scale for name in self.names if self[name].scale != 1}
        record = recorded(self._config) | {"names": self.names, "scales": scales} | changes
        self._config.learned_states = record if self.names else None

    @contextmanager
    def disable_adapter(self) -> Iterator[None]:
        """Within the `with` block, sequences start from zero."""
        active = self.active_adapter
        self.set_adapter(None)
        try:
            yield
        finally:
            self.set_adapter(active)

    def add(self, adapter_name: str, state: LearnedState) -> None:
        """Add a state under a new name, and make it the active one."""
        if adapter_name in self._modules or hasattr(self, adapter_name) or not re.fullmatch(r"[\w-]+", adapter_name):
            raise ValueError(
                f"A learned state cannot be named {adapter_name!r}: give a new name of letters, digits, - and _, "
                f"other than {self.names} and those of methods of modules, such as half, float and train."
            )
        self.add_module(adapter_name, state)
        self._added.add(adapter_name)
        self._record(active=adapter_name, shapes=[[list(part.shape[1:]) for part in layer] for layer in state()])

    def delete_adapter(self, adapter_name: str) -> None:
        """Delete a state; if it was active, sequences start from zero."""
        self[adapter_name]
        active = None if self.active_adapter == adapter_name else self.active_adapter
        delattr(self, adapter_name)
        self._record(active=active)


def checked_scale(scale: Any) -> float:
    """The scale; a `ValueError` for what is no finite number."""
    if isinstance(scale, bool) or not isinstance(scale, int | float) or not math.isfinite(scale):
        raise ValueError(f"The scale of a learned state must be a finite number, got {scale!r:.80}.")
    return float(scale)


def _frozen(state: RecurrentState) -> LearnedState:
    """A learned state with the values of a state of one row, which is not trained."""
    shapes = [LayerShape(*(tuple(part.shape[1:]) for part in layer)) for layer in state]
    learned = LearnedState(shapes, state[0].recurrent.dtype).to(state[0].recurrent.device)
    learned.set(state)
    return learned.requires_grad_(False)


def recorded(config: Any) -> dict[str, Any]:
    """The entry of a config, without states if it has none."""
    return dict(getattr(config, "learned_states", None) or {"names": [], "active": None, "shapes": []})


def active_row(model: Any) -> RecurrentState | None:
    """One row of the state that sequences of a model start from, with gradients; None for the zero state.

    Raises:
        ValueError: if the config names learned states that the model lacks, or that have other shapes.
    """
    record = recorded(model.config)
    if record["active"] is None:
        return None
    states = model.learned_states
    if states is None or set(states.names) != set(record["names"]):
        raise ValueError(
            f"The config of this {type(model).__name__} names the learned states {record['names']}, but the model has "
            f"{[] if states is None else states.names}: load the checkpoint with hf_recurrent_lengthgen.load_model, "
            "or set model.config.learned_states = None to start from zero."
        )
    state: RecurrentState = map_state(lambda part: part.to(state_dtype(model.dtype)), states.state())
    return check_state(
        state, model.state_shapes(), 1, model.device, state_dtype(model.dtype), f"learned state {record['active']!r}"
    )


def add_learned_state(model: Any, adapter_name: str, state: RecurrentState | None) -> LearnedStates:
    """See `LearnedStatesMixin.add_learned_state`."""
    getattr(model, "check_has_states", lambda: None)()
    shapes, dtype = model.state_shapes(), state_dtype(model.dtype)
    if any(len(shape) > len(LayerState._fields) for shape in shapes):
        raise ValueError("A model with a window (`forgetting` in its config) takes no learned state: leave it out.")
    if state is not None:
        state = check_state(state, shapes, 1, model.device, dtype, "state")
        check_finite_state(state, "state")
    learned = LearnedState(shapes, dtype).to(model.device) if state is None else _frozen(state)
    states = model.learned_states
    if states is None:
        if recorded(model.config)["names"]:
            active_row(model)  # says what is wrong
        states = model.base_model.learned_states = LearnedStates(model.config)
    states.add(adapter_name, learned)
    return states
