"""Adapters (PEFT) and learned states: a folder with weights that belong to a base model, which it names.

An adapter belongs to exactly the weights it was trained on, and its training sets fields of their config. PEFT stores
neither, so `adapter_base.json` does.
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
from torch import nn

from hf_recurrent_lengthgen.checkpoints.records import Adapter, carded, read_json_object, verified_files
from hf_recurrent_lengthgen.checkpoints.tensor_files import stored_tensors
from hf_recurrent_lengthgen.evaluation.files import read_result, write_result
from hf_recurrent_lengthgen.evaluation.json_schema import document
from hf_recurrent_lengthgen.models.state_learned_files import CONFIG_FILE as LEARNED_STATE_CONFIG
from hf_recurrent_lengthgen.models.state_learned_files import read_about

CONFIG_FILE, WEIGHTS_FILE, BASE_FILE = "adapter_config.json", "adapter_model.safetensors", "adapter_base.json"
TRAINED_FIELDS = ("training_length", "interventions", "task")
"""Fields of the config that training sets."""


@document("adapter_base")
@dataclass(frozen=True)
class AdapterBase:
    """SHA-256 of weights and config of a base, by name, and the fields that training set in its config, as JSON."""

    files: dict[str, str]
    config: dict[str, str]


def holds_adapter(folder: str | os.PathLike[str]) -> bool:
    """Whether a folder holds an adapter of PEFT."""
    return (Path(folder) / CONFIG_FILE).is_file()


def merge_advice(folder: str | os.PathLike[str]) -> str:
    """A message for commands that need a merged model instead of an adapter."""
    command = shlex.join(["lengthgen", "merge", str(folder), "--output", "FOLDER"])
    return f"{folder} holds an adapter (PEFT), whose results depend on another checkpoint: merge first, `{command}`"


def refuse_adapter(folder: str | os.PathLike[str]) -> None:
    """Raise a `ValueError` for a folder with an adapter or a learned state alone."""
    if holds_adapter(folder):
        raise ValueError(f"{merge_advice(folder)}, and give FOLDER.")
    if holds_learned_state(folder):
        raise ValueError(
            f"{folder} holds a learned state, which belongs to {base_of_learned_state(folder)}: give that checkpoint, "
            "or save both in one, load_model(...).save_pretrained(FOLDER), and give FOLDER."
        )


def holds_learned_state(folder: str | os.PathLike[str]) -> bool:
    """Whether a folder holds a learned state as files of its own."""
    return (Path(folder) / LEARNED_STATE_CONFIG).is_file()


def base_of_learned_state(folder: str | os.PathLike[str]) -> str:
    """Folder or name on the Hub of the checkpoint that a learned state belongs to.

    Raises:
        ValueError: for a damaged file, and a base that is not named or does not exist.
    """
    path = Path(folder) / LEARNED_STATE_CONFIG
    return _existing_base(read_about(path)["base_model_name_or_path"], path, "the learned state")


def base_of_part(folder: str | os.PathLike[str]) -> str | None:
    """The base of a folder that holds an adapter or a learned state; None for other folders."""
    if holds_adapter(folder):
        return base_of_adapter(folder)
    return base_of_learned_state(folder) if holds_learned_state(folder) else None


def base_of_adapter(folder: str | os.PathLike[str]) -> str:
    """Folder or name on the Hub of the checkpoint that an adapter belongs to.

    Raises:
        ValueError: for damaged, missing and pickled files, other methods than LoRA, and a base that is not named or
            does not exist.
    """
    path = Path(folder)
    config = read_json_object(path / CONFIG_FILE)
    kind = config.get("peft_type")
    if kind != "LORA" or config.get("alora_invocation_tokens"):
        sort = "of LoRA that tokens switch on (alora_invocation_tokens)" if kind == "LORA" else f"of the kind {kind!r}"
        raise ValueError(
            f"{path} holds an adapter {sort}: only LORA for all tokens is supported, which can be merged. Load it "
            "with PEFT, PeftModel.from_pretrained(load_model(BASE), FOLDER)."
        )
    if not (path / WEIGHTS_FILE).is_file():
        raise ValueError(f"{path} holds no {WEIGHTS_FILE}: save the adapter as safetensors, pickles are not read.")
    return _existing_base(config.get("base_model_name_or_path"), path / CONFIG_FILE, "the adapter")


def _existing_base(base: Any, config: Path, what: str) -> str:
    """The base that a config names; a `ValueError` if it names none, or one that does not exist."""
    place = Path(str(base or "none/at/all"))
    if not place.is_dir() and (place.is_absolute() or len(place.parts) != 2 or place.parent.is_dir()):
        also = ", or --base of lengthgen merge" if config.name == CONFIG_FILE else ""
        raise ValueError(
            f"The base of {what} {config.parent} does not exist any more: {base}. Put it back, or give its new place: "
            f"base_model_name_or_path in {config.name}{also}."
        )
    return str(base)


def adapter_folder(folder: str | os.PathLike[str], model: Any) -> Path:
    """Where PEFT saves the active adapter of a model: in the folder, or in one below with its name."""
    name = model.active_adapter if hasattr(model, "get_base_model") else "default"
    return Path(folder) if name == "default" else Path(folder) / name


def write_adapter_base(folder: str | os.PathLike[str], model: Any) -> None:
    """Write the digests of an adapter's base, and the fields of its config that training set, into its folder."""
    settings = model.get_base_model().config
    values = {name: getattr(settings, name, None) for name in TRAINED_FIELDS}
    config = {name: json.dumps(value) for name, value in values.items() if value}
    base = next(iter(model.peft_config.values())).base_model_name_or_path
    write_result(Path(folder) / BASE_FILE, AdapterBase(_base_files(str(base or "")), config))


