"""`generate` from a state: the cache that passes from token to token, which is one recurrent state, and its checks.

Shapes: B batch, T tokens, D hidden size.
"""

import copy
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache
from transformers.generation import GenerationMixin
from transformers.utils import ModelOutput

from .configuration_stateful import CACHE_NAME, OLD_CACHE_NAMES
from .rows import check_prompts
from .state_value import (
    RecurrentState,
    check_finite_state,
    check_state,
    map_state,
    state_batch_size,
    state_dtype,
    take_rows,
)

NO_KEYS = (
    "prefix tuning and cartridges of PEFT train keys and values before the text, which recurrent layers do not have. "
    "Train the state before the text instead (add_learned_state, LearnedStateTrainer), or virtual tokens "
    "(PromptTuningConfig, PromptEncoderConfig)"
)


# arguments of `generate` that tell which tokens are unread, which the cache knows
_BOOKKEEPING = ("cache_position", "is_first_iteration", "labels", "next_sequence_length")
_DROPPED = (*_BOOKKEEPING, "tokenizer", "assistant_tokenizer")
_PER_TOKEN = ("attention_mask", "position_ids", "token_type_ids")
NOT_OBEYED = {
    "cache_implementation": "the cache is the state",
    "prefill_chunk_size": "read the beginning of a prompt in chunks, model(chunk, cache=cache), and give the cache",
}
"""Settings of `generate` that are refused, and why."""


class RecurrentCache(Cache):
    """The state after the tokens seen so far. Every update replaces it; the old value is never changed.

    But inside `generate`, a token overwrites the state that the tokens before it in this `generate` have made.

    Args:
        state: State to start from; None for zero.

    Attributes:
        state: The current state, None before the first forward pass from zero.
        tokens_seen: Tokens read since the cache was made (tokens before the initial state do not count).
        ends: The tokens that end a row in the `generate` that runs; those after them are not read.
        prompt: Tokens of its prompt; None before they were read.
        before_beams: What this cache was before its beams first parted; None without beam search.
    """

    is_compileable = False

    def __init__(self, state: RecurrentState | None = None) -> None:
        super().__init__(layers=[])
        self.state = state
        self.tokens_seen = 0
        self._in_generate = self._is_own = False
        self.ends: Any = None
        self.prompt: int | None = None
        self.before_beams: Any = None

    def state_for(self, batch_size: int) -> RecurrentState | None:
        """The state of so many rows; None before any token."""
        rows = batch_size if self.state is None else state_batch_size(self.state)
        if rows == batch_size:
            return self.state
        raise ValueError(f"The cached state has {rows} rows, the batch has {batch_size}: give the same rows to both.")

    def advance(self, state: RecurrentState, tokens: int) -> None:
        """Replace the state by the one after `tokens` more tokens."""
        self.state, self._is_own = state, self._in_generate
        self.tokens_seen += tokens

    def set_in_generate(self, begins: bool, ends: Any = None) -> None:
        """Whether a `generate` begins or ends: the states before and after it belong to the caller."""
        self._in_generate, self._is_own = begins, False
        self.ends, self.prompt, self.before_beams = ends, None, None

    def still_read(self, input_ids: Tensor, length: int, mask: Tensor | None) -> Tensor | None:
        """The mask (B, length) of the last tokens of a text, without those after the end of its row."""
        self.prompt = input_ids.shape[1] if self.prompt is None else self.prompt
        if self.ends is None or input_ids.shape[1] < self.prompt + 2:
            return mask
        is_end = torch.isin(input_ids, torch.as_tensor(self.ends, device=input_ids.device)).long()
        is_end[:, : self.prompt] = 0
        over = (is_end.cumsum(1) > is_end)[:, -length:]
        if not bool(over.any()):
            return mask
        return (torch.ones_like(over, dtype=torch.long) if mask is None else mask).masked_fill(over, 0)

    @property
    def may_overwrite(self) -> bool:
        """Whether nobody but this cache holds the state."""
        return self._is_own

    def reorder_cache(self, beam_idx: Tensor) -> None:
        if self.prompt is not None and self.before_beams is None:
            self.before_beams = copy.copy(self)
        self.batch_select_indices(beam_idx)

    @torch.no_grad()
    def end_generate(self, sequences: Tensor, model: Any, name: str = "cache") -> None:
        """Belong to the caller again, and after beam search hold what the answers leave, not the beams that ran on.

        `model` reads the answers in `sequences` (B, T) from this cache, its argument `name`.
        """
        before, prompt = self.before_beams, self.prompt
        if before is not None:
            vars(self).update(vars(before))
            N, rows = len(sequences), torch.arange(state_batch_size(before.state), device=sequences.device)
            chosen, order = rows[:N] * len(rows) // N, rows * N // len(rows)
            order[chosen] = rows[:N]  # as many rows as before, since PEFT may have an adapter for each
            text = sequences[order, :-1]
            real = text.ge(0).long()[:, prompt:]  # without an end token, Transformers pads with -1
            mask = self.still_read(text, real.shape[1], real)
            if real.shape[1]:
                model(input_ids=text[:, prompt:].clamp(min=0), attention_mask=mask, use_cache=True, **{name: self})
            self.batch_select_indices(chosen)
        self.set_in_generate(False)

    def reset(self) -> None:
        self.state, self._is_own = None, False
        self.tokens_seen = 0

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.state is not None:
            self.state = map_state(lambda part: part.repeat_interleave(repeats, dim=0), self.state)

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.state is not None:
            self.state = take_rows(self.state, indices)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """The tokens seen, from which PEFT knows that its virtual tokens were read."""
        return self.tokens_seen

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
        """-1: there is no maximum."""
        return -1

    def crop(self, max_length: int) -> None:
        """Refuse to crop: a recurrent state holds no earlier token."""
        raise ValueError(
            "A recurrent state cannot be cropped to an earlier token, as assisted generation needs: "
            "keep the state of that token instead."
        )

    @property
    def is_initialized(self) -> bool:
        return self.state is not None

    def __len__(self) -> int:
        return 0 if self.state is None else len(self.state)

    def __repr__(self) -> str:
        return f"RecurrentCache(layers={len(self)}, tokens_seen={self.tokens_seen})"


