"""Adapters (PEFT): weights beside a base, in a folder that names it.

An adapter belongs to the very weights that it was trained on, and its training sets fields of their config, for which
PEFT has no place: `adapter_base.json` keeps both.
"""

import json
import os
import re
import shlex
import warnings
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import hf_hub_download
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors import safe_open
from torch import nn

from hf_recurrent_lengthgen.evaluation.files import read_result, write_result
from hf_recurrent_lengthgen.evaluation.json_schema import document
from hf_recurrent_lengthgen.records import Adapter, carded, verified_files

CONFIG_FILE, WEIGHTS_FILE, BASE_FILE = "adapter_config.json", "adapter_model.safetensors", "adapter_base.json"
TRAINED_FIELDS = ("training_length", "interventions", "task")
"""Fields of a config that training sets."""


@document("adapter_base")
@dataclass(frozen=True)
class AdapterBase:
    """SHA-256 by name of weights and config of a base, and fields that training set in its config, each as JSON."""

    files: dict[str, str]
    config: dict[str, str]


def holds_adapter(folder: str | os.PathLike[str]) -> bool:
    """Whether a folder holds an adapter of PEFT."""
    return (Path(folder) / CONFIG_FILE).is_file()


def to_merge(folder: str | os.PathLike[str]) -> str:
    """What to do where an adapter is not enough, for people."""
    command = shlex.join(["lengthgen", "merge", str(folder), "--output", "FOLDER"])
    return f"{folder} holds an adapter (PEFT), whose results depend on another checkpoint: merge first, `{command}`"


def refuse_adapter(folder: str | os.PathLike[str]) -> None:
    """Raise a `ValueError` for a folder with an adapter, where a whole model is needed."""
    if holds_adapter(folder):
        raise ValueError(f"{to_merge(folder)}, and give FOLDER.")


def base_of_adapter(folder: str | os.PathLike[str]) -> str:
    """Folder or name on the Hub of the checkpoint that an adapter belongs to.

    Raises:
        ValueError: for damaged, missing and pickled files, methods that change the inputs, and a base that is not
            named or not there.
    """
    path = Path(folder)
    try:
        config = json.loads((path / CONFIG_FILE).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path / CONFIG_FILE} is damaged ({error}): copy or save it again.") from error
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        kind = config.get("peft_type") if isinstance(config, dict) else None
        raise ValueError(f"{path} holds an adapter of the kind {kind!r}: only LORA is read, which can be merged.")
    if not (path / WEIGHTS_FILE).is_file():
        raise ValueError(f"{path} holds no {WEIGHTS_FILE}, as PEFT saves weights: a pickle is not read.")
    base = config.get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise ValueError(f"{path / CONFIG_FILE} names no base: set base_model_name_or_path to its folder or name.")
    place = Path(base)
    if not place.is_dir() and (place.is_absolute() or len(place.parts) != 2 or place.parent.is_dir()):
        raise ValueError(
            f"The base of the adapter {path} is not here any more: {base}. Put it back, or say where it is now: "
            f"base_model_name_or_path in {CONFIG_FILE}, or --base of lengthgen merge."
        )
    return base


def write_adapter_base(folder: str | os.PathLike[str], model: Any) -> None:
    """Write beside an adapter which files the base of a PEFT model has, and what training set in the config."""
    settings = model.get_base_model().config
    values = {name: getattr(settings, name, None) for name in TRAINED_FIELDS}
    config = {name: json.dumps(value) for name, value in values.items() if value}
    base = next(iter(model.peft_config.values())).base_model_name_or_path
    write_result(Path(folder) / BASE_FILE, AdapterBase(_base_files(str(base or "")), config))


def _base_files(base: str) -> dict[str, str]:
    """Digests of weights and config of a folder here, or of what is cached of a name on the Hub."""
    folder = Path(base)
    if not base or not folder.is_dir():
        try:
            folder = Path(hf_hub_download(base, "config.json", local_files_only=True)).parent
        except (LocalEntryNotFoundError, ValueError):  # not from the Hub either: made in memory
            return {}
    return carded(verified_files(folder))


