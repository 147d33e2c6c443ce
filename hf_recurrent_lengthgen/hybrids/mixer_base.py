"""Recurrent mixers of Transformers with a state as argument and result, as those of this package have it.

A mixer of a wrapped model gets a subclass of its class. In a call with a `CallCache` it reads from the state in there
with the scan of this package: any number of tokens, padding at the ends of rows, gradients to the state. All other
calls are those of the stock class. Only the attributes of the mixers that hold weights and sizes are used. A mixer
without an entry in `mixers.MIXERS` reads its state through the public methods of the cache.

Shapes: B rows, T tokens, D hidden size, K taps.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor, nn
from transformers.activations import ACT2FN

from hf_recurrent_lengthgen.hybrids.call_cache import CallCache
from hf_recurrent_lengthgen.models.layers_conv import CausalConv1d
from hf_recurrent_lengthgen.models.layers_mixer import ScanMixer
from hf_recurrent_lengthgen.models.rows import Rows
from hf_recurrent_lengthgen.models.scan_backends import ScanBackend
from hf_recurrent_lengthgen.models.state_value import LayerState, layer_state, state_dtype


def call_of(args: Sequence[Any], kwargs: dict[str, Any]) -> CallCache | None:
    """The `CallCache` among the arguments of a module."""
    return next((x for x in (*args, *kwargs.values()) if isinstance(x, CallCache)), None)


class StateMixer(ScanMixer):
    """Base of the subclasses of stock mixers. A subclass gives `state_shape` and `read`.

    Attributes:
        kernels: The functions that must be installed for the kernel path.
        one_scan: Whether a layer has one scan.
        read_directly: Children whose weights are read past what an adapter puts around them.
        layer_idx: The layer.
    """

    kernels: ClassVar[tuple[Any, ...]] = ()
    one_scan: ClassVar[bool] = True
    read_directly: ClassVar[tuple[str, ...]] = ("conv1d",)
    layer_idx: int
    conv1d: Any
    activation: str

    def read(self, x: Tensor, state: LayerState, rows: Rows | None) -> tuple[Tensor, LayerState]:
        """Outputs (B, T, D), and the state after the last real token of each row; rows as layers get them."""
        raise NotImplementedError

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        call = call_of(args, kwargs)
        if call is None:
            return super().forward(hidden_states, *args, **kwargs)
        y, state = self.read(hidden_states, self.state_before(call, hidden_states), call.rows)
        call.keep(self.layer_idx, state)
        return y

    def state_before(self, call: CallCache | None, x: Tensor) -> LayerState:
        """The state in the call, or zero."""
        state = None if call is None else call.before_layer(self.layer_idx)
        if state is not None:
            return state
        return layer_state(x.new_zeros(len(x), *shape, dtype=state_dtype(x.dtype)) for shape in self.state_shape)

    def take_over(self) -> None:
        """Prepare a stock module: children that are called with more than the stock class does."""
        self.kernel_available = all(kernel is not None for kernel in self.kernels)
        if type(getattr(self, "conv1d", None)) is nn.Conv1d:
            self.conv1d.__class__ = CausalConv1d
            self.conv1d.activation = self.activation in ("silu", "swish")

    def backend_for(self, x: Tensor) -> ScanBackend:
        for name, child in self.named_children():
            if name in self.read_directly and any(part == "base_layer" for part, _ in child.named_children()):
                raise ValueError(
                    f"An adapter on {name} of layer {self.layer_idx} has no effect, since {type(self).__name__} of "
                    f"Transformers reads the weight directly: leave {name} out of its target_modules, train the whole "
                    "module (modules_to_save), or load a Mamba or FalconMamba with load_model."
                )
        return self.choose_backend("auto", x)

    @property
    def scans_unwatched(self) -> bool:
        return "scan" not in vars(self) and type(self).advance is StateMixer.advance

    def convolve(self, x: Tensor, state: Tensor, rows: Rows | None, backend: ScanBackend) -> tuple[Tensor, Tensor]:
        """The short convolution and its activation: (B, T, C), and the K-1 columns after it."""
        y, after = self.conv1d(x, state, rows, backend)
        return (y if self.activation in ("silu", "swish") else ACT2FN[self.activation](y)), after

    def advance(
        self, *inputs: Tensor, state: LayerState, rows: Rows | None, **options: Any
    ) -> tuple[Tensor, LayerState]:
        y, recurrent = self.scan(*inputs, state.recurrent, **options)
        return y, state._replace(recurrent=recurrent)
