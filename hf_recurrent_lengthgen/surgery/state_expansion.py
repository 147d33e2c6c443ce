"""State expansion: enlarge the recurrent states of some layers of a trained model, which is then post-trained.

"StateX: Enhancing RNN Recall via Post-training State Expansion" (Shen et al., 2025, arXiv:2509.22630), section 4:

- Mamba-2 gets more rows of B and C, that is, keys and queries of more dimensions (Eq. 5). So does Mamba-1.
- GLA gets fewer and larger heads (Eq. 4). H heads of N keys and P values hold H N P numbers. One head of H N keys and
  H P values holds H times as many, with the same weights. Beyond the paper, linear attention, HGRN-2, RWKV-5 to
  RWKV-7, DeltaNet, Gated DeltaNet and KDA do the same.
- 4 layers are expanded, one in every m from the first (4.4).
- "reinit" is the paper's choice, "inherit" ours, and "inherit-zero" what the paper compares with (5.5): all new
  weights are zero. Then no gradient reaches them, because a new row of B writes what no row of C reads, and a new row
  of C reads what no row of B wrote. Training cannot use the larger state. Where states begin as noise there is
  something to read: then the rows of Mamba-1 learn, but of Mamba-2 only the biases of the convolution, since rows and
  taps are both zero.
- "released", and its baseline "merge-copy", are what the authors' code does (thunlp/StateX, commit 76d15ef), for
  Mamba-2 and GLA; `expanded_weights.py` says how. In GLA, the norm before the block is then new, too.

The delta rule (DeltaNet, Gated DeltaNet, KDA, RWKV-7) cannot inherit. A key of norm 1 over g merged heads has a norm
of about 1 / sqrt(g) in each, so that it erases 1 / g of what it erased, and g rates and decays become one. The same
heads with wider keys could: new rows of k that are zero keep the state, and small ones of q change the outputs by
their square only, if the scale of queries stays; zero ones would stop all gradients. That takes key sizes and scales
of each layer, which there are not.

The config of the new model has the sizes of all layers, so its checkpoint describes itself.
"""

import copy
import math
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.initialization import no_init_weights

from hf_recurrent_lengthgen.hybrids import stateful
from hf_recurrent_lengthgen.hybrids.layer_sizes import new_model, stock_class
from hf_recurrent_lengthgen.hybrids.wrapping import StatefulMixin
from hf_recurrent_lengthgen.models.layers_known import kind_of
from hf_recurrent_lengthgen.models.state_learned import recorded
from hf_recurrent_lengthgen.surgery.expanded_weights import (
    EXPANSIONS,
    RELEASED,
    Weights,
    draw_as_mamba_ssm,
    draw_as_released,
    expansion_of,
)
from hf_recurrent_lengthgen.surgery.expansion_plan import (
    Layers,
    Plan,
    blank_model,
    check_type,
    expandable_mixers,
    expansion_plan,
)

Initialization = Literal["reinit", "inherit", "inherit-zero", "released", "merge-copy"]


