"""Rows of the caches in which attention layers keep the keys and values of a text.

A cache of Transformers changes in place when a model reads on, but the tensors in it do not. So a copy that shares
them continues the same text in another way, and costs nothing before it is read on.
"""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from hf_recurrent_lengthgen.models.modeling_generation import RecurrentCache

KEYS_ONLY = (DynamicLayer, DynamicSlidingWindowLayer)


def holds_keys_only(cache: Any) -> bool:
    """Whether a cache holds keys and values and nothing else, which could change in place."""
    return type(cache) is DynamicCache and all(type(layer) in KEYS_ONLY for layer in cache.layers)


def cached_tokens(cache: Any) -> int:
    """Number of tokens that a cache has read; 0 for None."""
    if isinstance(cache, RecurrentCache):
        return cache.get_seq_length()
    return max((int(layer.get_seq_length()) for layer in _filled(cache)), default=0)


def cached_elements(cache: Any) -> int:
    """Number of elements of all keys and values; 0 for None."""
    return sum(part.numel() for layer in _filled(cache) for part in (layer.keys, layer.values))


def forked(cache: Any) -> Any:
    """A copy that shares the tensors; reading on with it leaves `cache` as it is."""
    copied = copy.copy(cache)
    copied.layers = [copy.copy(layer) for layer in cache.layers]
    return copied


def cache_rows(cache: Any, rows: Tensor | slice) -> Any:
    """A cache with these rows, in the order given; reading on with it leaves `cache` as it is."""
    chosen = forked(cache)
    for layer in _filled(chosen):
        layer.keys, layer.values = _rows(layer.keys, rows), _rows(layer.values, rows)
    return chosen


def joined_caches(caches: Sequence[Any]) -> Any:
    """A cache with the rows of several after the same number of tokens; reading on with it leaves them as they are."""
    assert len({cached_tokens(cache) for cache in caches}) == 1
    joined = forked(caches[0])
    if len(caches) > 1:
        for index, layer in enumerate(joined.layers):
            if getattr(layer, "keys", None) is not None:
                layer.keys = torch.cat([cache.layers[index].keys for cache in caches])
                layer.values = torch.cat([cache.layers[index].values for cache in caches])
    return joined


def _filled(cache: Any) -> list[Any]:
    return [layer for layer in getattr(cache, "layers", ()) if getattr(layer, "keys", None) is not None]


def _rows(part: Tensor, rows: Tensor | slice) -> Tensor:
    """Rows in their own memory, or the tensor itself if these are all its rows."""
    if isinstance(rows, Tensor):
        return part[rows.to(part.device)]
    return part if range(len(part))[rows] == range(len(part)) else part[rows].clone()
