"""`generate` of Transformers from a `HybridCache`."""

import copy
import functools
from typing import Any

from torch import Tensor

from hf_recurrent_lengthgen.hybrids.caches import HybridCache
from hf_recurrent_lengthgen.hybrids.calls import (
    CACHE_NAMES,
    cache_argument,
    check_attention_cache,
    check_prompt_mask,
    uses_of_rows,
    with_one_cache,
)
from hf_recurrent_lengthgen.hybrids.registry import check_uses
from hf_recurrent_lengthgen.hybrids.rows import rows_of, text_positions, uncounted
from hf_recurrent_lengthgen.models.modeling_generation import NOT_OBEYED, RecurrentGenerationMixin, virtual_tokens
from hf_recurrent_lengthgen.models.rows import check_prompts
from hf_recurrent_lengthgen.models.state_learned import recorded
from hf_recurrent_lengthgen.models.state_value import RecurrentState


class HybridGenerationMixin:
    """`generate` that can continue from a state, keys and values."""

    def prepare_inputs_for_generation(
        self: Any,
        input_ids: Tensor,
        inputs_embeds: Tensor | None = None,
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """What a step of generation reads: with a `HybridCache`, all tokens that this has not read."""
        kwargs["attention_mask"] = attention_mask
        if (cache := _hybrid_cache_of(kwargs)) is None:
            return super().prepare_inputs_for_generation(  # type: ignore[misc]
                input_ids, inputs_embeds=inputs_embeds, **kwargs
            )
        kwargs = {name: x for name, x in kwargs.items() if x is not cache and name != "position_ids"}
        prepared = RecurrentGenerationMixin.prepare_inputs_for_generation(
            self, input_ids, cache=cache, inputs_embeds=inputs_embeds, **kwargs
        )
        if cache.prompt == input_ids.shape[1]:
            check_prompt_mask(self, cache, attention_mask, prepared["attention_mask"])
        if not prepared["logits_to_keep"]:
            del prepared["logits_to_keep"]
        return prepared | uncounted(kwargs, self.config)

    def generate(
        self: Any,
        inputs: Tensor | None = None,
        *args: Any,
        initial_state: RecurrentState | None = None,
        attention_cache: HybridCache | None = None,
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
            ValueError: if the state does not fit the prompt or holds NaN, with a cache, and without `use_cache`.
        """
        kwargs = with_one_cache(self, kwargs)
        passed = _hybrid_cache_of(kwargs)
        before: Any = copy.copy(passed)
        try:
            kwargs |= _arguments(self, inputs, initial_state, attention_cache, args, kwargs)
            result = super().generate(inputs, *args, **kwargs)  # type: ignore[misc]
            cache = _hybrid_cache_of(kwargs)
            if cache is not None and (passed is not None or not isinstance(result, Tensor)):
                read = functools.partial(self, **uncounted(kwargs, self.config))
                cache.end_generate(getattr(result, "sequences", result), read, cache_argument(self))
        except BaseException:
            if passed is not None:
                passed.become(before)
            raise
        return result


def _arguments(
    model: Any,
    inputs: Tensor | None,
    state: RecurrentState | None,
    attention_cache: HybridCache | None,
    positional: tuple[Any, ...],
    keyword: dict[str, Any],
) -> dict[str, Any]:
    """Further arguments for the stock `generate`, which gets `positional` and `keyword` ones.

    The stock `generate` is left as it is without a cache.
    """
    config = positional[0] if positional else keyword.get("generation_config")

    def setting(name: str, default: Any = None) -> Any:
        configs: Any = ({} if config is None else vars(config), vars(model.generation_config))
        sources = [keyword] if name in keyword else configs
        return next((source[name] for source in sources if source.get(name) is not None), default)

    check_prompts(keyword)
    if "position_ids" in keyword:
        keyword["position_ids"] = text_positions(keyword["position_ids"])
    prompt = next((x for x in (inputs, keyword.get("input_ids"), keyword.get("inputs_embeds")) if x is not None), None)
    if prompt is not None and keyword.get("position_ids") is not None:
        tokens = "inputs_embeds" if prompt.is_floating_point() else "input_ids"
        rows = rows_of({tokens: prompt, "position_ids": keyword["position_ids"]})
        check_uses(model, uses_of_rows(rows) | {"use_cache": True})
    name, use_cache = cache_argument(model), bool(setting("use_cache", True))
    cache = keyword.get(name)
    starts = state is not None or recorded(model.config)["active"] is not None
    stock = cache is not None and not isinstance(cache, HybridCache)
    uses: dict[str, Any] = {"states": state is not None, "use_cache": cache is not None, "no prompt": prompt is None}
    uses |= {"a state to generate from": starts, "use_cache=False": not use_cache, "a stock cache": stock}
    uses |= {name: setting(name) not in (None, "dynamic") for name in NOT_OBEYED}
    uses |= {"virtual tokens of PEFT": bool(virtual_tokens(model)), "generate with a cache": use_cache}
    assists = any(setting(name) is not None for name in ("assistant_model", "prompt_lookup_num_tokens"))
    check_uses(model, uses | {"assistant_model or prompt_lookup_num_tokens": assists})
    if attention_cache is not None:
        check_attention_cache(model, attention_cache, state)
    if not use_cache or prompt is None:
        return {}
    if cache is None:
        state = model.first_state(len(prompt)) if state is None else model._check_state(state, len(prompt))
        cache = model.cache_from_state(state, attention_cache)
    cache.check_rows(len(prompt))
    cache.set_in_generate(False, setting("eos_token_id"))
    cache.batch_repeat_interleave(max(setting("num_beams", 1), setting("num_return_sequences", 1)))
    return {name: cache, "cache_implementation": None}


def _hybrid_cache_of(model_kwargs: dict[str, Any]) -> HybridCache | None:
    """The `HybridCache` among the arguments of a step of generation."""
    return next((model_kwargs[n] for n in CACHE_NAMES if isinstance(model_kwargs.get(n), HybridCache)), None)
