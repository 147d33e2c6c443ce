"""YAML files of users, in which a key stands once."""

from pathlib import Path
from typing import Any

import yaml


class UniqueKeys(yaml.BaseLoader):
    """Scalars stay as written ("no", "1e-3"); a key that stands twice in a mapping is an error, at any depth."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        lines: dict[str, int] = {}
        for key, _ in node.value:
            name, line = str(key.value), key.start_mark.line + 1
            if name in lines:
                raise yaml.YAMLError(f"{name} stands twice, in line {lines[name]} and line {line}: leave one out.")
            lines[name] = line
        return super().construct_mapping(node, deep)


def read_yaml(path: str) -> Any:
    """What a YAML file holds, with scalars as text.

    Raises:
        ValueError: for a file that is missing or not valid, or has a key twice.
    """
    try:
        return yaml.load(Path(path).read_text(encoding="utf-8"), Loader=UniqueKeys)
    except FileNotFoundError as error:
        raise ValueError(f"There is no config file {path}.") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid YAML: {error}") from error
