"""`generate` for models whose cache is a state.

Shapes: B batch, T tokens, D hidden size.
"""

import copy
from typing import Any

from torch import Tensor
from transformers.generation import GenerationMixin

from .configuration_code import CACHE_NAME
from .recurrent_cache import RecurrentCache
from .recurrent_state import RecurrentState, check_finite_state, check_state, state_dtype
from .rows import check_prompts, read_rows, text_positions
from .token_inputs import check_token_ids, given_cache
from .virtual_tokens import GOES_ON, virtual_tokens

# arguments of `generate` that tell which tokens are unread, which the cache knows
_BOOKKEEPING = ("cache_position", "is_first_iteration", "labels", "next_sequence_length")
_FOR_GENERATE = ("tokenizer", "assistant_tokenizer")
_PER_TOKEN = ("attention_mask", "position_ids", "token_type_ids")


def refuse_continuous_batching(model: Any) -> None:
    """Raise a `ValueError`: the manager of continuous batching keeps pages of keys and no recurrent states."""
    raise ValueError(
        f"{type(model).__name__} cannot be batched continuously (generate_batch, ContinuousBatchingManager, "
        "transformers serve --continuous-batching): Transformers keeps pages of keys and values there, and no "
        "recurrent states. Use generate with padded prompts, or serve without --continuous-batching."
    )


