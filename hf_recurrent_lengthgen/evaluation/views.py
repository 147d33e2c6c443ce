"""How results show themselves in a session: a line per field, a table of all their numbers, a picture in notebooks."""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from html import escape
from importlib import import_module
from itertools import pairwise
from typing import Any

Row = dict[str, Any]
_LONGEST = 90


def summary(result: Any) -> str:
    """The fields of a dataclass, one a line, with what is in them."""
    width = max((len(field.name) for field in fields(result)), default=0)
    lines = [f"  {field.name:<{width}}  {_told(getattr(result, field.name))}" for field in fields(result)]
    name = type(result).__name__
    return "\n".join([f"{name}: .to_frame() has all numbers, help({name}) says what the fields are", *lines])


def _told(value: Any) -> str:
    names = [field.name for field in fields(value)] if is_dataclass(value) else []
    if {"mean", "low", "high"} == {*names} and not isinstance(value.mean, tuple):
        bounds = "" if value.low is None else f" [{value.low:.4g}, {value.high:.4g}]"
        return f"{value.mean:.4g}{bounds}"
    if names:
        text = f"{type(value).__name__}: {', '.join(names)}"
    elif isinstance(value, dict):
        text = f"{{{', '.join(map(str, value))}}}"
    elif isinstance(value, tuple) and value and (is_dataclass(value[0]) or len(value) > 4):
        kind = type(value[0]).__name__
        text = f"{len(value)} x {kind}" + (
            f" ({value[0]!r:.20} to {value[-1]!r:.20})" if kind in ("int", "str") else ""
        )
    else:
        text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


def to_html(result: Any, figure: str) -> str:
    """The figure of the models of a result, on white, and its fields: what a notebook shows."""
    module, _, name = figure.rpartition(".")
    drawn = getattr(import_module(f"hf_recurrent_lengthgen.metrics.{module}"), name)(result.models)
    images = import_module("hf_recurrent_lengthgen.plotting.images")
    svg = images.inline_svg(drawn, f"r{id(result)}", type(result).__name__, {})
    return f'<div style="max-width:720px;background:#fff">{svg}</div><pre>{escape(summary(result))}</pre>'


def to_frame(result: Any) -> Any:
    """All numbers of a result as a pandas DataFrame in long form.

    Columns: `model`, where the result names it; `quantity`, the path of fields, "harm.last"; `item`, the places in
    tuples and the names in dictionaries on this path, "0", else ""; `start` and `stop`, the positions of a bin;
    `value`, and the interval from `low` to `high`. What there is not is NaN. Texts are left out.

    Raises:
        ImportError: without pandas.
    """
    try:
        pandas: Any = import_module("pandas")
    except ImportError as error:
        raise ImportError("A table of results needs pandas: pip install pandas.") from error
    columns = ["model", "quantity", "item", "start", "stop", "value", "low", "high"]
    return pandas.DataFrame(list(_rows(result, {"model": None, "quantity": "", "item": ""})), columns=columns)


def _rows(value: Any, place: Row) -> Iterator[Row]:
    if is_dataclass(value):
        parts = {field.name: getattr(value, field.name) for field in fields(value)}
        owner = getattr(parts.get("evaluation"), "model", None) or parts.get("model")
        place = place | ({"model": owner} if isinstance(owner, str) else {})
        if {"mean", "low", "high"} <= parts.keys():
            bounds = (parts.pop("mean"), parts.pop("low"), parts.pop("high"))
            if (edges := parts.pop("edges", None)) is None:
                yield place | dict(zip(("value", "low", "high"), bounds, strict=True))
            else:
                for index, (start, stop) in enumerate(pairwise(edges)):
                    values = {
                        name: None if bound is None else bound[index]
                        for name, bound in zip(("value", "low", "high"), bounds, strict=True)
                    }
                    yield place | {"start": start, "stop": stop} | values
        for name, part in parts.items():
            yield from _rows(part, place | {"quantity": f"{place['quantity']}.{name}".removeprefix(".")})
    elif isinstance(value, tuple | dict):
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _rows(part, place | {"item": f"{place['item']}.{key}".removeprefix(".")})
    elif value is None or isinstance(value, int | float):
        yield place | {"value": None if value is None else float(value)}