def with_adapter(base: Any, folder: str | os.PathLike[str], name: str) -> Any:
    """The PEFT model of an adapter and its base, in evaluation mode, the adapter's weights to be trained.

    Args:
        base: The model that the folder or name `name` holds, changed in place.
        folder: The adapter.
        name: Of the base.

    Raises:
        ValueError: if the adapter does not fit: to files that have changed since, or to another architecture.
    """
    from peft import PeftModel, get_peft_model_state_dict  # takes seconds, and most checkpoints need none

    path = Path(folder)
    record = read_result(path / BASE_FILE, AdapterBase) if (path / BASE_FILE).is_file() else AdapterBase({}, {})
    found = _base_files(name) if record.files else {}
    if changed := sorted(key for key in record.files.keys() | found.keys() if record.files.get(key) != found.get(key)):
        raise ValueError(
            f"The adapter {path} belongs to {name} as it was when it was trained, and since then have changed: "
            f"{', '.join(changed)}. Give the base that it was trained on."
        )
    told = f"The adapter {path} does not fit {name}, a {type(base).__name__}"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of keys that are missing, which is an error below
            model: Any = PeftModel.from_pretrained(base, str(path), is_trainable=True)
    except (ValueError, RuntimeError, TypeError) as error:
        raise ValueError(f"{told}: {' '.join(str(error).split())}") from error
    with safe_open(os.fspath(path / WEIGHTS_FILE), framework="pt") as file:
        given = {key for key in file.keys() if "lora_" in key}
    wanted = {key for key in get_peft_model_state_dict(model, save_embedding_layers=False) if "lora_" in key}
    if given != wanted:
        raise ValueError(
            f"{told}: missing {sorted(wanted - given)[:3]}, left over {sorted(given - wanted)[:3]} (of {len(given)})."
        )
    for key, value in record.config.items():
        setattr(base.config, key, json.loads(value))
    model.adapter_folder = str(path)
    return model.eval()


def add_adapter(model: Any, rank: int, alpha: int, targets: list[str] | None = None) -> Any:
    """A PEFT model with a new LoRA adapter, which counts alpha / rank.

    Args:
        model: Of `load_model`.
        rank, alpha: Of the adapter.
        targets: Names, or ends of names, of linear layers; None for those that the model or its config names as
            `lora_target_modules`.

    Raises:
        ValueError: for targets that are no linear layers of the model, or share their weights.
    """
    from peft import LoraConfig, get_peft_model  # takes seconds

    linear = {f".{name}": module.weight for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    owners = Counter(id(module.weight) for module in model.modules() if isinstance(module, nn.Linear | nn.Embedding))

    def found(target: str) -> list[int]:
        """For each layer of this name, how many there are with its weight."""
        return [owners[id(weight)] for name, weight in linear.items() if name.endswith(f".{target}")]

    defaults: Any = getattr(model, "lora_target_modules", None) or getattr(model.config, "lora_target_modules", ())
    targets = sorted(targets or [name for name in defaults if {*found(name)} == {1}])
    if shared := [target for target in targets if max(found(target), default=1) > 1]:
        raise ValueError(
            f"{', '.join(shared)} of {type(model).__name__} share a weight with other layers, which could not be "
            "merged with an adapter for each: leave them out."
        )
    wrong = [target for target in targets if not found(target)]
    if wrong or not targets:
        known = sorted({re.sub(r".*\.\d+\.", "", name) for name in linear})
        raise ValueError(
            f"The adapter's targets {wrong} are no linear layers of {type(model).__name__}, whose names end with "
            f"{', '.join(known)}."
        )
    config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=targets, task_type="CAUSAL_LM")
    try:
        return get_peft_model(model, config)
    except ValueError as error:
        raise ValueError(f"{type(model).__name__} takes no adapter on {', '.join(targets)}: {error}") from error


def adapter_of(model: Any) -> Adapter | None:
    """The adapter on a model; None for a model without."""
    config = getattr(model, "peft_config", {}).get("default")
    if config is None:
        return None
    if config.peft_type != "LORA":
        return Adapter(str(config.peft_type))
    targets = config.target_modules
    names = (targets,) if isinstance(targets, str) else tuple(sorted(targets or ()))
    return Adapter("LORA", config.r, float(config.lora_alpha), names)
