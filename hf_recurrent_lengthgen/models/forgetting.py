"""Forgetting that is induced at inference, without training: its settings in a configuration.

"Stuffed Mamba" (Chen et al. 2024, arXiv:2410.07145), section 3.2.2, weakens what a model keeps; "LongMamba" (see its
appendix C) shrinks the step sizes. forgetting_scans.py does both.
"""

import copy
import math
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple


class Forgetting(NamedTuple):
    """How a model forgets more than it has learned to forget.

    Attributes:
        retention: Factor on the decays alpha_t (Eq. 2), above 0 and at most 1; the paper takes 0.9999.
        insertion: Factor on what is written into the state, that is on B_t or the keys, above 0; the paper takes
            0.75. Both together are its "reduced memory retention and insertion" (RRI).
        window: Number r of last tokens that the state of each layer holds (Eq. 8); None for all. Exact for each layer
            and its inputs; through these inputs, a model of several layers sees further back.
        delta_scale: Factor on the step sizes of Mamba-1 and Mamba-2, above 0 and at most 1; LongMamba takes 0.5.
    """

    retention: float = 1.0
    insertion: float = 1.0
    window: int | None = None
    delta_scale: float = 1.0

    @classmethod
    def of(cls, config: Any) -> "Forgetting":
        """The rule in the `forgetting` of a configuration; one that changes nothing if it has none."""
        given = getattr(config, "forgetting", None)
        if given is None:
            return cls()
        if not isinstance(given, Mapping) or not set(given) <= set(cls._fields):
            raise ValueError(f"forgetting must be None or a mapping with some of {list(cls._fields)}, got {given!r}.")
        rule = cls(**given)
        for name, value in zip(cls._fields, rule, strict=True):
            if name == "window":
                if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                    raise ValueError(f"forgetting: window must be None or a number of tokens, got {value!r}.")
                continue
            most = math.inf if name == "insertion" else 1.0
            number = value if isinstance(value, (int, float)) and not isinstance(value, bool) else math.nan
            if not (math.isfinite(number) and 0 < number <= most):
                allowed = "above 0 and finite" if name == "insertion" else "above 0 and at most 1"
                raise ValueError(f"forgetting: {name} must be {allowed}, got {value!r}.")
        return rule

    @property
    def in_recurrence(self) -> bool:
        """Whether the recurrence itself changes, and not only the step sizes."""
        return (self.retention, self.insertion, self.window) != (1.0, 1.0, None)


class _Block:
    """An open `with` block: its thread, and the configuration of the model before and inside."""

    def __init__(self, thread: int, before: Any, inside: Any) -> None:
        self.thread, self.before, self.inside = thread, before, inside


_BLOCKS: list[_Block] = []


@contextmanager
def forgetting(model: Any, **settings: Any) -> Iterator[Any]:
    """Switch forgetting on in a loaded model, for the time of a `with` block.

    Inside, the model has a copy of its configuration with these settings, and `save_pretrained` writes a checkpoint
    that forgets by itself. States with another `window` do not fit. With activation checkpointing, call `backward`
    inside as well, since it recomputes layers.

    Args:
        model: A model of this package, or one that `stateful` wrapped; also with PEFT adapters.
        settings: Fields of `Forgetting`. Fields that are not given are off, so no settings switch all forgetting off.

    Raises:
        ValueError: for a model that cannot forget in this way, and settings out of range.
    """
    config = getattr(model, "config", None)
    if config is None or not (hasattr(config, "check_forgetting") or hasattr(model, "check_forgetting")):
        raise ValueError(
            f"{type(model).__name__} cannot be made to forget: give a model of this package, of load_model or of "
            "stateful."
        )
    thread = threading.get_ident()
    if any(block.inside is config and block.thread != thread for block in _BLOCKS):
        raise ValueError("Another thread has switched forgetting on in this model: take turns, or copy the model.")
    changed = copy.copy(config)
    changed.forgetting = dict(settings) or None
    this = _Block(thread, config, changed)
    # vars: a wrapper that passes attributes on would keep the one that is set on it
    owners = [module for module in model.modules() if vars(module).get("config") is config]
    _BLOCKS.append(this)
    try:
        for module in owners:
            module.config = changed
        (changed if hasattr(changed, "check_forgetting") else model).check_forgetting()
        yield model
    finally:
        _BLOCKS.remove(this)
        for later in _BLOCKS:  # begun inside this block, and still open
            if later.before is changed:
                later.before = this.before
        for module in owners:
            if module.config is changed:
                module.config = this.before
