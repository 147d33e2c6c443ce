"""What the config of a language model says about reading it."""

from typing import Any

from torch import nn

ROPE_OF_LENGTH = ("dynamic", "longrope")
"""Rotary encodings that rotate all keys anew when a text gets longer, which does not reach the keys in a cache."""


def vocabulary_size(model: nn.Module) -> int:
    return int(text_config(model).vocab_size)


def text_config(model: Any) -> Any:
    config = getattr(model, "config", None)
    if config is None:
        raise ValueError(f"{type(model).__name__} has no config: give a language model of Transformers.")
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def attention_window(model: Any) -> int | None:
    """The window of a hybrid's attention in tokens; None for full attention, and for a model without a config."""
    config = None if getattr(model, "config", None) is None else text_config(model)
    return getattr(config, "attention_window", None)


def rope_of_length(config: Any) -> str:
    """The first of `ROPE_OF_LENGTH` that a config has in any layer, else ""."""
    settings = repr([getattr(config, name, None) for name in ("rope_parameters", "rope_scaling")])
    return next((kind for kind in ROPE_OF_LENGTH if repr(kind) in settings), "")
