"""What the config of a language model says about reading it."""

from typing import Any

from torch import nn


def vocabulary_size(model: nn.Module) -> int:
    return int(text_config(model).vocab_size)


def text_config(model: Any) -> Any:
    config = getattr(model, "config", None)
    if config is None:
        raise ValueError(f"{type(model).__name__} has no config: give a language model of Transformers.")
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def attention_window(model: Any) -> int | None:
    """The window of a hybrid's attention in tokens; None for all, and for a model without a config."""
    config = None if getattr(model, "config", None) is None else text_config(model)
    return getattr(config, "attention_window", None)


def rope_types(config: Any) -> set[str]:
    """The types of rotary position encoding in a config, for all layer types."""
    types, waiting = set(), [getattr(config, "rope_parameters", None), getattr(config, "rope_scaling", None)]
    while waiting:
        if isinstance(settings := waiting.pop(), dict):
            types |= {settings[key] for key in ("rope_type", "type") if isinstance(settings.get(key), str)}
            waiting += settings.values()
    return types
