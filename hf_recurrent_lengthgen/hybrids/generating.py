"""`generate` of Transformers from a state: its cache, and prompts that stock models would not read exactly from it.

Those are prompts behind padding, and prompts of several tokens for Mamba-1 mixers, which drop the state. The cache
then carries the state to the first call of the model, which reads the prompt as any call with states, and returns the
stock cache from which the following tokens are generated.
"""

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from hf_recurrent_lengthgen.hybrids.cache_adapters import rows_of_keys
from hf_recurrent_lengthgen.hybrids.calls import check_attention_cache, check_padding, check_rows, starts_learned
from hf_recurrent_lengthgen.hybrids.registry import cache_adapter_of
from hf_recurrent_lengthgen.hybrids.rows import check_cached, real_of, rows_of, text_positions
from hf_recurrent_lengthgen.models.modeling_generation import virtual_tokens
from hf_recurrent_lengthgen.models.rows import LAYOUT, check_prompts, token_shape
from hf_recurrent_lengthgen.models.state_value import RecurrentState, map_state


def generation_arguments(
    model: Any,
    inputs: Tensor | None,
    initial_state: RecurrentState | None,
    attention_cache: Cache | None,
    positional: tuple[Any, ...],
    given: dict[str, Any],
) -> dict[str, Any]:
    """Further arguments for the stock `generate`; arguments as in `StatefulMixin.generate`, with the other ones.

    Positions among them become those of text. Without a state, it starts from the active learned one. Without that,
    too, the stock `generate` is left as it is where it reads what it is given.

    Raises:
        ValueError: as there.
    """
    check_prompts(given)
    prompt = next((x for x in (inputs, given.get("input_ids"), given.get("inputs_embeds")) if x is not None), None)
    if given.get("position_ids") is not None:
        given["position_ids"] = text_positions(given["position_ids"])
        if prompt is not None:
            check_cached({name: given.get(name) for name in LAYOUT} | {"input_ids": prompt})
    if initial_state is None and attention_cache is not None:
        raise ValueError("generate(attention_cache=...) needs the initial_state after the same text, too.")
    others = {name: value for name, value in given.items() if name != "generation_config"}
    config = positional[0] if positional else given.get("generation_config")
    config, _ = model._prepare_generation_config(config, **others)
    if virtual_tokens(model) and config.use_cache is not False:
        raise ValueError(
            f"With {type(model).__name__}, PEFT reads its virtual tokens again before each new token: generate with "
            "use_cache=False, or convert the checkpoint to a family of this package."
        )
    adapter = cache_adapter_of(model)
    cache = given.get(adapter.argument)
    from_nothing = initial_state is None and not starts_learned(model, cache)
    if cache is not None:
        if from_nothing:
            return {}
        raise ValueError(f"Give initial_state or {adapter.argument}, not both: each is a state to start from.")
    if from_nothing and (config.use_cache is False or prompt is None):
        return {}
    if config.use_cache is False:
        raise ValueError("generate keeps the initial state in the cache: leave use_cache on.")
    if prompt is None:
        raise ValueError("generate from an initial state needs a prompt of at least one token.")
    rows, length = prompt.shape[:2]
    seen = attention_cache.get_seq_length() if isinstance(attention_cache, Cache) else 0
    mask = given.get("attention_mask")
    mask = _inferred_mask(prompt, config) if mask is None else mask
    real = real_of(mask, (rows, length), seen)
    if from_nothing and real is None:
        return {}
    if from_nothing and (adapter.skips_padding or not adapter.reads_padding):
        check_padding(model, real)
        return {"attention_mask": mask}
    if (kind := config.cache_implementation) not in (None, "dynamic"):
        raise ValueError(
            f"generate from a state or behind padding makes the cache itself: leave cache_implementation={kind!r} out."
        )
    initial_state = model._check_state(model.first_state(rows) if initial_state is None else initial_state, rows)
    read_here = real is not None or (length > 1 and not adapter.reads_prompts)
    if read_here:
        _check_prompt(model, real, attention_cache, config)
    copies = max(config.num_beams or 1, config.num_return_sequences or 1)
    further: dict[str, Any] = {} if mask is None else {"attention_mask": mask}
    if attention_cache is not None:
        check_attention_cache(model, attention_cache, initial_state)
        # Positions and unread tokens follow from a mask over the whole text.
        whole = attention_cache.get_seq_length() + length
        padding: Any = getattr(attention_cache, "padding", torch.zeros(rows, dtype=torch.long, device=prompt.device))
        further["attention_mask"] = (torch.arange(whole, device=prompt.device) >= padding[:, None]).long()
        attention_cache = rows_of_keys(attention_cache, torch.arange(rows).repeat_interleave(copies))
    initial_state = map_state(lambda part: part.repeat_interleave(copies, dim=0), initial_state)
    cache = model.cache_from_state(initial_state, attention_cache)
    if read_here:
        cache.unread_state = initial_state
    return further | {adapter.argument: cache}


def _inferred_mask(prompt: Tensor, config: Any) -> Tensor | None:
    """The mask (B, T) of a prompt with padding tokens, as Transformers infers it; None if there is none."""
    pad, ends = config.pad_token_id, config.eos_token_id
    ends = ends if isinstance(ends, list) else [ends]
    if pad is None or pad in ends or prompt.is_floating_point():
        return None
    mask = prompt != pad
    return None if bool(mask.all()) else mask.long()


def _check_prompt(model: Any, real: Tensor | None, attention_cache: Cache | None, config: Any) -> None:
    """Refuse a prompt that `read_prompt` cannot read, or that the stock model cannot go on with."""
    name = type(model).__name__
    if attention_cache is not None:
        what = "drops the state when it reads more than one token" if real is None else "takes no padding"
        raise ValueError(
            f"generate of {name} {what} with an attention_cache: call the model with all tokens of the prompt but the "
            "last, one row at a time, then generate from that one, the final state and the cache."
        )
    if real is not None:
        check_padding(model, real)
        check_rows(model, None, None)
    if config.prefill_chunk_size is not None:
        raise ValueError(f"generate of {name} reads this prompt at once: leave prefill_chunk_size out.")


def read_prompt(model: Any, state: RecurrentState, arguments: dict[str, Any]) -> Any:
    """The stock output for a prompt after a state; its cache is that after the prompt, with keys at padding, too."""
    adapter, rows = cache_adapter_of(model), rows_of(arguments)
    size = token_shape(arguments.get("input_ids"), arguments.get("inputs_embeds"))
    kept: dict[int, tuple[Tensor, Tensor]] = {}
    output, after = model._read(state, size, rows, arguments, keys=kept)
    cache = adapter.to_cache(after)
    for layer, keys in kept.items():
        cache.update(*(x if rows is None else rows.back(x.transpose(1, 2)).transpose(1, 2) for x in keys), layer)
    return type(output)(**{**output, adapter.argument: cache})
