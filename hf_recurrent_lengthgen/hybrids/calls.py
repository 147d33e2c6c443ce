"""Checks of the arguments of a wrapped model, and the context that activation checkpointing needs."""

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache
from transformers.modeling_layers import GradientCheckpointingLayer

from hf_recurrent_lengthgen.hybrids.registry import REFUSED, SUPPORTED, cache_adapter_of, stock_type_of
from hf_recurrent_lengthgen.hybrids.rows import StockRows, check_positions, reads_tokens, rows_of
from hf_recurrent_lengthgen.hybrids.state_cache import NoCache
from hf_recurrent_lengthgen.hybrids.windows import window_of
from hf_recurrent_lengthgen.models.configuration_stateful import OLD_CACHE_NAMES
from hf_recurrent_lengthgen.models.modeling_generation import NO_KEYS
from hf_recurrent_lengthgen.models.modeling_protocols import HybridModel
from hf_recurrent_lengthgen.models.rows import token_shape
from hf_recurrent_lengthgen.models.scan_forgetting import Forgetting
from hf_recurrent_lengthgen.models.state_learned import recorded
from hf_recurrent_lengthgen.models.state_value import RecurrentState


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
    if text_type in REFUSED:
        raise ValueError(f"{name} cannot carry its states: {REFUSED[text_type]}.")
    if text_type not in SUPPORTED:
        raise ValueError(
            f"{name} is of type {text_type!r}, which is no recurrent type that is known: stateful takes "
            f"{', '.join(sorted(SUPPORTED))}."
        )


def check_arguments(cache_argument: str, arguments: dict[str, Any], seen: int) -> tuple[int, int, StockRows | None]:
    """Number of rows and tokens, and how rows must be moved; arguments that cannot be used with states are refused."""
    rows, length = token_shape(arguments.get("input_ids"), arguments.get("inputs_embeds"))
    if arguments.get("use_cache") or arguments.get(cache_argument) is not None:
        raise ValueError(
            f"use_cache and {cache_argument} cannot be used with states: give attention_cache to let attention layers "
            "see what came before, and call generate(initial_state=...) to generate."
        )
    return rows, length, rows_of(arguments, seen)


def check_rows(model: HybridModel, attention_cache: Cache | None, group: Any) -> None:
    """Refuse padding and several sequences in a row where they would not be exact."""
    what = "attention_mask has zeros, or several sequences are in a row"
    if group is not None:
        raise ValueError(
            f"{what}, which a sequence_group does not take with wrapped models: give rows of one sequence without "
            "padding."
        )
    if attention_cache is not None and window_of(model.config) is None:
        raise ValueError(
            f"{what}, but attention_cache keeps equally many keys of every row: read rows of unequal length one at "
            "a time, leave attention_cache out, or give the model an attention_window, which takes both."
        )
    if not reads_tokens(model):
        raise ValueError(f"{what}, but {type(model).__name__} is not a language model: give rows of equal length.")


def check_stops(model: HybridModel) -> None:
    """Refuse rows of unequal length where states cannot stop before the padding at the end of a row."""
    if why := cache_adapter_of(model).why_not_stop:
        raise ValueError(
            "attention_mask has zeros, or sequences of unequal length are in the rows (reset_at_document makes such), "
            f"and {type(model).__name__} cannot stop its states before padding, since {why}: give rows of one length "
            "without padding, or no states."
        )


def check_stopped(model: HybridModel, state_cache: Any) -> None:
    """Raise a `ValueError` if a layer read on over the padding."""
    missed = sorted(getattr(state_cache, "asked", set()) - getattr(state_cache, "stopped", set()))
    if missed:
        raise ValueError(
            f"The states of layers {missed} of {type(model).__name__} would not stop before the padding: give rows of "
            "equal length without padding."
        )


def targets_of_piece(arguments: dict[str, Any], attention_cache: Cache | None) -> dict[str, Any]:
    """The arguments for a piece of rows that processes share; stock models compute a loss where they get labels.

    Raises:
        ValueError: for what is not known for a piece: its labels, which need the next piece, an attention cache, and
            the loss of experts, which is one of all tokens.
    """
    given = [name for name in ("labels", "seq_idx") if arguments.get(name) is not None]
    given += ["output_router_logits"] * bool(arguments.get("output_router_logits"))
    given += ["attention_cache"] * (attention_cache is not None)
    if given:
        raise ValueError(
            f"With a sequence_group, leave {given} out: give shift_labels, rows of one sequence, no loss of "
            "experts and no keys of an earlier text."
        )
    if (targets := arguments.get("shift_labels")) is None:
        return arguments
    targets = targets.contiguous()  # Transformers takes views of it
    return arguments | {"labels": targets, "shift_labels": targets}


def check_attention_cache(model: HybridModel, cache: Cache, state: RecurrentState | None) -> None:
    """Refuse an attention cache that cannot belong to the model or the state."""
    if not (model.attends and isinstance(cache, Cache) and len(cache.layers) == len(model.state_shapes())):
        raise ValueError("attention_cache must be made by new_attention_cache() of this model.")
    layer: Any = cache.layers[min(model._layout.attending)]
    if layer.keys is not None and state is None:
        raise ValueError(
            f"attention_cache holds {layer.get_seq_length()} tokens, but there is no initial_state: give the final "
            "state after them, or a new attention cache for a new text."
        )


