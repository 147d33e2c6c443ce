"""The inputs of the scans of a model's layers, recorded while the model runs, also with the code of a checkpoint, and
the weights of softmax attention.

The `scan` of every mixer (`models/layers_mixer.py`) is replaced within a `with` block.

Shapes: B rows, T tokens of a call, H heads (channels in Mamba-1), N states (keys), P values, G groups.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


def layers_of(model: nn.Module) -> nn.ModuleList:
    """The layers of a model of this package, also with the code of its checkpoint; a `ValueError` for other models."""
    blocks = getattr(getattr(model, "base_model", model), "layers", None)
    if blocks is None or not hasattr(model, "zero_state"):
        raise ValueError(
            f"The layers of {type(model).__name__} are not known to this package: load the model with "
            "hf_recurrent_lengthgen.load_model(...)."
        )
    return blocks


@contextmanager
def recorded_scans(model: nn.Module, readers: Mapping[str, Callable[..., None]]) -> Iterator[None]:
    """Call `readers[name](layer, *arguments)` before a layer runs its scan of that name."""
    before: list[tuple[Any, Any]] = []  # mixers, and the scans that enclosing blocks have put in place

    def recording(layer: int, function: Any, read: Any) -> Any:
        @wraps(function)
        def scan(*args: Any, **kwargs: Any) -> Any:
            read(layer, *args)
            return function(*args, **kwargs)

        return scan

    try:
        for layer, mixer in _mixers_of(model):
            if mixer.scan.__name__ in readers:
                before.append((mixer, vars(mixer).get("scan")))
                mixer.scan = recording(layer, mixer.scan, readers[mixer.scan.__name__])
        yield
    finally:
        for mixer, scan in before:
            if scan is None:
                del mixer.scan
            else:
                mixer.scan = scan


def _mixers_of(model: nn.Module) -> Iterator[tuple[int, Any]]:
    """The mixers with one scan, and their layers; those of Zamba scan each head by itself."""
    if hasattr(model, "new_attention_cache"):  # wrapped models of Transformers
        mixers: list[Any] = [module for module in model.modules() if hasattr(module, "one_scan")]
        yield from ((mixer.layer_idx, mixer) for mixer in mixers if mixer.one_scan)
        return
    for layer, block in enumerate(layers_of(model)):
        if (mixer := getattr(block, "scan_mixer", None)) is not None:
            yield layer, mixer


@contextmanager
def recorded_attention(model: Any, read: Callable[[int, Tensor], None]) -> Iterator[None]:
    """Call `read(layer, weights)` with the weights (B, H, T, T) of each causal softmax attention of Transformers.

    It is computed with weights ("eager") within the block. Modules without a layer index, which several layers share
    (Zamba), are left out.
    """
    modules = [each for each in model.modules() if isinstance(getattr(each, "layer_idx", None), int)]
    implementation = model.config._attn_implementation

    def look(module: Any, _: Any, output: Any) -> None:
        for weights in output[1:] if isinstance(output, tuple) else ():
            square = isinstance(weights, Tensor) and weights.ndim == 4 and weights.shape[2] == weights.shape[3]
            if square and not weights.triu(1).any() and bool((weights >= 0).all()):
                read(module.layer_idx, weights)

    hooks = [each.register_forward_hook(look) for each in modules]
    try:
        if implementation != "eager":
            model.set_attn_implementation("eager")
        yield
    finally:
        for hook in hooks:
            hook.remove()
        if implementation != "eager":
            model.set_attn_implementation(implementation)


class ScanSums(NamedTuple):
    """Sums over the tokens of a call, per row and head, float64.

    Attributes:
        log_decay, first_log_decay: Sum of the log decays, and the log decay of the first token, (B, H, n): n = N in
            Mamba-1, GLA, HGRN-2 and RWKV, where each state (key channel) has its own decay, else 1.
        key, value: Sums of the norms of B_t (keys) before Delta, and of x_t (values), (B, H).
        step: Sum of Delta_t, (B, H); None for families without steps.
    """

    log_decay: Tensor
    first_log_decay: Tensor
    key: Tensor
    value: Tensor
    step: Tensor | None


def sums_of_selective(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, *_: Tensor) -> ScanSums:
    """Mamba-1: x and dt (B, T, D), A (D, N), B (B, T, N)."""
    step, rates = _sum(dt), A.double()
    first = dt[:, 0, :, None].double() * rates
    return ScanSums(step[..., None] * rates, first, _norms(B)[:, None].expand_as(step), _sum(x.abs()), step)


def sums_of_ssd(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, *_: Tensor) -> ScanSums:
    """Mamba-2: x (B, T, H, P), dt (B, T, H), A (H,), B (B, T, G, N)."""
    step, rates = _sum(dt), A.double()
    key = _norms(B).repeat_interleave(x.shape[2] // B.shape[2], 1)
    return ScanSums((step * rates)[..., None], (dt[:, 0].double() * rates)[..., None], key, _norms(x), step)


def sums_of_trapezoid(dt: Tensor, g: Tensor, share: Tensor, w: Tensor, x: Tensor, B: Tensor, *_: Tensor) -> ScanSums:
    """Mamba-3: dt and log decays g (B, T, H), x (B, 1 + T, H, P) and B (B, 1 + T, H, N) from the token before on."""
    return ScanSums(_sum(g)[..., None], g[:, 0, :, None].double(), _norms(B[:, 1:]), _norms(x[:, 1:]), _sum(dt))


def sums_of_gated(q: Tensor, k: Tensor, v: Tensor, g: Tensor, *_: Tensor) -> ScanSums:
    """GLA, HGRN-2, linear attention, RWKV: k and log decays g (B, T, H, N), v (B, T, H, P)."""
    return ScanSums(_sum(g), g[:, 0].double(), _norms(k), _norms(v), None)


def sums_of_linear(q: Tensor, k: Tensor, v: Tensor, *_: Tensor) -> ScanSums:
    """Linear attention among Mamba layers: k (B, H, T, N), v (B, H, T, P)."""
    k, v = (x.transpose(1, 2) for x in (k, v))
    return sums_of_gated(q, k, v, torch.zeros_like(k))


SUMS: dict[str, Callable[..., ScanSums]] = {
    "scan_selective": sums_of_selective,
    "scan_ssd": sums_of_ssd,
    "scan_trapezoid": sums_of_trapezoid,
    "scan_gla": sums_of_gated,
    "scan_rwkv6": sums_of_gated,
    "linear_attention": sums_of_linear,
}


def _sum(x: Tensor) -> Tensor:
    return x.sum(1, dtype=torch.promote_types(x.dtype, torch.float32)).double()


def _norms(x: Tensor) -> Tensor:
    """Sum over the tokens of the norms of the last dimension, float64."""
    return _sum(torch.linalg.vector_norm(x, dim=-1, dtype=torch.promote_types(x.dtype, torch.float32)))
