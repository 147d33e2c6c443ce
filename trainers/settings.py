"""Checks of settings against the type annotations of their dataclass, in one place for all fields."""

import math
import types
from dataclasses import MISSING, fields
from enum import Enum
from inspect import get_annotations
from numbers import Integral, Real
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

# Other numbers must be at least 0, or at least their default if that is negative, such as -1 for "not given".
AT_LEAST_ONE = (
    *("alignment_length", "alignment_max_extra", "alignment_min_extra", "training_length", "bptt_chunk_length"),
    *("bptt_window", "context_parallel_size", "eval_accumulation_steps", "expand_count", "expand_num_heads"),
    *("expand_state_size", "gradient_accumulation_steps", "lora_alpha", "lora_r", "per_device_eval_batch_size"),
    *("per_device_train_batch_size", "retrieval_samples", "task_vocabulary"),
)
MAY_BE_NONE = ("max_grad_norm",)  # Trainer takes None, although the annotation does not say so
PROBABILITIES = ("state_drop_probability",)
ABOVE_ZERO = ("expand_factor", "mimetic_c", "new_weights_lr_multiplier", "noise_sigma")


def defaults_of(settings: Any) -> dict[str, Any]:
    """The default of each field of a dataclass."""
    return {
        item.name: item.default if item.default_factory is MISSING else item.default_factory()
        for item in fields(settings)
    }


def check_settings(settings: Any) -> None:
    """Check all fields of a dataclass: types by their annotations, and the ranges of this module.

    Fields that may be lists are not checked. Values that were made from a setting (enumerations, parsed configs) pass,
    so that `dataclasses.replace` works.

    Raises:
        ValueError: with the field, what is allowed and what was given.
    """
    hints = _hints(type(settings))
    for item in fields(settings):
        value, kinds = getattr(settings, item.name), _kinds(hints[item.name])
        if any(kind is Any or get_origin(kind) is list for kind in kinds):
            continue
        if value is None and (item.default is None or type(None) in kinds or item.name in MAY_BE_NONE):
            continue
        if not any(_fits(value, kind) for kind in kinds):
            raise ValueError(f"{item.name} must be {_in_words(kinds)}, got {value!r:.80}.")
        if not isinstance(value, bool | str) and isinstance(value, Real):
            _check_range(item.name, value, item.default)


def _hints(settings: type) -> dict[str, Any]:
    """The annotations of a dataclass; Any for those that name what only type checkers import."""
    hints: dict[str, Any] = {}
    for base in reversed(settings.__mro__):
        for name, annotation in get_annotations(base).items():
            alone = type(name, (), {"__annotations__": {name: annotation}, "__module__": base.__module__})
            try:
                hints |= get_type_hints(alone)
            except NameError:
                hints[name] = Any
    return hints


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


def _kinds(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)


def _fits(value: Any, kind: Any) -> bool:
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    if kind is bool or isinstance(value, bool):
        return kind is bool and isinstance(value, bool)
    if kind is int or kind is float:
        return isinstance(value, Integral if kind is int else Real)
    if kind is str or (isinstance(kind, type) and issubclass(kind, Enum)):
        return not isinstance(value, Real)  # also paths, and the objects that Trainer makes from names
    return kind is not type(None) and not isinstance(value, str | Real)


def _in_words(kinds: tuple[Any, ...]) -> str:
    names = {int: "an integer", float: "a number", bool: "true or false", str: "text", type(None): "None"}
    words = []
    for kind in kinds:
        if get_origin(kind) is Literal:
            words += [repr(choice) for choice in get_args(kind)]
        elif isinstance(kind, type) and issubclass(kind, Enum):
            words += [repr(member.value) for member in kind]
        else:
            words.append(names.get(kind, "a mapping"))
    return " or ".join(words)
