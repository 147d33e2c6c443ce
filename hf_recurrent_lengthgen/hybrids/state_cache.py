"""A cache that carries recurrent states through a stock model as values.

The mixers of Transformers read their states from the cache, and write to a stock cache in place. That would change the
caller's state, and lose gradients or make them wrong. `StateCache` has one slot for the state before the tokens and
one for the state after them. It never writes to the first. So recomputation under activation checkpointing reads the
same state, and gradients flow from the second to the first.

Attention layers get only the keys and values of this call: each sequence attends to itself, from position 0.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.cache_utils import Cache

from hf_recurrent_lengthgen.models.rows import Rows
from hf_recurrent_lengthgen.models.rows_moved import inputs_around, last_inputs
from hf_recurrent_lengthgen.models.state_value import LayerState, RecurrentState


class Overwritten(Tensor):
    """A state for the single-token step of a mixer, which overwrites it with `copy_`; the new value is recorded.

    All other functions see a plain tensor. A kernel that bypasses `copy_` writes to this copy.
    """

    layer_idx: int
    record: Callable[[Tensor], None]

    @classmethod
    def of(cls, state: Tensor, layer_idx: int, record: Callable[[Tensor], None]) -> Tensor:
        """A copy of the state of a layer that calls `record` when it is overwritten."""
        overwritten = state.clone().as_subclass(cls)
        overwritten.layer_idx, overwritten.record = layer_idx, record
        return overwritten

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is Tensor.copy_ and isinstance(args[0], cls):
            args[0].record(args[1].as_subclass(Tensor))
            return args[0]
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class NoCache(Cache):
    """What a call with padding returns where a stock model returns a cache; a call with it is refused.

    Without it, a loop that gives back what it got would go on from nothing.
    """

    is_compileable = False

    def __init__(self) -> None:
        super().__init__(layers=[])


class StateCache(Cache):
    """Carries one `RecurrentState` through a forward pass of a stock model.

    Args:
        initial_state: State before the tokens; None lets the mixers start from zero.
        single_token: Whether the pass has one token; mixers then write their state in place.
        attention: A stock cache that keeps the keys and values of the attention layers; None to keep none.
        dtype: Dtype in which mixers get their states; None for that of the states.
        shared: What shares the rows with other processes (`sharing.Shared`); None where none does.
        rows: Rows with padding at their ends; None if there is none.

    Attributes:
        attending: The layers that asked for keys and values during the pass.
        asking: The layer that last asked for its recurrent state.
        asked: The layers that did.
        stopped: The layers whose recurrent state ends at the last real token (`stopping.py`).
        keys: Where to note the keys and values of this call by layer; None for nowhere.
        dropped_columns: For each layer, the number of columns of the stock convolution state that never reach an
            output and are not part of our states: 1, or 0 if the mixer gives the exact window.
    """

    is_compileable = False

    def __init__(
        self,
        num_layers: int,
        initial_state: RecurrentState | None = None,
        single_token: bool = False,
        attention: Cache | None = None,
        dtype: torch.dtype | None = None,
        shared: Any = None,
        rows: Rows | None = None,
    ) -> None:
        # by name: MiniMax's cache, mixed in, takes no arguments
        Cache.__init__(self, layers=[] if attention is None else attention.layers)
        self.initial_state = initial_state
        self.single_token = single_token
        self.attention = attention
        self.dtype = dtype
        self.shared = shared
        self.rows = rows
        self.attending: dict[int, list[tuple[int, int]]] = {}
        self.asking = 0
        self.asked: set[int] = set()
        self.stopped: set[int] = set()
        self.keys: dict[int, tuple[Tensor, Tensor]] | None = None
        self.dropped_columns = [1] * num_layers
        self._final: list[dict[str, Tensor]] = [{} for _ in range(num_layers)]
        self._steps: list[dict[str, Tensor]] = [{} for _ in range(num_layers)]

    def __len__(self) -> int:
        return len(self._final)

    def _initial(self, layer_idx: int, part: str) -> Tensor | None:
        if self.initial_state is None:
            return None
        state: Tensor = getattr(self.initial_state[layer_idx], part)
        return None if state.shape[1:] == (0,) else state.to(self.dtype or state.dtype)

    def _handed_out(self, layer_idx: int, part: str, state: Tensor | None) -> Tensor | None:
        if state is None or not self.single_token:
            return state
        final = self._final[layer_idx]
        step = Overwritten.of(state, layer_idx, lambda value: final.__setitem__(part, value))
        self._steps[layer_idx][part] = step
        return step

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """The columns before the first token, (B, C, K-1); None at the start."""
        _only_one_state(state_idx)
        return self._handed_out(layer_idx, "conv", self._initial(layer_idx, "conv"))

    def update_conv_state(
        self,
        conv_states: Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Record the last columns, and return the new ones after the earlier ones, (B, C, K-1 + T).

        `conv_states` are the new columns, (B, C, T); without a kernel size K, the window to keep.
        """
        _only_one_state(state_idx)
        if conv_kernel_size is None:
            self.dropped_columns[layer_idx] = 0
            self._final[layer_idx]["conv"] = conv_states
            return conv_states
        initial = self._initial(layer_idx, "conv")
        if self.shared is not None:
            assert initial is not None
            before, self._final[layer_idx]["conv"] = inputs_around([conv_states.mT], initial, self.shared.rows)
            return torch.cat([before.to(conv_states.dtype), conv_states], dim=-1)
        if initial is None:
            columns = F.pad(conv_states, (conv_kernel_size - 1, 0))
        else:
            columns = torch.cat([initial.to(conv_states.dtype), conv_states], dim=-1)
        last = columns[..., columns.shape[-1] - (conv_kernel_size - 1) :]
        if self.rows is not None:
            assert initial is not None
            last = last_inputs(conv_states.mT, initial, self.rows.lengths)
        self._final[layer_idx]["conv"] = last
        return columns

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """The recurrent state before the first token, in the model's own layout; None at the start."""
        _only_one_state(state_idx)
        return self._handed_out(layer_idx, "recurrent", self._asked(layer_idx))

    def _asked(self, layer_idx: int) -> Tensor | None:
        self.asking = layer_idx
        state = self._initial(layer_idx, "recurrent")
        if state is not None:
            self.asked.add(layer_idx)
        return state

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        """Record the recurrent state after the tokens."""
        _only_one_state(state_idx)
        self._final[layer_idx]["recurrent"] = recurrent_states
        return recurrent_states

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Whether there is a state before the tokens."""
        return self.initial_state is not None

    def is_recording_past(self, layer_idx: int) -> bool:
        """True, so that mixers do not use the convolution step that writes in place."""
        return True

    def final_state(self, batch_size: int, device: torch.device, dtype: torch.dtype) -> RecurrentState:
        """The state after the tokens; a part that a layer lacks is (B, 0).

        Raises:
            ValueError: if a kernel wrote a state in place while gradients were asked for.
        """
        state: list[LayerState] = []
        for index, (final, steps) in enumerate(zip(self._final, self._steps, strict=True)):
            missing = {part: step for part, step in steps.items() if part not in final}
            if missing and torch.is_grad_enabled():
                raise ValueError(
                    f"Layer {index} wrote its state with a kernel without gradient, as kernels for a single token "
                    "do: give two or more tokens in training, or wrap the call in torch.no_grad()."
                )
            parts = {part: step.as_subclass(Tensor) for part, step in missing.items()} | final
            empty = torch.empty(batch_size, 0, device=device, dtype=dtype)
            state.append(LayerState(*(_alone(parts.get(part, empty).to(dtype)) for part in LayerState._fields)))
        return tuple(state)

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """The keys and values to attend to: the given ones, or those of the attention cache."""
        self.attending[layer_idx] = [(part.shape[1], part.shape[3]) for part in (key_states, value_states)]
        if self.keys is not None:
            self.keys[layer_idx] = key_states, value_states
        if self.shared is not None:
            return self.shared.up_to_here(key_states), self.shared.up_to_here(value_states)
        if self.attention is None:
            return key_states, value_states
        return self.attention.update(key_states, value_states, layer_idx, *args, **kwargs)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Number of tokens whose keys are kept, which is the position of the first new token."""
        if self.shared is not None:
            return int(self.shared.start)
        return 0 if self.attention is None else self.attention.get_seq_length(layer_idx)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Number of keys, and position of the first key."""
        if self.shared is not None:
            return self.shared.before + query_length, self.shared.start - self.shared.before
        if self.attention is None:
            return query_length, 0
        return self.attention.get_mask_sizes(query_length, layer_idx)

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """-1: there is no maximum."""
        return -1


def _alone(part: Tensor) -> Tensor:
    """The tensor in its own memory, if it is a view of a larger one such as the states of all chunks."""
    return part if part.untyped_storage().nbytes() == part.nbytes else part.clone()


def _only_one_state(state_idx: int) -> None:
    if state_idx:
        raise ValueError("Layers with several convolution or recurrent states are not supported.")
