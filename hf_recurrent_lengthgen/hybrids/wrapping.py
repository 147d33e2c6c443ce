"""`stateful(model)`: the state contract for stock recurrent and hybrid models of Transformers.

    model = stateful(AutoModelForCausalLM.from_pretrained("tiiuae/Falcon-H1-0.5B-Base"))
    first = model(input_ids=one, output_final_state=True)
    second = model(input_ids=two, initial_state=first.final_state)

The model stays the same object; only its class changes, to a subclass with the name and module of the stock class.
Called without states, it behaves as the stock model. docs/hybrids.md explains states, keys and values.
"""

import copy
import dataclasses
import functools
import inspect
from typing import Any, cast

import torch
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss

from hf_recurrent_lengthgen.evaluation.text_configs import rope_of_length
from hf_recurrent_lengthgen.hybrids.caches import HybridCache
from hf_recurrent_lengthgen.hybrids.call_cache import CallCache, HeadInput, Layout
from hf_recurrent_lengthgen.hybrids.calls import (
    cache_argument,
    check_attention_cache,
    check_call,
    check_stock,
    further_arguments,
    layout_of,
    let_checkpointing_recompute,
    uses_of_rows,
    with_one_cache,
)
from hf_recurrent_lengthgen.hybrids.chunked_loss import read_without_logits
from hf_recurrent_lengthgen.hybrids.generating import HybridGenerationMixin
from hf_recurrent_lengthgen.hybrids.mixers import take_mixers_over, under_its_name
from hf_recurrent_lengthgen.hybrids.registry import ROPE, adapter_targets, check_uses, stock_type_of
from hf_recurrent_lengthgen.hybrids.rows import (
    StockRows,
    experts_counted,
    of_whole_rows,
    read_stock,
    reads_tokens,
    refuse_unread,
    rows_of,
    scale_router_loss,
)
from hf_recurrent_lengthgen.hybrids.windows import check_same_window, limits_of, obey_window, set_window
from hf_recurrent_lengthgen.models.rows import token_shape
from hf_recurrent_lengthgen.models.state_learned import recorded
from hf_recurrent_lengthgen.models.state_value import (
    LayerShape,
    LearnedStatesMixin,
    RecurrentState,
    check_initial_state,
    check_state,
    learned_row,
    state_batch_size,
    state_dtype,
)


