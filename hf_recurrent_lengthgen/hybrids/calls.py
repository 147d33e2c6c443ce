"""Checks of a call of a wrapped model (`registry.check_uses`), and its further arguments."""

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache
from transformers.modeling_layers import GradientCheckpointingLayer

from hf_recurrent_lengthgen.hybrids.caches import HybridCache
from hf_recurrent_lengthgen.hybrids.call_cache import CallCache, Layout
from hf_recurrent_lengthgen.hybrids.registry import REFUSED, SEVERAL, SUPPORTED, check_uses
from hf_recurrent_lengthgen.hybrids.rows import StockRows, check_positions
from hf_recurrent_lengthgen.models.configuration_stateful import OLD_CACHE_NAMES
from hf_recurrent_lengthgen.models.modeling_protocols import evaluation_mode
from hf_recurrent_lengthgen.models.scan_forgetting import Forgetting
from hf_recurrent_lengthgen.models.state_value import LayerShape, RecurrentState, state_dtype

CACHE_NAMES = ("cache", *OLD_CACHE_NAMES)


def cache_argument(model: Any) -> str:
    """The name of the cache in the arguments and the output of a model's `forward`."""
    parameters = inspect.signature(type(model).forward).parameters
    return next((name for name in CACHE_NAMES if name in parameters), CACHE_NAMES[0])


def check_stock(model: PreTrainedModel) -> None:
    """Refuse models that cannot be wrapped, whatever their states."""
    name = type(model).__name__
    if not isinstance(model, PreTrainedModel):
        raise ValueError(
            f"stateful takes a model of Transformers, got {name}. For a PEFT model, call stateful(model) before "
            "get_peft_model(model, ...)."
        )
    if any("forward" in vars(module) for module in (model, model.base_model)):
        raise ValueError(
            f"{name} has a replaced forward, as hooks of accelerate make it (device_map over several devices, "
            "offloading); it would drop the states. Load it without device_map, call stateful(model), then offload it."
        )
    text_type = model.config.get_text_config(decoder=True).model_type
    if text_type not in SUPPORTED:
        unknown = f"{text_type!r} is no supported recurrent type; those are {', '.join(sorted(SUPPORTED))}"
        raise ValueError(f"{name} cannot carry its states: {REFUSED.get(text_type, unknown)}.")


def check_call(model: Any, cache: Any) -> None:
    """Refuse what makes wrong states: layers that PEFT repeats, `forgetting`, a cache of Transformers."""
    adapters = vars(model).get("peft_config", {}).values()
    uses = {"layer_replication of PEFT": any(getattr(config, "layer_replication", None) for config in adapters)}
    uses |= {"forgetting": Forgetting.of(model.config) != Forgetting()}
    check_uses(model, uses | {"a stock cache": cache is not None and not isinstance(cache, HybridCache)})


def uses_of_rows(rows: StockRows | None) -> dict[str, bool]:
    """Whether rows have padding, or several sequences."""
    if rows is None:
        return {}
    return {"padding": rows.layout.real is not None, SEVERAL: rows.layout.starts is not None}


def check_prompt_mask(model: Any, cache: HybridCache, mask: Any, unread: Any) -> None:
    """Refuse a mask (B, seen + T) that counts other tokens than the cache has read, or none that it has not."""
    check_uses(model, {"a row without a new token": unread is not None and not bool(unread.any(1).all())})
    seen = cache.tokens_seen
    if mask is None or not seen or mask.shape[1] != seen + unread.shape[1]:
        return
    counted, read = mask[:, :seen].sum(1), cache.row_lengths() - cache.before
    if cache.rows == len(mask) and len(read) == len(mask) and bool((counted != read.to(counted)).any()):
        raise ValueError(
            f"attention_mask counts {counted.tolist()} tokens before the new ones, but the cache has read "
            f"{read.tolist()}: append to what generate returned (sequences), with 0 at padding in it, and do not pad "
            "a conversation again; or leave the cache out."
        )


