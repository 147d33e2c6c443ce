"""`generate` of Transformers from a `HybridCache`: the arguments that it gets."""

import inspect
from typing import Any

import torch
from torch import Tensor

from hf_recurrent_lengthgen.hybrids.caches import HybridCache
from hf_recurrent_lengthgen.hybrids.calls import (
    CACHE_NAMES,
    cache_argument,
    check_attention_cache,
    check_one_sequence,
    check_stock_rows,
)
from hf_recurrent_lengthgen.hybrids.rows import rows_of, text_positions
from hf_recurrent_lengthgen.models.modeling_generation import virtual_tokens
from hf_recurrent_lengthgen.models.rows import check_prompts
from hf_recurrent_lengthgen.models.state_learned import recorded
from hf_recurrent_lengthgen.models.state_value import RecurrentState

OWN_CACHE = "cache_implementation", "assistant_model", "prompt_lookup_num_tokens"
"""Settings with which Transformers makes a cache of its own."""


def generation_arguments(
    model: Any,
    inputs: Tensor | None,
    initial_state: RecurrentState | None,
    attention_cache: HybridCache | None,
    positional: tuple[Any, ...],
    given: dict[str, Any],
) -> dict[str, Any]:
    """Further arguments for the stock `generate`; arguments as in `StatefulMixin.generate`, with the other ones.

    The stock `generate` is left as it is without a cache, and with one that it makes itself (`OWN_CACHE`).

    Raises:
        ValueError: as there.
    """
    config = positional[0] if positional else given.get("generation_config")

    def setting(name: str, default: Any = None) -> Any:
        if name in given:
            return default if given[name] is None else given[name]
        for source in (vars(config) if config is not None else {}, vars(model.generation_config)):
            if source.get(name) is not None:
                return source[name]
        return default

    check_prompts(given)
    if "position_ids" in given:
        given["position_ids"] = text_positions(given["position_ids"])
    prompt = next((x for x in (inputs, given.get("input_ids"), given.get("inputs_embeds")) if x is not None), None)
    if prompt is not None and given.get("position_ids") is not None:
        check_one_sequence(rows_of(_tokens(prompt) | {"position_ids": given["position_ids"]}))
    starts = initial_state is not None or recorded(model.config)["active"] is not None
    cache, name = given.get(cache_argument(model)), cache_argument(model)
    if attention_cache is not None and initial_state is None:
        raise ValueError("generate(attention_cache=...) needs the initial_state after the same text, too.")
    if virtual_tokens(model) and setting("use_cache", True):
        raise ValueError(
            f"With {type(model).__name__}, PEFT reads its virtual tokens again before each new token: generate with "
            "use_cache=False, or convert the checkpoint to a family of this package."
        )
    if cache is not None and initial_state is not None:
        raise ValueError(f"Give initial_state or {name}, not both: each is a state to start from.")
    own = [each for each in OWN_CACHE if setting(each) not in (None, "dynamic")]
    stock_cache = cache is not None and not isinstance(cache, HybridCache)
    if own and prompt is not None:
        check_stock_rows(_tokens(prompt) | {"attention_mask": given.get("attention_mask")})
    if setting("use_cache", True) is False or own or stock_cache or prompt is None:
        if starts and not stock_cache:
            if prompt is None:
                raise ValueError("generate from an initial state needs a prompt of at least one token.")
            instead = f"leave {own[0]}={setting(own[0])!r} out" if own else "leave use_cache on"
            raise ValueError(f"generate from an initial state makes the cache itself: {instead}.")
        return {}
    cache = _starting_cache(model, cache, initial_state, attention_cache, len(prompt))
    further: dict[str, Any] = {name: cache, "cache_implementation": None}
    cache.set_in_generate(False, setting("eos_token_id"))
    if cache.rows not in (None, len(prompt)):
        raise ValueError(f"The cache has {cache.rows} rows, the prompts {len(prompt)}: give the same rows to both.")
    mask = given.get("attention_mask")
    if mask is None and (mask := _inferred_mask(prompt, setting("pad_token_id"), setting("eos_token_id"))) is not None:
        further["attention_mask"] = mask  # for models without that argument, too
    if (size := setting("prefill_chunk_size")) is not None:
        _read_in_chunks(model, prompt, mask, cache, size)
        further["prefill_chunk_size"] = None
    cache.batch_repeat_interleave(max(setting("num_beams", 1), setting("num_return_sequences", 1)))
    return further


def _tokens(prompt: Tensor) -> dict[str, Tensor]:
    return {"inputs_embeds" if prompt.is_floating_point() else "input_ids": prompt}


def _starting_cache(
    model: Any, cache: Any, state: RecurrentState | None, attention_cache: HybridCache | None, rows: int
) -> HybridCache:
    """The cache that is given, or a new one that starts from a state and the keys of a text."""
    if cache is not None:
        return cache
    if state is not None:
        state = model._check_state(state, rows)
    if attention_cache is not None:
        check_attention_cache(model, attention_cache, state)
    return model.cache_from_state(model.first_state(rows) if state is None else state, attention_cache)


def _inferred_mask(prompt: Tensor, pad: Any, ends: Any) -> Tensor | None:
    """The mask (B, T) of a prompt with padding tokens, as Transformers infers it; None if there is none."""
    if pad is None or (ends is not None and pad in torch.as_tensor(ends)) or prompt.is_floating_point():
        return None
    mask = prompt != pad
    return None if bool(mask.all()) else mask.long()


@torch.no_grad()
def _read_in_chunks(model: Any, prompt: Tensor, mask: Tensor | None, cache: HybridCache, size: int) -> None:
    """Read all chunks of a prompt but the last, from the tokens that the cache has not read."""
    if mask is not None and not bool(mask[:, -1].all()):
        raise ValueError("prefill_chunk_size needs prompts padded on the left: set padding_side='left'.")
    few = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(type(model).forward).parameters else {}
    seen = cache.tokens_seen
    for start in range(seen, seen + (prompt.shape[1] - 1 - seen) // size * size, size):
        piece = _tokens(prompt[:, start : start + size].to(model.device)) | {cache_argument(model): cache}
        if mask is not None:
            piece["attention_mask"] = mask[:, mask.shape[1] - prompt.shape[1] :][:, start : start + size]
        model(**piece, **few, use_cache=True)


def hybrid_cache_of(model_kwargs: dict[str, Any]) -> HybridCache | None:
    """The `HybridCache` among the arguments of a step of generation."""
    return next((model_kwargs[n] for n in CACHE_NAMES if isinstance(model_kwargs.get(n), HybridCache)), None)
