"""The versions that results and bug reports name."""

import platform
import runpy
from functools import cache
from importlib import metadata, util
from pathlib import Path


def installed_versions() -> dict[str, str]:
    names = ("hf_recurrent_lengthgen", "torch", "transformers", "numpy", "scipy")
    return {"python": platform.python_version(), **{name: version_of(name) for name in names}}


@cache  # reading a file takes 5 ms
def version_of(name: str) -> str:
    """The version of a package, of torch with its build (`2.13.0+cu130`), which decides how results round.

    The metadata of torch's ordinary wheels leave the build out; its file says it, without an import of seconds.
    """
    if name == "torch" and (found := util.find_spec(name)) is not None and found.origin is not None:
        return runpy.run_path(str(Path(found.origin).with_name("version.py")))["__version__"]
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed as a package"
