"""State expansion: a trained model whose recurrent states in some layers are larger, to be post-trained.

"StateX: Enhancing RNN Recall via Post-training State Expansion" (arXiv:2509.22630), section 4:

- Mamba-2 gets more rows of B and C, that is keys and queries of more dimensions (Eq. 5); so does Mamba-1.
- GLA gets fewer and larger heads (Eq. 4): H heads of N keys and P values hold H N P numbers, one head of H N keys and
  H P values holds H times as many, with the same weights. So do linear attention, HGRN-2, RWKV-6 and RWKV-5, ours
  beyond the paper.
- One layer in every m is expanded, from the first, so that there are 4 (4.4).
- "reinit" starts the recurrence of these layers anew, "inherit" keeps what was trained (4.3; the paper's choice is the
  first).

The sizes of all layers stand in the config of the new model, so that its checkpoint describes itself.
"""

import copy
import math
import re
from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.initialization import no_init_weights

from hf_recurrent_lengthgen.hybrids import stateful
from hf_recurrent_lengthgen.hybrids.wrapping import StatefulMixin
from hf_recurrent_lengthgen.models import STATEFUL_CLASSES
from hf_recurrent_lengthgen.surgery.expanded_weights import Weights, merged_heads, widened_mamba, widened_mamba2

Initialization = Literal["reinit", "inherit"]
Layers = Iterable[int] | Literal["all"] | None

DEFAULT_LAYERS, DEFAULT_FACTOR = 4, 4


class _Family(NamedTuple):
    """How the states of a family grow.

    Attributes:
        size: "state_size" if N grows, "num_heads" if heads are merged.
        per_layer: Field of the config with a size for each layer; None where one field holds for all layers.
        field: That one field.
    """

    size: str
    per_layer: str | None = None
    field: str | None = None


FAMILIES = {
    "stateful_mamba": _Family("state_size", per_layer="layer_state_sizes"),
    "stateful_mamba2": _Family("state_size", per_layer="layer_state_sizes"),
    **{
        f"stateful_{name}": _Family("num_heads", per_layer="layer_num_heads")
        for name in ("gla", "linear_attention", "hgrn2", "rwkv5", "rwkv6")
    },
    "bamba": _Family("state_size", field="mamba_d_state"),
    "falcon_h1": _Family("state_size", field="mamba_d_state"),
    "falcon_mamba": _Family("state_size", field="state_size"),
    "granitemoehybrid": _Family("state_size", field="mamba_d_state"),
    "mamba": _Family("state_size", field="state_size"),
    "mamba2": _Family("state_size", field="state_size"),
    "nemotron_h": _Family("state_size", field="ssm_state_size"),
    "zamba2": _Family("state_size", field="mamba_d_state"),
}
_DELTA = (
    "its delta rule erases along keys of unit length, which wider keys or merged heads would change for every old "
    "association, and its configuration has one size for all layers"
)
REFUSED = {
    **dict.fromkeys(
        ("bailing_hybrid", "kimi_linear", "olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"), _DELTA
    ),
    "jamba": "learned norms of B and C over N would have to grow, too, in a way no one has studied",
    **dict.fromkeys(("lfm2", "lfm2_moe", "lfm3"), "it has short convolutions only, no state that could grow"),
    "minimax": "its decays are fixed numbers of each head, which merged heads cannot share",
    "rwkv": "the state of RWKV-4 is a vector of the model's width: there are no heads to merge",
    "xlstm": "its normalizer and stabilizer belong to the heads and their gates, which merged heads cannot share",
    "zamba": "its Mamba-1 mixers have heads of their own layout",
    "zaya": "its state is one delayed value, nothing that could grow",
}


class LayerExpansion(NamedTuple):
    """One expanded layer: its index among the recurrent layers, and before and after N or H, state and parameters."""

    layer: int
    size_before: int
    size_after: int
    state_before: int
    state_after: int
    parameters_before: int
    parameters_after: int


