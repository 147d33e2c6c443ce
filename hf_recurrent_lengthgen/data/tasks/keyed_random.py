"""Random numbers that depend only on a seed, a row and a place, so that a row is the same in every process.

The generator is SplitMix64 (Steele, Lea & Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014): a
hash of a counter. It makes a whole batch at once, which one numpy generator per row cannot do.
"""

from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]

LENGTH_STREAM = 0
"""Stream of the lengths of strings; other quantities have other numbers."""
_STEP = np.uint64(0x9E3779B97F4A7C15)
_STREAM = np.uint64(1 << 32)


def random_bits(seed: int, rows: Array, count: int, stream: int) -> Array:
    """64 random bits for each of `count` places of each row.

    Args:
        seed: At least 0 and below 2**64.
        rows: (B,) integers of at least 0.
        count: n, below 2**32.
        stream: Number of the quantity to draw; streams are independent.

    Returns:
        (B, n) uint64.
    """
    start = _mixed(np.array([seed], np.uint64) + _STEP)
    keys = _mixed(start + rows.astype(np.uint64) * _STEP)  # (B,)
    places = np.arange(1, count + 1, dtype=np.uint64) + np.array([stream], np.uint64) * _STREAM
    return _mixed(keys[:, None] + places * _STEP)


def random_integers(seed: int, rows: Array, count: int, below: Array | int, stream: int) -> Array:
    """Uniform integers from 0 to `below` - 1, (B, n) int64; `below` is a bound of at most 2**31, or (B, 1) bounds."""
    high = random_bits(seed, rows, count, stream) >> np.uint64(32)
    return ((high * np.asarray(below).astype(np.uint64)) >> np.uint64(32)).astype(np.int64)


def random_orders(seed: int, rows: Array, size: int, stream: int) -> Array:
    """A uniform permutation of 0 .. `size` - 1 for each row, (B, size) int64."""
    return random_bits(seed, rows, size, stream).argsort(axis=1)


def _mixed(bits: Array) -> Array:
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))
