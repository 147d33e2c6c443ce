"""Forgetting in a loaded model, for the time of a `with` block."""

import copy
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from .forgetting import Forgetting


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
    names = ("config", "_config")  # the second is that of the learned states
    owners = [(module, name) for module in model.modules() for name in names if vars(module).get(name) is config]
    _BLOCKS.append(this)
    try:
        for module, name in owners:
            setattr(module, name, changed)
        (changed if hasattr(changed, "check_forgetting") else model).check_forgetting()
        yield model
    finally:
        _BLOCKS.remove(this)
        for later in _BLOCKS:  # begun inside this block, and still open
            if later.before is changed:
                later.before = this.before
        if model.config is changed and "learned_states" in vars(changed):  # they are those of the model
            this.before.learned_states = changed.learned_states
        for module in model.modules():
            for name in names:
                if vars(module).get(name) is changed:
                    setattr(module, name, this.before)


def in_words(rule: Forgetting) -> str:
    """The settings that differ from no forgetting: "retention 0.9999, insertion 0.75", "window 4,096"."""
    changed = [(name, value) for name, value in rule._asdict().items() if value != Forgetting._field_defaults[name]]
    words = [f"{name.replace('_', ' ')} {value:{',' if name == 'window' else ''}}" for name, value in changed]
    return ", ".join(words) or "no forgetting"
