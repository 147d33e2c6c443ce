"""The papers' training runs as YAML files that `lengthgen train` takes; README.md lists them."""

import shutil
from pathlib import Path

RECIPES = Path(__file__).parent


def recipe_names() -> list[str]:
    """Names of all recipes."""
    return sorted(path.relative_to(RECIPES).with_suffix("").as_posix() for path in RECIPES.glob("*/*.yaml"))


def recipe_text(name: str) -> str:
    """The file of a recipe, whose first line says what it trains, and the place in the paper."""
    if name not in recipe_names():
        raise ValueError(f"There is no recipe {name}: lengthgen recipe list lists all.")
    return (RECIPES / f"{name}.yaml").read_text(encoding="utf-8")


def copy_recipes(folder: str | Path) -> Path:
    """Copy README.md, the YAML files and the model configs to a new folder, and return it.

    Raises:
        ValueError: if it exists.
    """
    target = Path(folder)
    if target.exists():
        raise ValueError(f"{target} exists: give a new folder, so that no changed recipe is lost.")
    return Path(shutil.copytree(RECIPES, target, ignore=shutil.ignore_patterns("*.py", "__pycache__")))
