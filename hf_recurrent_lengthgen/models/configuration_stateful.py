"""What the configurations of all stateful families have in common, and what this code needs and carries.

To support a newer release of Transformers: run `make test-newest`, then raise `NEWEST` here, the bound in
pyproject.toml and the pin in constraints.txt, which a test holds together.
"""

import inspect
import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import transformers
from transformers.dynamic_module_utils import get_relative_import_files
from transformers.utils import logging

OLDEST, NEWEST = (5, 21), (5, 24)

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


def optional_module(name: str) -> Any:
    """A module of this folder that few models need; a checkpoint has it only if it needs it (`EXTRAS`).

    Raises:
        ValueError: in the code of a checkpoint without it.
    """
    try:
        return import_module(f".{name}", __package__)
    except ModuleNotFoundError as error:
        if error.name != f"{__package__}.{name}":
            raise
        raise ValueError(
            f"The code of this checkpoint has no {name}.py, which few models need: pip install "
            '"hf_recurrent_lengthgen", and load the checkpoint with hf_recurrent_lengthgen.load_model.'
        ) from error


if TYPE_CHECKING:
    from .extras import *  # noqa: F403

EXTRAS = {"forgetting": "scan_forgetting", "learned_states": "state_learned", "attention_layers": "layers_attention"}
"""Modules that travel only with a checkpoint that needs them, by the field of its configuration that then is set."""


def carry_extras(folder: Path, names: Iterable[str]) -> None:
    """Let the code in a folder import these extras in its `extras.py`, by which Transformers finds and copies them."""
    entry = folder / "extras.py"
    if not entry.exists():  # a configuration alone
        return
    entry.write_text("".join(f"from .{name} import *\n" for name in names), encoding="utf-8")
    for file in (str(optional_module(name).__file__) for name in names):
        for needed in {file, *get_relative_import_files(file)}:
            if Path(needed).name != entry.name:
                shutil.copyfile(needed, folder / Path(needed).name)


CODE_FORMAT_VERSION = 1
SCAN_BACKEND_SETTINGS = ("auto", "torch", "kernel")
# one entry per layer, where layers differ, in the families that have them
PER_LAYER_FIELDS = ("layer_num_heads", "layer_state_sizes")
LAYER_FIELDS = (*PER_LAYER_FIELDS, "attention_layers")
BOUNDS = {
    **dict.fromkeys(("norm_eps", "group_norm_eps", "layer_norm_epsilon", "mixer_rms_eps"), (0, inf)),
    **dict.fromkeys(("clamp_min", "lower_bound"), (-inf, 0)),  # of log decays
    "training_length": (1, inf),
}
"""The least and the largest value of numbers in all families; None is none."""


