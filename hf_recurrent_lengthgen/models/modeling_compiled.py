"""A compiled step for `generate(compile_config=CompileConfig())`: states have one size, so no token compiles again.

A graph is one layer's, and serves all layers of its kind. Prompts, whose lengths differ, run without it, as do chunks
of more than one token. A graph overwrites a copy of the state, which only the running `generate` holds. A second
number of rows gives one more graph, which then serves them all.

Shapes: B batch, D hidden size.
"""

import inspect
from typing import Any

import torch
from torch import Tensor

from .state_value import LayerState, RecurrentState, map_state

_SETTINGS = ("fullgraph", "dynamic", "backend", "mode", "options")
_COMPILED: dict[str, Any] = {}  # by settings and configuration: models of one configuration share their graphs
# before these arguments, at most 8 graphs for all models of a process (torch._dynamo.config.recompile_limit)
_FOR_EACH_MODEL = {"isolate_recompiles": True, "recompile_limit": 64}


def layer_step(layer: Any, x: Tensor, state: LayerState, *inputs: Any) -> tuple[Any, ...]:
    """What a layer returns for one token per row, x (B, 1, D); `state` becomes that after it."""
    x, after, *further = layer(x, state, *inputs)
    for old, new in zip(state, after, strict=True):
        if old is not new:
            old.copy_(new)
    return x, state, *further


class CompiledSteps:
    """What one `generate` calls its layers by, once they have read the prompt."""

    def __init__(self, step: Any) -> None:
        self.step = step
        self.state: RecurrentState = ()

    def begin(self, state: RecurrentState) -> tuple[RecurrentState, Any]:
        """A state that the step may overwrite, with the values of `state`; and the step."""
        if not self.state or state[0].recurrent is not self.state[0].recurrent:  # after a prompt, or of other beams
            self.state = map_state(lambda part: part.clone(memory_format=torch.contiguous_format), state)
        return self.state, self.step


def compile_steps(model: Any, generation_config: Any, cache: Any) -> None:
    """Give the cache of a `generate` that begins the compiled step which its `compile_config` asks for.

    Raises:
        ValueError: without a cache, and for models and machines for which nothing can be compiled.
    """
    config, generation_config.compile_config = generation_config.compile_config, None  # done: not by Transformers, too
    model.check_has_states()
    places = sorted({str(place) for place in getattr(model, "hf_device_map", {}).values()})
    quantizer = getattr(model, "hf_quantizer", None)
    refused = {
        "forgetting": model.config.forgetting,
        "use_cache=False": cache is None,
        f"weights on several devices, {places}": len(places) > 1 or "disk" in places,
        f"weights quantized by {type(quantizer).__name__}": quantizer is not None and not quantizer.is_compileable,
    }
    if reasons := [reason for reason, holds in refused.items() if holds]:
        raise ValueError(f"compile_config does not go with {' and '.join(reasons)}: leave one of them out.")
    settings = {name: getattr(config, name) for name in _SETTINGS}
    if (key := f"{settings} {model.config.to_json_string()}") not in _COMPILED:
        known = inspect.signature(torch.compile).parameters
        limits: Any = {name: value for name, value in _FOR_EACH_MODEL.items() if name in known}
        _COMPILED[key] = torch.compile(layer_step, **settings, **limits)
    cache.steps = CompiledSteps(_COMPILED[key])