def _base_files(base: str) -> dict[str, str]:
    """Digests of weights and config of a local folder, or of the cached files of a Hub name."""
    folder = Path(base)
    if not base or not folder.is_dir():
        try:
            folder = Path(hf_hub_download(base, "config.json", local_files_only=True)).parent
        except (LocalEntryNotFoundError, ValueError):  # neither local nor from the Hub: made in memory
            return {}
    return carded(verified_files(folder))


def with_adapter(base: Any, folder: str | os.PathLike[str], name: str) -> Any:
    """The PEFT model of an adapter and its base, in evaluation mode, with trainable adapter weights.

    Args:
        base: The base model, loaded from `name`; it is changed in place.
        folder: The folder of the adapter.
        name: Folder or Hub name of the base.

    Raises:
        ValueError: if the adapter does not fit, because the base has changed or has another architecture.
    """
    from peft import PeftModel, get_peft_model_state_dict  # takes seconds, and most checkpoints have no adapter

    path = Path(folder)
    record = read_result(path / BASE_FILE, AdapterBase) if (path / BASE_FILE).is_file() else AdapterBase({}, {})
    files = _base_files(name) if record.files else {}
    if changed := sorted(key for key in record.files.keys() | files.keys() if record.files.get(key) != files.get(key)):
        raise ValueError(
            f"The adapter {path} was trained on {name}, of which these files have changed since: "
            f"{', '.join(changed)}. Give the base that it was trained on."
        )
    misfit = f"The adapter {path} does not fit {name}, a {type(base).__name__}"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # its warning about missing keys is an error below
            model: Any = PeftModel.from_pretrained(base, str(path), is_trainable=True)
    except (ValueError, RuntimeError, TypeError, LookupError, AttributeError, ImportError) as error:
        raise ValueError(
            f"{misfit}: {' '.join(str(error).split())}. Give the base that it was trained on, which is saved after "
            "resize_token_embeddings if tokens were added."
        ) from error
    stored = set(stored_tensors(path / WEIGHTS_FILE))
    expected = set(get_peft_model_state_dict(model, save_embedding_layers=False))
    missing, left_over = expected - stored, {key for key in stored - expected if "lora_" in key}  # not embeddings
    if missing or left_over:
        raise ValueError(
            f"{misfit}: missing {sorted(missing)[:3]}, left over {sorted(left_over)[:3]} (of {len(stored)})."
        )
    for key, value in record.config.items():
        setattr(base.config, key, json.loads(value))
    base.adapter_folder = str(path)  # which the PEFT model has, too, and the base keeps when it is merged
    return model.eval()


