"""A compiled step for `generate(compile_config=CompileConfig())`: states have one size, so one graph is enough.

Prompts, whose lengths differ, run without it, as do chunks of more than one token. The graph overwrites a copy of the
state, which only the running `generate` holds. Other numbers of rows give one more graph, which then serves them all.

Shapes: B batch, D hidden size.
"""

from typing import Any

import torch
from torch import Tensor

from .rows import Rows
from .rows_moved import MovedRows
from .state_value import RecurrentState, map_state

_SETTINGS = ("fullgraph", "dynamic", "backend", "mode", "options")
_COMPILED: dict[str, Any] = {}  # by settings; models of one configuration share their graphs


def decode_step(backbone: Any, x: Tensor, state: RecurrentState, keep_all: bool) -> list[Tensor]:
    """The hidden states of one token per row, x (B, 1, D); `state` becomes that after it."""
    rows = Rows((x.shape[0], x.shape[1]))
    hidden_states, final_state = backbone._through_layers(x, state, rows, None, keep_all, True)
    for before, after in zip(state, final_state, strict=True):
        for old, new in zip(before, after, strict=True):
            if old is not new:
                old.copy_(new)
    return hidden_states  # type: ignore[no-any-return]


class CompiledSteps:
    """What one `generate` calls in place of the backbone's `_through_layers`, with the same arguments and results."""

    def __init__(self, backbone: Any, step: Any) -> None:
        self.backbone, self.step = backbone, step
        self.state: RecurrentState = ()

    def __call__(
        self, x: Tensor, state: RecurrentState, rows: Rows, moved: MovedRows | None, keep_all: bool, keep_states: bool
    ) -> tuple[list[Tensor], RecurrentState]:
        if x.shape[1] > 1 or moved is not None:
            result: Any = self.backbone._through_layers(x, state, rows, moved, keep_all, keep_states)
            return result
        if not self.state or state[0].recurrent is not self.state[0].recurrent:  # after a prompt, or of other beams
            self.state = map_state(lambda part: part.clone(memory_format=torch.contiguous_format), state)
        return self.step(self.backbone, x, self.state, keep_all), self.state


def compile_steps(model: Any, generation_config: Any, cache: Any) -> None:
    """Give the cache of a `generate` that begins the compiled step which its `compile_config` asks for.

    Raises:
        ValueError: without a cache, and for models and machines for which nothing can be compiled.
    """
    config, generation_config.compile_config = generation_config.compile_config, None  # done: not by Transformers, too
    what = "generate(compile_config=...)"
    model.check_has_states()
    if model.config.forgetting:
        raise ValueError(
            f"{what} cannot compile a model that forgets by rule: leave compile_config or forgetting out."
        )
    if cache is None:
        raise ValueError(f"{what} compiles the step from one state to the next: leave use_cache on.")
    places = sorted({str(place) for place in getattr(model, "hf_device_map", {}).values()})
    if len(places) > 1 or "disk" in places:
        raise ValueError(f"{what} needs all weights on one device, they are on {places}: leave compile_config out.")
    quantizer = getattr(model, "hf_quantizer", None)
    if quantizer is not None and not quantizer.is_compileable:
        raise ValueError(
            f"{what} cannot compile weights quantized by {type(quantizer).__name__}: leave compile_config out."
        )
    if config.backend == "inductor" and model.device.type == "cpu":
        _check_compiler(what)
    settings = {name: getattr(config, name) for name in _SETTINGS}
    if (key := repr(settings)) not in _COMPILED:
        _COMPILED[key] = torch.compile(decode_step, **settings)
    cache.steps = CompiledSteps(model.base_model, _COMPILED[key])


def _check_compiler(what: str) -> None:
    from torch._inductor import cpp_builder, exc  # seconds to import

    try:
        cpp_builder.get_cpp_compiler()
    except exc.InvalidCxxCompiler as error:
        raise ValueError(
            f"{what} needs a C++ compiler on a CPU, and found none ({error}): install g++, name one in the "
            "environment variable CXX, or leave compile_config out."
        ) from error
