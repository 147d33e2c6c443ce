"""The folder of a learned state: a JSON file that describes it and its base, and one safetensors file.

The base is known by a fingerprint of its weights, which is cheap and independent of how they are stored.
"""

import hashlib
import json
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import cached_file

from .state_learned import checked_scale
from .state_on_disk import load_state, save_state, write_text
from .state_value import RecurrentState, detach_state, map_state, state_dtype

CONFIG_FILE, STATE_FILE = "learned_state_config.json", "learned_state.safetensors"
FORMAT, FORMAT_VERSION = "learned_state", 2
SAMPLES = 64
"""Values of each parameter that a fingerprint reads."""


def load_learned_state(
    model: Any, folder: str | os.PathLike[str], adapter_name: str, revision: str | None, is_trainable: bool
) -> Any:
    """See `LearnedStatesMixin.load_learned_state`."""
    about, state = read_folder(folder, revision)
    base, name = about["base_model_name_or_path"], getattr(model.config, "_name_or_path", "")
    if about["base_fingerprint"] != fingerprint(model):
        raise ValueError(
            f"The learned state in {folder} belongs to {base or 'a base without a name'}"
            f" ({about['base_model_class']}), whose weights are not those of this {type(model).__name__}"
            f"{f' of {name}' if name else ''}: load the base that it was trained on. (load_state reads the file "
            "for any model of the same sizes.)"
        )
    dtype, scale = state_dtype(model.dtype), checked_scale(about.get("scale", 1.0))
    state = map_state(lambda part: part.to(model.device, dtype), state)
    states = model.add_learned_state(adapter_name, state)
    states.set_scale(adapter_name, scale)
    if is_trainable:
        states[adapter_name].learn(about["learn_conv_state"])
    return states


def save_learned_state(model: Any, folder: str | os.PathLike[str], adapter_name: str | None) -> None:
    """See `LearnedStatesMixin.save_learned_state`."""
    states = model.learned_states
    adapter_name = states.active_adapter if adapter_name is None and states is not None else adapter_name
    if states is None or adapter_name is None:
        raise ValueError("There is no active learned state: name one of model.learned_states.names.")
    learned = states[adapter_name]
    learn_conv = any(parameter.requires_grad or bool(parameter.any()) for parameter in learned.conv)
    scale = learned.scale
    with learned.unscaled():
        write_folder(folder, model, detach_state(learned()), learn_conv, scale)


def write_folder(
    folder: str | os.PathLike[str], model: Any, state: RecurrentState, learn_conv: bool, scale: float = 1.0
) -> None:
    """Write a state of one row that belongs to the weights of a model, whether its convolution part is learned, and
    the scale: sequences start from the scale times the state.

    Raises:
        ValueError: for a folder that holds a checkpoint, and a state that is not finite.
    """
    name = str(getattr(model.config, "_name_or_path", "") or "")
    name = os.path.abspath(name) if os.path.isdir(name) else name
    path = Path(folder)
    if (path / "config.json").exists():
        raise ValueError(
            f"{path} holds a checkpoint, which the learned state would be confused with: give a folder of its "
            "own, or save_pretrained the model, whose checkpoint has the state."
        )
    path.mkdir(parents=True, exist_ok=True)
    save_state(path / STATE_FILE, state)
    about = {
        "format": FORMAT,
        "format_version": 1 if scale == 1 else FORMAT_VERSION,  # a reader of version 1 would leave the scale out
        "base_model_name_or_path": name,
        "base_model_revision": getattr(model.config, "_commit_hash", None),
        "base_model_class": type(model).__name__,
        "base_fingerprint": fingerprint(model),
        "layers": [index for index, layer in enumerate(state) if any(bool(part.any()) for part in layer)],
        "learn_conv_state": learn_conv,
        "scale": scale,
        "state_sha256": hashlib.sha256((path / STATE_FILE).read_bytes()).hexdigest(),
    }
    write_text(path / CONFIG_FILE, json.dumps(about, indent=2) + "\n")


def fingerprint(model: Any) -> str:
    """SHA-256 of the names, shapes and some values of the own parameters of a backbone.

    Those of learned states and adapters do not count, which may be on the model or not.
    Values are rounded to bfloat16, so that it is the same for weights that were loaded in bfloat16 and in float32.
    """
    digest, samples = hashlib.sha256(), []
    for name, parameter in _own_parameters(model.base_model):
        digest.update(f"{name} {tuple(parameter.shape)}\n".encode())
        flat, count = parameter.detach().flatten(), min(parameter.numel(), SAMPLES)
        places = torch.arange(count, device=flat.device) * (len(flat) - 1) // max(count - 1, 1)
        samples.append(flat[places].to(torch.bfloat16).cpu())
    digest.update(torch.cat(samples).view(torch.int16).numpy().tobytes())
    return digest.hexdigest()


def _own_parameters(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Parameters without those of adapters, which PEFT puts around the layers, and names as without PEFT."""
    inner = getattr(module, "original_module", None) or getattr(module, "base_layer", None)
    if isinstance(inner, nn.Module):
        yield from _own_parameters(inner, prefix)
        return
    yield from ((prefix + name, value) for name, value in module.named_parameters(recurse=False))
    for name, child in module.named_children():
        if name != "learned_states":
            yield from _own_parameters(child, f"{prefix}{name}.")


def read_folder(folder: str | os.PathLike[str], revision: str | None = None) -> tuple[dict[str, Any], RecurrentState]:
    """What describes a learned state in a folder or on the Hub, and the state."""
    about_file, state_file = (_file(folder, name, revision) for name in (CONFIG_FILE, STATE_FILE))
    about = read_about(about_file)
    if hashlib.sha256(state_file.read_bytes()).hexdigest() != about["state_sha256"]:
        raise ValueError(f"{state_file} is not what {CONFIG_FILE} describes: copy or download both again.")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a file without a checksum of its own was compared above
        return about, load_state(state_file)[0]


def _file(folder: str | os.PathLike[str], name: str, revision: str | None) -> Path:
    """A file of a folder, or of a repository on the Hub."""
    path = Path(folder)
    if path.is_dir():
        if not (path / name).is_file():
            raise ValueError(
                f"{path} holds no {name}, so it is no learned state: give a folder that save_learned_state or "
                "LearnedStateTrainer wrote."
            )
        return path / name
    try:
        return Path(str(cached_file(os.fspath(folder), name, revision=revision)))
    except OSError as error:
        raise ValueError(f"{folder} is no folder here, and no learned state on the Hub: {error}") from error


def read_about(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The content of a `learned_state_config.json`.

    Raises:
        ValueError: if it is damaged, of another kind, or of a newer version.
    """
    try:
        about = json.loads(Path(path).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged ({error}): copy or download it again.") from error
    about = about if isinstance(about, dict) else {}
    if about.get("format") != FORMAT or about.get("format_version") not in range(1, FORMAT_VERSION + 1):
        raise ValueError(
            f"{path} must describe a learned state, with the format {FORMAT!r} and a format version up to "
            f"{FORMAT_VERSION}: update hf_recurrent_lengthgen for a newer one."
        )
    return about