def add_adapter(model: Any, rank: int, alpha: int, targets: list[str] | None = None) -> Any:
    """A PEFT model with a new LoRA adapter of scale alpha / rank.

    Args:
        model: A model from `load_model`.
        rank, alpha: Rank and alpha of LoRA.
        targets: Names, or ends of names, of linear layers; None for `lora_target_modules` of the model or its config,
            and those of PEFT for a model without (Llama: q_proj and v_proj).

    Raises:
        ValueError: for targets that are no linear layers of the model.
    """
    from peft import LoraConfig, get_peft_model  # takes seconds
    from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as OF_PEFT

    linear = [f".{name}" for name, module in model.named_modules() if isinstance(module, nn.Linear)]

    def is_layer(target: str) -> bool:
        return any(name.endswith(f".{target}") for name in linear)

    declared: Any = getattr(model, "lora_target_modules", None) or getattr(model.config, "lora_target_modules", ())
    defaults = declared or OF_PEFT.get(model.config.model_type, ())
    targets = sorted(targets or filter(is_layer, defaults))  # not all variants of a family have all of them
    if not targets or not all(map(is_layer, targets)):  # PEFT passes over some of several
        known = sorted({re.sub(r".*\.\d+\.", "", name) for name in linear})
        raise ValueError(
            f"The adapter targets {targets} must be linear layers of {type(model).__name__}, whose names end with "
            f"{', '.join(known)}."
        )
    config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=targets, task_type="CAUSAL_LM")
    return get_peft_model(model, config)


def merged(model: Any) -> Any:
    """The model of a PEFT model, with the adapter in its weights, which are trainable again.

    Raises:
        Unmergeable: if no weights of the model could hold it; the model is then as it was.
    """
    _check_mergeable(model)
    whole = model.merge_and_unload(safe_merge=True)
    for weight in whole.parameters():  # PEFT froze what no adapter trains
        weight.requires_grad_(weight.is_floating_point())
    return whole


class Unmergeable(ValueError):
    """An adapter that cannot be part of the weights of its model."""


def _check_mergeable(model: Any) -> None:
    """Raise `Unmergeable` if no weights give the same results as the model with its adapter."""
    from peft.utils import ModulesToSaveWrapper  # takes seconds

    wrappers = [module for module in model.modules() if isinstance(module, ModulesToSaveWrapper)]
    replaced = {module for wrapper in wrappers for module in wrapper.original_module.modules()}
    read = [module for module in model.modules() if module not in replaced]
    owners = Counter(id(weight) for module in read for weight in module._parameters.values() if weight is not None)
    layers = {name: layer for name, layer in model.named_modules() if hasattr(layer, "get_base_layer")}
    # tied embeddings and heads share the deltas of trained tokens, which is one update
    updates = {name: id(getattr(layer, "trainable_tokens_delta", layer)) for name, layer in layers.items()}
    same = Counter((id(weight), updates[name]) for name, layer in layers.items() for weight in layer.parameters())
    for name, layer in layers.items():
        if any(owners[id(weight)] > same[id(weight), updates[name]] for weight in layer.parameters()):
            shown = name.removeprefix("base_model.model.").removesuffix(".token_adapter")
            why = f"{shown} shares its weight with another layer, which has another update or none"
            raise Unmergeable(f"The adapter cannot be merged: {why}.")


def adapter_of(model: Any) -> Adapter | None:
    """The active adapter on a model; None without one."""
    config = getattr(model, "peft_config", {}).get(getattr(model, "active_adapter", "default"))
    if config is None:
        return None
    if config.peft_type != "LORA":
        return Adapter(str(config.peft_type))
    targets = config.target_modules
    names = (targets,) if isinstance(targets, str) else tuple(sorted(targets or ()))
    return Adapter("LORA", config.r, float(config.lora_alpha), names)
