"""Checks of settings against the type annotations of their dataclass, in one place for all fields."""

import math
import os
import types
from collections.abc import Collection
from dataclasses import fields
from numbers import Integral, Real
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

# Other numbers must be at least 0, or at least their default if that is negative, such as -1 for "not set".
AT_LEAST_ONE = (
    *("alignment_length", "alignment_max_extra", "alignment_min_extra", "training_length", "bptt_chunk_length"),
    *("bptt_window", "context_parallel_size", "expand_count", "expand_num_heads", "expand_state_size"),
    *("lora_alpha", "lora_r", "retrieval_samples", "task_vocabulary"),
)
PROBABILITIES = ("state_drop_probability",)
ABOVE_ZERO = ("expand_factor", "mimetic_c", "new_weights_lr_multiplier", "noise_sigma")
WORDS = {int: "an integer", float: "a number", bool: "true or false", str: "text", type(None): "None"}


def check_settings(settings: Any, names: Collection[str] | None = None) -> None:
    """Check the fields of a dataclass, or those of some names: types by their annotations, and the ranges of this
    module. Lists are not checked.

    Raises:
        ValueError: with the field, what is allowed and the value.
    """
    hints = get_type_hints(type(settings))
    for item in fields(settings):
        hint, value = hints[item.name], getattr(settings, item.name)
        kinds = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
        if names is not None and item.name not in names:
            continue
        if value is item.default or Any in kinds or list in [get_origin(kind) for kind in kinds]:
            continue
        if not any(_fits(value, kind) for kind in kinds):
            raise ValueError(f"{item.name} must be {' or '.join(map(_in_words, kinds))}, got {value!r:.80}.")
        if not isinstance(value, bool) and isinstance(value, Real):
            _check_range(item.name, value, item.default)


def _check_range(name: str, value: Any, default: Any) -> None:
    least = 1 if name in AT_LEAST_ONE else min(0, default) if isinstance(default, Real) else 0
    finite = "" if isinstance(value, Integral) else "a finite number of "
    allowed, right = f"{finite}at least {least}", value >= least
    if name in ABOVE_ZERO:
        allowed, right = "a finite number above 0", value > 0
    elif name in PROBABILITIES:
        allowed, right = "between 0 and 1", 0 <= value <= 1
    if not right or not value < math.inf:
        raise ValueError(f"{name} must be {allowed}, got {value!r:.80}.")


def _fits(value: Any, kind: Any) -> bool:
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    if kind in (int, float):
        return isinstance(value, Integral if kind is int else Real) and not isinstance(value, bool)
    return isinstance(value, (str, os.PathLike) if kind is str else get_origin(kind) or kind)


def _in_words(kind: Any) -> str:
    return " or ".join(map(repr, get_args(kind))) if get_origin(kind) is Literal else WORDS.get(kind, "a mapping")
