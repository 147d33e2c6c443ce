"""Reading texts chunk by chunk with any causal language model.

Models with the state contract (ours, `stateful(model)`, checkpoints with our code) carry a state from one chunk to the
next; the state is a value. Hybrids also carry the keys and values of their attention. Other models of Transformers
carry a cache of keys and values, which the next chunk changes in place. Models without either read a text as a whole.

A short text tests once whether a model uses its cache correctly. Transformers' Mamba-1 and Jamba, for example, take a
cache and drop the recurrent state in it.
"""

import copy
import inspect
import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DynamicCache

from hf_recurrent_lengthgen.evaluation.text_configs import rope_of_length, text_config, vocabulary_size
from hf_recurrent_lengthgen.models.modeling_protocols import evaluation_mode
from hf_recurrent_lengthgen.models.state_value import RecurrentState, concatenate_rows, take_rows

LOGITS_PER_LOSS = 2**18
"""Logits whose log-probabilities are in memory at once: 1 MiB, which fits into the cache of a CPU."""
PROBE_LENGTH = 24
"""Length of the text that tests a cache, in tokens."""


def nll_of(logits: Tensor, targets: Tensor) -> Tensor:
    """NLL (B, C) in float32 of targets (B, C) from logits (B, C, V), `LOGITS_PER_LOSS` at a time."""
    dtype = torch.promote_types(logits.dtype, torch.float32)
    tokens = max(1, LOGITS_PER_LOSS // logits.shape[-1])
    parts = zip(logits.flatten(0, 1).split(tokens), targets.flatten().split(tokens), strict=True)
    nll = torch.cat([F.cross_entropy(part.to(dtype), target, reduction="none").float() for part, target in parts])
    return nll.view(targets.shape)


def chunk_prompts(prompt: Sequence[int], length: int, after: int = 0, before: int = 0) -> list[list[int]]:
    """[P, C_i, S] as in state_files/independent_chunks.py: C_i of `length`, P of `before`, S of `after` tokens."""
    if length < 1 or min(after, before) < 0:
        raise ValueError(f"A chunk has 1 token or more, 0 or more around it; got {length}, {before}, {after}.")
    stop = max(before, len(prompt) - after)
    starts = [*range(before, stop - length, length), max(before, stop - length)]
    return [[*prompt[:before], *prompt[start : min(start + length, stop)], *prompt[stop:]] for start in starts]


def entropy(logits: Tensor) -> Tensor:
    """Entropy in bits (...) float64 of predictions from logits (..., V), of which -inf masks a token."""
    entropies = torch.special.entr(logits.double().softmax(-1)).sum(-1) / math.log(2)
    if not bool(entropies.isfinite().all()):
        raise ValueError("Predictions after a chunk are NaN or infinite: the model overflows. Evaluate in float32.")
    return entropies


class Reader:
    """Reads with a model that carries nothing from chunk to chunk; subclasses are for models that do.

    Attributes:
        model: The model, without a PEFT wrapper.
        vocabulary: Vocabulary size of the model.
        carries: Whether a text can be read in chunks.
        carried_by_row: Whether the cache is a value of constant size, which `take_rows` and `join_rows` work on and
            reading does not change.
        branches: Whether several texts can continue one, with `fork`, `take_rows` and `join_rows`; caches that grow
            can be joined after the same number of tokens only.
        keeps: Whether the model computes only the logits that `logits_to_keep` asks for.
        why: Why the cache is no value of constant size.
    """

    carries = False
    carried_by_row = False
    branches = False

    def __init__(self, model: nn.Module, why: str = "") -> None:
        self.model: Any = model
        self.vocabulary = vocabulary_size(model)
        self.why = why
        self.keeps = "logits_to_keep" in inspect.signature(model.forward).parameters

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def name(self) -> str:
        return type(self.model).__name__

    def begin(self, initial_state: RecurrentState | None = None) -> Any:
        """The cache for the first chunk of a text that starts from a state."""
        return None if initial_state is None else self.refuse("an initial state")

    def read(self, input_ids: Tensor, cache: Any = None, logits_to_keep: int = 0) -> tuple[Tensor, Any]:
        """Read a chunk.

        Args:
            input_ids: (B, C) int64 on the model's device.
            cache: The cache that reading the previous tokens returned; None at the beginning of a text. Unless
                `carried_by_row`, it cannot be used again.
            logits_to_keep: Return only this many last logits; 0 for all.

        Returns:
            Logits (B, C or `logits_to_keep`, V), and the cache for the next chunk.

        Raises:
            ValueError: for a cache if `carries` is False, and for positions beyond those of the model.
        """
        if cache is not None:
            self.refuse("reading a text in chunks")
        without = {"use_cache": False} if "use_cache" in inspect.signature(self.model.forward).parameters else {}
        return self._forward(input_ids, logits_to_keep, **without), None

    def take_rows(self, cache: Any, rows: Tensor | slice) -> Any:
        self.refuse("taking rows of its cache")

    def join_rows(self, caches: Sequence[Any]) -> Any:
        self.refuse("joining rows of its caches")

    def keys_of(self, cache: Any) -> Any:
        """The keys and values in a cache; None if its size is constant."""
        return None

    @cached_property
    def elements_per_token(self) -> int:
        """Elements of keys and values by which the cache of a row grows with each token, outside windows."""
        if self.carried_by_row:
            return 0
        with torch.inference_mode(), evaluation_mode(self.model):
            _, cache = self.read(torch.zeros(1, 1, dtype=torch.long, device=self.device))
        layers = getattr(self.keys_of(cache), "layers", ())
        return sum(x.keys.numel() + x.values.numel() for x in layers if getattr(x, "keys", None) is not None)

    def state(self, cache: Any) -> RecurrentState:
        """The recurrent state in a cache; empty for a model without states."""
        return ()

    def refuse(self, what: str, otherwise: str = "") -> NoReturn:
        raise ValueError(
            f"{self.name} does not carry a recurrent state by value, which {what} needs"
            f"{f' ({self.why})' if self.why else ''}. Models of recurrent families do: load them with "
            f"hf_recurrent_lengthgen.load_model(...), or wrap them with stateful(model).{otherwise}"
        )

    def _forward(self, input_ids: Tensor, logits_to_keep: int, **arguments: Any) -> Tensor:
        if logits_to_keep and self.keeps:
            arguments["logits_to_keep"] = logits_to_keep
        try:
            logits: Tensor = self.model(input_ids=input_ids, **arguments).logits
        except IndexError as error:  # positions beyond the learned position embeddings
            positions = getattr(text_config(self.model), "max_position_embeddings", None)
            raise ValueError(
                f"{self.name} cannot read a text of this length ({error}): its config has {positions} positions. "
                "Choose a shorter length."
            ) from error
        return logits[:, -logits_to_keep:] if logits_to_keep else logits


class StateReader(Reader):
    """Reads with a model that has the state contract; carries (state, cache of the attention layers or None)."""

    carries = True
    branches = True

    @classmethod
    def of(cls, model: Any, what: str) -> "StateReader":
        """`reader_of` the model; a `ValueError` that says `what` requires a state by value if it has none."""
        reader = reader_of(model)
        return reader if isinstance(reader, cls) else reader.refuse(what)

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model, "its attention layers keep a cache of the text")
        self._attends = bool(getattr(model, "attends", False))
        self.carried_by_row = not self._attends

    def begin(self, initial_state: RecurrentState | None = None) -> Any:
        return initial_state, self.model.new_attention_cache() if self._attends else None

    def read(self, input_ids: Tensor, cache: Any = None, logits_to_keep: int = 0) -> tuple[Tensor, Any]:
        state, attention_cache = cache or self.begin()
        arguments = {"attention_cache": attention_cache} if self._attends else {}
        if logits_to_keep and self.keeps:
            arguments["logits_to_keep"] = logits_to_keep
        output = self.model(input_ids=input_ids, initial_state=state, output_final_state=True, **arguments)
        logits = output.logits
        return logits[:, -logits_to_keep:] if logits_to_keep else logits, (output.final_state, attention_cache)

    def fork(self, cache: Any) -> Any:
        """A cache to read from that leaves `cache` as it is, without a copy of what it holds."""
        state, keys = cache
        return state, copy.copy(keys)

    def take_rows(self, cache: Any, rows: Tensor | slice) -> Any:
        state, attention_cache = cache
        return take_rows(state, rows), attention_cache.taken(rows) if self._attends else None

    def join_rows(self, caches: Sequence[Any]) -> Any:
        state = concatenate_rows([state for state, _ in caches])
        return state, type(caches[0][1]).joined([keys for _, keys in caches]) if self._attends else None

    def keys_of(self, cache: Any) -> Any:
        return cache[1]

    def generation_arguments(self, cache: Any) -> dict[str, Any]:
        """What `generate` needs to continue texts, with a prompt of one token each."""
        state, attention_cache = cache
        return {"initial_state": state} | ({"attention_cache": attention_cache} if self._attends else {})

    def state(self, cache: Any) -> RecurrentState:
        return cache[0]