class StatefulMixin(HybridGenerationMixin, LearnedStatesMixin):
    """The methods that `stateful` adds to a stock class."""

    lora_target_modules = property(adapter_targets)

    @functools.cached_property
    def _layout(self) -> Layout:
        """The layout that `stateful` sets; a model that its class has made or loaded is prepared at the first use."""
        return _prepare(self)

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
    def can_skip_logits(self: Any) -> bool:
        """Whether `skip_logits` is taken: by language models whose loss is a sum over tokens."""
        is_language_model = self.base_model is not self and self.get_output_embeddings() is not None
        of_all_logits = getattr(self.config, "z_loss_coefficient", 0)  # Bamba's
        return bool(is_language_model and self.loss_function is ForCausalLMLoss and not of_all_logits)

    def state_shapes(self: Any) -> tuple[LayerShape, ...]:
        """Shapes of the state of every layer, without the batch dimension."""
        return self._layout.shapes

    def check_reads_chunks(self: Any) -> None:
        """Raise a `ValueError` if a row in chunks, with states, keys and values carried, is not the row at once."""
        scaled = self.attends and bool(rope_of_length(self.config.get_text_config(decoder=True)))
        check_uses(self, {"chunks": True, ROPE: scaled})

    def new_attention_cache(self: Any) -> HybridCache | None:
        """An empty cache for the keys and values of one text; None for a model without attention layers."""
        return HybridCache(len(self._layout.shapes)) if self.attends else None

    def cache_from_state(self: Any, state: RecurrentState, attention_cache: HybridCache | None = None) -> HybridCache:
        """A cache, for the argument `cache` of the model and of `generate`, that starts from the state.

        Args:
            state: The state after a text; not modified.
            attention_cache: The keys and values of that text; not modified either. Without it, new tokens start at
                position 0 and attend to themselves only.
        """
        cache = HybridCache(len(self._layout.shapes), self._check_state(state, state_batch_size(state)))
        if attention_cache is not None:
            check_attention_cache(self, attention_cache, state)
            attention_cache.check_rows(state_batch_size(state))
            cache.__dict__ |= copy.copy(attention_cache).__dict__ | {"state": cache.state, "tokens_seen": 0}
            cache.before = cache.position
            check_same_window(self, cache)
        return cache

    def _check_state(self: Any, state: RecurrentState, batch_size: int) -> RecurrentState:
        state = check_state(state, self.state_shapes(), batch_size, self.device, state_dtype(self.dtype))
        check_initial_state(state)
        return state

    def _forward(
        self: Any,
        initial_state: RecurrentState | None,
        output_final_state: bool | None,
        attention_cache: HybridCache | None,
        arguments: dict[str, Any],
    ) -> Any:
        cache = arguments.get(name := cache_argument(self))
        if isinstance(cache, HeadInput):
            return cache.output
        if isinstance(cache, CallCache):  # the backbone of a model that has read the arguments
            return cache.for_head(super().forward(**arguments))  # type: ignore[misc]
        refuse_unread(arguments)
        check_call(self, cache)
        check_uses(self, {"sequence_group": arguments.get("sequence_group")})
        obey_window(self)
        if initial_state is not None or attention_cache is not None or output_final_state:
            uses_cache = bool(arguments.get("use_cache")) or cache is not None
            check_uses(self, {"states": True, "use_cache": uses_cache})
            if attention_cache is not None:
                check_attention_cache(self, attention_cache, initial_state)
            rows = rows_of(arguments, 0 if attention_cache is None else attention_cache.get_seq_length())
            return self._read(initial_state, attention_cache, rows, arguments, output_final_state is not False)
        learned = recorded(self.config)["active"] is not None
        if not learned and not reads_tokens(self):
            rows = rows_of(arguments) if "SequenceClassification" in type(self).__name__ else None
            check_uses(self, uses_of_rows(rows) | {"classification of rows": True})
            return super().forward(**arguments)  # type: ignore[misc]
        rows = rows_of(arguments, 0 if cache is None else cache.get_seq_length())
        if cache is not None or self._returns_cache(arguments, rows):
            cache = HybridCache(len(self._layout.shapes)) if cache is None else cache
            return self._read(None, cache, rows, arguments, fills=name)
        if learned or rows is not None or arguments.get("skip_logits"):
            return self._read(None, None, rows, arguments, keeps=False)
        return super().forward(**of_whole_rows(arguments, ("attention_mask", "position_ids")))  # type: ignore[misc]

    def _returns_cache(self: Any, arguments: dict[str, Any], rows: StockRows | None) -> bool:
        """Whether a call without a cache returns one, as in Transformers."""
        if (use_cache := arguments.get("use_cache")) is not None:
            return bool(use_cache)
        default = getattr(self.config.get_text_config(decoder=True), "use_cache", False)
        if self.training or torch.compiler.is_compiling() or not default:
            return False
        return rows is None or rows.layout.starts is None

    @torch.compiler.disable(reason="wrapped models run uncompiled from a state")
    def _read(
        self: Any,
        state: RecurrentState | None,
        cache: HybridCache | None,
        rows: StockRows | None,
        arguments: dict[str, Any],
        keeps: bool = True,
        fills: str | None = None,
    ) -> Any:
        """The output of a call.

        Args:
            state: The state before the tokens; None for that in the cache that the call `fills`, or the first one.
            cache: Keys and values before the tokens, to which those of the tokens go; None for no others.
            rows: How the rows are moved; None if they are not.
            arguments: Of the stock model, for the rows of the call.
            keeps: Whether the output has the final state.
            fills: The name under which the output has the cache, which then gets the final state, too.
        """
        batch_size, length = size = token_shape(arguments.get("input_ids"), arguments.get("inputs_embeds"))
        if cache is not None:
            cache.check_rows(batch_size)
            check_same_window(self, cache)
        if fills is not None and cache is not None:
            check_uses(self, {"a cache of keys without a state": cache.state is None and cache.position > 0})
            state = cache.state
        uses = {"use_cache": fills is not None, "another head": not reads_tokens(self)}
        check_uses(self, uses_of_rows(rows) | uses)
        state = self.first_state(batch_size) if state is None else self._check_state(state, batch_size)
        keys, padded = cache, None
        if rows is not None:
            state, keys = rows.starting(state, learned_row(self)), rows.keys(cache)
            size, padded = (rows.rows, rows.length), rows.padded
        call = CallCache(self._layout, state, keys, padded, self.dtype)
        start, positions = 0 if cache is None else cache.position, arguments.get("position_ids")
        further = further_arguments(self, call, start, positions, rows, size[1])
        experts = experts_counted(arguments, self.config)
        unequal = {"a cache of rows of unequal length": "attention_mask" in further}
        check_uses(self, unequal | {"output_router_logits": experts})
        output = self._carry(call, {n: x for n, x in arguments.items() if n != "position_ids"}, rows, further)
        check_uses(self, {"stock mixers that read over padding": call.over_padding})
        after: Any = None
        if keeps or (cache is not None and cache.state is not None):
            after = call.final_state(size[0], self.device, state_dtype(self.dtype))
            after = after if rows is None else rows.final(after)
        if cache is not None:
            cache.advance_keys(call, size[1], limits_of(self), rows)
            cache.tokens_seen += length
            cache.state = after if fills is not None or cache.state is not None else None
        call.close()
        if fills is not None:
            output[fills] = cache
        else:
            entries = {name: x for name, x in output.items() if name != cache_argument(self)}
            output = _output_class(cast(Any, type(output)))(**entries)
            output.final_state = after if keeps else None
        return output if self._wants_dict(arguments) else output.to_tuple()

    def _wants_dict(self: Any, arguments: dict[str, Any]) -> bool:
        return_dict = arguments.get("return_dict")
        return bool(self.config.return_dict if return_dict is None else return_dict)

    def _carry(self: Any, call: CallCache, arguments: Any, rows: StockRows | None = None, further: Any = None) -> Any:
        """The stock forward pass with a `CallCache`; `further` arguments are of moved rows."""
        arguments = {**arguments, cache_argument(self): call, "use_cache": False, "return_dict": True}
        let_checkpointing_recompute(self)
        if arguments.pop("skip_logits", False):
            return read_without_logits(self, super().forward, call, rows, arguments, further or {})  # type: ignore[misc]
        return read_stock(self, super().forward, rows, arguments, further or {})  # type: ignore[misc]


