"""What measurements ask of a wrapped model: the inputs of its scans."""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any

from torch import Tensor

from hf_recurrent_lengthgen.hybrids import mixers as our_scans
from hf_recurrent_lengthgen.hybrids.forgetting import as_scan_of_one, mamba_mixers
from hf_recurrent_lengthgen.hybrids.mixers import CHUNKS, STEP, as_chunk_scan, exchanged
from hf_recurrent_lengthgen.models.modeling_protocols import HybridModel


@contextmanager
def watched_scans(model: HybridModel, readers: Mapping[str, Callable[..., None]]) -> Iterator[None]:
    """Call `readers[name](layer, *arguments)` before a Mamba mixer of a wrapped model scans.

    The names are "scan_ssd" (Mamba-2) and "scan_selective" (Mamba-1), the arguments those of our scans of that name.
    Zamba's mixers, which scan the heads of a layer one by one, are left out.
    """
    scans = {1: "scan_ssd", 2: "scan_selective"}  # by the dimensions of A_log
    mixers = {layer: each for layer, each in mamba_mixers(model).items() if scans.get(each.A_log.ndim) in readers}
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
            as_scan_of_one(look_at_chunk, state, *args, **kwargs)
            return stock(state, *args, **kwargs)

        return step

    def selective_scan(ours: Any) -> Any:
        @wraps(ours)
        def scan(*args: Any, **kwargs: Any) -> Any:
            readers["scan_selective"](now[0], *args)
            return ours(*args, **kwargs)

        return scan

    files = {sys.modules[type(mixer).__module__] for mixer in mixers.values()}
    two, one = ({file for file in files if hasattr(file, CHUNKS)}, [our_scans] if mixers else [])
    hooks = [mixer.register_forward_pre_hook(entering) for mixer in mixers.values()]
    try:
        with (
            exchanged(two, CHUNKS, chunk_scan),
            exchanged(two, STEP, single_step),
            exchanged(one, "scan_selective", selective_scan),
        ):
            yield
    finally:
        for hook in hooks:
            hook.remove()
