"""Typed values with a strict JSON form: what results are written as, and read back from.

A document is a frozen dataclass of plain types: dataclasses of such, tuples, `dict[str, ...]`, `Literal`, `None`,
int, float, str and bool. `@document("kind")` gives it a name in its file. Where one document holds others of which
only a base class on `AnyDocument` is known, each of them says its kind and version.
"""

import json
import re
import sys
import types
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

Document = TypeVar("Document")

_SCHEMAS: dict[type, tuple[str, int]] = {}


class AnyDocument:
    """Base of base classes: a field of such a class holds any document that is made on it."""


def document(kind: str, version: int = 1) -> Callable[[type[Document]], type[Document]]:
    """Give a dataclass a file form.

    Args:
        kind: Its name in files, which no other document has.
        version: Raised with every change that an older reader cannot understand.
    """

    def register(cls: type[Document]) -> type[Document]:
        if any(kind == known for known, _ in _SCHEMAS.values()):
            raise ValueError(f"There is a document of kind {kind!r} already.")
        _SCHEMAS[cls] = (kind, version)
        return cls

    return register


def to_json(document: Any) -> str:
    """The JSON text of a document, with its kind and schema version.

    Raises:
        ValueError: naming the first value that is NaN, infinite or of a wrong type.
    """
    plain = _tagged(document)
    _from_plain(plain, type(document), "")  # the reader's own checks: nothing is written that it would refuse
    text = json.dumps(plain, indent=1)
    # lists of numbers on one line: a newline in JSON stands between values only
    return re.sub(r"\[\n([^\[\]{}\"]*)\n *\]", lambda match: f"[{' '.join(match[1].split())}]", text)


def from_json(text: str, kind: type[Document]) -> Document:
    """Read what `to_json` wrote.

    Args:
        text: The JSON text.
        kind: The class of the document.

    Raises:
        ValueError: for text that is not JSON, another kind, a schema version this code does not know, and for
            every missing, unknown, doubled or wrongly typed entry or value that is not finite, by its path.
    """
    try:
        plain = json.loads(text, object_pairs_hook=_unique)
    except json.JSONDecodeError as error:
        raise ValueError(f"This is not JSON ({error}); the file may be cut off.") from error
    result: Document = _from_plain(plain, kind, "")
    return result


def _from_plain(plain: Any, kind: type, path: str) -> Any:
    """A document from parsed JSON with its kind and version; `kind` may be a base class on `AnyDocument`."""
    known = {name: (cls, version) for cls, (name, version) in _SCHEMAS.items() if issubclass(cls, kind)}
    where, name = f" in {path}" if path else "", plain.get("kind") if isinstance(plain, dict) else type(plain).__name__
    if not isinstance(plain, dict) or name not in known:
        newer = ": update hf_recurrent_lengthgen if a newer one wrote it" if path else ""
        raise ValueError(f"Expected a document of kind {' or '.join(map(repr, known))}{where}, got {name!r}{newer}.")
    cls, version = known[name]
    if plain.get("schema_version") != version or isinstance(plain["schema_version"], bool):
        raise ValueError(
            f"The document{where} has schema version {plain.get('schema_version')!r}, this code reads {version}: "
            "update hf_recurrent_lengthgen if it is newer, else repeat the evaluation."
        )
    return _decode({key: value for key, value in plain.items() if key not in ("kind", "schema_version")}, cls, path)


def _tagged(document: Any) -> dict[str, Any]:
    kind, version = _SCHEMAS[type(document)]
    return {"kind": kind, "schema_version": version, **_plain(document)}


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"Doubled entries: {sorted({key for key in keys if keys.count(key) > 1})}.")
    return entries


def _plain(value: Any) -> Any:
    """`value` as what JSON knows: dictionaries, lists and the scalars as they are."""
    if is_dataclass(value):
        return {field.name: _nested(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, tuple):
        return [_nested(item) for item in value]
    return {key: _nested(item) for key, item in value.items()} if isinstance(value, dict) else value


def _nested(value: Any) -> Any:
    return _tagged(value) if isinstance(value, AnyDocument) else _plain(value)


def _decode(value: Any, kind: Any, path: str) -> Any:
    """`value` (parsed JSON) as an instance of `kind`, a type made of the types in this file."""
    origin, arguments = get_origin(kind), get_args(kind)
    if isinstance(kind, type) and issubclass(kind, AnyDocument) and kind not in _SCHEMAS:
        return _from_plain(value, kind, path)
    if is_dataclass(kind) and isinstance(value, dict):
        names, hints = [field.name for field in fields(kind)], get_type_hints(kind)
        if missing := [name for name in names if name not in value]:
            raise ValueError(f"Missing in {path or 'the document'}: {missing}.")
        if unknown := [name for name in value if name not in names]:
            raise ValueError(f"Unknown in {path or 'the document'}: {unknown}; allowed are {names}.")
        decoded = {name: _decode(value[name], hints[name], f"{path}.{name}".lstrip(".")) for name in names}
        try:
            return kind(**decoded)  # type: ignore[operator]
        except ValueError as error:
            raise ValueError(f"In {path or 'the document'}: {error}") from error
    if origin in (Union, types.UnionType):
        if value is None:
            return None
        (kind,) = (argument for argument in arguments if argument is not type(None))
        return _decode(value, kind, path)
    if origin is tuple and isinstance(value, list):
        kinds = [arguments[0]] * len(value) if arguments[-1] is Ellipsis else list(arguments)
        if len(kinds) == len(value):
            pairs = enumerate(zip(value, kinds, strict=True))
            return tuple(_decode(item, item_kind, f"{path}[{index}]") for index, (item, item_kind) in pairs)
    if origin is dict and isinstance(value, dict):
        return {key: _decode(item, arguments[1], f"{path}.{key}") for key, item in value.items()}
    if origin is Literal and value in arguments:
        return value
    if kind is float and type(value) in (int, float) and abs(value) <= sys.float_info.max:
        return float(value)
    if kind in (bool, int, str) and type(value) is kind:
        return value
    expected = "a finite number" if kind is float else f"of type {kind.__name__ if origin is None else kind}"
    raise ValueError(f"{path or 'The document'} must be {expected}, got {value!r:.80}.")