@functools.cache
def _stateful_class(stock: Any) -> Any:
    """The stateful subclass of a stock class, under its name."""
    signature = inspect.signature(stock.forward)
    parameters = list(signature.parameters.values())
    catch_all = [p for p in parameters if p.kind is inspect.Parameter.VAR_KEYWORD]
    own = ["initial_state", "output_final_state", "attention_cache", "attention_mask", "position_ids", "seq_idx"]
    own = [name for name in own if name not in signature.parameters]  # `Trainer` keeps columns that are named here
    added = [inspect.Parameter(k, inspect.Parameter.KEYWORD_ONLY, default=None) for k in own]

    def forward(
        self: Any,
        *args: Any,
        initial_state: RecurrentState | None = None,
        output_final_state: bool | None = None,
        attention_cache: HybridCache | None = None,
        **kwargs: Any,
    ) -> Any:
        bound = signature.bind(self, *args, **kwargs).arguments
        extra = bound.pop(catch_all[0].name, {}) if catch_all else {}
        bound.pop("self")
        arguments = with_one_cache(self, {**bound, **extra})
        call = functools.partial(self._forward, initial_state, output_final_state, attention_cache)
        return scale_router_loss(self, call, arguments)

    forward.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[p for p in parameters if p not in catch_all] + added + catch_all
    )
    forward.__doc__ = stock.forward.__doc__
    return under_its_name(stock, _stateful_class, StatefulMixin, {"forward": forward, "stock_class": stock})


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
            "none" for full attention, and None for the window of the config.

    Returns:
        The same object, with the methods of `StatefulMixin`. Its `forward` takes `initial_state`, `attention_cache`
        and `output_final_state` (by default true with one of the others) and returns `final_state`. Its
        `generate` takes `initial_state` and `attention_cache`.

    Raises:
        ValueError: with the reason, if the model's states cannot be carried, or its attention cannot have the window.
    """
    stock, wrapped = cast(Any, type(model)), cast(Any, model)
    if isinstance(model, PreTrainedModel) and "initial_state" in inspect.signature(model.forward).parameters:
        set_window(model, attention_window)
        return model
    check_stock(model)
    wrapped.__class__ = _stateful_class(stock)
    try:
        _prepare(wrapped)
        set_window(wrapped, attention_window)
    except Exception:
        wrapped.__class__ = stock
        raise
    check_call(wrapped, None)
    learned_row(wrapped)  # the stock class does not load learned states
    return wrapped


def _prepare(model: Any) -> Layout:
    """Let the mixers of a model of a stateful class, and its backbone, take states; their layout."""
    take_mixers_over(model)
    layout: Layout = layout_of(model)
    model._layout = layout
    backbone = model.base_model
    if backbone is not model and isinstance(backbone, PreTrainedModel):
        # Some training scripts call the backbone without the head; a stock backbone would ignore a state silently.
        if not isinstance(backbone, StatefulMixin):
            backbone.__class__ = _stateful_class(cast(Any, type(backbone)))
        model.base_model._layout = layout
    return layout
