"""What this code needs and carries: releases of Transformers, checked when it is imported, and extra files.

To support a newer release: run `make test-newest`, then raise `NEWEST` here, the bound in pyproject.toml and the pin
in constraints.txt, which a test holds together.

Releases before 5.10 copy of a checkpoint's code only the files that its entry file imports. So the entry files of
configurations, which are loaded first, import all that they need, and their users get to the sentence below.
"""

import os
import shutil
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING as TYPE_CHECKING
from typing import Any

import transformers
from transformers.dynamic_module_utils import get_relative_import_files
from transformers.utils import logging

OLDEST, NEWEST = (5, 10), (5, 24)

_installed = tuple(int(part) for part in transformers.__version__.split(".")[:2])
TESTED = "{}.{} to {}.{}".format(*OLDEST, *NEWEST)
if _installed < OLDEST:
    raise ImportError(
        f"Transformers {transformers.__version__} is installed, and models of hf_recurrent_lengthgen need {TESTED}: "
        f'pip install "transformers>={OLDEST[0]}.{OLDEST[1]},<{NEWEST[0]}.{NEWEST[1] + 1}".'
    )
if _installed > NEWEST:
    logging.get_logger(__name__).warning_once(
        f"Transformers {transformers.__version__} is installed, and models of hf_recurrent_lengthgen were tested with "
        f"{TESTED}: should anything fail, install one of these, or a newer hf_recurrent_lengthgen."
    )

# What `generate` calls the cache. The models of this package take it under all names with every release.
CACHE_NAME = "cache" if _installed >= (5, 24) else "past_key_values"
OLD_CACHE_NAMES = ("past_key_values", "cache_params")
PreTrainedConfig = transformers.PreTrainedConfig  # not imported above, since older releases name it otherwise


def extra(name: str) -> Any:
    """A module of this folder that few models need; a checkpoint has it only if it needs it.

    Raises:
        ValueError: in the code of a checkpoint without it.
    """
    try:
        return import_module(f".{name}", __package__)
    except ModuleNotFoundError as error:
        if error.name != f"{__package__}.{name}":
            raise
        raise ValueError(
            f"The code of this checkpoint has no {name}.py, which only checkpoints that were saved with it carry: "
            'pip install "hf_recurrent_lengthgen", and load the checkpoint with hf_recurrent_lengthgen.load_model.'
        ) from error


# The line before the imports that a checkpoint's copy of this file ends with.
_EXTRAS = "\n# Extras of this checkpoint: Transformers copies the files that are imported in so many words.\n"


def carry_extras(folder: str | os.PathLike[str], names: Iterable[str]) -> None:
    """Give the code that was saved to a folder these extras, and its copy of this file imports of them."""
    here, copy = Path(__file__), Path(folder, Path(__file__).name)
    if not copy.exists():  # a configuration alone
        return
    lines = []
    for name in names:
        file = Path(str(extra(name).__file__))
        for needed in (file, *map(Path, get_relative_import_files(file))):
            if needed.name != copy.name:
                shutil.copyfile(needed, copy.with_name(needed.name))
        lines.append(f"    from .{name} import *  # noqa: F403\n")
    own = here.read_text(encoding="utf-8").partition(_EXTRAS)[0]
    copy.write_text("".join([own, *([_EXTRAS, "if TYPE_CHECKING:\n", *lines] if lines else [])]), encoding="utf-8")
