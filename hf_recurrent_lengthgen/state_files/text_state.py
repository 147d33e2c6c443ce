"""A text state: all that a model keeps of a text that it has read up to a position.

A text state is a value: no function here changes its argument, so it can answer any number of questions.

Shapes: B rows, T tokens, H heads of keys, D size of a key or value.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hf_recurrent_lengthgen.evaluation.readers import check_generation, reader_of
from hf_recurrent_lengthgen.evaluation.streaming import Tokens, check_tokens, chunk_borders, reading_plan
from hf_recurrent_lengthgen.models.modeling_protocols import base_of, evaluation_mode
from hf_recurrent_lengthgen.models.state_value import RecurrentState, check_finite_state, state_batch_size, take_rows
from hf_recurrent_lengthgen.state_files.origin import (
    NO_TOKENS,
    Origin,
    check_origin,
    differing_fields,
    origin_of,
    prefix_hash,
)
from hf_recurrent_lengthgen.state_files.transitions import recorded_transitions


class LayerKeys(NamedTuple):
    """Keys and values of an attention layer, (B, H, n, D) each: of all tokens, or of the last in a window."""

    keys: Tensor
    values: Tensor


@dataclass(frozen=True, eq=False)
class TextState:
    """What a model keeps of a text.

    Attributes:
        state: The state after the text.
        position: Number of tokens read.
        prefix: `prefix_hash` of the tokens; empty if unknown.
        origin: The model and tokenizer.
        keys: Keys and values, by attention layer.
        metadata: Further fields of its file, also those that this version does not know.
        transitions: What the text does to an earlier state (transitions.py), by layer; by default none.
    """

    state: RecurrentState
    position: int
    prefix: str
    origin: Origin
    keys: Mapping[int, LayerKeys] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)
    transitions: Mapping[int, Tensor] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        return state_batch_size(self.state)

    @property
    def nbytes(self) -> int:
        layers = [*self.state, *self.keys.values(), self.transitions.values()]
        return sum(part.nbytes for layer in layers for part in layer)

    def take(self, rows: Tensor | slice) -> "TextState":
        """Rows by index tensor or slice, in that order, whose prefixes and transitions are then unknown."""
        keys = {index: LayerKeys(*(part[rows] for part in layer)) for index, layer in self.keys.items()}
        return replace(self, state=take_rows(self.state, rows), prefix="", keys=keys, transitions={})


def start_of(model: Any, text_state: TextState) -> dict[str, Any]:
    """The arguments `initial_state` and, for attention layers, `attention_cache` of a call or `generate` of a model.

    They can be used once by a call, which appends to the cache, and any number of times by `generate`.

    Raises:
        ValueError: for keys of a model with another config, such as another window for attention.
    """
    if not text_state.keys:
        return {"initial_state": text_state.state}
    if fields := differing_fields(text_state.origin.config, base_of(model).config):
        raise ValueError(
            f"The text state was read by a model with another config ({', '.join(fields)}): give the model that read "
            "it, or read the text again."
        )
    cache = base_of(model).new_attention_cache().replaced(text_state.keys, text_state.position)
    cache.window = getattr(base_of(model).config.get_text_config(decoder=True), "attention_window", None)
    return {"initial_state": text_state.state, "attention_cache": cache}


def branch(text_state: TextState, rows: int) -> TextState:
    """The text state of one row, repeated for so many questions or continuations."""
    if text_state.rows != 1 or rows < 1:
        raise ValueError(
            f"branch repeats the one row of a text state at least once, got {text_state.rows} rows, {rows} times."
        )
    return text_state.take(torch.zeros(rows, dtype=torch.int64))


def read_text(
    model: Any,
    tokens: Tokens,
    text_state: TextState | None = None,
    *,
    tokenizer: Any = None,
    chunk_length: int | None = None,
    transitions: bool = False,
) -> TextState:
    """Read a text, or the continuation of one, in chunks, so that memory does not grow with it.

    Keys and values of attention layers do grow.

    Args:
        model: A model of this package or from `stateful`, also in PEFT.
        tokens: Token ids, (T,) or (B, T); a memory map is read chunk by chunk.
        text_state: What the text continues; None for a new text, which starts from the active learned state, or zero.
        tokenizer: The tokenizer that made the tokens, to be known to files; None if unknown.
        chunk_length: Tokens in a forward pass; None to choose by memory.
        transitions: Whether to keep what the text does to an earlier state, to compose it (`mix_text_states`).

    Raises:
        ValueError: for a model without states, token ids outside the vocabulary, a text state of another model or with
            other rows, and states that become NaN; transitions of a model that forgets or starts from a learned state.
    """
    stops = [check_rows(tokens).shape[1]]
    *_, last = text_states(model, tokens, stops, text_state, tokenizer, chunk_length, transitions)
    return last


def check_rows(tokens: Tokens | Sequence[int]) -> np.ndarray:
    """Token ids as an array (B, T) without a copy; one row for (T,)."""
    array = tokens.numpy(force=True) if isinstance(tokens, Tensor) else np.asarray(tokens)
    array = array[None] if array.ndim == 1 else array
    if array.ndim != 2 or array.size == 0:
        raise ValueError(f"tokens must be ids of shape (T,) or (B, T), at least one, got shape {array.shape}.")
    return array


@torch.no_grad()
def text_states(
    model: Any,
    tokens: Tokens,
    stops: Sequence[int],
    text_state: TextState | None,
    tokenizer: Any,
    chunk_length: int | None,
    transitions: bool,
) -> Iterator[TextState]:
    """The text states after each number of `tokens` in `stops`, ascending; arguments as in `read_text`."""
    reader, rows = reader_of(model), check_rows(tokens)
    if not hasattr(reader.model, "state_shapes"):
        reader.refuse("keeping what it has read")
    rows = check_tokens(rows, reader.vocabulary, shortest=0)
    if text_state is None:
        text_state = TextState(reader.model.first_state(len(rows)), 0, NO_TOKENS, origin_of(model, tokenizer))
    else:
        here = check_origin(text_state.origin, model, tokenizer, "The text state")
        text_state = replace(text_state, origin=here if tokenizer is not None else text_state.origin)
    if text_state.rows != len(rows):
        raise ValueError(
            f"The text state has {text_state.rows} rows, the tokens {len(rows)}: use branch, or other tokens."
        )
    start = start_of(model, text_state)
    cache: Any = (start["initial_state"], start.get("attention_cache"))
    if getattr(reader.model, "attends", False) and cache[1] is None:
        cache = (cache[0], reader.model.new_attention_cache())
    _, chunk = reading_plan(reader, len(rows), rows.shape[1], len(rows), chunk_length)
    prefix, begin, recorded = text_state.prefix, 0, dict(text_state.transitions)
    if transitions and text_state.position and not recorded:
        raise ValueError("The text state was read without transitions: read the text from its beginning with them.")
    with evaluation_mode(reader.model):
        for stop in stops:
            for first, last in chunk_borders(stop, chunk, (), begin):
                ids = torch.from_numpy(rows[:, first:last].astype(np.int64)).to(reader.device)
                with recorded_transitions(reader.model, recorded) if transitions else nullcontext():
                    _, cache = reader.read(ids, cache, 1)
                if prefix:
                    prefix = prefix_hash(rows[:, first:last], prefix)
                check_finite_state(cache[0], f"The state after token {text_state.position + last}")
            begin = stop
            position = text_state.position + stop
            layers = [] if cache[1] is None else cache[1].layers  # which replace keys when they grow: no copies
            keys = {i: LayerKeys(layer.keys, layer.values) for i, layer in enumerate(layers) if layer.keys is not None}
            read = replace(text_state, state=cache[0], position=position, prefix=prefix, keys=keys)
            yield replace(read, transitions=dict(recorded) if transitions else {})


@torch.no_grad()
def ask(model: Any, text_state: TextState, prompts: Tensor, **generation: Any) -> Tensor:
    """Continue a prompt after a text that was read.

    Args:
        model: The model of the text state.
        text_state: One row for each prompt; it can be used again.
        prompts: Token ids, (B, T), without padding.
        generation: Arguments of `generate`. Functions such as `logits_processor` get the prompt, not the text.

    Returns:
        Prompt and continuation, as from `generate`.

    Raises:
        ValueError: for settings that need more tokens than those of the prompt, such as penalties for repetition, and
            lengths that count the text, also in the generation config of the model.
    """
    begin = prompts.shape[1] - check_generation(base_of(model), generation, prompts.shape[1])
    if begin:
        text_state = read_text(model, prompts[:, :begin], replace(text_state, prefix=""))
    answers: Tensor = model.generate(prompts[:, begin:].to(model.device), **start_of(model, text_state), **generation)
    first = prompts[:, :begin].repeat_interleave(len(answers) // len(prompts), dim=0)  # num_return_sequences
    return torch.cat([first.to(answers.device), answers], dim=1)