class OutputWithCache(ModelOutput):
    """An output whose field `cache` is also found as `past_key_values`, its name before Transformers 5.24."""

    if CACHE_NAME != "cache":  # newer releases do this themselves

        @property
        def past_key_values(self) -> RecurrentCache | None:
            cache: RecurrentCache | None = vars(self)["cache"]
            return cache

        def __contains__(self, key: object) -> bool:
            return super().__contains__("cache" if key == CACHE_NAME else key)

        def __getitem__(self, key: Any) -> Any:
            return super().__getitem__("cache" if key == CACHE_NAME else key)

        def get(self, key: Any, default: Any = None) -> Any:
            return super().get("cache" if key == CACHE_NAME else key, default)


def virtual_tokens(model: Any) -> int:
    """Number of tokens that PEFT puts before each text that the model generates from; 0 without such a method.

    `generate` of PEFT has its own `prepare_inputs_for_generation` on the model.

    Raises:
        ValueError: for a method that trains keys and values.
    """
    wrapper = getattr(vars(model).get("prepare_inputs_for_generation"), "__self__", None)
    config: Any = getattr(wrapper, "active_peft_config", None)
    if not getattr(config, "is_prompt_learning", False):
        return 0
    if config.peft_type in ("PREFIX_TUNING", "CARTRIDGE"):
        raise ValueError(f"{type(model).__name__} does not take {config.peft_type}: {NO_KEYS}.")
    return int(config.num_virtual_tokens)


def checked_cache(initial_state: RecurrentState | None = None, **names: Any) -> RecurrentCache | None:
    """The cache of a call, under any of its names; a `ValueError` for another type, and two states to start from."""
    caches = [cache for cache in names.values() if cache is not None]
    if len(caches) + (initial_state is not None) > 1:
        raise ValueError("Give initial_state or cache, not both, under one name: each is the state to start from.")
    cache = next(iter(caches), None)
    if cache is not None and not isinstance(cache, RecurrentCache):
        raise ValueError(
            f"cache must be a RecurrentCache, got {type(cache).__name__}; give a state as initial_state. If PEFT gave "
            f"it: {NO_KEYS}."
        )
    return cache


