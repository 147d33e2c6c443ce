"""How results show themselves in a session: a line per field, a picture in notebooks."""

import reprlib
from dataclasses import fields
from html import escape
from importlib import import_module
from typing import Any

_SHORT = reprlib.Repr()
_SHORT.maxother = _SHORT.maxstring = _LONGEST = 90


def summary(result: Any) -> str:
    """The fields of a dataclass, one a line, with what is in them."""
    name, values = type(result).__name__, {field.name: getattr(result, field.name) for field in fields(result)}
    width = max(map(len, values), default=0)
    lines = [f"  {name:<{width}}  {' '.join(_SHORT.repr(of).split()):.{_LONGEST}}" for name, of in values.items()]
    return "\n".join([f"{name}: help({name}) says what the fields are", *lines])


def to_html(result: Any, figure: str) -> str:
    """The figure of the models of a result, on white, and its fields: what a notebook shows."""
    module, _, name = figure.rpartition(".")
    drawn = getattr(import_module(f"hf_recurrent_lengthgen.metrics.{module}"), name)(result.models)
    images = import_module("hf_recurrent_lengthgen.plotting.images")
    svg = images.inline_svg(drawn, f"r{id(result)}", type(result).__name__, {})
    return f'<div style="max-width:720px;background:#fff">{svg}</div><pre>{escape(summary(result))}</pre>'
