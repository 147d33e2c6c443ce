"""`generate` of Transformers from a state: its cache, and what its stock cache cannot do."""

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from hf_recurrent_lengthgen.hybrids.cache_adapters import repeated_keys
from hf_recurrent_lengthgen.hybrids.calls import check_attention_cache, refuse_padding
from hf_recurrent_lengthgen.hybrids.registry import cache_adapter_of
from hf_recurrent_lengthgen.models.recurrent_state import RecurrentState, map_state


def generation_arguments(
    model: Any,
    inputs: Tensor | None,
    initial_state: RecurrentState,
    attention_cache: Cache | None,
    given: dict[str, Any],
) -> dict[str, Any]:
    """Further arguments for the stock `generate`; arguments as in `StatefulMixin.generate`, `given` its keywords.

    Raises:
        ValueError: as there.
    """
    adapter = cache_adapter_of(model)
    if given.get(adapter.argument) is not None:
        raise ValueError(f"Give initial_state or {adapter.argument}, not both: each is a state to start from.")
    config, _ = model._prepare_generation_config(given.get("generation_config"), **given)
    if config.use_cache is False:
        raise ValueError("generate(initial_state=...) keeps the state in the cache: leave use_cache on.")
    prompts = (inputs, given.get("input_ids"), given.get("inputs_embeds"))
    prompt = next((x for x in prompts if x is not None), None)
    if prompt is None:
        raise ValueError("generate(initial_state=...) needs a prompt of at least one token.")
    refuse_padding(given.get("attention_mask"))
    rows, length = prompt.shape[:2]
    model._check_state(initial_state, rows)
    if length > 1 and not adapter.reads_prompts:
        raise ValueError(
            f"generate of {type(model).__name__} drops the state when it reads more than one token, got {length}: "
            "call the model with all tokens of the prompt but the last, then generate from that one and the final "
            "state."
        )
    copies = max(config.num_beams or 1, config.num_return_sequences or 1)
    further: dict[str, Any] = {}
    if attention_cache is not None:
        check_attention_cache(model, attention_cache, initial_state, rows)
        # Positions and unread tokens follow from a mask over the whole text.
        whole = attention_cache.get_seq_length() + length
        further["attention_mask"] = torch.ones(rows, whole, dtype=torch.long, device=prompt.device)
        attention_cache = repeated_keys(attention_cache, copies)
    initial_state = map_state(lambda part: part.repeat_interleave(copies, dim=0), initial_state)
    return further | {adapter.argument: model.cache_from_state(initial_state, attention_cache)}
