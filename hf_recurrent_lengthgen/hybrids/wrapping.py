"""`stateful(model)`: the state contract for stock recurrent and hybrid models of Transformers.

    model = stateful(AutoModelForCausalLM.from_pretrained("tiiuae/Falcon-H1-0.5B-Base"))
    first = model(input_ids=one, output_final_state=True)
    second = model(input_ids=two, initial_state=first.final_state)

The model stays the same object; only its class changes, to a subclass with the name and module of the stock class.
Called without states, it behaves as the stock model. docs/hybrids.md explains states, keys and values.
"""

import dataclasses
import functools
import inspect
from typing import Any, cast

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache
from transformers.utils import ModelOutput

from hf_recurrent_lengthgen.hybrids.cache_adapters import copy_keys, keys_of_sequences
from hf_recurrent_lengthgen.hybrids.calls import (
    check_arguments,
    check_attention_cache,
    check_call,
    check_remembers,
    check_rows,
    check_stock,
    check_stock_cache,
    check_stopped,
    check_stops,
    checkpointing,
    going_on,
    in_place_of_cache,
    set_positions,
    starts_learned,
    targets_of_piece,
    with_one_cache,
    without_checkpointing,
)
from hf_recurrent_lengthgen.hybrids.delta_scans import under_its_name, use_our_scan
from hf_recurrent_lengthgen.hybrids.generating import generation_arguments, read_prompt
from hf_recurrent_lengthgen.hybrids.layouts import Layout, layout_of
from hf_recurrent_lengthgen.hybrids.measuring import watched_scans
from hf_recurrent_lengthgen.hybrids.registry import adapter_targets, cache_adapter_of, stock_type_of
from hf_recurrent_lengthgen.hybrids.rows import (
    StockRows,
    loss_of,
    of_whole_rows,
    refuse_unread,
    stock_call,
    with_share_of_experts,
)
from hf_recurrent_lengthgen.hybrids.sharing import Shared
from hf_recurrent_lengthgen.hybrids.windows import obey_window, set_window, shorten_keys, window_of
from hf_recurrent_lengthgen.models.modeling_generation import refuse_continuous_batching
from hf_recurrent_lengthgen.models.state_value import (
    LayerShape,
    LearnedStatesMixin,
    RecurrentState,
    check_given_state,
    check_state,
    learned_row,
    map_state,
    state_batch_size,
    state_dtype,
    zero_state,
)