class CacheReader(Reader):
    """Reads with a model of Transformers that caches keys and values; carries this cache, one text at a time.

    `argument` is the name of the cache in the model's `forward`.
    """

    carries = True

    def __init__(self, model: nn.Module, argument: str) -> None:
        super().__init__(model, "its cache changes as it reads")
        self._argument = argument

    def read(self, input_ids: Tensor, cache: Any = None, logits_to_keep: int = 0) -> tuple[Tensor, Any]:
        cache = DynamicCache(config=self.model.config) if cache is None else cache
        return self._forward(input_ids, logits_to_keep, use_cache=True, **{self._argument: cache}), cache

    def keys_of(self, cache: Any) -> Any:
        return cache


def reader_of(model: Any) -> Reader:
    """A reader for a causal language model: `model(input_ids=...)` has `logits` (B, C, V).

    Raises:
        ValueError: for a model that sees later tokens, for one whose predictions change from call to call, and for
            PEFT methods that put virtual tokens before the text.
    """
    if hasattr(model, "get_base_model"):
        if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
            raise ValueError(
                f"{type(model).__name__} puts virtual tokens before each text, which cannot be read in chunks."
            )
        model = model.get_base_model()
    parameters = inspect.signature(model.forward).parameters
    config = text_config(model)
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(f"{type(model).__name__} is an encoder-decoder: give a causal language model.")
    if "initial_state" in parameters:
        try:
            for check in ("check_has_states", "check_reads_chunks"):
                getattr(model, check, lambda: None)()
        except ValueError as error:
            return Reader(model, str(error))
        return StateReader(model)
    whole = Reader(model, "its forward takes neither initial_state nor a cache")
    with torch.inference_mode(), evaluation_mode(model):
        positions = min(PROBE_LENGTH, getattr(config, "max_position_embeddings", None) or PROBE_LENGTH)
        ids = (torch.arange(positions, device=whole.device)[None] * 7919 + 1) % whole.vocabulary
        at_once, _ = whole.read(ids)
        if not _equal(at_once, whole.read(ids)[0]):
            raise ValueError(
                f"{whole.name} cannot be evaluated: its predictions for the same text change from call to call."
            )
        changed = torch.cat([ids[:, :-1], (ids[:, -1:] + 1) % whole.vocabulary], dim=1)
        if not _equal(at_once[:, :-1], whole.read(changed)[0][:, :-1]):
            raise ValueError(f"{whole.name} attends to later tokens: give a causal language model.")
        # the code of a checkpoint may have the older name with a newer Transformers, too
        argument = next((name for name in ("cache", "past_key_values") if name in parameters), None)
        if argument is None or positions < 2:
            return whole
        if changing := rope_of_length(config):
            return Reader(model, f"its {changing} position encoding depends on the length of the text")
        begin = max(1, positions // 3 - 1)
        try:
            reader = CacheReader(model, argument)
            first, cache = reader.read(ids[:, :begin])
            second, _ = reader.read(ids[:, begin:], cache)
        except (AttributeError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
            return Reader(model, f"its cache does not work in chunks: {error}")
        if not _equal(at_once, torch.cat([first, second], dim=1)):
            return Reader(model, "its predictions with a cache differ from those without")
        return reader


_NEUTRAL = {
    **dict.fromkeys(("repetition_penalty", "encoder_repetition_penalty"), 1.0),
    **dict.fromkeys(("no_repeat_ngram_size", "encoder_no_repeat_ngram_size"), 0),
    "token_healing": False,
}
_OF_NEW_TOKENS = {"max_length": (20, "max_new_tokens"), "min_length": (0, "min_new_tokens")}
"""Lengths that count the text, their defaults in Transformers, and those that do not count it."""
_OF_ALL_TOKENS = "logits_processor", "prefix_allowed_tokens_fn", "stopping_criteria"
"""Arguments of `generate` that are called with all tokens that it has."""


def check_generation(model: Any, arguments: Mapping[str, Any], most: int = 1) -> int:
    """The last tokens of a text that `generate` requires for its settings after the text was read; at least 1.

    Args:
        model: The model, whose generation config counts, too.
        arguments: Arguments of `generate`.
        most: Tokens that `generate` can get; functions of the caller get all of them.

    Raises:
        ValueError: for settings that require more tokens, or the length of the text.
    """
    options = {name: value for name, value in arguments.items() if name != "generation_config"}
    config, _ = model._prepare_generation_config(arguments.get("generation_config"), **options)
    required = _tokens_required(config)

    def check(name: str, allowed: bool, why: str) -> None:
        if not allowed:
            where = "or in the generation config of the model (generation_config.json)"
            raise ValueError(f"{name}={getattr(config, name)!r} {why}, {where}.")

    for name, neutral in _NEUTRAL.items():
        why = "needs all tokens of the text, of which generate gets the last one: leave it out, or set it to"
        check(name, getattr(config, name, None) in (None, neutral), f"{why} {neutral}")
    for name, (default, instead) in _OF_NEW_TOKENS.items():
        unset = arguments.get(name) is None and getattr(config, name) in (None, default)
        counted = getattr(config, instead) is not None
        check(name, unset or counted, f"would not count the text that was read before: give {instead}")
    for name, tokens in required.items():
        why = f"needs the last {tokens} tokens of the text, and generate gets {most} of them: give a text state a"
        check(name, tokens <= most, f"{why} prompt of {tokens} tokens, or leave it out")
    return most if any(arguments.get(name) for name in _OF_ALL_TOKENS) else max(1, *required.values())


def _tokens_required(config: Any) -> dict[str, int]:
    """The last tokens of a text that settings of `generate` look at, by setting."""
    stop = config.stop_strings or []
    biased = [entry if isinstance(config.sequence_bias, dict) else entry[0] for entry in config.sequence_bias or []]
    lengths = {
        "bad_words_ids": config.bad_words_ids or [],
        "sequence_bias": biased,
        "stop_strings": [stop] if isinstance(stop, str) else stop,  # a token has a character or more
    }
    return {name: max(map(len, entries), default=1) - 1 for name, entries in lengths.items()} | {
        "watermarking_config": getattr(config.watermarking_config, "context_width", 0),  # SynthID's has none
        "forced_bos_token_id": 0 if config.forced_bos_token_id is None else 2,  # it follows a text of one token
    }


def _equal(one: Tensor, other: Tensor) -> bool:
    """Equal up to the rounding of the dtype, in units of the largest logit."""
    allowed = 1e-4 if one.dtype in (torch.float32, torch.float64) else 5e-2
    return bool((one - other).abs().max() <= allowed * one.abs().max())