class ExpansionReport(NamedTuple):
    """What an expansion changes; states are elements of the recurrent part, without convolution taps.

    Attributes:
        size: "state_size" or "num_heads".
        layers: The expanded layers.
        recurrent_layers: How many layers could be expanded.
        parameters_before, parameters_after: Of the whole model; tied weights count once.
        state_before, state_after: Of all layers.
    """

    size: str
    layers: tuple[LayerExpansion, ...]
    recurrent_layers: int
    parameters_before: int
    parameters_after: int
    state_before: int
    state_after: int

    def __str__(self) -> str:
        rows = [("layer", self.size, "state elements", "parameters")]
        rows += [
            (
                str(layer.layer),
                f"{layer.size_before} -> {layer.size_after}",
                f"{layer.state_before:,} -> {layer.state_after:,}",
                f"{layer.parameters_before:,} -> {layer.parameters_after:,}",
            )
            for layer in self.layers
        ]
        rows.append(
            (
                f"all {self.recurrent_layers}",
                "",
                f"{self.state_before:,} -> {self.state_after:,} ({self.state_after / self.state_before:.2f}x)",
                f"{self.parameters_before:,} -> {self.parameters_after:,} "
                f"({self.parameters_after / self.parameters_before - 1:+.2%})",
            )
        )
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
        return "\n".join(line.rstrip() for line in lines)


