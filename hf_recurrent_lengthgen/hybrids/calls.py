"""What a call of a wrapped model may have, and what it is given in addition."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache
from transformers.modeling_layers import GradientCheckpointingLayer

from hf_recurrent_lengthgen.hybrids.caches import CallCache, HybridCache
from hf_recurrent_lengthgen.hybrids.registry import REFUSED, SUPPORTED, stock_type_of
from hf_recurrent_lengthgen.hybrids.rows import StockRows, check_positions, reads_tokens, rows_of
from hf_recurrent_lengthgen.models.configuration_stateful import OLD_CACHE_NAMES
from hf_recurrent_lengthgen.models.modeling_generation import NO_KEYS
from hf_recurrent_lengthgen.models.modeling_protocols import HybridModel
from hf_recurrent_lengthgen.models.scan_forgetting import Forgetting
from hf_recurrent_lengthgen.models.state_learned import recorded
from hf_recurrent_lengthgen.models.state_value import RecurrentState

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
    if text_type in REFUSED:
        raise ValueError(f"{name} cannot carry its states: {REFUSED[text_type]}.")
    if text_type not in SUPPORTED:
        raise ValueError(
            f"{name} is of type {text_type!r}, which is no recurrent type that is known: stateful takes "
            f"{', '.join(sorted(SUPPORTED))}."
        )


def check_call(model: HybridModel) -> None:
    """Refuse what makes wrong states: layers that PEFT repeats, `forgetting`."""
    check_remembers(model)
    if any(getattr(config, "layer_replication", None) for config in vars(model).get("peft_config", {}).values()):
        raise ValueError(f"layer_replication of PEFT repeats layers of {type(model).__name__}: leave it out.")


def check_remembers(model: HybridModel) -> None:
    """Refuse a configuration with `forgetting`."""
    if Forgetting.of(model.config) != Forgetting():
        raise ValueError(
            f"{type(model).__name__} cannot be made to forget, as the families of this package can: set forgetting "
            "in its config to None."
        )


def check_rows(model: HybridModel, rows: StockRows, group: Any, fills: bool) -> None:
    """Refuse padding and several sequences in a row where they would not be exact, or one value stands for a row."""
    what = "attention_mask has zeros, or several sequences are in a row"
    if group is not None:
        raise ValueError(
            f"{what}, which a sequence_group does not take with wrapped models: give rows of one sequence without "
            "padding."
        )
    if not reads_tokens(model):
        raise ValueError(f"{what}, but {type(model).__name__} is not a language model: give rows of equal length.")
    if fills:
        check_one_sequence(rows)


def check_classified(model: HybridModel, arguments: dict[str, Any]) -> None:
    """Refuse several sequences in a row of which one output stands for the row."""
    if (
        "SequenceClassification" in type(model).__name__
        and (rows := rows_of(arguments))
        and rows.given.starts is not None
    ):
        raise ValueError(
            "Sequence classification takes one sequence per row, and positions or a mask begin several: unpack rows."
        )


def check_prompt_mask(cache: HybridCache, mask: Any, unread: Any) -> None:
    """Refuse a mask (B, seen + T) that counts other tokens than the cache has read, or none that it has not."""
    if unread is not None and not bool(unread.any(1).all()):
        raise ValueError("A row has no new token, where attention_mask is 0 all over: give each row a token.")
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


def check_one_sequence(rows: StockRows | None) -> None:
    """Refuse several sequences in a row beside a cache, which holds one state and the keys of one text."""
    if rows is not None and rows.given.starts is not None:
        raise ValueError(
            "Several sequences in a row cannot be read with a cache (use_cache, generate): give one sequence per row, "
            "or leave the cache out."
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


def check_attention_cache(model: HybridModel, cache: Any, state: RecurrentState | None) -> None:
    """Refuse an attention cache that cannot belong to the model or the state."""
    attending = model._layout.attending
    fits = model.attends and isinstance(cache, HybridCache) and len(cache) == len(model.state_shapes())
    layers = enumerate(cache.layers if fits else [])
    held = {index: [(x.shape[1], x.shape[3]) for x in layer.parts[0]] for index, layer in layers if layer.parts}
    if not fits or any(attending.get(index) != sizes for index, sizes in held.items()):
        raise ValueError("attention_cache must be made by new_attention_cache() of this model.")
    if cache.position and state is None:
        raise ValueError(
            f"attention_cache holds {cache.position} tokens, but there is no initial_state: give the final "
            "state after them, or a new attention cache for a new text."
        )


def further_arguments(
    model: HybridModel, call: CallCache, position: int, given: Any, rows: StockRows | None, length: int
) -> dict[str, Tensor]:
    """Positions that the stock model would not find, after a check of those given, and the mask that hides columns.

    Args:
        call: What the stock model gets.
        position: Tokens before those of the call, where no row differs.
        given: `position_ids` of the call.
        rows: How rows are moved.
        length: Tokens of each row of the stock model.
    """
    if not model.attends:
        return {}
    before: Any = call.lengths_before
    start = call.shared.start if call.shared is not None else position
    begins = torch.tensor([start], device=model.device)[None] if before is None else before[:, None]
    positions = begins + torch.arange(length, device=model.device)
    check_positions(given, rows, positions)
    further = {}
    if before is not None and call.offset:
        columns = torch.arange(call.offset + length, device=model.device)
        further["attention_mask"] = (columns >= call.offset - begins).long()
    # given, because Bamba does not ask the cache, and windows keep fewer columns than there were tokens
    takes = (start or before is not None) and "position_ids" in inspect.signature(type(model).forward).parameters
    return further | {"position_ids": positions} if takes else further


def with_one_cache(arguments: dict[str, Any], name: str) -> dict[str, Any]:
    """Arguments in which a cache has the name that the stock `forward` takes.

    Raises:
        ValueError: for a cache under two names.
    """
    given = [each for each in CACHE_NAMES if arguments.get(each) is not None]
    if len(given) > 1:
        raise ValueError(f"{' and '.join(given)} are names of one argument: give {given[0]}.")
    others = {each: value for each, value in arguments.items() if each not in CACHE_NAMES}
    return others | ({name: arguments[given[0]]} if given else {})


def check_stock_cache(model: HybridModel, cache: Any, arguments: dict[str, Any]) -> None:
    """Refuse a stock cache from which the stock model would go on wrongly: of keys alone, unread under activation
    checkpointing, with a learned state, or by mixers that drop its state."""
    name, layers = type(model).__name__, getattr(cache, "layers", ())
    flagged = [hasattr(layer, "is_conv_states_initialized") for layer in layers]
    if type(cache) is DynamicCache and flagged and not any(flagged):
        raise ValueError(
            f"The cache given to {name} holds keys and values alone: give one that its own calls or "
            f"cache_from_state returned. If PEFT gave it: {NO_KEYS}."
        )
    if model.training and any(checkpointed(model)):
        raise ValueError(
            "Activation checkpointing leaves a stock cache unread in training: call model.eval(), or give "
            "use_cache=True in place of a cache."
        )
    check_stock_rows(arguments)
    flags = ("is_recurrent_states_initialized", "is_conv_states_initialized")
    has_read = any(any(getattr(layer, flag, {}).values()) for layer in layers for flag in flags)
    if recorded(model.config)["active"] is not None and not has_read:
        raise ValueError(
            "A new cache starts from zero, not from the active learned state: leave the cache out and call generate, "
            "or give cache_from_state(model.first_state(rows))."
        )
    ids = arguments.get("input_ids")
    ids = arguments.get("inputs_embeds") if ids is None else ids
    if has_read and ids is not None and ids.shape[1] > 1 and stock_type_of(model).drops_state:
        raise ValueError(
            f"{name} misreads a {type(cache).__name__} with more than one new token: give one at a time, or the cache "
            "that a call with use_cache=True returned."
        )


def check_stock_rows(arguments: dict[str, Any]) -> None:
    """Refuse rows that the stock model misreads with a stock cache: of several sequences, or with padding that is not
    before their tokens."""
    ids = arguments.get("input_ids")
    ids = arguments.get("inputs_embeds") if ids is None else ids
    mask = arguments.get("attention_mask")
    if ids is None or ids.shape[1] < 2 or not (mask is None or (isinstance(mask, Tensor) and mask.ndim == 2)):
        return  # other masks are those that generate makes from one that was checked
    last = None if mask is None else mask[:, mask.shape[1] - ids.shape[1] :]
    if (rows := rows_of(arguments | {"attention_mask": last})) is None:
        return
    check_one_sequence(rows)
    real: Any = rows.given.real
    if not bool((real[:, 1:] >= real[:, :-1]).all() & real[:, -1].all()):
        raise ValueError(
            "A stock cache takes padding before the tokens only: set padding_side='left' in the tokenizer and give "
            "each row a token, or leave the cache (cache_implementation) to the model."
        )


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


def let_checkpointing_recompute(model: nn.Module) -> None:
    """Let activation checkpointing keep a `CallCache`, from which layers recompute what they computed.

    Raises:
        ValueError: for reentrant checkpointing.
    """
    for layer in model.modules():
        if isinstance(layer, GradientCheckpointingLayer) and layer.gradient_checkpointing and layer.training:
            if getattr(layer._gradient_checkpointing_func, "keywords", {}).get("use_reentrant", True):
                raise ValueError(
                    "Reentrant activation checkpointing loses the gradients through recurrent states: "
                    'use gradient_checkpointing_kwargs={"use_reentrant": False}.'
                )
            layer._can_checkpoint_with_cache = True
