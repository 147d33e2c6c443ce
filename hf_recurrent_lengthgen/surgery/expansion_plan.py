"""Which layers a state expansion enlarges, their new sizes, and the config of the expanded model."""

import copy
import math
from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, PreTrainedModel
from transformers.initialization import no_init_weights

from hf_recurrent_lengthgen.hybrids.layer_sizes import new_model, sizes_of_layers, with_size
from hf_recurrent_lengthgen.hybrids.registry import SUPPORTED
from hf_recurrent_lengthgen.models import FAMILIES, STATEFUL_CLASSES
from hf_recurrent_lengthgen.models.layers_known import kind_of
from hf_recurrent_lengthgen.surgery.expanded_weights import EXPANSIONS

Layers = Iterable[int] | Literal["all"] | None

DEFAULT_LAYERS, DEFAULT_FACTOR = 4, 4

PER_LAYER = {"state_size": "layer_state_sizes", "num_heads": "layer_num_heads"}
"""The field of our configs with the size of each layer."""

SHARED_HEADS = ("num_kv_heads", "num_v_heads")
"""Fields with another number of heads than `num_heads`, where several heads share one of keys."""

ONE_SIZE = {"falcon_h1", *STATEFUL_CLASSES}
"""Types of Transformers whose layers are expanded together only."""


def layers_of(value: str | int | Iterable[int | str] | None, name: str) -> Any:
    """ "all", layer numbers or None, from a setting called `name`."""
    layers = list(value) if isinstance(value, Iterable) and not isinstance(value, str) else [value]
    if value is None or layers == ["all"]:
        return None if value is None else "all"
    try:
        return sorted({int(str(layer)) for layer in layers})  # str refuses 1.5 and True
    except ValueError as error:
        raise ValueError(f'{name} must be "all" or layer numbers, got {value!r}.') from error


class Growth(NamedTuple):
    """How states grow: by "state_size" or "num_heads", in all layers together or in each, and in which field."""

    size: str
    field: str
    per_layer: bool


