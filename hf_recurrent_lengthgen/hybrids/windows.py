"""A window for the attention of hybrids: a token attends to the last W tokens, itself included.

W is `attention_window` in the config. The functions of Transformers that make masks, and those of flash attention, are
registered anew, under their names, to obey it: so every call does, also one of the stock class and of `generate`. A
`HybridCache` then keeps W - 1 keys.
"""

import functools
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, and_masks, sliding_window_overlay
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_recurrent_lengthgen.evaluation.text_configs import rope_of_length
from hf_recurrent_lengthgen.hybrids.registry import ROPE, SUPPORTED, check_uses


def window_of(config: Any) -> int | None:
    """W of a config, or of its text model; None for full attention, and for types where the field differs."""
    config = config.get_text_config(decoder=True)  # LED names the blocks of its encoder so
    return getattr(config, "attention_window", None) if config.model_type in SUPPORTED else None


def set_window(model: Any, window: int | str | None) -> None:
    """Put a window into the config of a wrapped model, "none" takes it out, and let attention obey what is there.

    Raises:
        ValueError: for a window below 1, without attention layers, with frequencies that change with the length.
    """
    config = model.config.get_text_config(decoder=True)
    before = window_of(config)
    if isinstance(window, str) and window.isdecimal():
        window = int(window)
    new = before if window is None else None if window == "none" else window
    if new is not None:
        check_window(model, new)
    if new != before:
        config.attention_window = new


@contextmanager
def attending_to(model: Any, window: int | None) -> Iterator[None]:
    """Within the block, the config of a wrapped model has another window, None for full attention."""
    values = vars(model.config.get_text_config(decoder=True))
    before = {name: value for name, value in values.items() if name == "attention_window"}
    values["attention_window"] = window
    try:
        yield
    finally:
        del values["attention_window"]
        values.update(before)


def check_window(model: Any, window: Any) -> None:
    """Raise a `ValueError` for a window that is none, or that the attention of a model cannot have."""
    _check_number(window)
    attends = getattr(model, "attends", False)
    scaled = attends and bool(rope_of_length(model.config.get_text_config(decoder=True)))
    check_uses(model, {"attention_window": True, "no attention layers": not attends, ROPE: scaled})


def _check_number(window: Any) -> None:
    if isinstance(window, bool) or not isinstance(window, int) or window < 1:
        raise ValueError(f'attention_window must be a number of tokens of at least 1, or "none", got {window!r}.')


def obey_window(model: Any) -> None:
    """Let the attention that a model's config names obey its window.

    Raises:
        ValueError: for attention whose masks Transformers does not make, and for a W that is no number above 0.
    """
    if (window := window_of(model.config)) is None:
        return
    _check_number(window)
    name = model.config.get_text_config(decoder=True)._attn_implementation
    check_uses(model, {"attention_window": True, "this attn_implementation": name not in ALL_MASK_ATTENTION_FUNCTIONS})
    for interface, wrap in ((ALL_MASK_ATTENTION_FUNCTIONS, _masking), (ALL_ATTENTION_FUNCTIONS, _attending)):
        stock = interface.get(name)
        if stock is not None and not hasattr(stock, "obeys"):
            wrapped = wrap(stock)
            wrapped.obeys = True
            interface.register(name, wrapped)


def _masking(stock: Any) -> Any:
    """A function that makes masks, within the window of the config."""

    @functools.wraps(stock)
    def mask(*args: Any, **options: Any) -> Any:
        if "config" in options and (window := window_of(options["config"])) is not None:
            options["mask_function"] = and_masks(options["mask_function"], sliding_window_overlay(window))
            options["local_size"] = min(window, options.get("local_size") or window)
        return stock(*args, **options)

    return mask


def _attending(stock: Any) -> Any:
    """A function of attention; flash takes the window as an argument in place of a mask."""
    takes = "sliding_window" in inspect.signature(stock).parameters

    @functools.wraps(stock)
    def attend(module: Any, *args: Any, **options: Any) -> Any:
        if takes and (window := window_of(module.config)) is not None:
            options["sliding_window"] = min(window, options.get("sliding_window") or window)
        return stock(module, *args, **options)

    return attend


def limits_of(model: Any) -> list[int | None]:
    """How many keys each layer of a model must keep for the tokens that follow; None for all."""
    window = window_of(model.config)
    return [min(windows) - 1 if (windows := {window, own} - {None}) else None for own in model._layout.windows]


def check_same_window(model: Any, cache: Any) -> None:
    """Raise a `ValueError` for a cache whose keys were shortened to another window; note that of the model in it."""
    window = window_of(model.config)
    if cache.position and cache.window not in (None, window):
        raise ValueError(
            f"The cache keeps the keys of a window of {cache.window} tokens, but attention_window of the model is "
            f"{window}: read the text again with a new cache."
        )
    cache.window = window