def spread_layers(total: int, count: int = DEFAULT_LAYERS) -> list[int]:
    """One layer in every m = total // count, from the first, `count` in all (section 4.4); all of `total` <= count.

    Where `count` does not divide `total`, the layers after the last m are the ones left over.
    """
    if count < 1:
        raise ValueError(f"At least one layer must be expanded, got {count}.")
    return list(range(total)) if total <= count else [index * (total // count) for index in range(count)]


def expand_state(
    model: PreTrainedModel,
    layers: Layers = None,
    count: int | None = None,
    factor: float | None = None,
    state_size: int | None = None,
    num_heads: int | None = None,
    initialization: Initialization = "reinit",
    seed: int = 0,
) -> Any:
    """A new model of the same class with larger states in some layers; the given one and its config do not change.

    Take it as it is for post-training, before adapters, quantization and activation checkpointing, which are not
    carried over. Parameters that are frozen stay frozen; dtype, device and tied weights are those of the given model.

    Args:
        model: A language model of this package, also one whose code came with a checkpoint; or a stock or stateful
            Mamba or hybrid of Transformers with Mamba-2 layers, where all recurrent layers are expanded together.
        layers: Which layers, counted from 0, or "all"; None for `count` of them, see `spread_layers`.
        count: How many layers, if not 4.
        factor: By how much the state of these layers grows. Default 4 in Mamba; with heads, all are merged into one.
        state_size: N of these layers instead, above the one they have (Mamba-1, Mamba-2).
        num_heads: Heads of these layers instead, a divisor of those they have (other families).
        initialization: "reinit" starts anew in these layers: in Mamba-2 A_log, dt_bias and the rows and convolution
            channels of B and C, in Mamba-1 A_log, the bias of dt_proj and the rows of B and C; where heads are merged
            the whole recurrent block (projections, gate, norm of its outputs), but not the norm before it. "inherit"
            keeps what was trained. In Mamba-1 and Mamba-2 logits stay as they are then (to 1e-5), and every new
            weight has a gradient, of B from the second step on. Merged heads read what the others wrote, so there
            logits change with "inherit", too.
        seed: Of the new weights; torch's global random state is left alone.

    Raises:
        ValueError: with the reason, for a family that cannot be expanded, for sizes and layers that do not fit, and
            for adapters, quantized weights and whatever else is no plain model of its class.
    """
    if initialization not in ("reinit", "inherit"):
        raise ValueError(f'initialization must be "reinit" or "inherit", got {initialization!r}.')
    _check_plain(model)
    wrapped = isinstance(model, StatefulMixin)
    model_class: Any = type(model)
    if wrapped:
        model_class = model_class.__mro__[model_class.__mro__.index(StatefulMixin) + 1]
    plan = _plan(model.config, model_class, layers, count, factor, state_size, num_heads)
    with no_init_weights():
        new = model_class(plan.config)
    old_weights, expected = model.state_dict(), new.state_dict()
    if set(old_weights) != set(expected):
        strange = sorted(set(old_weights) ^ set(expected))
        raise ValueError(
            f"The model is no plain {model_class.__name__}: {', '.join(strange[:4])} "
            f"{'and others ' if len(strange) > 4 else ''}should not be there, or should. Remove what was added."
        )
    weights = {name: value.detach().clone() for name, value in old_weights.items()}
    expand = _EXPANSIONS[_layout_of(plan.config)]
    mixers, old_mixers = _mixers(new), _mixers(model)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        for layer in plan.layers:
            name, mixer = mixers[layer]
            mixer.apply(new._init_weights)
            old = {key: value.detach() for key, value in old_mixers[layer][1].state_dict().items()}
            fresh = {key: value.to(old[key]) for key, value in mixer.state_dict().items()}
            expanded = expand(old, fresh, mixer, initialization == "inherit")
            weights |= {f"{name}.{key}": value.clone() for key, value in expanded.items()}
    new.load_state_dict(weights, assign=True)
    new.tie_weights()
    trained = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    for name, parameter in new.named_parameters():
        parameter.requires_grad_(trained[name])
    _copy_buffers(model, new)
    new.generation_config = copy.deepcopy(model.generation_config)
    new.config.interventions = [*(getattr(model.config, "interventions", None) or ()), plan.describe(initialization)]
    new.train(model.training)
    return stateful(new) if wrapped else new


def expansion_report(
    config: Any,
    layers: Layers = None,
    count: int | None = None,
    factor: float | None = None,
    state_size: int | None = None,
    num_heads: int | None = None,
    model_class: type[Any] | None = None,
) -> ExpansionReport:
    """What `expand_state` with these arguments would change, from a config alone: no weight is made.

    Args:
        config: Of the model; it does not change.
        layers, count, factor, state_size, num_heads: See `expand_state`.
        model_class: Class of the model, for code that came with a checkpoint; None for the one of the config.

    Raises:
        ValueError: as `expand_state`.
    """
    plan = _plan(config, model_class, layers, count, factor, state_size, num_heads)
    before, after = _meta(config, model_class), _meta(plan.config, model_class)
    (old, new) = ([mixer for _, mixer in _mixers(model).values()] for model in (before, after))
    states = [{layer: _state_elements(model, layer) for layer in plan.recurrent} for model in (before, after)]
    index = {layer: position for position, layer in enumerate(plan.recurrent)}
    expanded = tuple(
        LayerExpansion(
            layer,
            plan.before[layer],
            plan.after[layer],
            *(state[layer] for state in states),
            *(sum(p.numel() for p in mixers[index[layer]].parameters()) for mixers in (old, new)),
        )
        for layer in plan.layers
    )
    parameters = (sum(p.numel() for p in model.parameters()) for model in (before, after))
    return ExpansionReport(
        plan.size, expanded, len(plan.recurrent), *parameters, *(sum(state.values()) for state in states)
    )


def recorded_expansions(config: Any) -> dict[int, str]:
    """The layers that a config says were expanded, counted as in `expand_state`, and their last initialization."""
    found: dict[int, str] = {}
    for entry in getattr(config, "interventions", None) or ():
        if match := _RECORD.fullmatch(entry):
            found |= {int(layer): match["initialization"] for layer in match["layers"].split(", ")}
    return found


def expanded_parameters(model: Any) -> dict[str, nn.Parameter]:
    """The parameters that hold new values in an expanded model: whole tensors, so also the old rows beside new ones.

    Where heads are merged, these are all of the recurrent block. Adapters on them count, too.

    Args:
        model: Made by `expand_state`, or loaded from its checkpoint.
    """
    if not (layers := recorded_expansions(model.config)):
        return {}
    mixers, size, layout = _mixers(model), _family_of(model.config).size, _layout_of(model.config)
    found = {}
    for layer, initialization in layers.items():
        prefix, mixer = mixers[layer]
        names = _NEW_VALUES[layout] + (_NEW_VALUES_OF_REINIT[layout] if initialization == "reinit" else ())
        for name, parameter in mixer.named_parameters():
            if size == "num_heads" or name.startswith(names):
                found[f"{prefix}.{name}"] = parameter
    return found


_RECORD = re.compile(r"state expansion, .* in layers? (?P<layers>\d+(, \d+)*), (?P<initialization>\w+)")
_NEW_VALUES = {"heads": (), "mamba": ("A_log", "x_proj."), "mamba2": ("in_proj.", "conv1d.")}
_NEW_VALUES_OF_REINIT = {"heads": (), "mamba": ("dt_proj.bias",), "mamba2": ("A_log", "dt_bias")}


class _Plan(NamedTuple):
    """Which layers change, and the config after it; `before` and `after` hold N or H of every recurrent layer."""

    config: Any
    size: str
    recurrent: tuple[int, ...]
    layers: tuple[int, ...]
    before: dict[int, int]
    after: dict[int, int]

    def describe(self, initialization: str) -> str:
        """What was done, in words."""
        changes = sorted({(self.before[layer], self.after[layer]) for layer in self.layers})
        sizes = ", ".join(f"{before} -> {after}" for before, after in changes)
        which = f"layer{'s' * (len(self.layers) > 1)} {_listed(self.layers)}"
        return f"state expansion, {self.size} {sizes} in {which}, {initialization}"


def _plan(
    config: Any,
    model_class: type[Any] | None,
    layers: Layers,
    count: int | None,
    factor: float | None,
    state_size: int | None,
    num_heads: int | None,
) -> _Plan:
    family = _family_of(config)
    given: dict[str, Any] = {"factor": factor, "state_size": state_size, "num_heads": num_heads}
    if sum(value is not None for value in given.values()) > 1:
        raise ValueError(f"Give one of factor, state_size and num_heads, got {given}.")
    other = "num_heads" if family.size == "state_size" else "state_size"
    if given[other] is not None:
        raise ValueError(f"{other} does not apply to {config.model_type}: its state grows by {family.size} or factor.")
    if getattr(config, "num_kv_heads", None) not in (None, getattr(config, "num_heads", None)):
        raise ValueError(
            f"Each head of keys and values serves {config.num_heads // config.num_kv_heads} heads of queries "
            "(num_kv_heads): merged, they would need more weights, not the same ones in larger heads. Only models "
            "with as many heads of keys as of queries can be expanded."
        )
    recurrent = tuple(_mixers(_meta(config, model_class)))
    chosen = _chosen(config, family, recurrent, layers, count)
    before = {layer: _size_of(config, family, layer) for layer in recurrent}
    after = dict(before)
    for layer in chosen:
        after[layer] = _new_size(family.size, layer, before[layer], factor, given[family.size])
    new = copy.deepcopy(config)
    if family.per_layer is None:
        assert family.field is not None
        setattr(new, family.field, after[chosen[0]])
    else:
        if family.size == "num_heads" and hasattr(new, "num_kv_heads"):
            new.num_kv_heads = None
        total = range(config.num_hidden_layers)
        setattr(new, family.per_layer, [after.get(layer, _size_of(config, family, layer)) for layer in total])
    return _Plan(new, family.size, recurrent, chosen, before, after)


def _family_of(config: Any) -> _Family:
    model_type = getattr(config, "model_type", None)
    family = FAMILIES.get(str(model_type))
    if family is None:
        reason = REFUSED.get(str(model_type), f"possible are {', '.join(sorted(FAMILIES))}")
        raise ValueError(f"The states of {model_type!r} cannot be expanded: {reason}.")
    if family.per_layer is not None and not hasattr(config, family.per_layer):
        raise ValueError(
            f"The code of this checkpoint has no {family.per_layer}: load it with hf_recurrent_lengthgen.load_model, "
            "whose class has it."
        )
    return family


def _chosen(
    config: Any, family: _Family, recurrent: tuple[int, ...], layers: Layers, count: int | None
) -> tuple[int, ...]:
    if layers is not None and layers != "all":
        given = layers
        layers = list(given) if isinstance(given, Iterable) else None
        if layers is None or any(type(layer) is not int for layer in layers):
            raise ValueError(f'layers must be "all" or integers, the numbers of layers, got {given!r}.')
    if family.per_layer is None:
        if layers != "all" and set(layers or ()) != set(recurrent):
            ours = ", or load it with hf_recurrent_lengthgen.load_model, whose class has a size for each layer"
            raise ValueError(
                f"The configuration of {config.model_type} has one {family.field} for all layers, so some of them "
                f'cannot be expanded alone: give layers="all"{ours if config.model_type in STATEFUL_CLASSES else ""}.'
            )
        layers = "all"
    if layers is not None and count is not None:
        raise ValueError(f"Give layers or count, not both, got {layers} and {count}.")
    if layers == "all":
        return recurrent
    if layers is None:
        return tuple(recurrent[i] for i in spread_layers(len(recurrent), DEFAULT_LAYERS if count is None else count))
    wanted = sorted(set(layers))
    if not wanted or any(layer not in recurrent for layer in wanted):
        raise ValueError(f"layers must be some of the recurrent layers, {_listed(recurrent)}, got {wanted}.")
    return tuple(wanted)


def _size_of(config: Any, family: _Family, layer: int) -> int:
    if family.per_layer is None:
        return int(getattr(config, str(family.field)))
    size: int = config.state_size_of(layer) if family.size == "state_size" else config.heads_of(layer)[0]
    return size


def _new_size(size: str, layer: int, old: int, factor: float | None, given: int | None) -> int:
    if factor is not None and not 0 < factor < math.inf:
        raise ValueError(f"factor must be a finite number above 1, got {factor:g}.")
    if given is not None and not math.isfinite(given):
        raise ValueError(f"{size} must be an integer, got {given:g}.")
    if size == "state_size":
        new = old * (DEFAULT_FACTOR if factor is None else factor) if given is None else given
        if new <= old or new != int(new):
            raise ValueError(
                f"state_size of layer {layer} is {old} and would become {new:g}: give an integer above it, or a "
                "factor above 1 that makes one."
            )
        return int(new)
    new = (1 if factor is None else old / factor) if given is None else given
    if old == 1:
        raise ValueError(f"Layer {layer} has one head already: there is nothing to merge.")
    if new != int(new) or not 1 <= new < old or old % int(new):
        raise ValueError(
            f"num_heads of layer {layer} is {old} and would become {new:g}: give a smaller divisor of it, or a factor "
            "above 1 that makes one."
        )
    return int(new)


def _meta(config: Any, model_class: type[Any] | None) -> Any:
    """The model of a config without weights."""
    config = copy.deepcopy(config)
    with torch.device("meta"), no_init_weights():
        model = AutoModelForCausalLM.from_config(config) if model_class is None else model_class(config)
    model.tie_weights()
    return model


def _mixers(model: Any) -> dict[int, tuple[str, nn.Module]]:
    """Name and module of the mixers that can be expanded, by layer; in hybrids the recurrent layers are counted."""
    if _family_of(model.config).per_layer is None:
        found = [(name, module) for name, module in model.named_modules() if _has_ssm(module)]
        return dict(enumerate(found))
    names = {module: name for name, module in model.named_modules()}
    blocks: Any = model.base_model.layers
    mixers = {}
    for layer, block in enumerate(blocks):
        mixer = next(getattr(block, name) for name in ("mixer", "attn", "attention") if hasattr(block, name))
        if _has_ssm(mixer) or "mamba" not in model.config.model_type:
            mixers[layer] = (names[mixer], mixer)
    return mixers


def _has_ssm(module: Any) -> bool:
    """Whether a module is a Mamba-1 or Mamba-2 mixer, by its parameters."""
    return isinstance(getattr(module, "A_log", None), nn.Parameter) and all(
        hasattr(module, name) for name in ("in_proj", "conv1d", "out_proj")
    )


def _state_elements(model: Any, layer: int) -> int:
    """Elements of a layer's recurrent state."""
    if hasattr(model, "state_shapes"):
        return int(torch.Size(model.state_shapes()[layer].recurrent).numel())
    mixer: Any = _mixers(model)[layer][1]
    family = _family_of(model.config)
    return int(mixer.out_proj.weight.shape[1]) * _size_of(model.config, family, layer)


def _layout_of(config: Any) -> str:
    if _family_of(config).size == "num_heads":
        return "heads"
    return "mamba" if config.model_type.removeprefix("stateful_") in ("mamba", "falcon_mamba") else "mamba2"


def _is_falcon(mixer: Any) -> bool:
    return mixer.config.model_type == "falcon_mamba" or getattr(mixer.config, "mixer_rms_eps", None) is not None


_EXPANSIONS: dict[str, Callable[[Weights, Weights, Any, bool], Weights]] = {
    "mamba2": lambda old, new, mixer, inherit: widened_mamba2(old, new, mixer.n_groups, inherit),
    "mamba": lambda old, new, mixer, inherit: widened_mamba(old, new, inherit, _is_falcon(mixer)),
    "heads": lambda old, new, mixer, inherit: merged_heads(old, new, inherit),
}


def _check_plain(model: Any) -> None:
    """Raise a `ValueError` for a model whose weights are not its own plain ones."""
    if hasattr(model, "get_base_model") or getattr(model, "_hf_peft_config_loaded", False):
        raise ValueError(
            "The model has adapters, which belong to weights that would change: merge them first "
            "(merge_and_unload), or expand first and add adapters then."
        )
    if not isinstance(model, PreTrainedModel):
        raise ValueError(f"expand_state takes a model of Transformers or of this package, got {type(model).__name__}.")
    _family_of(model.config)
    if getattr(model, "is_quantized", False) or any(not p.is_floating_point() for p in model.parameters()):
        raise ValueError("The model is quantized: expand it in full precision, and quantize the result.")
    places = {str(place) for place in getattr(model, "hf_device_map", {}).values()}
    if len(places) > 1 or any(p.is_meta for p in model.parameters()):
        raise ValueError(
            f"The weights are spread over {sorted(places) or 'no device'}: load the model on one device to expand it."
        )


def _copy_buffers(old: nn.Module, new: nn.Module) -> None:
    """Place buffers that no checkpoint holds, such as rotary frequencies, where the model is."""
    kept = dict(old.named_buffers())
    for name, buffer in new.named_buffers():
        parent, _, last = name.rpartition(".")
        value = kept[name].clone() if kept[name].shape == buffer.shape else buffer.to(kept[name])
        setattr(new.get_submodule(parent), last, value)


def _listed(layers: Iterable[int]) -> str:
    return ", ".join(map(str, layers))