def check_call(model: HybridModel, arguments: dict[str, Any]) -> None:
    """Refuse what makes wrong states: layers that PEFT repeats, a cache of keys alone, `forgetting`."""
    check_remembers(model)
    if any(getattr(config, "layer_replication", None) for config in vars(model).get("peft_config", {}).values()):
        raise ValueError(f"layer_replication of PEFT repeats layers of {type(model).__name__}: leave it out.")
    for cache in (value for value in arguments.values() if type(value) is DynamicCache):
        flagged = [hasattr(layer, "is_conv_states_initialized") for layer in cache.layers]
        if flagged and not any(flagged):
            raise ValueError(
                f"The cache given to {type(model).__name__} holds keys and values alone: give one that its own calls "
                f"or cache_from_state returned. If PEFT gave it: {NO_KEYS}."
            )


def check_remembers(model: HybridModel) -> None:
    """Refuse a configuration with `forgetting`."""
    if Forgetting.of(model.config) != Forgetting():
        raise ValueError(
            f"{type(model).__name__} cannot be made to forget, as the families of this package can: set forgetting "
            "in its config to None."
        )


def set_positions(
    model: HybridModel, state_cache: Any, arguments: dict[str, Any], rows: StockRows | None, length: int
) -> dict[str, Tensor]:
    """Positions of moved rows that the stock model would not find, after a check of given ones, which are taken out.

    Where an attention cache has read rows of unequal length, also the mask that hides the padding before them.
    """
    given = arguments.pop("position_ids", None)
    if not model.attends:
        return {}
    start, padding = state_cache.get_seq_length(), getattr(state_cache.attention, "padding", None)
    begins = 0 if padding is None else padding[:, None]
    columns = torch.arange(start + length, device=model.device)[None] - begins
    check_positions(given, rows, columns[:, start:])
    if not start:
        return {}
    further = {} if padding is None else {"attention_mask": (columns >= 0).long()}
    # given, because Bamba does not ask the cache
    takes = "position_ids" in inspect.signature(model.forward).parameters
    return further | {"position_ids": columns[:, start:]} if takes else further


def with_one_cache(arguments: dict[str, Any], takes_cache: bool) -> dict[str, Any]:
    """Arguments in which a cache under an older name is named `cache`, if the stock `forward` takes that.

    Raises:
        ValueError: for a cache under two names.
    """
    given = [name for name in ("cache", *OLD_CACHE_NAMES) if arguments.get(name) is not None]
    if len(given) > 1:
        raise ValueError(f"{' and '.join(given)} are names of one argument: give {given[0]}.")
    older = [name for name in OLD_CACHE_NAMES if name in arguments]
    if not takes_cache or not older:
        return arguments
    others = {name: value for name, value in arguments.items() if name not in ("cache", *older)}
    return others | {"cache": arguments[given[0]] if given else None}


def check_stock_cache(model: HybridModel, cache: Any, arguments: dict[str, Any]) -> None:
    """Refuse a call that fills or reads a stock cache, and would read other tokens than it is given.

    Raises:
        ValueError: for what a call with padding returned in place of a cache, for padding that is not on the left, and
            for a cache that activation checkpointing or a mixer would leave unread.
    """
    adapter, name = cache_adapter_of(model), type(model).__name__
    if isinstance(cache, NoCache):
        raise ValueError(
            f"{name} fills no cache where it has read padding or several sequences in a row, so it cannot go on from "
            "one: call generate, or give use_cache=True and padding on the left only."
        )
    if cache is not None and model.training and any(checkpointed(model)):
        raise ValueError(
            f"Activation checkpointing leaves {adapter.argument} unread in training: call model.eval(), or carry "
            "the state with initial_state."
        )
    ids = arguments.get("input_ids")
    ids = arguments.get("inputs_embeds") if ids is None else ids
    if ids is None or ids.shape[1] < 2 or not (cache is not None or arguments.get("use_cache")):
        return
    if has_read(cache):
        # MiniMax counts positions from 0 again, which one token does not see
        recounts = not adapter.reads_padding and cache.get_seq_length(min(model._layout.attending)) > 0
        if recounts or not adapter.reads_prompts:
            raise ValueError(
                f"{name} misreads a cache with more than one new token: give one at a time, or carry "
                "the state with initial_state."
            )
        return
    mask = arguments.get("attention_mask")
    if not isinstance(mask, Tensor) or mask.shape != ids.shape[:2] or bool((mask != 0).all()):
        return
    check_padding(model, mask != 0)
    if not adapter.skips_padding:
        raise ValueError(f"{name} fills no cache exactly where it reads padding: call generate, or carry the state.")


