"""How states go into the caches of Transformers, `Cache`s of `LinearAttentionLayer`s, and come out of them.

`registry.py` says which model type has which adapter.
"""

import copy
import inspect
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch.nn.functional as F
from transformers.cache_utils import Cache, DynamicCache

from hf_recurrent_lengthgen.hybrids.forgetting import forgetting_scans
from hf_recurrent_lengthgen.hybrids.mixers import Mamba1StateCache, limited_steps, scans_from_state
from hf_recurrent_lengthgen.hybrids.state_cache import StateCache
from hf_recurrent_lengthgen.models.forgetting import Forgetting
from hf_recurrent_lengthgen.models.recurrent_state import LayerState, RecurrentState, state_dtype
from hf_recurrent_lengthgen.models.stateful_model import HybridModel

# What a layer of a stock cache holds about its keys; `cumulative_length` counts tokens that left a sliding window.
KEY_ATTRIBUTES = ("keys", "values", "is_initialized", "cumulative_length", "dtype", "device")


class CacheAdapter:
    """The usual cache.

    Args:
        model: The model that takes it.

    Attributes:
        argument: The name of the cache among the arguments of the model's `forward`.
        reads_prompts: Whether a mixer that reads several tokens from a stock cache starts from its recurrent state.
        rounds: Whether mixers want the recurrent state in the dtype of the model: a bfloat16 model then rounds it
            between calls, as it does without us.

    Raises:
        ValueError: if the model takes no cache.
    """

    reads_prompts: ClassVar[bool] = True
    rounds: ClassVar[bool] = False
    state_cache_class: ClassVar[type[StateCache]] = StateCache

    def __init__(self, model: HybridModel) -> None:
        parameters = inspect.signature(type(model).forward).parameters
        found = [name for name in ("past_key_values", "cache_params") if name in parameters]
        if not found:
            raise ValueError(f"{type(model).__name__} takes no cache, so nothing can carry its states.")
        self.model, self.argument = model, found[0]
        self.dtype = model.dtype if self.rounds else None

    def state_cache(self, state: RecurrentState | None, single_token: bool, attention: Cache | None) -> StateCache:
        """A state cache with `state` before the tokens; keys and values go to `attention`, if given."""
        layers = self.model.config.get_text_config(decoder=True).num_hidden_layers
        return self.state_cache_class(layers, state, single_token, attention, self.dtype)

    def mixers(self, state_cache: Any) -> AbstractContextManager[None]:
        """What must hold while the state cache passes through the mixers, also when they are recomputed."""
        rule = Forgetting.of(self.model.config)
        if rule != Forgetting():
            return forgetting_scans(self.model, rule, state_cache)
        return limited_steps(self.model) if state_cache.single_token else nullcontext()

    def to_cache(self, state: RecurrentState) -> DynamicCache:
        """A stock cache that starts from `state`, which it may keep and write to."""
        cache = DynamicCache(config=self.model.config)
        stock_layers: list[Any] = cache.layers
        layers = zip(stock_layers, state, self.model._layout.shapes, self.model._layout.dropped_columns, strict=True)
        for layer, (recurrent, conv), shape, dropped in layers:
            if shape.conv != (0,):
                layer.update_conv_state(F.pad(conv, (dropped, 0)).to(self.model.dtype))
            if shape.recurrent != (0,):
                layer.update_recurrent_state(recurrent.to(self.dtype or recurrent.dtype))
        return cache

    def from_cache(self, cache: Any) -> RecurrentState:
        """A copy of the states in a stock cache, in our dtype; parts that a layer lacks are (B, 0).

        Raises:
            ValueError: if the cache has not read any token.
        """
        layout, state = self.model._layout, []
        for layer, shape, dropped in zip(cache.layers, layout.shapes, layout.dropped_columns, strict=True):
            recurrent = layer.recurrent_states[0] if shape.recurrent != (0,) else None
            conv = layer.conv_states[0] if shape.conv != (0,) else None
            state.append((recurrent, None if conv is None else conv[..., dropped:]))
        given = [part for layer in state for part in layer if part is not None]
        if not given:
            raise ValueError("The cache has read no token, so it holds no state: use zero_state.")
        empty, dtype = given[0].new_empty(given[0].shape[0], 0), state_dtype(self.model.dtype)
        return tuple(
            LayerState(*((empty if part is None else part).detach().to(dtype, copy=True) for part in layer))
            for layer in state
        )


class RoundingCacheAdapter(CacheAdapter):
    """For mixers that want states in the dtype of the model."""

    rounds = True


class Mamba1CacheAdapter(CacheAdapter):
    """For mixers that must be made to use the cache."""

    reads_prompts = False
    state_cache_class = Mamba1StateCache

    def mixers(self, state_cache: Any) -> AbstractContextManager[None]:
        return scans_from_state(self.model, state_cache)


def copy_keys(attention: Cache, cache: Cache) -> None:
    """Put the keys and values of an attention cache into a stock cache of the same model."""
    for source, target in zip(attention.layers, cache.layers, strict=True):
        for name in KEY_ATTRIBUTES:
            if hasattr(source, name):
                setattr(target, name, copy.deepcopy(getattr(source, name)))


def repeated_keys(attention: Cache, copies: int) -> Cache:
    """A copy of an attention cache with every row `copies` times."""
    repeated: Any = copy.deepcopy(attention)
    for layer in repeated.layers:
        if getattr(layer, "keys", None) is not None:
            layer.batch_repeat_interleave(copies)
    return repeated
