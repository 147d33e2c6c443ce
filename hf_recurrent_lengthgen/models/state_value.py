"""The state of a recurrent language model as a value, and the functions on it.

A state is a plain tuple with one `LayerState` per layer, so that DDP, FSDP, accelerate, torch.compile
and activation checkpointing see the tensors inside. Everything a layer carries from one token to the
next is in its two parts, batch first:

    family                           recurrent       conv
    Mamba-2                          (B, H, P, N)    (B, H*P + 2*G*N, K-1)   last inputs of the short convolution
    Mamba-3                          (B, H, P, N)    (B, H*P + G*N, 1)       x and B of the last token
    Mamba-1, FalconMamba             (B, D, N)       (B, D, K-1)             the same, D inner channels
    GLA, HGRN-2, linear attention,   (B, H, P, N)    (B, 0), or with short convolutions (B, C, K-1) for the
    DeltaNet, Gated DeltaNet, KDA                    C channels of q, k and v
    RWKV-7, RWKV-6, RWKV-5           (B, H, P, N)    (B, 2*E, 1)             last inputs of the two token shifts

    B batch, H heads, P head (value) dim, N state (key) dim, G groups, K convolution taps, E hidden size

A part that a layer does not have is an empty tensor of shape (B, 0). All parts are float32 whatever
the dtype of the model (float64 in a float64 model). The convolution keeps K-1 columns: of K stored
ones the oldest never reaches an output.

No function changes its argument, unless it is an `OwnLayerState`, which only `generate` makes.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import _register_namedtuple

from .configuration_stateful import optional_module


class LayerState(NamedTuple):
    """What one layer carries between tokens; shapes are in the table of this module."""

    recurrent: Tensor
    conv: Tensor


class OwnLayerState(LayerState):
    """A `LayerState` that nobody else holds, so that a mixer may overwrite its recurrent part."""


class WindowedLayerState(NamedTuple):
    """What one layer carries between tokens when its state holds only the last r of them (`Forgetting.window`).

    `window` (B, 1 + r, F) holds what those tokens wrote (scan_window.py) and belongs to `recurrent`.
    """

    recurrent: Tensor
    conv: Tensor
    window: Tensor


for _kind in (LayerState, WindowedLayerState):  # torch.export saves and loads programs that take and give them
    _register_namedtuple(_kind, serialized_type_name=f"{__name__}.{_kind.__name__}")
    torch.serialization.add_safe_globals([_kind])

RecurrentState = tuple[LayerState, ...]  # or WindowedLayerState; only scan_window.py uses its third part


class LayerShape(NamedTuple):
    """Shapes of a `LayerState` without the batch dimension."""

    recurrent: tuple[int, ...]
    conv: tuple[int, ...]


class WindowedLayerShape(NamedTuple):
    """Shapes of a `WindowedLayerState` without the batch dimension."""

    recurrent: tuple[int, ...]
    conv: tuple[int, ...]
    window: tuple[int, ...]


def layer_state(parts: Iterable[Tensor]) -> LayerState:
    """The parts of one layer, as a `LayerState` or, if there are three, a `WindowedLayerState`."""
    parts = tuple(parts)
    kind: Any = LayerState if len(parts) == len(LayerState._fields) else WindowedLayerState
    return kind(*parts)


def state_dtype(model_dtype: torch.dtype) -> torch.dtype:
    """The dtype of the states of a model: float32, or float64 for a float64 model."""
    return torch.float64 if model_dtype == torch.float64 else torch.float32


def map_state(function: Callable[[Tensor], Tensor], state: RecurrentState) -> RecurrentState:
    """Apply `function` to every tensor of a state."""
    return tuple(layer_state(map(function, layer)) for layer in state)


def zero_state(
    shapes: Sequence[LayerShape],
    batch_size: int,
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.float32,
) -> RecurrentState:
    """The state before any token, with `batch_size` rows."""
    return tuple(
        layer_state(torch.zeros(batch_size, *shape, device=device, dtype=dtype) for shape in layer) for layer in shapes
    )


def mutable_state(state: RecurrentState) -> RecurrentState:
    """The same state for mixers that may overwrite it; unchanged where gradients are on, and with a `window`."""
    if torch.is_grad_enabled() or any(len(layer) > len(LayerState._fields) for layer in state):
        return state
    return tuple(OwnLayerState(*layer) for layer in state)


def detach_state(state: RecurrentState) -> RecurrentState:
    """The same values without gradient history."""
    return map_state(Tensor.detach, state)


def clone_state(state: RecurrentState) -> RecurrentState:
    """A copy in its own memory; gradients flow through it."""
    return map_state(Tensor.clone, state)


def state_to(state: RecurrentState, device: torch.device | str) -> RecurrentState:
    """The state on another device; the dtype stays."""
    return map_state(lambda part: part.to(device), state)


def state_batch_size(state: RecurrentState) -> int:
    """Number of rows of a state."""
    return state[0].recurrent.shape[0]


def take_rows(state: RecurrentState, rows: Tensor | slice) -> RecurrentState:
    """Rows of a state by index tensor or slice, in that order."""
    return map_state(lambda part: part[rows.to(part.device) if isinstance(rows, Tensor) else rows], state)


def keep_rows(state: RecurrentState, keep: Tensor) -> RecurrentState:
    """The rows where the boolean mask `keep` (B,) is true; the others become zero, also where they hold NaN."""
    return map_state(
        lambda part: torch.where(keep.to(part.device).reshape(-1, *[1] * (part.ndim - 1)), part, 0), state
    )


def concatenate_rows(states: Sequence[RecurrentState]) -> RecurrentState:
    """Stack the rows of several states of one model."""
    return tuple(
        layer_state(torch.cat(parts) for parts in zip(*layers, strict=True)) for layers in zip(*states, strict=True)
    )


def zero_conv(state: RecurrentState) -> RecurrentState:
    """The state with its convolution part set to zero."""
    return tuple(layer._replace(conv=torch.zeros_like(layer.conv)) for layer in state)


_CHECKED_BY_CALLER = ContextVar("_CHECKED_BY_CALLER", default=False)


@contextmanager
def states_checked_by_caller() -> Iterator[None]:
    """Within the `with` block, models do not look at the values of initial states, which would wait for the device."""
    token = _CHECKED_BY_CALLER.set(True)
    try:
        yield
    finally:
        _CHECKED_BY_CALLER.reset(token)


def check_initial_state(state: RecurrentState) -> None:
    """`check_finite_state` of an initial state, unless the caller does that, or the model is compiled."""
    if not torch.compiler.is_compiling() and not _CHECKED_BY_CALLER.get():
        check_finite_state(state)


def check_finite_state(state: RecurrentState, name: str = "initial_state") -> None:
    """Raise a `ValueError` that names the first layer and part with NaN or infinite values, and its rows."""
    parts = [part.detach() for layer in state for part in layer if part.numel()]
    # which are NaN if any entry is; one kernel for each part
    extremes = [extreme for part in parts for extreme in part.aminmax()]
    if not parts or bool(torch.stack(extremes).isfinite().all()):
        return
    for index, layer in enumerate(state):
        for part_name, part in zip(WindowedLayerState._fields, layer, strict=False):
            if not bool(part.isfinite().all()):
                rows = (~part.isfinite().flatten(1).all(1)).nonzero().flatten().tolist()
                raise ValueError(
                    f"{name}: layer {index}, part '{part_name}' has NaN or infinite values in rows {rows}. "
                    "Start these rows from zero (keep_rows) or from a state saved before they broke."
                )


def check_state(
    state: RecurrentState,
    shapes: Sequence[LayerShape],
    batch_size: int,
    device: torch.device,
    dtype: torch.dtype,
    name: str = "initial_state",
) -> RecurrentState:
    """Check that a state fits a model and a batch, and return it as a tuple of `LayerState`."""
    if not isinstance(state, (tuple, list)) or not all(
        isinstance(layer, (tuple, list)) and 2 <= len(layer) <= 3 for layer in state
    ):
        raise ValueError(
            f"{name} must be a tuple with one LayerState{LayerState._fields} per layer, as returned in "
            f"`final_state`; got {type(state).__name__}."
        )
    if any(len(layer) != len(shape) for layer, shape in zip(state, shapes, strict=False)):
        needs = "with" if len(shapes[0]) > len(LayerState._fields) else "without"
        raise ValueError(
            f"{name} does not fit a model {needs} a window (`forgetting` in its config), and cannot be converted: "
            "read the earlier tokens again, without a state."
        )
    if len(state) != len(shapes):
        raise ValueError(f"{name} has {len(state)} layers, the model has {len(shapes)}.")
    for index, (layer, layer_shape) in enumerate(zip(state, shapes, strict=True)):
        for part_name, part, shape in zip(layer_shape._fields, layer, layer_shape, strict=True):
            expected = (batch_size, *shape)
            fits = isinstance(part, Tensor) and tuple(part.shape) == expected and part.dtype == dtype
            if not fits or part.device != device:
                found = (
                    f"{tuple(part.shape)}, {part.dtype} on {part.device}" if isinstance(part, Tensor) else type(part)
                )
                raise ValueError(
                    f"{name}: layer {index}, part '{part_name}' must be a tensor {expected}, the rows first, {dtype} "
                    f"on {device} (full precision; state_to moves states, take_rows selects rows), got {found}."
                )
    return tuple(layer_state(map(_outside_inference_mode, layer)) for layer in state)


def _outside_inference_mode(part: Tensor) -> Tensor:
    """A copy of a tensor made under `torch.inference_mode()`, which autograd cannot save; others as they are."""
    if torch.compiler.is_compiling() or torch.is_inference_mode_enabled() or not part.is_inference():
        return part
    return part.clone()


def learned_row(model: Any) -> RecurrentState | None:
    """One row of the learned state that sequences of a model start from, with gradients; None for the zero state."""
    if getattr(model.config, "learned_states", None) is None:
        return None
    return optional_module("state_learned").active_row(model)


class LearnedStatesMixin:
    """What all models that take states share: the zero state, learned ones (state_learned.py), kernels of the Hub."""

    def zero_state(self: Any, batch_size: int) -> RecurrentState:
        """The state before any token, on the device of the model."""
        return zero_state(self.state_shapes(), batch_size, self.device, state_dtype(self.dtype))

    def set_use_kernels(self, use_kernels: bool, *args: Any, **kwargs: Any) -> None:
        super().set_use_kernels(use_kernels, *args, **kwargs)  # type: ignore[misc]
        if use_kernels:
            optional_module("scan_hub_kernels").use_hub_kernels(self)

    @property
    def learned_states(self: Any) -> Any:
        """The `LearnedStates` of the model; None if it never had any."""
        return self.base_model._modules.get("learned_states")

    @property
    def device(self: Any) -> torch.device:
        """Where the first weights are, or, if accelerate offloads them, where it brings them for computing."""
        found: torch.device = super().device  # type: ignore[misc]
        if found.type != "meta":
            return found
        hooks = [module._hf_hook for module in self.modules() if hasattr(module, "_hf_hook")]
        hooks = [one for hook in hooks for one in getattr(hook, "hooks", [hook])]
        places = [hook.execution_device for hook in hooks if getattr(hook, "execution_device", None) is not None]
        return torch.device(places[0]) if places else found

    def first_state(self: Any, batch_size: int) -> RecurrentState:
        """The state before any token: the active learned state, or zero; rows share memory."""
        row = learned_row(self)
        if row is None:
            return self.zero_state(batch_size)
        return map_state(lambda part: part.expand(batch_size, *part.shape[1:]), row)

    def add_learned_state(self: Any, adapter_name: str = "default", state: RecurrentState | None = None) -> Any:
        """Add a learned state, make it the active one, and return all.

        Args:
            adapter_name: A new name.
            state: Its values, one row, which are not trained; None for a state of zeros that is trained.

        Raises:
            ValueError: for a name that exists, a model with a window, and a state that does not fit or is not finite.
        """
        return optional_module("state_learned").add_learned_state(self, adapter_name, state)

    def load_learned_state(
        self: Any,
        folder: str | os.PathLike[str],
        adapter_name: str = "default",
        revision: str | None = None,
        is_trainable: bool = False,
    ) -> Any:
        """Load a learned state from a folder or the Hub, make it the active one, and return all.

        Args:
            folder: What `save_learned_state` or `LearnedStateTrainer` wrote, or its name on the Hub (owner/name).
            adapter_name: A new name.
            revision: Branch, tag or commit on the Hub.
            is_trainable: Whether it is trained further; by default it is frozen.

        Raises:
            ValueError: for missing, damaged and newer files, and for a state of another base.
        """
        files = optional_module("state_learned_files")
        return files.load_learned_state(self, folder, adapter_name, revision, is_trainable)

    def save_learned_state(self: Any, folder: str | os.PathLike[str], adapter_name: str | None = None) -> None:
        """Write a learned state, by default the active one, into a folder.

        Raises:
            ValueError: if there is no such state, none is active, or it is not finite.
        """
        optional_module("state_learned_files").save_learned_state(self, folder, adapter_name)
