"""What measurements ask of a wrapped model: the inputs of its scans."""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any

from torch import Tensor

from hf_recurrent_lengthgen.hybrids import mixers as our_scans
from hf_recurrent_lengthgen.hybrids.mixers import CHUNKS, STEP, as_chunk_scan, exchanged
from hf_recurrent_lengthgen.models.modeling_protocols import HybridModel


@contextmanager
def watched_scans(model: HybridModel, readers: Mapping[str, Callable[..., None]]) -> Iterator[None]:
    """Call `readers[name](layer, *arguments)` before a Mamba mixer of a wrapped model scans.

    The names are "scan_ssd" (Mamba-2) and "scan_selective" (Mamba-1), the arguments those of our scans of that name.
    Zamba's mixers, which scan the heads of a layer one by one, are left out.
    """
    scans = {1: "scan_ssd", 2: "scan_selective"}  # by the dimensions of A_log
    modules: Iterator[Any] = model.modules()
    mixers = [each for each in modules if hasattr(each, "ssm_state_size") and scans.get(each.A_log.ndim) in readers]
    now = [0]

    def entering(mixer: Any, _: Any) -> None:
        now[0] = mixer.layer_idx

    def look(inputs: tuple[Tensor, ...], before: Tensor, _: Any) -> tuple[Tensor, Tensor]:
        readers["scan_ssd"](now[0], *inputs)
        return inputs[0], before

    look_at_chunk = as_chunk_scan(look)

    def chunk_scan(stock: Any) -> Any:
        def scan(*args: Any, **kwargs: Any) -> Any:
            look_at_chunk(*args, **kwargs)
            return stock(*args, **kwargs)

        return scan

    def single_step(stock: Any) -> Any:
        def step(state: Tensor, *args: Any, **kwargs: Any) -> Any:
            _as_scan_of_one(look_at_chunk, state, *args, **kwargs)
            return stock(state, *args, **kwargs)

        return step

    def selective_scan(ours: Any) -> Any:
        @wraps(ours)
        def scan(*args: Any, **kwargs: Any) -> Any:
            readers["scan_selective"](now[0], *args)
            return ours(*args, **kwargs)

        return scan

    files = {sys.modules[type(mixer).__module__] for mixer in mixers}
    hooks = [mixer.register_forward_pre_hook(entering) for mixer in mixers]
    try:
        with (
            exchanged(files, CHUNKS, chunk_scan),
            exchanged(files, STEP, single_step),
            exchanged([our_scans] if mixers else [], "scan_selective", selective_scan),
        ):
            yield
    finally:
        for hook in hooks:
            hook.remove()


def _as_scan_of_one(
    scan: Callable[..., Any],
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    **_: Any,
) -> None:
    """Call a `mamba2_chunk_scan` of Transformers with the arguments of the step for one token.

    Of these, dt, dt_bias and D are repeated over the head dimension, A also over the state dimension.
    """
    D, dt_bias = (None if each is None else each[:, 0] for each in (D, dt_bias))
    inputs = x[:, None], dt[:, None, :, 0], A[:, 0, 0], B[:, None], C[:, None]
    scan(*inputs, D=D, dt_bias=dt_bias, initial_states=state, dt_softplus=dt_softplus)
