"""Our scan in the mixers of Transformers with a delta rule (Gated DeltaNet, Kimi Delta Attention).

Without kernels, these mixers call torch functions of their module, which keep every intermediate result for the
backward pass and compute in float32 whatever the model's dtype. The mixers of a wrapped model call `scan_delta`
instead: each gets a subclass of its class whose `forward` finds it under the names of those functions. Modules,
classes and functions of Transformers stay as they are, so other models do, too.
"""

import functools
import inspect
from collections.abc import Callable, Iterator
from types import CellType, FunctionType
from typing import Any

from torch import Tensor
from transformers.utils import is_kernels_available

from hf_recurrent_lengthgen.hybrids.stopping import RULES, reading_now, stopped_rule
from hf_recurrent_lengthgen.models.layers_delta import l2_norm
from hf_recurrent_lengthgen.models.modeling_protocols import StatefulModel
from hf_recurrent_lengthgen.models.scan_delta import chunk_gated_delta_rule, scan_delta
from hf_recurrent_lengthgen.models.scan_pieces import piece_delta
from hf_recurrent_lengthgen.models.state_value import state_dtype

KERNELS = chunk_gated_delta_rule is not None or is_kernels_available()


def use_our_scan(model: StatefulModel) -> None:
    """Let the mixers that call one of `RULES` call our scan where no kernel is installed."""
    modules: Iterator[Any] = model.modules()
    for module in modules:
        if RULES & set(inspect.unwrap(type(module).forward).__code__.co_names):
            stock: Any = type(module)
            module.__class__ = _scanning_class(stock)


@functools.cache
def _scanning_class(stock: Any) -> Any:
    """The subclass of a mixer's class that calls our scan, under its name."""
    return under_its_name(stock, _scanning_class, (), _with_our_scan(stock.forward))


def under_its_name(stock: Any, make: Any, mixins: tuple[type, ...], forward: Any) -> Any:
    """A subclass of a stock class under its name, by which pickle would find that one: it is told `make(stock)`."""

    def reduced(self: Any, protocol: Any) -> Any:
        _, _, *contents = stock.__reduce_ex__(self, protocol)
        return _empty, (make, stock), *contents

    names = {"__module__": stock.__module__, "__qualname__": stock.__qualname__, "__doc__": stock.__doc__}
    return type(stock.__name__, (*mixins, stock), names | {"forward": forward, "__reduce_ex__": reduced})


def _empty(make: Any, stock: Any) -> Any:
    made = make(stock)
    return made.__new__(made)


def _with_our_scan(function: Any) -> Any:
    """A copy of a function, and of what it decorates, that finds our scan under the names in `RULES`."""
    ours = {name: _in_place_of(function.__globals__[name]) for name in RULES & function.__globals__.keys()}
    decorated = getattr(function, "__wrapped__", None)
    cells = function.__closure__ or ()
    closure = tuple(CellType(_with_our_scan(decorated)) if cell.cell_contents is decorated else cell for cell in cells)
    copy = FunctionType(
        function.__code__, function.__globals__ | ours, function.__name__, function.__defaults__, closure
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return functools.update_wrapper(copy, function)


def needs_stock(device_type: str) -> bool:
    """Whether the stock function may have a kernel for a device, or the device is one that our scan does not know."""
    return device_type == "meta" or (KERNELS and device_type != "cpu")


def _in_place_of(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Our scan with the arguments and results of a function in `RULES`."""

    @functools.wraps(stock)
    @stopped_rule
    def rule(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        shared = getattr(reading_now(), "shared", None)
        if shared is None and needs_stock(query.device.type):
            kwargs |= {"initial_state": initial_state, "output_final_state": output_final_state}
            kwargs |= {"g": g, "beta": beta, "use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel}
            return stock(query, key, value, **kwargs)
        y, final = stock_delta_rule(query, key, value, g, beta, initial_state, use_qk_l2norm_in_kernel, shared)
        return y, final if output_final_state else None

    return rule


def stock_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None,
    normalize: bool,
    shared: Any = None,
) -> tuple[Tensor, Tensor]:
    """`scan_delta` in the layouts of Transformers (and fla).

    Args:
        query: (B, T, G, N), not scaled; each of the G groups serves H / G heads one after another.
        key: (B, T, G, N).
        value: (B, T, H, P).
        g: Logarithms of the decays, (B, T, H), or (B, T, H, N) with one per channel.
        beta: (B, T, H).
        initial_state: (B, H, N, P); zero when None.
        normalize: Whether queries and keys are divided by their norms.
        shared: What shares the rows with other processes (`sharing.Shared`), if any does.

    Returns:
        Outputs in the dtype of `query`, (B, T, H, P), and the final state, (B, H, N, P), float32 or float64.
    """
    dtype = state_dtype(query.dtype)
    q, k = (l2_norm(x.to(dtype)) if normalize else x.to(dtype) for x in (query, key))
    q = q * q.shape[3] ** -0.5
    if initial_state is None:
        state = q.new_zeros(len(q), *value.shape[2:], q.shape[3])
    else:
        state = initial_state.as_subclass(Tensor).to(dtype).mT
    inputs = q, k, value, g[..., None] if g.ndim == 3 else g, beta
    if shared is None:
        y, final = scan_delta(*inputs, state)
    else:
        y, final = shared.scan(scan_delta, piece_delta, inputs, state, {})
    return y.to(query.dtype), final.mT.contiguous()
