"""The cache that a stock model gets in one call: what is before the tokens, and what comes after them.

Nothing is written in place, as in `caches.HybridCache`.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from hf_recurrent_lengthgen.hybrids.caches import HybridCache, KeyLayer, joined_parts
from hf_recurrent_lengthgen.models.rows import Rows
from hf_recurrent_lengthgen.models.rows_moved import inputs_around
from hf_recurrent_lengthgen.models.state_value import LayerShape, LayerState, RecurrentState


class Layout(NamedTuple):
    """What a forward pass of one token shows of a model.

    Attributes:
        shapes: Of the state of every layer, without B.
        attending: Heads and size of keys and values, of the layers with attention.
        windows: W of every layer with sliding attention in the stock model, else None.
    """

    shapes: tuple[LayerShape, ...]
    attending: dict[int, list[tuple[int, int]]]
    windows: tuple[int | None, ...]


class CallCache(Cache):
    """The cache that the stock model gets in one call.

    Args:
        layout: Of the model.
        before: The state before the tokens; None for nothing.
        cache: Keys and values before them, one row for each row of the call; None for none.
        rows: Rows with padding at their ends, as layers get them; None without padding.
        dtype: In which stock mixers get their states.

    Attributes:
        after: The states after the tokens, by layer.
        new_keys: Keys and values of the tokens, by layer.
        columns: Columns of a long row that each layer of xLSTM has read, which Transformers cuts in evaluation.
        over_padding: Whether a layer has read its state over padding, too.
        skips_logits: Whether the head gets no more than the last token.
        backbone_output: That of the backbone then.
    """

    is_compileable = False

    def __init__(
        self,
        layout: Layout,
        before: RecurrentState | None,
        cache: HybridCache | None = None,
        rows: Rows | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(layers=[])
        self.layout, self.before, self.dtype = layout, before, dtype
        self.keys: list[KeyLayer] = [KeyLayer()] * len(layout.windows) if cache is None else list(cache.layers)
        self.lengths_before = None if cache is None else cache.lengths
        self.offset = 0 if cache is None else cache.columns
        self.rows, self.lengths = rows, None if rows is None else rows.lengths
        self.after: dict[int, LayerState] = {}
        self.new_keys: dict[int, tuple[Tensor, Tensor]] = {}
        self.columns: dict[int, int] = {}
        self.over_padding = self.skips_logits = False
        self.backbone_output: Any = None
        self.is_closed = False

    def __len__(self) -> int:
        return len(self.layout.windows)

    def for_head(self, output: Any) -> Any:
        """What the head gets of the output of the backbone."""
        if not self.skips_logits:
            return output
        self.backbone_output = output
        return type(output)(**{**output, "last_hidden_state": output.last_hidden_state[:, -1:]})

    def before_layer(self, layer_idx: int) -> LayerState | None:
        """The state before the tokens; None at the start."""
        return None if self.before is None else self.before[layer_idx]

    def keep(self, layer_idx: int, state: LayerState) -> None:
        if not self.is_closed:
            self.after[layer_idx] = state

    def close(self) -> None:
        """End the call: nothing that activation checkpointing recomputes later is stored."""
        self.is_closed = True
        self.after, self.new_keys = {}, {}

    def final_state(self, rows: int, device: torch.device, dtype: torch.dtype) -> RecurrentState:
        """The state after the tokens; a part that a layer lacks is (B, 0)."""
        empty = torch.empty(rows, 0, device=device, dtype=dtype)
        states = (self.after.get(index, LayerState(empty, empty)) for index in range(len(self)))
        return tuple(LayerState(*(_alone(part.to(dtype)) for part in state)) for state in states)

    # states, as the mixers of Transformers ask for them

    def _part(self, layer_idx: int, name: str, state_idx: int) -> Tensor | None:
        if state_idx:
            raise ValueError("Layers with several convolution or recurrent states are not supported.")
        part = None if self.before is None else getattr(self.before[layer_idx], name)
        if part is None or part.shape[1:] == (0,):
            return None
        return part.to(self.dtype or part.dtype).clone()  # one token may be written into it

    def _put(self, layer_idx: int, **parts: Tensor) -> None:
        some = next(iter(parts.values()))
        state = self.after.get(layer_idx) or LayerState(*[some.new_empty(len(some), 0)] * 2)
        self.keep(layer_idx, state._replace(**parts))

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """The columns before the first token, (B, C, K-1)."""
        return self._part(layer_idx, "conv", state_idx)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self._part(layer_idx, "recurrent", state_idx)

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None, **_: Any
    ) -> Tensor:
        """The new columns (B, C, T) after those before them, (B, C, K-1 + T). Without K, the columns to keep."""
        if conv_kernel_size is None:
            self._put(layer_idx, conv=conv_states)
            return conv_states
        initial = self._part(layer_idx, "conv", state_idx)
        if initial is None:
            initial = conv_states.new_zeros(*conv_states.shape[:2], conv_kernel_size - 1)
        before, after = inputs_around([conv_states.mT], initial, self.rows)
        self._put(layer_idx, conv=after)
        return torch.cat([before.to(conv_states.dtype), conv_states], dim=-1)

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> Tensor:
        self._put(layer_idx, recurrent=recurrent_states)
        self.over_padding |= self.rows is not None
        return recurrent_states

    def is_recording_past(self, layer_idx: int) -> bool:
        """True, so that mixers do not use the convolution step that writes in place."""
        return True

    @property
    def rnn_state(self) -> "CallCache":
        """Where xLSTM looks for the state of a layer."""
        return self

    def __getitem__(self, layer_idx: int) -> "_OfXlstm":
        return _OfXlstm(((self, layer_idx), None, None))

    # keys and values

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> Any:
        """The keys and values to attend to."""
        new = key_states, value_states
        if not self.is_closed:
            self.new_keys[layer_idx] = new
        return joined_parts((*self.keys[layer_idx].parts, new))

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns of keys before the first token."""
        return self.offset

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Number of keys, and column of the first key."""
        attends = layer_idx in self.layout.attending  # else it stands for those that do, before Transformers 5.23
        before = self.keys[layer_idx].columns if attends else self.offset
        return before + query_length, self.offset - before

    @property
    def is_sliding(self) -> list[bool]:
        return [window is not None for window in self.layout.windows]

    @property
    def is_linear(self) -> list[bool]:
        return [index not in self.layout.attending for index in range(len(self))]

    @property
    def is_dummy(self) -> list[bool]:
        return [False] * len(self)


class HeadInput(NamedTuple):
    """In place of a cache: what the backbone returns without running its layers."""

    output: Any


class _OfXlstm(tuple[Any, None, None]):
    """The three states of a layer, for `XlstmBackend`; of no length, so that the model copies nothing into them."""

    def __len__(self) -> int:
        return 0


def _alone(part: Tensor) -> Tensor:
    """The tensor in its own memory, if it is a view of a larger one such as the states of all chunks."""
    return part if part.untyped_storage().nbytes() == part.nbytes else part.clone()