class RecurrentGenerationMixin(GenerationMixin):
    """`GenerationMixin` that can continue from a state."""

    def _prepare_cache_for_generation(  # type: ignore[override]
        self, generation_config: Any, model_kwargs: dict[str, Any], generation_mode: Any, batch_size: int, *args: Any
    ) -> None:
        """The cache is a state."""
        for name, why in NOT_OBEYED.items():
            if (value := getattr(generation_config, name)) not in (None, "dynamic"):
                raise ValueError(f"{name} must be left out, got {value!r}: {why}.")
        if generation_config.use_cache is not False and model_kwargs.get(CACHE_NAME) is None:
            model_kwargs[CACHE_NAME] = RecurrentCache()
        if (cache := model_kwargs.get(CACHE_NAME)) is not None:
            cache.set_in_generate(True, generation_config.eos_token_id)
            repeats = max(generation_config.num_beams, generation_config.num_return_sequences)
            if repeats > 1 and cache.state is not None and state_batch_size(cache.state) == batch_size:
                cache.batch_repeat_interleave(repeats)

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
        inputs: dict[str, Any] = {name: value for name, value in kwargs.items() if name not in _DROPPED}
        inputs |= {
            "past_key_values": cache,  # where PEFT looks for it with every release
            "logits_to_keep": 0 if logits_to_keep is None else logits_to_keep,
            "attention_mask": attention_mask,
        }
        virtual = virtual_tokens(self)
        seen = 0 if cache is None else max(cache.tokens_seen - virtual, 0)
        if inputs_embeds is not None and seen < inputs_embeds.shape[1]:
            name, unread = "inputs_embeds", inputs_embeds[:, seen:]
        elif inputs_embeds is not None:
            name, unread = "input_ids", input_ids[:, -1:]
        else:
            name, unread = "input_ids", input_ids[:, seen:]
        length = unread.shape[1]
        if length == 0:
            source = "input_ids" if inputs_embeds is None else "inputs_embeds"
            width = (input_ids if inputs_embeds is None else inputs_embeds).shape[1]
            raise ValueError(
                f"The cache has read {seen} tokens and {source} has {width}: give the whole text so far "
                "with the cache, or only the new tokens with initial_state=cache.state (a hybrid needs "
                "attention_cache=copy.copy(cache), too)."
            )
        for per_token in _PER_TOKEN:
            if inputs.get(per_token) is not None and not (virtual and per_token == "attention_mask"):
                inputs[per_token] = inputs[per_token][:, -length:]
        if cache is not None and not (virtual and inputs_embeds is not None):
            width = input_ids.shape[1] if virtual else length  # PEFT puts the columns of its tokens before all others
            inputs["attention_mask"] = cache.still_read(input_ids, width, inputs["attention_mask"])
        inputs[name] = unread
        return inputs

    def generate(
        self, inputs: Tensor | None = None, *args: Any, initial_state: RecurrentState | None = None, **kwargs: Any
    ) -> Any:
        """`GenerationMixin.generate` that can continue from a state.

        Args:
            inputs: Prompt, (B, T), or by keyword as in Transformers.
            initial_state: State with B rows that has read what comes before the prompt. It is not changed.

        The state after generation is in the cache of the output with `return_dict_in_generate=True`
        (`output.cache.state`); it has read everything but the last token.

        Raises:
            ValueError: if the state does not fit the prompt, holds NaN, or comes with a cache; and for settings that
                cannot be obeyed (`NOT_OBEYED`).
        """
        model: Any = self
        cache = checked_cache(initial_state, **{name: kwargs.pop(name, None) for name in ("cache", *OLD_CACHE_NAMES)})
        check_prompts(kwargs)
        if virtual_tokens(self) and cache is not None:
            raise ValueError("PEFT reads only the last token after a cache: leave it out and give the whole text.")
        if initial_state is not None:
            prompts = (inputs, kwargs.get("input_ids"), kwargs.get("inputs_embeds"))
            rows = next((len(prompt) for prompt in prompts if prompt is not None), 1)
            state = check_state(initial_state, model.state_shapes(), rows, model.device, state_dtype(model.dtype))
            check_finite_state(state)
            cache = RecurrentCache(state)
        return self._generate(cache, inputs, *args, **kwargs)

    def _generate(self, cache: RecurrentCache | None, *args: Any, **kwargs: Any) -> Any:
        """`GenerationMixin.generate`; then the cache is the caller's."""
        before: Any = copy.copy(cache)
        kwargs |= {} if cache is None else {CACHE_NAME: cache}
        try:
            result: Any = super().generate(*args, **kwargs)
            if (used := getattr(result, CACHE_NAME, cache)) is not None:
                used.end_generate(getattr(result, "sequences", result), self)
        except BaseException:
            if cache is not None:
                vars(cache).update(vars(before))
            raise
        if hasattr(result, CACHE_NAME):
            result.cache = used  # its name in newer releases
        return result
