"""The fields of our config classes, in all versions of Transformers."""

from typing import Any, ClassVar, get_origin

from transformers import PreTrainedConfig


def config_fields(config_class: Any) -> list[str]:
    """Names of all fields; early 5.x leaves those that have their default out of `to_dict()`."""
    ours = [cls for cls in config_class.__mro__ if not issubclass(PreTrainedConfig, cls)]
    declared = [
        name
        for cls in ours
        for name, kind in vars(cls).get("__annotations__", {}).items()
        if kind is not ClassVar and get_origin(kind) is not ClassVar
    ]
    return list(dict.fromkeys([*config_class().to_dict(), *declared]))