@dataclass(init=False, repr=False, eq=False)
class StatefulConfigMixin:
    """Fields and checks of every family; comes before the upstream configuration among the bases.

    Args:
        scan_backend: "torch" for the plain torch scan, "kernel" for the family's GPU kernels, "auto" for the
            kernels on a GPU where they are installed and take the sizes and dtype, and torch elsewhere.
        training_length: Tokens per training sequence (T_train); None if unknown. Evaluations compare with it.
        forgetting: What the model forgets at inference beyond what it has learned to forget, a mapping with some of
            the fields of `Forgetting`; None for nothing more.
        interventions: What was done to the model after its first training, in order, in words.
        learned_states: Names, shapes and the active one of the learned initial states that the checkpoint holds
            (state_learned.py); None for none.
        expanded_layers: The layers whose states were expanded (StateX), by number, each with its last initialization.
        code_format_version: Version of the checkpoint's code format. A checkpoint of a newer version than
            this code is refused.
    """

    _auto_class: ClassVar[str | None] = "AutoConfig"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["final_state", "cache"]
    # what a family says of itself
    display_name: ClassVar[str] = ""  # as people write it
    hub_tags: ClassVar[tuple[str, ...]] = ()  # further ones of its cards
    forgets_by: ClassVar[tuple[str, ...]] = ()  # the settings of `forgetting` that it takes
    lora_target_modules: ClassVar[tuple[str, ...]] = ()  # linear layers of its mixers, as PEFT names them
    upstream_types: ClassVar[tuple[str, ...]] = ()  # model types whose files have the same fields and weights
    why_not_forget: ClassVar[str] = ""  # by a window, in words
    choices: ClassVar[dict[str, tuple[Any, ...]]] = {"scan_backend": SCAN_BACKEND_SETTINGS}  # all that fields may be
    layouts: ClassVar[tuple[str, ...]] = ()  # formats that it is converted from and to; the first has `upstream_types`
    tiny: ClassVar[dict[str, Any]] = {}  # further settings of a model of width 64, for trials

    scan_backend: str = "auto"
    training_length: int | None = None
    interventions: tuple[str, ...] | list[str] = ()
    forgetting: dict[str, Any] | None = None
    learned_states: dict[str, Any] | None = None
    expanded_layers: dict[str, str] | None = None
    code_format_version: int = CODE_FORMAT_VERSION

    def __setattr__(self, name: str, value: Any) -> None:
        """As in Transformers, whose strict classes refuse the whole number of a JSON file in place of a float."""
        is_float = type(value) is int and _annotations(type(self)).get(name) is float  # type: ignore[arg-type]
        super().__setattr__(name, float(value) if is_float else value)

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)  # type: ignore[misc]
        vars(self).pop("model_type", None)  # from the to_dict() of an upstream config; PEFT reads it
        self.check()

    @classmethod
    def get_config_dict(cls, *args: Any, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """As in Transformers; a file of an upstream model type is read as one of this type, without a warning."""
        config_dict, kwargs = super().get_config_dict(*args, **kwargs)  # type: ignore[misc]
        return cls.from_upstream(config_dict), kwargs

    @classmethod
    def from_upstream(cls, config_dict: dict[str, Any]) -> dict[str, Any]:
        """The settings of a file of an upstream model type as those of this one; others as they are."""
        if config_dict.get("model_type") not in cls.upstream_types:
            return config_dict
        settings = {name: value for name, value in config_dict.items() if name not in ("architectures", "auto_map")}
        return settings | {"model_type": cls.model_type}  # type: ignore[attr-defined]

    @classmethod
    def name_of(cls, values: Mapping[str, Any]) -> str:
        """The name of the architecture of a config.json, for people."""
        return cls.display_name or cls.model_type.removeprefix("stateful_")  # type: ignore[attr-defined]

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """As in Transformers; a file of an upstream model type makes a configuration of this one."""
        own = cls.model_type  # type: ignore[attr-defined]
        config_dict = cls.from_upstream(config_dict)
        if (file_type := config_dict.get("model_type", own)) != own:
            raise ValueError(
                f"{cls.__name__} takes files of the model types {[own, *cls.upstream_types]}, got {file_type!r}: "
                "hf_recurrent_lengthgen.load_model chooses the class for a checkpoint."
            )
        return super().from_dict(config_dict | {"model_type": own}, **kwargs)  # type: ignore[misc]

    def check(self) -> None:
        """Refuse fields that the stateful classes cannot honor; models call it too, since fields may be set later."""
        if self.code_format_version > CODE_FORMAT_VERSION:
            raise ValueError(
                f"This checkpoint has code format version {self.code_format_version}, this code reads up to "
                f"{CODE_FORMAT_VERSION}: update hf_recurrent_lengthgen."
            )
        for name, allowed in self.choices.items():
            if (value := getattr(self, name)) not in allowed:
                raise ValueError(f"{name} must be {' or '.join(map(repr, allowed))}, got {value!r}.")
        for name, (least, most) in BOUNDS.items():
            value = getattr(self, name, None)
            if value is not None and not least <= value <= most:  # NaN, too
                raise ValueError(f"{name} must be from {least} to {most}, got {value}.")
        self.check_forgetting()
        for name in LAYER_FIELDS:
            value = getattr(self, name, None)
            if value is not None and not hasattr(type(self), name):
                raise ValueError(f"{type(self).__name__} has no {name}, got {value}: leave it out.")
        layers: int = self.num_hidden_layers  # type: ignore[attr-defined]
        for name in PER_LAYER_FIELDS:
            sizes = getattr(self, name, None)
            if sizes is not None and (len(sizes) != layers or min(sizes) < 1):
                raise ValueError(
                    f"{name} must be None or hold one integer above 0 for each of the num_hidden_layers ({layers}) "
                    f"layers, got {sizes}."
                )

    def part(self, name: str, total: float, count: int) -> int:
        """The size of each of `count` equal parts of `total`, which has a `name`."""
        if count < 1 or total < count or total % count:
            raise ValueError(f"{name} ({total:g}) must be a multiple of {count}, the number of its parts.")
        return int(total) // count

    def to_json_file(self, json_file_path: str | os.PathLike[str], use_diff: bool = True) -> None:
        """As in Transformers; code in the same folder gets the extras that this configuration asks for."""
        carry_extras(Path(json_file_path).parent, [EXTRAS[name] for name in EXTRAS if getattr(self, name, None)])
        super().to_json_file(json_file_path, use_diff)  # type: ignore[misc]

    def check_forgetting(self) -> None:
        """Refuse a `forgetting` that is out of range, or that this family cannot honor."""
        if self.forgetting:
            rule = optional_module("scan_forgetting").Forgetting.of(self)
            rule.check_for(type(self).__name__, self.forgets_by)


@lru_cache
def _annotations(config_class: type) -> dict[str, Any]:
    """Types of the fields."""
    types: dict[str, Any] = {}
    for base in reversed(config_class.__mro__):
        types |= inspect.get_annotations(base)
    return types
