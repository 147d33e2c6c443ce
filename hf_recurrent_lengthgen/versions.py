"""The versions that results and bug reports name."""

import platform
from functools import cache
from importlib import metadata


def installed_versions() -> dict[str, str]:
    names = ("hf_recurrent_lengthgen", "torch", "transformers", "numpy", "scipy")
    return {"python": platform.python_version(), **{name: version_of(name) for name in names}}


@cache  # reading a file takes 5 ms
def version_of(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed as a package"
