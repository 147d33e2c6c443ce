"""Typed values with a strict JSON form, in which results and records are written and read.

A document is a frozen dataclass of plain types: int, float, str, bool, `None`, `Literal`, tuples, `dict[str, ...]`,
and dataclasses of these. `@document("kind")` gives it a name in its file. A document in a field whose type is a base
class on `AnyDocument` is written with its own kind and version.
"""

import json
import re
from collections.abc import Callable
from functools import cache, partialmethod
from typing import Any, TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic_core import core_schema

from hf_recurrent_lengthgen.evaluation.views import summary, to_html

Document = TypeVar("Document")
Scalar = bool | int | float | str | None
Value = Scalar | tuple[Scalar, ...] | dict[str, Scalar | dict[str, Scalar]]
"""An option of any type."""

_SCHEMAS: dict[type, tuple[str, int]] = {}
_STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, ser_json_inf_nan="constants")


class AnyDocument:
    """Base of base classes: a field of such a class holds any document that is a subclass of it."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        if cls in _SCHEMAS:
            return handler(source)
        written = core_schema.plain_serializer_function_ser_schema(_tagged)
        return core_schema.no_info_plain_validator_function(lambda plain: _untagged(plain, cls), serialization=written)


def document(kind: str, version: int = 1, figure: str = "") -> Callable[[type[Document]], type[Document]]:
    """Give a dataclass a file form and a short `repr`.

    `figure` names the function ("folder.figure.function" in `metrics`) whose picture of `models` notebooks show.

    A field added later needs a default, so that older files can be read; removing a field would make them unreadable.
    Increase `version` with every field that is added, here or in the dataclasses that it holds.
    """

    def register(cls: type[Document]) -> type[Document]:
        _SCHEMAS[cls] = (kind, version)
        cls.__repr__ = summary  # type: ignore[method-assign]
        if figure:
            cls._repr_html_ = partialmethod(to_html, figure)  # type: ignore[attr-defined]
        return cls

    return register


def to_json(document: Any) -> str:
    """The JSON text of a document, with its kind and schema version.

    Raises:
        ValueError: for values that are NaN, infinite or of a wrong type, with the path of each.
    """
    text = json.dumps(_tagged(document), indent=1)
    # put lists of numbers on one line; newlines in JSON occur only between values
    return re.sub(r"\[\n([^\[\]{}\"]*)\n *\]", lambda match: f"[{' '.join(match[1].split())}]", text)


def from_json(text: str, kind: type[Document]) -> Document:
    """Read what this version or an earlier one of `to_json` wrote; fields that it lacks take their defaults.

    Raises:
        ValueError: for text that is not JSON, another kind, a newer schema version, and missing, unknown,
            wrongly typed or not finite entries, with the path of each.
    """
    try:
        return _untagged(json.loads(text), kind)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"The text is not JSON ({error}); the file may be truncated.") from error


def to_plain(value: Any) -> Any:
    """A dataclass as plain JSON types, or a `ValueError` for what `from_plain` would refuse."""
    adapter = _adapter(type(value))  # type: ignore[arg-type]  # a class can be hashed
    plain = json.loads(adapter.dump_json((value,), warnings=False))[0]
    from_plain(plain, type(value))
    return plain


def from_plain(plain: Any, kind: type[Document]) -> Document:
    """A dataclass from plain JSON types, or a `ValueError` with all missing, unknown or wrongly typed entries."""
    try:
        (value,) = _adapter(kind).validate_json(json.dumps([plain]))  # type: ignore[arg-type]
    except ValidationError as error:
        raise ValueError("; ".join(_problem(one["loc"][1:], one) for one in error.errors()[:10])) from error
    return value


@cache
def _adapter(kind: type) -> TypeAdapter[Any]:
    return TypeAdapter(tuple[kind], config=_STRICT)  # type: ignore[valid-type]  # a tuple passes its config to `kind`


def _tagged(document: Any) -> dict[str, Any]:
    if type(document) not in _SCHEMAS:
        raise ValueError(f"{type(document).__name__} has no file form: give it one with @document.")
    kind, version = _SCHEMAS[type(document)]
    return {"kind": kind, "schema_version": version, **to_plain(document)}


def _untagged(plain: Any, kind: type) -> Any:
    """A document from parsed JSON with its kind and version; `kind` may be a base class on `AnyDocument`."""
    known = {name: (cls, version) for cls, (name, version) in _SCHEMAS.items() if issubclass(cls, kind)}
    name = plain.get("kind") if isinstance(plain, dict) else type(plain).__name__
    if not isinstance(plain, dict) or not isinstance(name, str) or name not in known:
        newer = ": update hf_recurrent_lengthgen if a newer one wrote it" if kind not in _SCHEMAS else ""
        raise ValueError(f"Expected a document of kind {' or '.join(map(repr, known))}, got {name!r}{newer}.")
    (cls, reads), version = known[name], plain.get("schema_version")
    if not isinstance(version, int) or version > reads:
        raise ValueError(
            f"The document has schema version {version!r}, but this version of the package reads up to {reads}: "
            "update hf_recurrent_lengthgen."
        )
    return from_plain({key: value for key, value in plain.items() if key not in ("kind", "schema_version")}, cls)


def _problem(place: tuple[int | str, ...], error: Any) -> str:
    """One error of pydantic with its place: "models[1].role: Input should be 'base' or 'other', got 'control'"."""
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place).lstrip(".")
    why = error["msg"].removeprefix("Value error, ").replace("Unexpected keyword argument", "There is no such field")
    got = "" if error["type"] in ("missing", "value_error") else f", got {error['input']!r:.80}"
    return f"{path or 'the document'}: {why}{got}"