def spread_layers(total: int, count: int = DEFAULT_LAYERS) -> list[int]:
    """One layer in every m = total // count, from the first, `count` in all (section 4.4); all if `total` <= count.

    If `count` does not divide `total`, the last layers are the remainder.
    """
    return list(range(total)) if total <= count else [index * (total // count) for index in range(count)]


class Plan(NamedTuple):
    """The layers to expand, and the new config; `before` and `after` hold N or H of every recurrent layer."""

    config: Any
    size: str
    layers: tuple[int, ...]
    before: dict[int, int]
    after: dict[int, int]

    def describe(self, initialization: str) -> str:
        changes = sorted({(self.before[layer], self.after[layer]) for layer in self.layers})
        sizes = ", ".join(f"{before} -> {after}" for before, after in changes)
        which = f"layer{'s' * (len(self.layers) > 1)} {str([*self.layers])[1:-1]}"
        return f"state expansion, {self.size} {sizes} in {which}, {initialization}"


def expansion_plan(
    config: Any,
    model_class: type[Any] | None,
    layers: Layers,
    count: int | None,
    factor: float | None,
    state_size: int | None,
    num_heads: int | None,
) -> Plan:
    check_type(config)
    blank = blank_model(config, model_class)
    growth, mixers = growth_of(blank), expandable_mixers(blank)
    recurrent = tuple(mixers)
    layers = layers if layers is None or layers == "all" else sorted(set(layers))
    sizes: dict[str, Any] = {"factor": factor, "state_size": state_size, "num_heads": num_heads}
    sizes = {name: value for name, value in sizes.items() if value is not None}
    other = "num_heads" if growth.size == "state_size" else "state_size"
    shared = {name: getattr(config, name, None) for name in (*SHARED_HEADS, "num_heads")}
    some = not growth.per_layer and layers != "all" and set(layers or ()) != set(recurrent)
    refused = {
        f"give one of factor, state_size and num_heads, got {sizes}": len(sizes) > 1,
        f"factor must be a finite number above 1, got {factor}": "factor" in sizes
        and not 1 < sizes["factor"] < math.inf,
        f"{other} does not apply to {config.model_type}: its state grows by {growth.size} or factor": other in sizes,
        f"heads share keys ({shared}), and merged heads would need more weights": len({*shared.values()} - {None}) > 1,
        f"give layers or count, not both, got {layers} and {count}": layers is not None and count is not None,
        f"its configuration has one {growth.field} for all layers, so some of them cannot be expanded alone: give "
        f'layers="all", or load it with load_model, if its class has one size for each layer': some
        and config.model_type in ONE_SIZE,
        f'plain Transformers loads one {growth.field} in all layers only: give layers="all", or layers or count for a '
        "model that plain Transformers refuses": some and layers is None and count is None,
    }
    if why := next((why for why, applies in refused.items() if applies), ""):
        raise ValueError(f"The states of {config.model_type} cannot be expanded: {why}.")
    if layers == "all":
        layers = recurrent
    elif layers is None:
        layers = [recurrent[i] for i in spread_layers(len(recurrent), DEFAULT_LAYERS if count is None else count)]
    if not layers or not {*layers} <= {*recurrent}:
        raise ValueError(f"layers must be some of the recurrent layers, {str([*recurrent])[1:-1]}, got {layers}.")
    chosen = tuple(layers)
    before = {layer: _size_of(mixer, growth) for layer, (_, mixer) in mixers.items()}
    after = before | {
        layer: _new_size(growth.size, layer, before[layer], factor, sizes.get(growth.size)) for layer in chosen
    }
    new = copy.deepcopy(config)
    if growth.per_layer:
        for field in SHARED_HEADS:
            if growth.size == "num_heads" and hasattr(new, field):
                setattr(new, field, None)
        known = getattr(config, growth.field) or [getattr(config, growth.size, None)] * config.num_hidden_layers
        setattr(new, growth.field, [after.get(layer, size) for layer, size in enumerate(known)])
    elif chosen == recurrent and not sizes_of_layers(config):
        setattr(new, growth.field, after[chosen[0]])
    else:
        with_size(new, growth.field, {mixers[layer][1].layer_idx: after[layer] for layer in chosen})
    return Plan(new, growth.size, chosen, before, after)


def check_type(config: Any) -> None:
    """Raise a `ValueError` for a type of Transformers whose states cannot grow."""
    model_type = str(getattr(config, "model_type", None))
    stock = SUPPORTED.get(model_type)
    if (stock is not None and stock.state_field) or hasattr(config, "check_forgetting"):  # ours has that
        return
    types = sorted((*FAMILIES, *(name for name, other in SUPPORTED.items() if other.state_field)))
    reason = stock.no_expansion if stock is not None else f"possible are {', '.join(types)}"
    raise ValueError(f"The states of {model_type!r} cannot be expanded: {reason}.")


def growth_of(model: PreTrainedModel) -> Growth:
    """How the states of a model grow; raises a `ValueError` for mixers that do not declare it."""
    config = model.config
    if config.model_type in SUPPORTED:
        return Growth("state_size", SUPPORTED[config.model_type].state_field, per_layer=False)
    sizes = {mixer.grows for _, mixer in expandable_mixers(model).values()}
    if len(sizes) != 1:
        blocks: Any = model.base_model.layers
        reasons = {getattr(getattr(block, "scan_mixer", None), "why_not_grow", "") for block in blocks} - {""}
        why = "; ".join(sorted(reasons)) or "its mixers do not say how they grow (`grows` of `ScanMixer`)"
        raise ValueError(f"The states of {config.model_type!r} cannot be expanded: {why}.")
    (size,) = sizes
    return Growth(size, PER_LAYER[size], per_layer=True)


def _size_of(mixer: Any, growth: Growth) -> int:
    if not growth.per_layer:
        return int(mixer.ssm_state_size)
    recurrent = mixer.state_shape.recurrent
    return int(recurrent[-1] if growth.size == "state_size" else recurrent[0])


def _new_size(size: str, layer: int, old: int, factor: float | None, new_size: int | None) -> int:
    if size == "state_size":
        new = old * (DEFAULT_FACTOR if factor is None else factor) if new_size is None else new_size
        fits, what = new > old, "larger integer"
    else:
        new = (1 if factor is None else old / factor) if new_size is None else new_size
        fits, what = 1 <= new < old and old % new == 0, "smaller divisor"
    if not fits or new % 1:
        raise ValueError(
            f"{size} of layer {layer} is {old} and would become {new:g}: give a {what}, or a factor above 1 that "
            "gives one."
        )
    return int(new)


def blank_model(config: Any, model_class: type[Any] | None) -> Any:
    """The model of a config without weights."""
    config = copy.deepcopy(config)
    with torch.device("meta"), no_init_weights():
        sized = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)] if sizes_of_layers(config) else None
        make: Any = model_class or sized or AutoModelForCausalLM.from_config
        model = new_model(make, config)
    model.tie_weights()
    return model


def expandable_mixers(model: Any) -> dict[int, tuple[str, Any]]:
    """Name and module of the mixers that can be expanded, by layer; hybrids count recurrent layers only."""
    named = list(model.named_modules())
    if model.config.model_type in SUPPORTED:
        return dict(enumerate((name, module) for name, module in named if kind_of(module) in EXPANSIONS))
    names = {module: name for name, module in named}
    mixers = {layer: getattr(block, "scan_mixer", None) for layer, block in enumerate(model.base_model.layers)}
    return {layer: (names[m], m) for layer, m in mixers.items() if m is not None and m.grows is not None}
