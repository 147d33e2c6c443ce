"""The papers' training runs as YAML files that `lengthgen train` takes; README.md lists them."""

import difflib
import re
import shutil
from pathlib import Path
from typing import NamedTuple

import yaml

RECIPES = Path(__file__).parent


class Recipe(NamedTuple):
    """One file of settings.

    Args:
        name: Its path in the folder of recipes, without ".yaml".
        text: The file.
        runs: Commands of README.md that train with it, with the other sizes of the paper.
    """

    name: str
    text: str
    runs: tuple[str, ...]

    @property
    def title(self) -> str:
        """The first sentence of the file: what it trains, and the place in the paper."""
        comment = re.sub(r"\n# ", " ", self.text.partition("\n\n")[0]).removeprefix("# ")
        return re.split(r"(?<=[\w)])\.(?: |\n)", comment, maxsplit=1)[0]

    @property
    def model(self) -> str:
        return str(yaml.safe_load(self.text)["model"])


def recipe_names() -> list[str]:
    """Names of all recipes."""
    return sorted(path.relative_to(RECIPES).with_suffix("").as_posix() for path in RECIPES.glob("*/*.yaml"))


def load_recipe(name: str) -> Recipe:
    """A recipe by name. A `ValueError` for an unknown one gives similar names."""
    if name not in (names := recipe_names()):
        near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}?" if near else "lengthgen recipe list lists all."
        raise ValueError(f"There is no recipe {name}: {hint}")
    readme = (RECIPES / "README.md").read_text(encoding="utf-8")
    runs = re.findall(rf"`(lengthgen train {re.escape(name)}\.yaml[^`]*)` \|$", readme, flags=re.MULTILINE)
    return Recipe(name, (RECIPES / f"{name}.yaml").read_text(encoding="utf-8"), tuple(runs))


def copy_recipes(folder: str | Path) -> Path:
    """Copy README.md, the YAML files and the model configs to a new folder, and return it.

    Raises:
        ValueError: if it exists.
    """
    target = Path(folder)
    if target.exists():
        raise ValueError(f"{target} exists: give a new folder, so that no changed recipe is lost.")
    return Path(shutil.copytree(RECIPES, target, ignore=shutil.ignore_patterns("*.py", "__pycache__")))