def going_on(model: HybridModel, cache: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call with a stock cache, with what some stock models misread after other tokens.

    Bamba counts positions from 0 again. Models without attention layers apply a mask of the whole text to new tokens.
    """
    if cache is None:
        return arguments
    length = token_shape(arguments.get("input_ids"), arguments.get("inputs_embeds"))[1]
    mask = arguments.get("attention_mask")
    if not model.attends:
        wide = isinstance(mask, Tensor) and mask.ndim == 2 and mask.shape[1] > length and has_read(cache)
        return arguments | {"attention_mask": mask[:, -length:]} if wide else arguments  # type: ignore[index]
    if not has_read(cache):
        return arguments
    if getattr(cache, "padding", None) is not None and mask is None:
        raise ValueError(
            "The cache holds rows of unequal length: give the attention_mask (B, all tokens) of the text."
        )
    takes = "position_ids" in inspect.signature(model.forward).parameters and arguments.get("position_ids") is None
    if stock_type_of(model).counts_tokens or not takes:
        return arguments
    start = cache.get_seq_length(min(model._layout.attending))
    return arguments | {"position_ids": torch.arange(start, start + length, device=model.device)[None]}


def in_place_of_cache(model: HybridModel, arguments: dict[str, Any]) -> dict[str, Any]:
    """The entry of an output that stands for the cache which the stock model would return by default."""
    fills = not model.training and getattr(model.config.get_text_config(decoder=True), "use_cache", False)
    return {cache_adapter_of(model).argument: NoCache()} if fills and arguments.get("use_cache") is None else {}


def check_padding(model: HybridModel, real: Any) -> None:
    """Refuse padding (B, T), false there, after which a stock model cannot go on with its cache."""
    if not cache_adapter_of(model).reads_padding:
        raise ValueError(
            f"Transformers generates wrongly with {type(model).__name__} after padding: give prompts of equal length, "
            "or use_cache=False."
        )
    if not bool((real[:, 1:] >= real[:, :-1]).all() & real[:, -1].all()):
        raise ValueError(
            "generate takes padding before the prompts only: set padding_side='left' in the tokenizer, and give "
            "each row a token."
        )


def has_read(cache: Any) -> bool:
    """Whether a stock cache holds the state of some token."""
    if isinstance(memories := getattr(cache, "rnn_state", None), dict):  # in xLSTM, of zeros if it is new
        return hasattr(cache, "holds_state") or any(bool(part.any()) for layer in memories.values() for part in layer)
    flags = ("is_recurrent_states_initialized", "is_conv_states_initialized")
    layers = getattr(cache, "layers", ())
    return bool(getattr(cache, "linear_cache", None)) or any(
        any(getattr(layer, flag, {}).values()) for layer in layers for flag in flags
    )


def starts_learned(model: HybridModel, cache: Any) -> bool:
    """Whether a call without a state starts from the learned state that is active, given its stock cache or None.

    Raises:
        ValueError: for a stock cache that has read nothing, from which the call would start at zero.
    """
    if recorded(model.config)["active"] is None or has_read(cache):
        return False
    if cache is not None:
        raise ValueError(
            "A new cache starts from zero, not from the active learned state: leave the cache out and call generate, "
            "or give cache_from_state(model.first_state(rows))."
        )
    return True


def checkpointed(model: Any) -> list[Any]:
    """The modules of a model with activation checkpointing."""
    return [module for module in model.modules() if getattr(module, "gradient_checkpointing", False)]


@contextmanager
def without_checkpointing(model: nn.Module) -> Iterator[None]:
    """Switch activation checkpointing off, under which Transformers would leave the cache of `generate` empty."""
    modules = checkpointed(model)
    try:
        for module in modules:
            module.gradient_checkpointing = False
        yield
    finally:
        for module in modules:
            module.gradient_checkpointing = True


@contextmanager
def checkpointing(
    model: nn.Module, mixers: Callable[[], AbstractContextManager[None]], attention: Cache | None
) -> Iterator[None]:
    """Let activation checkpointing recompute with the same state cache, in the context that the mixers need.

    Raises:
        ValueError: for reentrant checkpointing, and with an attention cache.
    """
    layers: list[Any] = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    layers = [layer for layer in layers if layer.gradient_checkpointing and layer.training]
    functions = [layer._gradient_checkpointing_func for layer in layers]
    if any(getattr(function, "keywords", {}).get("use_reentrant", True) for function in functions):
        raise ValueError(
            "Reentrant activation checkpointing loses the gradients through recurrent states: "
            'use gradient_checkpointing_kwargs={"use_reentrant": False}.'
        )
    if layers and attention is not None:
        raise ValueError(
            "attention_cache cannot be used with activation checkpointing, which would append the keys a second time: "
            "leave one of them out."
        )
    try:
        for layer, function in zip(layers, functions, strict=True):
            layer._can_checkpoint_with_cache = True
            layer._gradient_checkpointing_func = functools.partial(
                function, context_fn=lambda: (nullcontext(), mixers())
            )
        yield
    finally:
        for layer, function in zip(layers, functions, strict=True):
            layer._gradient_checkpointing_func = function
            del layer._can_checkpoint_with_cache
