"""A trainable initial state ("state tuning" in the RWKV community)."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from hf_recurrent_lengthgen.models.recurrent_state import LayerShape, LayerState, RecurrentState, map_state
from hf_recurrent_lengthgen.trainers.initial_states import BatchPlace, InitialStateSource


class LearnedState(nn.Module):
    """One row of a recurrent state as parameters, zero at first.

    Args:
        shapes: Shapes of the model's state.
        dtype: Dtype of the state: float32, or float64 in a float64 model.
        learn_conv: Whether the states of short convolutions and token shifts are learned, too, or stay zero.
    """

    def __init__(self, shapes: Sequence[LayerShape], dtype: torch.dtype, learn_conv: bool) -> None:
        super().__init__()
        self.recurrent = nn.ParameterList(torch.zeros(1, *shape.recurrent, dtype=dtype) for shape in shapes)
        self.conv = nn.ParameterList(
            nn.Parameter(torch.zeros(1, *shape.conv, dtype=dtype), requires_grad=learn_conv and 0 not in shape.conv)
            for shape in shapes
        )

    def forward(self) -> RecurrentState:
        """The state with one row."""
        return tuple(LayerState(*parts) for parts in zip(self.recurrent, self.conv, strict=True))

    @torch.no_grad()
    def set(self, state: RecurrentState) -> None:
        """Copy the values of a state with one row."""
        for own, given in zip(self(), state, strict=True):
            for parameter, value in zip(own, given, strict=True):
                parameter.copy_(value)


class LearnedStates(InitialStateSource):
    """Every sequence starts from the same learned state, also in evaluation.

    Args:
        learned: The parameters.
    """

    def __init__(self, learned: LearnedState) -> None:
        self._learned = learned

    def initial_state(self, place: BatchPlace) -> RecurrentState:
        """The learned state for every row; gradients flow into it."""
        return map_state(lambda part: part.expand(place.rows, *part.shape[1:]), self._learned())

    def evaluation_state(self, place: BatchPlace) -> RecurrentState:
        """The learned state for every row."""
        return self.initial_state(place)

    def state_dict(self) -> dict[str, Tensor]:
        return {name: value.cpu() for name, value in self._learned.state_dict().items()}

    def load_state_dict(self, tensors: dict[str, Tensor], device: torch.device) -> None:
        """Restore what `state_dict` returned."""
        self._learned.load_state_dict(tensors)
