"""Public names of a package that are imported on first use (PEP 562), because importing all of them takes seconds.

Each name stands once, in a line `from module import name as name` under `if TYPE_CHECKING:`, where type checkers and
editors find it.
"""

import ast
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any


def on_first_use(package: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """The `__getattr__`, `__dir__` and `__all__` of a package, from the imports for type checkers in its `file`."""
    statements = ast.parse(Path(file).read_text(encoding="utf-8")).body
    block = next(statement for statement in statements if isinstance(statement, ast.If))
    imports = [statement for statement in block.body if isinstance(statement, ast.ImportFrom)]
    homes = {alias.name: f"{'.' * one.level}{one.module}" for one in imports for alias in one.names}
    names = sorted(homes)

    def load(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(homes[name], package), name)

    return load, lambda: names, names
