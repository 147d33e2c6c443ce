"""The cache that `generate` passes from token to token: one recurrent state."""

from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache
from transformers.utils import ModelOutput

from .configuration_code import CACHE_NAME
from .recurrent_state import RecurrentState, map_state, state_batch_size, take_rows


class RecurrentCache(Cache):
    """The state after the tokens seen so far. Every update replaces it; the old value is never changed.

    But inside `generate`, a token overwrites the state that the tokens before it in this `generate` have made.

    Args:
        state: State to start from; None for zero.

    Attributes:
        state: The current state, None before the first forward pass from zero.
        tokens_seen: Tokens read since the cache was made (tokens before the initial state do not count).
    """

    is_compileable = False

    def __init__(self, state: RecurrentState | None = None) -> None:
        super().__init__(layers=[])
        self.state = state
        self.tokens_seen = 0
        self._in_generate = self._is_own = False

    def state_for(self, batch_size: int) -> RecurrentState | None:
        """The state with its rows repeated for beams or several returned sequences of each prompt."""
        if self.state is None:
            return None
        rows = state_batch_size(self.state)
        if rows == batch_size:
            return self.state
        if self.tokens_seen == 0 and batch_size % rows == 0:
            return map_state(lambda part: part.repeat_interleave(batch_size // rows, dim=0), self.state)
        raise ValueError(f"The cached state has {rows} rows, the batch has {batch_size}: give the same rows to both.")

    def advance(self, state: RecurrentState, tokens: int) -> None:
        """Replace the state by the one after `tokens` more tokens."""
        self.state, self._is_own = state, self._in_generate
        self.tokens_seen += tokens

    def set_in_generate(self, begins: bool) -> None:
        """Whether a `generate` begins or ends: the states before and after it belong to the caller."""
        self._in_generate, self._is_own = begins, False

    @property
    def may_overwrite(self) -> bool:
        """Whether nobody but this cache holds the state."""
        return self._is_own

    def reorder_cache(self, beam_idx: Tensor) -> None:
        if self.state is not None:
            self.state = take_rows(self.state, beam_idx)

    def reset(self) -> None:
        self.state, self._is_own = None, False
        self.tokens_seen = 0

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.state is not None:
            self.state = map_state(lambda part: part.repeat_interleave(repeats, dim=0), self.state)

    def batch_select_indices(self, indices: Tensor) -> None:
        self.reorder_cache(indices)

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
