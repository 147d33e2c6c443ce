"""JSON files of checkpoints: configs and indices, read strictly."""

import json
import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

AGAIN = "copy or download it again"


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if repeated := [name for name, count in Counter(name for name, _ in pairs).items() if count > 1]:
        raise ValueError(f"repeated keys: {', '.join(repeated)}")
    return dict(pairs)


def read_json_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file; a `ValueError` for damaged files and repeated keys."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_without_repetition)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged ({error}): {AGAIN}.") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(value).__name__}: {AGAIN}.")
    return value


def read_settings_file(path: Path) -> dict[str, Any]:
    """The settings in a config.json, with infinite numbers as Transformers tags them. Errors as `read_json_object`."""
    settings: dict[str, Any] = _untagged(read_json_object(path))
    return settings


def write_settings_file(path: Path, settings: dict[str, Any]) -> None:
    """Write a config.json, in the format of Transformers if it has a model type, else as plain JSON."""
    value = _tagged(settings) if "model_type" in settings else settings
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _untagged(value: Any) -> Any:
    if isinstance(value, dict):
        if value.keys() == {"__float__"}:
            return float(value["__float__"])
        return {name: _untagged(part) for name, part in value.items()}
    return [_untagged(part) for part in value] if isinstance(value, list) else value


def _tagged(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return {"__float__": {math.inf: "Infinity", -math.inf: "-Infinity"}.get(value, "NaN")}
    if isinstance(value, dict):
        return {name: _tagged(part) for name, part in value.items()}
    return [_tagged(part) for part in value] if isinstance(value, list | tuple) else value


def texts_in(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from texts_in(part)