class RecurrentGenerationMixin(GenerationMixin):
    """`GenerationMixin` that can continue from a state."""

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse continuous batching."""
        refuse_continuous_batching(self)

    def _prepare_cache_for_generation(  # type: ignore[override]
        self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        """The cache is a state, of one size for sequences of any length."""
        kind = generation_config.cache_implementation
        if kind not in (None, "dynamic"):
            raise ValueError(
                f"cache_implementation must be left out, got {kind!r}: the cache of a recurrent model is its state, "
                "of one size for all sequences."
            )
        if generation_config.use_cache is not False and model_kwargs.get(CACHE_NAME) is None:
            model_kwargs[CACHE_NAME] = RecurrentCache()
        if (cache := model_kwargs.get(CACHE_NAME)) is not None:
            cache.set_in_generate(True)

    def _prefill(
        self, input_ids: Tensor, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        """As in Transformers; with `prefill_chunk_size`, the cache first reads all chunks but the last."""
        model: Any = self
        prefill: Any = super()._prefill  # type: ignore[misc]
        size, cache = generation_config.prefill_chunk_size, model_kwargs.get(CACHE_NAME)
        if size is None or cache is None:
            return prefill(input_ids, generation_config, model_kwargs, *args, **kwargs)
        if virtual_tokens(self):
            raise ValueError(
                "The virtual tokens of PEFT are read at once with the prompt: leave prefill_chunk_size out."
            )
        if size < 1:
            raise ValueError(f"prefill_chunk_size must be a number of tokens above 0, got {size}.")
        inputs = self.prepare_inputs_for_generation(input_ids, **model_kwargs)
        text = "input_ids" if "input_ids" in inputs else "inputs_embeds"
        shape, mask = inputs[text].shape[:2], inputs.get("attention_mask")
        if mask is not None and not bool(mask[:, -1].all()):
            raise ValueError("prefill_chunk_size needs prompts padded on the left: set padding_side='left'.")
        if read_rows(inputs, cache.tokens_seen).starts is not None:
            raise ValueError("Sequences begin inside the prompt: leave prefill_chunk_size out.")
        last = (shape[1] - 1) // size * size
        for start in range(0, last, size):
            piece = {
                name: value[:, start : start + size] if name in (text, *_PER_TOKEN) and value is not None else value
                for name, value in inputs.items()
            }
            model(**piece | {"logits_to_keep": 1, "output_final_state": False, "output_hidden_states": False})
        rest = copy.copy(generation_config)
        rest.prefill_chunk_size = None
        return prefill(input_ids, rest, model_kwargs, *args, **kwargs)

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        cache: RecurrentCache | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        logits_to_keep: int | Tensor | None = None,
        past_key_values: RecurrentCache | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Feed what the state has not read: the rest of the prompt first, then one token at a time."""
        cache = past_key_values if cache is None else cache
        dropped = (*_BOOKKEEPING, *_FOR_GENERATE)
        inputs: dict[str, Any] = {name: value for name, value in kwargs.items() if name not in dropped}
        inputs |= {
            "past_key_values": cache,  # where PEFT looks for it with every release
            "logits_to_keep": 0 if logits_to_keep is None else logits_to_keep,
            "attention_mask": attention_mask,
        }
        seen = 0 if cache is None else cache.tokens_seen
        virtual = virtual_tokens(self)
        seen = max(seen - virtual, 0)
        if inputs_embeds is not None and seen < inputs_embeds.shape[1]:
            name, unread = "inputs_embeds", inputs_embeds[:, seen:]
        elif inputs_embeds is not None:
            name, unread = "input_ids", input_ids[:, -1:]
        else:
            name, unread = "input_ids", input_ids[:, seen:]
        length = unread.shape[1]
        if length == 0:
            given = "input_ids" if inputs_embeds is None else "inputs_embeds"
            width = (input_ids if inputs_embeds is None else inputs_embeds).shape[1]
            if width == 0:
                raise ValueError(f"The prompt, {given}, has no tokens: give at least one.")
            raise ValueError(
                f"The cache has read {seen} tokens and {given} has {width}: give the whole text so far "
                "with the cache, or only the new tokens with initial_state=cache.state."
            )
        for per_token in _PER_TOKEN:
            if inputs.get(per_token) is not None and not (virtual and per_token == "attention_mask"):
                inputs[per_token] = inputs[per_token][:, -length:]
        return inputs | {name: unread}

    def generate(
        self,
        inputs: Tensor | None = None,
        *args: Any,
        initial_state: RecurrentState | None = None,
        **kwargs: Any,
    ) -> Any:
        """`GenerationMixin.generate` that can continue from a state.

        Args:
            inputs: Prompt, (B, T), or by keyword as in Transformers.
            initial_state: State with B rows that has read what comes before the prompt. It is not changed.

        The state after generation is in the cache of the output with `return_dict_in_generate=True`
        (`output.cache.state`); it has read everything but the last token. With `prefill_chunk_size`, a prompt of any
        length takes the memory of that many tokens.

        Raises:
            ValueError: if the state does not fit the prompt, holds NaN, or comes with a cache or
                `use_cache=False`; for a `cache_implementation`, since the cache is a state; for ids outside the
                vocabulary.
        """
        model: Any = self
        given = given_cache(kwargs.pop("cache", None), kwargs)
        check_prompts(kwargs)
        if kwargs.get("position_ids") is not None:
            kwargs["position_ids"] = text_positions(kwargs["position_ids"])
        if virtual_tokens(self) and given is not None:
            raise ValueError(f"{GOES_ON}.")
        if (ids := kwargs.get("input_ids") if inputs is None else inputs) is not None:
            check_token_ids(ids, model.config.vocab_size)
        if initial_state is None:
            return self._generate(given, inputs, *args, **kwargs)
        if given is not None:
            raise ValueError("Give initial_state or cache, not both: each of them is the state to start from.")
        config = (args[0] if args else kwargs.get("generation_config")) or self.generation_config
        if kwargs.get("use_cache", config.use_cache) is False:
            raise ValueError("generate(initial_state=...) carries the state in the cache: leave use_cache on.")
        prompt = next(
            (x for x in (inputs, kwargs.get("input_ids"), kwargs.get("inputs_embeds")) if x is not None), None
        )
        if prompt is None:
            raise ValueError("generate(initial_state=...) needs a prompt of at least one token.")
        state = check_state(
            initial_state, model.state_shapes(), prompt.shape[0], model.device, state_dtype(model.dtype)
        )
        check_finite_state(state)
        return self._generate(RecurrentCache(state), inputs, *args, **kwargs)

    def _validate_model_kwargs(self, model_kwargs: dict[str, Any]) -> None:
        """As in Transformers; the cache is an argument under PEFT's `prepare_inputs_for_generation`, too."""
        others = {name: value for name, value in model_kwargs.items() if name != CACHE_NAME}
        super()._validate_model_kwargs(others)  # type: ignore[misc]

    def _generate(self, cache: RecurrentCache | None, *args: Any, **kwargs: Any) -> Any:
        """`GenerationMixin.generate`; afterwards, the state in the cache is the caller's."""
        result: Any = None
        if cache is not None:
            kwargs[CACHE_NAME] = cache
        try:
            result = super().generate(*args, **kwargs)
        finally:
            if (used := getattr(result, CACHE_NAME, cache)) is not None:
                used.set_in_generate(False)
        if hasattr(result, CACHE_NAME):
            result.cache = used  # its name in newer releases
        return result
