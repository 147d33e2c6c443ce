"""The papers' training runs as settings of `lengthgen train`; README.md lists them."""

import shutil
from pathlib import Path

RECIPES = Path(__file__).parent


def copy_recipes(folder: str | Path) -> Path:
    """Copy README.md, the YAML files and the model configs to a new folder, and return it.

    Raises:
        ValueError: if it exists.
    """
    target = Path(folder)
    if target.exists():
        raise ValueError(f"{target} exists: give a new folder, so that no changed recipe is lost.")
    return Path(shutil.copytree(RECIPES, target, ignore=shutil.ignore_patterns("*.py", "__pycache__")))