class ExpansionReport(NamedTuple):
    """What an expansion changes; state sizes are elements of the recurrent part, without convolution states.

    Attributes:
        size: "state_size" or "num_heads".
        layers: N or H of each expanded layer, by its number among the recurrent layers, before and after.
        recurrent_layers: Number of layers that can be expanded.
        parameters_before, parameters_after: Parameters of the whole model; tied weights count once.
        state_before, state_after: State elements of all layers.
    """

    size: str
    layers: dict[int, tuple[int, int]]
    recurrent_layers: int
    parameters_before: int
    parameters_after: int
    state_before: int
    state_after: int

    def __str__(self) -> str:
        times = self.state_after / self.state_before
        more = self.parameters_after / self.parameters_before - 1
        lines = [f"layer {layer}: {self.size} {before} -> {after}" for layer, (before, after) in self.layers.items()]
        lines += [
            f"{len(self.layers)} of {self.recurrent_layers} recurrent layers",
            f"state elements: {self.state_before:,} -> {self.state_after:,} ({times:.2f}x)",
            f"parameters: {self.parameters_before:,} -> {self.parameters_after:,} ({more:+.2%})",
        ]
        return "\n".join(lines)


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
    """A new model of the same class with larger states in some layers; `model` and its config do not change.

    Expand before you add adapters, quantize or turn on activation checkpointing, which are not carried over. Frozen
    parameters stay frozen. Dtype, device and tied weights are those of `model`.

    Args:
        model: A language model of this package, also one whose code came with a checkpoint; or a stock or stateful
            Mamba or hybrid of Transformers with Mamba-2 layers. Stock Mamba and Falcon-H1 are expanded in all
            recurrent layers together; so are the others if plain Transformers is to load them (`layer_sizes.py`).
        layers: Recurrent layers to expand, counted from 0, or "all"; None for `count` layers, see `spread_layers`.
            Stock hybrids need layers or `count`.
        count: Number of layers; default 4.
        factor: Factor by which the state of these layers grows. Default: 4 in Mamba; in families with heads, all heads
            become one.
        state_size: New N of these layers, larger than the old one (Mamba-1, Mamba-2); instead of `factor`.
        num_heads: New number of heads of these layers, a divisor of the old one (other families); instead of `factor`.
        initialization: "reinit" initializes anew: in Mamba-2 A_log, dt_bias and the rows and convolution channels of B
            and C; in Mamba-1 A_log, the bias of dt_proj and the rows of B and C; with merged heads the whole recurrent
            block (projections, gate, norm of its outputs) without the norm before it. New weights of Mamba are drawn
            as in mamba-ssm. "inherit" keeps the trained weights. In Mamba-1 and Mamba-2 the logits are then unchanged
            (to 1e-5), and every new weight has a gradient, those of B from the second step on. Merged heads read what
            the others wrote, so their logits change with "inherit", too; the delta rule refuses it. "inherit-zero",
            for Mamba only, is the paper's baseline (5.5): all new weights are 0, and so is their gradient, unless
            states begin as noise (see above). "released" and "merge-copy", for Mamba-2 and GLA only, are those of the
            authors' code (see above).
        seed: Seed of the new weights; torch's global random state does not change.

    Raises:
        ValueError: with the reason, for a family that cannot be expanded, sizes and layers that do not fit, adapters,
            and quantized weights.
        RuntimeError: for a model with added or removed parameters.
    """
    if initialization not in get_args(Initialization):
        raise ValueError(f"initialization must be one of {get_args(Initialization)}, got {initialization!r}.")
    _check_plain(model)
    wrapped = isinstance(model, StatefulMixin)
    model_class = stock_class(model)
    plan = expansion_plan(model.config, model_class, layers, count, factor, state_size, num_heads)
    with no_init_weights():
        new = new_model(model_class, plan.config)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        new.load_state_dict(_expanded_weights(model, new, plan, initialization), assign=True)
    new.tie_weights()
    trained = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    for name, parameter in new.named_parameters():
        parameter.requires_grad_(trained[name])
    _copy_buffers(model, new)
    new.generation_config = copy.deepcopy(model.generation_config)
    config = new.config
    config.interventions = [*(getattr(config, "interventions", None) or ()), plan.describe(initialization)]
    expansions = recorded_expansions(config) | dict.fromkeys(plan.layers, initialization)
    config.expanded_layers = {str(layer): done for layer, done in sorted(expansions.items())}  # as in JSON
    new.train(model.training)
    return stateful(new) if wrapped else new


def _expanded_weights(model: PreTrainedModel, new: Any, plan: Plan, how: Initialization) -> Weights:
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    mixers, old_mixers = expandable_mixers(new), expandable_mixers(model)
    for layer in plan.layers:
        name, mixer = mixers[layer]
        mixer.apply(new._init_weights)
        mamba = expansion_of(mixer) is not EXPANSIONS["heads"]
        reason = getattr(mixer, "why_not_inherit", "") if how.startswith("inherit") else ""
        if how == "inherit-zero" and not mamba:
            reason = "merged heads have no new weights of their own"
        elif how in RELEASED and kind_of(mixer) not in ("Mamba-2", "GLA"):
            reason = "the code of the paper's authors has Mamba-2 and GLA only"
        elif how == "merge-copy" and mamba and plan.after[layer] % plan.before[layer]:
            reason = f"it copies all rows of B and C, and {plan.after[layer]} is no multiple of {plan.before[layer]}"
        if reason:
            raise ValueError(f'"{how}" does not apply to {type(mixer).__name__}, since {reason}: give "reinit".')
        if how in RELEASED:
            draw_as_released(mixer)
        elif how == "reinit" and mamba:
            draw_as_mamba_ssm(mixer, new.config)
        old = old_mixers[layer][1].state_dict()
        fresh = {key: value.to(old[key]) for key, value in mixer.state_dict().items()}
        if how == "inherit-zero":  # A of a new state must be something
            fresh = {key: value if key == "A_log" else torch.zeros_like(value) for key, value in fresh.items()}
        expanded = expansion_of(mixer).weights(old, fresh, mixer, how)
        weights |= {f"{name}.{key}": value.clone() for key, value in expanded.items()}
        if how in RELEASED and not mamba:
            weights[f"{name}_norm.weight"].fill_(1)  # attn_norm
    return weights


