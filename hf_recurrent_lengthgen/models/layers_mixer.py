"""A mixer whose state advances by a scan, what goes around that scan, and the RMS norm; its statistics in float32.

Shapes: B batch, T tokens.
"""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm
from transformers.modeling_layers import GradientCheckpointingLayer

from .configuration_stateful import optional_module
from .rows import Rows
from .scan_backends import ScanBackend, resolve_backend
from .state_value import LayerShape, LayerState, OwnLayerState


def rms_normalize(x: Tensor, eps: float) -> Tensor:
    """`x / rms(x)` over the last dimension."""
    return rms_norm(x, x.shape[-1:], None, eps)


def is_plain(module: Any) -> bool:
    """Whether a module is no more than its weights: without hooks (of offloading, sharding, users), adapters,
    parametrizations, quantized or sharded weights. None is."""
    if module is None:
        return True
    hooks = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    weights = all(type(weight) in (nn.Parameter, Tensor) for weight in module.parameters(recurse=False))
    return weights and not hooks and "forward" not in vars(module) and not list(module.children())


class RMSNorm(nn.Module):
    """`weight * x / rms(x)` over the last dimension; without a weight unless `affine`."""

    weight: Any

    def __init__(self, size: int, eps: float, affine: bool = True) -> None:
        super().__init__()
        self.register_parameter("weight", nn.Parameter(torch.ones(size)) if affine else None)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        if self.weight is None or x.dtype == self.weight.dtype:
            return rms_norm(x, x.shape[-1:], self.weight, self.eps)  # one kernel on a GPU
        return self.weight * rms_normalize(x, self.eps)


class ScanMixer(nn.Module):
    """Base of mixers with one recurrence.

    A subclass sets `scan`, gives `state_shape`, and runs its recurrence by `advance`; the arguments of
    `forward` are those in `StatefulBackbone`. Measurements of a recurrence go by the name of its scan.

    Args:
        config: The configuration of the model.
        kernel_available: Whether the kernels of scan and short convolution are installed.

    Attributes:
        scan: The function of a file `scan_*.py`, as a static method: it takes the inputs of the recurrence and the
            recurrent part of a state, and gives outputs and the recurrent part after the last token. With
            `in_place=True` it may overwrite its argument.
        grows: What makes its state larger (StateX, Shen et al. 2025): "state_size", N of each head or channel, or
            "num_heads", fewer and larger heads; None where it cannot be expanded.
        why_not_grow: Why it cannot be expanded, in words; empty where it can.
        why_not_inherit: Why an expansion cannot keep its trained weights; empty where it can.
        convolves: Whether the convolution part of the state is that of short convolutions, which have kernels.
        layer: The number of its layer; the backbone sets it.
    """

    scan: Callable[..., Any]
    grows: ClassVar[str | None] = None
    why_not_grow: ClassVar[str] = ""
    why_not_inherit: ClassVar[str] = ""
    convolves: ClassVar[bool] = True
    layer: int = 0

    def __init__(self, config: Any, kernel_available: bool = False) -> None:
        super().__init__()
        self.config, self.kernel_available = config, kernel_available

    @property
    def state_shape(self) -> LayerShape:
        """Shapes of the state of its layer, without the batch dimension."""
        raise NotImplementedError

    @property
    def conv_parts(self) -> dict[str, int]:
        """Names of the parts of the convolution state, in its order, and the channels of each."""
        channels = self.state_shape.conv[0]
        return {"x": channels} if channels else {}

    def kernel_limit(self, dtype: torch.dtype) -> str:
        """What the kernels need and this layer lacks, in words; empty if they can run it."""
        if dtype not in (torch.float32, torch.float16, torch.bfloat16):
            return f"float32, float16 or bfloat16, got {dtype}"
        channels, *history = self.state_shape.conv
        if channels and self.convolves:
            if not 1 <= history[0] <= 3:
                return f"a convolution of 2, 3 or 4 taps, got {history[0] + 1}"
            if channels % 8:
                return f"convolved channels to be a multiple of 8, got {channels}"
        return ""

    def backend_for(self, x: Tensor) -> ScanBackend:
        """The backend for inputs like x."""
        for name, module in self._modules.items():
            if name.endswith("conv1d") and module is not None and "base_layer" in module._modules:
                raise ValueError(
                    f"An adapter on {name} has no effect, since it takes no state: leave {name} out of its "
                    "target_modules, or train the whole module (modules_to_save)."
                )
        return self.choose_backend(self.config.scan_backend, x)

    def choose_backend(self, setting: str, x: Tensor) -> ScanBackend:
        """See `resolve_backend`."""
        limit = self.kernel_limit(x.dtype) if self.kernel_available and x.device.type == "cuda" else ""
        trained = type(self).__name__ if self.training and torch.is_grad_enabled() else ""
        return resolve_backend(setting, x.device.type, self.kernel_available, limit, trained)

    @property
    def scans_unwatched(self) -> bool:
        """Whether the scan may run inside a larger operation: nobody records its inputs, and nothing is forgotten."""
        return "scan" not in vars(self) and type(self).advance is ScanMixer.advance and not self.config.forgetting

    def advance(
        self, *inputs: Tensor, state: LayerState, rows: Rows | None, **options: Any
    ) -> tuple[Tensor, LayerState]:
        """Outputs, and the state with the recurrent part after T tokens.

        `inputs` are those of `scan` before the state, `options` its keywords. Inputs at padding must write nothing.
        """
        otherwise = False  # whether the scan itself is another
        if self.config.forgetting:
            forgetting = optional_module("scan_forgetting")
            if (rule := forgetting.Forgetting.of(self.config, self.layer)).changed():
                inputs, otherwise = forgetting.scaled_inputs(rule, self.scan.__name__, inputs, rows)
        if rows is not None and rows.group is not None:
            affine_map = optional_module("scan_affine").AFFINE_MAPS.get(self.scan.__name__)
            if affine_map is None or otherwise:
                why = "has another scan" if affine_map is None else f"is made to forget ({self.config.forgetting})"
                raise ValueError(f"Processes cannot share a sequence of a model whose {type(self).__name__} {why}.")
            scan_chunk = optional_module("rows_shared").scan_chunk
            y, recurrent = scan_chunk(rows, self.scan, affine_map, inputs, state.recurrent, options)
            return y, LayerState(recurrent, state.conv)
        if otherwise:
            return forgetting.with_forgetting(rule, self.scan, inputs, state, rows, **options)
        if isinstance(state, OwnLayerState):
            options["in_place"] = True
        y, recurrent = self.scan(*inputs, state.recurrent, **options)
        return y, LayerState(recurrent, state.conv)


class MixerLayer(GradientCheckpointingLayer):
    """Base of layers with one mixer, in the attribute that `mixer_name` names."""

    mixer_name: ClassVar[str] = "mixer"

    @property
    def scan_mixer(self) -> ScanMixer:
        """The mixer; `state_shape` and `conv_parts` are those of the layer."""
        return getattr(self, self.mixer_name)