class StatefulMixin(LearnedStatesMixin):
    """The methods that `stateful` adds to a stock class."""

    _layout: Layout
    watched_scans = watched_scans
    lora_target_modules = property(adapter_targets)

    @property
    def attends(self) -> bool:
        """Whether the model has attention layers, whose keys and values no state carries."""
        return bool(self._layout.attending)

    @property
    def no_noise(self: Any) -> str | None:
        """Why the recurrent states cannot be noise; None if they can."""
        return stock_type_of(self).no_noise

    @property
    def accepts_loss_kwargs(self: Any) -> bool:
        """Whether the loss is divided by `num_items_in_batch`; that of other heads is a mean, as in Transformers."""
        own = getattr(super(), "accepts_loss_kwargs", True)
        return bool(own and self.get_output_embeddings() is not None)

    @property
    def loss_function(self: Any) -> Any:
        """The stock loss function; while rows are moved for the stock model, it gets what moved back."""
        return loss_of(super().loss_function)  # type: ignore[misc]

    @loss_function.setter
    def loss_function(self: Any, value: Any) -> None:
        self._loss_function = value

    def state_shapes(self: Any) -> tuple[LayerShape, ...]:
        """Shapes of the state of every layer, without the batch dimension."""
        return self._layout.shapes

    def check_shares_rows(self: Any) -> None:
        """Raise a `ValueError` if processes cannot share rows (`sequence_group`)."""
        if not cache_adapter_of(self).shares:
            raise ValueError(
                f"Processes cannot share rows of this {type(self).__name__}, because its states do not go through the "
                "cache of Transformers by value: leave sequence_group (context_parallel_size) out."
            )
        if getattr(self.config.get_text_config(decoder=True), "output_router_logits", False):
            raise ValueError(
                "output_router_logits=True in the config adds a loss of the experts that all tokens choose, "
                "which pieces of rows do not add up to: set it to False where processes share rows."
            )

    def zero_state(self: Any, batch_size: int) -> RecurrentState:
        """The state before any token, on the device of the model."""
        return zero_state(self.state_shapes(), batch_size, self.device, state_dtype(self.dtype))

    def new_attention_cache(self: Any) -> Cache | None:
        """An empty cache for the keys and values of one text; None for a model without attention layers."""
        return shorten_keys(DynamicCache(config=self.config), window_of(self.config)) if self.attends else None

    def cache_from_state(self: Any, state: RecurrentState, attention_cache: Cache | None = None) -> Any:
        """A stock cache, for the argument `cache` of the stock model, that starts from the state.

        Without the attention cache of the same text, new tokens start at position 0 and attend to themselves only.
        One of a model without a window is shortened to that of the model; one of another window is a `ValueError`.
        """
        self._check_state(state, state_batch_size(state))
        cache = cache_adapter_of(self).to_cache(map_state(lambda part: part.detach().clone(), state))
        for one in (cache, attention_cache):
            shorten_keys(one, window_of(self.config))
        if attention_cache is not None:
            copy_keys(attention_cache, cache)
            if (padding := getattr(attention_cache, "padding", None)) is not None:
                cache.padding = padding
        return cache

    def _check_state(self: Any, state: RecurrentState, batch_size: int) -> RecurrentState:
        state = check_state(state, self.state_shapes(), batch_size, self.device, state_dtype(self.dtype))
        check_given_state(state)
        return state

    def _forward(
        self: Any,
        initial_state: RecurrentState | None,
        output_final_state: bool | None,
        attention_cache: Cache | None,
        group: Any,
        arguments: dict[str, Any],
    ) -> Any:
        refuse_unread(arguments)
        adapter = cache_adapter_of(self)
        check_call(self, arguments)
        window = obey_window(self.config)
        for cache in (attention_cache, arguments.get(adapter.argument)):
            shorten_keys(cache, window)
        if (unread := getattr(arguments.get(adapter.argument), "unread_state", None)) is not None:
            return read_prompt(self, unread, arguments)
        if group is not None:
            self.check_shares_rows()
            arguments = targets_of_piece(arguments, attention_cache)
            output_final_state = True if output_final_state is None else output_final_state
        elif initial_state is None and not output_final_state and attention_cache is None:
            cache = arguments.get(adapter.argument)
            if hasattr(cache, "final_state"):  # the backbone of a model that carries a state
                return super().forward(**arguments)  # type: ignore[misc]
            check_stock_cache(self, cache, arguments)
            arguments = going_on(self, cache, arguments)
            if not starts_learned(self, cache):
                rows, arguments = stock_call(self, adapter.argument, arguments)
                if rows is None:
                    return super().forward(**arguments)  # type: ignore[misc]
                called = arguments | {"use_cache": False, "return_dict": True}
                output = rows.read(super().forward, called, self.config)  # type: ignore[misc]
                output = type(output)(**rows.output(output) | in_place_of_cache(self, arguments))
                return output if self._wants_dict(arguments) else output.to_tuple()
            output_final_state = False
        return self._from_state(initial_state, output_final_state is not False, attention_cache, group, arguments)

    @torch.compiler.disable(reason="wrapped models run uncompiled from a state")
    def _from_state(
        self: Any, initial_state: Any, output_final_state: bool, attention_cache: Any, group: Any, arguments: Any
    ) -> Any:
        adapter = cache_adapter_of(self)
        seen = attention_cache.get_seq_length() if isinstance(attention_cache, Cache) else 0
        batch_size, length, rows = check_arguments(adapter.argument, arguments, seen)
        if rows is not None:
            check_rows(self, attention_cache, group)
        if attention_cache is not None:
            check_attention_cache(self, attention_cache, initial_state)
        if initial_state is None:
            initial_state = self.first_state(batch_size)
        else:
            initial_state = self._check_state(initial_state, batch_size)
        stock_output, final = self._read(
            initial_state, (batch_size, length), rows, arguments, attention_cache, group, output_final_state
        )
        output = _output_class(cast(Any, type(stock_output)))(**{**stock_output, adapter.argument: None})
        output.final_state = final
        return output if self._wants_dict(arguments) else output.to_tuple()

    def _read(
        self: Any,
        state: RecurrentState,
        size: tuple[int, int],
        rows: StockRows | None,
        arguments: dict[str, Any],
        attention_cache: Cache | None = None,
        group: Any = None,
        final: bool = True,
        keys: dict[int, tuple[Tensor, Tensor]] | None = None,
    ) -> tuple[ModelOutput, RecurrentState | None]:
        """The stock output for (B, T) tokens after a state, and the final state; puts their keys into `keys`."""
        adapter, before, padded = cache_adapter_of(self), state, None
        if rows is not None:
            before, size = rows.starting(state, learned_row(self)), (rows.rows, rows.length)
            padded = rows.padded if rows.length > 1 else None
        if padded is not None:
            check_stops(self)
        shared = None if group is None else Shared(group, size, self.device, window_of(self.config))
        with keys_of_sequences(attention_cache, rows) as attention:
            state_cache: Any = adapter.state_cache(before, size[1] == 1, attention, padded, shared)
            state_cache.keys = keys
            further = set_positions(self, state_cache, arguments, rows, size[1])
            output = self._carry(state_cache, arguments, rows, further)
        if group is not None:
            state_cache.shared.check(len(state_cache.asked), type(self).__name__)
        if padded is not None:
            check_stopped(self, state_cache)
        after: Any = state_cache.final_state(size[0], self.device, state_dtype(self.dtype)) if final else None
        if rows is not None:
            output = type(output)(**rows.output(output))
            after = rows.final(before, after) if final else None
        return output, after

    def _wants_dict(self: Any, arguments: dict[str, Any]) -> bool:
        return_dict = arguments.get("return_dict")
        return bool(self.config.return_dict if return_dict is None else return_dict)

    def _carry(
        self: Any, state_cache: Any, arguments: Any, rows: StockRows | None = None, further: Any = None
    ) -> ModelOutput:
        """The stock forward pass with a state cache in place of the cache; `further` arguments are of moved rows."""
        adapter = cache_adapter_of(self)
        arguments = {**arguments, adapter.argument: state_cache, "use_cache": False, "return_dict": True}
        mixers = functools.partial(adapter.mixers, state_cache)
        with mixers(), checkpointing(self, mixers, getattr(state_cache, "attention", None)):
            if rows is not None:
                return rows.read(super().forward, arguments, self.config, further)  # type: ignore[misc]
            return super().forward(**of_whole_rows(arguments, ()) | (further or {}))  # type: ignore[misc]

    def generate(
        self: Any,
        inputs: Tensor | None = None,
        *args: Any,
        initial_state: RecurrentState | None = None,
        attention_cache: Cache | None = None,
        **kwargs: Any,
    ) -> Any:
        """`generate` of Transformers that can continue from a state.

        Args:
            inputs: Prompt, (B, T), or by keyword as in Transformers.
            initial_state: State of B rows after the text before the prompt; it is not modified. None for the active
                learned state, or zero.
            attention_cache: The keys and values of that text; not modified either. Without it, attention layers see
                only the prompt and the generated tokens, at positions from 0.

        Raises:
            ValueError: if the state does not fit the prompt or holds NaN, with a cache, without `use_cache`, and with
                padding that is not on the left, or beside an attention cache. Without a state, for padding that is not
                on the left, or that the stock `generate` cannot go on from.
        """
        obey_window(self.config)  # with a static cache, masks are made before the first call
        kwargs = with_one_cache(kwargs, cache_adapter_of(self).argument == "cache")
        kwargs |= generation_arguments(self, inputs, initial_state, attention_cache, args, kwargs)
        with without_checkpointing(self):
            return super().generate(inputs, *args, **kwargs)  # type: ignore[misc]

    def _reorder_cache(self: Any, cache: Any, rows: Tensor) -> Any:
        """Give the beams of a search the rows of a cache; Transformers leaves out the recurrent states of MiniMax."""
        if not hasattr(cache, "reorder_cache"):
            raise ValueError(f"{type(self).__name__} cannot search with beams from a cache: set use_cache=False.")
        cache.reorder_cache(rows)
        if (states := getattr(cache, "linear_cache", None)) is not None:
            cache.linear_cache = [state[rows] if isinstance(state, Tensor) else state for state in states]
        return cache

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse continuous batching."""
        refuse_continuous_batching(self)


@functools.cache
def _stateful_class(stock: Any) -> Any:
    """The stateful subclass of a stock class, under its name."""
    signature = inspect.signature(stock.forward)
    parameters = list(signature.parameters.values())
    catch_all = [p for p in parameters if p.kind is inspect.Parameter.VAR_KEYWORD]
    own = ("initial_state", "output_final_state", "attention_cache", "sequence_group")
    added = [inspect.Parameter(k, inspect.Parameter.KEYWORD_ONLY, default=None) for k in own]

    def forward(
        self: Any,
        *args: Any,
        initial_state: RecurrentState | None = None,
        output_final_state: bool | None = None,
        attention_cache: Cache | None = None,
        sequence_group: Any = None,
        **kwargs: Any,
    ) -> Any:
        bound = signature.bind(self, *args, **kwargs).arguments
        extra = bound.pop(catch_all[0].name, {}) if catch_all else {}
        bound.pop("self")
        arguments = with_one_cache({**bound, **extra}, "cache" in signature.parameters)
        call = functools.partial(self._forward, initial_state, output_final_state, attention_cache, sequence_group)
        return with_share_of_experts(self, call, arguments)

    forward.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[p for p in parameters if p not in catch_all] + added + catch_all
    )
    forward.__doc__ = stock.forward.__doc__
    return under_its_name(stock, _stateful_class, (StatefulMixin,), forward)


@functools.cache
def _output_class(stock: Any) -> Any:
    """A stock output class with the field `final_state`."""
    fields = [("final_state", RecurrentState | None, dataclasses.field(default=None))]
    return dataclasses.make_dataclass(f"Stateful{stock.__name__}", fields, bases=(stock,))


def stateful(model: PreTrainedModel, attention_window: int | str | None = None) -> Any:
    """Give a stock recurrent or hybrid model of Transformers the state contract, in place.

    Args:
        model: A model of a type in `registry.SUPPORTED`, with or without language modeling head. Not a PEFT model:
            wrap first, then add adapters.
        attention_window: Number of tokens that a token attends to, itself included, which is put into the config;
            "none" for all, and None for what the config says.

    Returns:
        The same object, with the methods of `StatefulMixin`. Its `forward` takes `initial_state`, `attention_cache`
        and `output_final_state` (by default true if one of the others is given) and returns `final_state`. It also
        takes a `sequence_group` of processes that share rows, as the models of this package do. Its `generate` takes
        `initial_state` and `attention_cache`.

    Raises:
        ValueError: with the reason, if the model's states cannot be carried, or its attention cannot have the window.
        ImportError: for Transformers before 5.21.
    """
    if not hasattr(Cache, "get_recurrent_state"):
        raise ImportError(
            "stateful needs Transformers 5.21 or newer, whose caches hold recurrent states; "
            f"{transformers.__version__} is installed."
        )
    stock, wrapped = cast(Any, type(model)), cast(Any, model)
    if isinstance(model, PreTrainedModel) and "initial_state" in inspect.signature(model.forward).parameters:
        set_window(model, attention_window)
        return model
    check_stock(model)
    wrapped.__class__ = _stateful_class(stock)
    try:
        wrapped._layout = layout_of(wrapped)
        set_window(wrapped, attention_window)
    except Exception:
        wrapped.__class__ = stock
        raise
    backbone = wrapped.base_model
    if backbone is not wrapped and isinstance(backbone, PreTrainedModel):
        # Some training scripts call the backbone without the head; a stock backbone would ignore a state silently.
        backbone.__class__ = _stateful_class(cast(Any, type(backbone)))
        backbone._layout = wrapped._layout
    use_our_scan(wrapped)
    check_remembers(wrapped)
    learned_row(wrapped)  # the stock class does not load learned states
    return wrapped