def expansion_report(
    config: Any,
    layers: Layers = None,
    count: int | None = None,
    factor: float | None = None,
    state_size: int | None = None,
    num_heads: int | None = None,
    model_class: type[Any] | None = None,
) -> ExpansionReport:
    """What `expand_state` with these arguments would change, from a config alone, without any weights.

    Args:
        config: Config of the model; it does not change.
        layers, count, factor, state_size, num_heads: See `expand_state`.
        model_class: Class of the model, if its code came with a checkpoint; None for the class of the config.

    Raises:
        ValueError: as `expand_state`.
    """
    plan = expansion_plan(config, model_class, layers, count, factor, state_size, num_heads)
    models = [blank_model(each, model_class) for each in (config, plan.config)]
    parameters = (sum(p.numel() for p in model.parameters()) for model in models)
    states = (sum(_recurrent_elements(mixer) for _, mixer in expandable_mixers(model).values()) for model in models)
    sizes = {layer: (plan.before[layer], plan.after[layer]) for layer in plan.layers}
    return ExpansionReport(plan.size, sizes, len(plan.before), *parameters, *states)


def recorded_expansions(config: Any) -> dict[int, str]:
    """The expanded layers according to a config, counted as in `expand_state`, and their last initialization."""
    return {int(layer): done for layer, done in (getattr(config, "expanded_layers", None) or {}).items()}


def expanded_parameters(model: PreTrainedModel) -> dict[str, nn.Parameter]:
    """The parameters of an expanded model that hold new values, as whole tensors, which may contain old rows, too.

    With merged heads, these are all parameters of the recurrent block, and in `RELEASED` those of the norm before it.
    Adapters on them are included.
    """
    mixers = expandable_mixers(model)
    parameters: dict[str, nn.Parameter] = {}
    for layer, initialization in recorded_expansions(model.config).items():
        prefix, mixer = mixers[layer]
        names = tuple(prefix + name for name in expansion_of(mixer).changed(initialization))
        parameters |= {name: p for name, p in model.named_parameters() if name.startswith(names)}
    return parameters


def _recurrent_elements(mixer: Any) -> int:
    if hasattr(mixer, "state_shape"):
        return math.prod(mixer.state_shape.recurrent)
    return int(mixer.out_proj.weight.shape[1] * mixer.ssm_state_size)  # of Transformers


def _check_plain(model: PreTrainedModel) -> None:
    """Raise a `ValueError` for a model with adapters, quantized weights, or weights on several devices."""
    check_type(model.config)
    learned = recorded(model.config)["names"]
    places = {str(place) for place in getattr(model, "hf_device_map", {}).values()}
    adapted = hasattr(model, "get_base_model") or getattr(model, "_hf_peft_config_loaded", False)
    refused = {
        "has adapters, which belong to weights that would change: merge them first (merge_and_unload)": adapted,
        f"has the learned states {learned}, whose sizes would change: delete them first "
        "(model.learned_states.delete_adapter), and learn new ones afterwards": learned,
        "is quantized: expand it in full precision, and quantize the result": getattr(model, "is_quantized", False)
        or any(not p.is_floating_point() for p in model.parameters()),
        f"has its weights spread over {sorted(places) or 'no device'}: load the model on one device to expand it": (
            len(places) > 1 or any(p.is_meta for p in model.parameters())
        ),
    }
    if why := next((why for why, applies in refused.items() if applies), ""):
        raise ValueError(f"The model {why}.")


def _copy_buffers(old: nn.Module, new: nn.Module) -> None:
    """Put buffers that no checkpoint holds, such as rotary frequencies, on the device of the model."""
    buffers = dict(old.named_buffers())
    for name, buffer in new.named_buffers():
        parent, _, last = name.rpartition(".")
        value = buffers[name].clone() if buffers[name].shape == buffer.shape else buffer.to(buffers[name])
        setattr(new.get_submodule(parent), last, value)