def check_attention_cache(model: Any, cache: Any, state: RecurrentState | None) -> None:
    """Refuse an attention cache that cannot belong to the model or the state."""
    attending = model._layout.attending
    fits = model.attends and isinstance(cache, HybridCache) and len(cache) == len(model.state_shapes())
    layers = enumerate(cache.layers if fits else [])
    held = {index: [(x.shape[1], x.shape[3]) for x in layer.parts[0]] for index, layer in layers if layer.parts}
    if not fits or any(attending.get(index) != sizes for index, sizes in held.items()):
        raise ValueError("attention_cache must be made by new_attention_cache() of this model.")
    check_uses(model, {"attention_cache with tokens": bool(cache.position), "no initial_state": state is None})


def further_arguments(
    model: Any, call: CallCache, position: int, position_ids: Any, rows: StockRows | None, length: int
) -> dict[str, Tensor]:
    """Positions that the stock model would not find, after a check of those of the call, and a mask over columns.

    `position` counts the tokens before those of the call, where no row differs, `length` those of its moved rows.
    """
    if not model.attends:
        return {}
    before: Any = call.lengths_before
    begins = torch.tensor([position], device=model.device)[None] if before is None else before[:, None]
    positions = begins + torch.arange(length, device=model.device)
    check_positions(position_ids, rows, positions)
    further = {}
    if before is not None and call.offset:
        columns = torch.arange(call.offset + length, device=model.device)
        further["attention_mask"] = (columns >= call.offset - begins).long()
    # needed, because Bamba does not ask the cache, and windows keep fewer columns than there were tokens
    takes = (position or before is not None) and "position_ids" in inspect.signature(type(model).forward).parameters
    return further | {"position_ids": positions} if takes else further


def with_one_cache(model: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """Arguments in which a cache has the name that the stock `forward` takes."""
    names = [each for each in CACHE_NAMES if arguments.get(each) is not None]
    check_uses(model, {"two names of a cache": len(names) > 1})
    others = {each: value for each, value in arguments.items() if each not in CACHE_NAMES}
    return others | ({cache_argument(model): arguments[names[0]]} if names else {})


def let_checkpointing_recompute(model: nn.Module) -> None:
    """Let activation checkpointing keep a `CallCache`, from which layers recompute what they computed."""
    for layer in model.modules():
        if isinstance(layer, GradientCheckpointingLayer) and layer.gradient_checkpointing and layer.training:
            reentrant = getattr(layer._gradient_checkpointing_func, "keywords", {}).get("use_reentrant", True)
            reentrant = reentrant and torch.is_grad_enabled()
            check_uses(model, {"states": True, "reentrant activation checkpointing": reentrant})
            layer._can_checkpoint_with_cache = True


def layout_of(model: Any) -> Layout:
    """The layout of a model's states, from a forward pass of one token.

    Raises:
        ValueError: if there are no states.
    """
    token, dtype = torch.zeros(1, 1, dtype=torch.long, device=model.device), state_dtype(model.dtype)
    config = model.config.get_text_config(decoder=True)
    windows: list[Any] = [getattr(layer, "sliding_window", None) for layer in DynamicCache(config=config).layers]
    windows = (windows + [None] * config.num_hidden_layers)[: config.num_hidden_layers]
    layout = Layout((), {}, tuple(windows))
    with torch.no_grad(), evaluation_mode(model):
        call = CallCache(layout, None, dtype=model.dtype)
        model._carry(call, {"input_ids": token})
        state = call.final_state(1, model.device, dtype)
        shapes = tuple(LayerShape(*(tuple(part.shape[1:]) for part in layer)) for layer in state)
        if all(size == (0,) for shape in shapes for size in shape):
            raise ValueError(f"{type(model).__name__} has no recurrent layers: there is no state to carry.")
    attending = {
        index: [(part.shape[1], part.shape[3]) for part in keys] for index, keys in sorted(call.new_keys.items())
    }
    return Layout(shapes, attending, tuple(windows))
