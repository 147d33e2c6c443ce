"""What a text state belongs to: a model, its tokenizer, and the tokens that it has read.

A text state fits the weights that made it, whatever their folder is called. So weights are known by a fingerprint, a
config by its fields, a tokenizer by its vocabulary and by the ids of a text, and tokens by a chain of hashes.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hf_recurrent_lengthgen.checkpoints.private_text import portable
from hf_recurrent_lengthgen.models.modeling_protocols import base_of

SAMPLED = 256
"""Values of each tensor in the fingerprint of weights, at even distances."""
NO_TOKENS = "0" * 64
"""The hash of a text before its first token."""
_NOT_OF_STATES = {
    *("_name_or_path", "architectures", "auto_map", "code_format_version", "dtype", "interventions", "return_dict"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "scan", "scan_backend", "task", "tokenizer_class"),
    *("torch_dtype", "training_length", "transformers_version", "use_cache"),
}
"""Fields of a config on which no state depends."""
_PROBE = "Größe 東京 don't  stop\n\tdef f(x1, y_2=0.5):\r\n🙂 THE END"


@dataclass(frozen=True)
class Origin:
    """The model and tokenizer of a text state.

    Attributes:
        name: Name on the Hub, or the last part of a folder's name; only for people.
        revision: Commit on the Hub; empty if unknown.
        dtype: Dtype of the weights, such as "float32".
        config: The fields of the config that results depend on.
        weights: `weights_fingerprint`.
        tokenizer: `tokenizer_hash`; empty if unknown.
    """

    name: str
    revision: str
    dtype: str
    config: Mapping[str, Any]
    weights: str
    tokenizer: str


def origin_of(model: Any, tokenizer: Any = None) -> Origin:
    model = base_of(model)
    name = getattr(model, "adapter_folder", "") or getattr(model.config, "_name_or_path", "") or type(model).__name__
    return Origin(
        name=portable(str(name)),
        revision=str(getattr(model.config, "_commit_hash", None) or ""),
        dtype=str(model.dtype).removeprefix("torch."),
        config=_fields(model.config),
        weights=weights_fingerprint(model),
        tokenizer="" if tokenizer is None else tokenizer_hash(tokenizer),
    )


def weights_fingerprint(model: nn.Module) -> str:
    """SHA-256 of names, dtypes and shapes of all weights, and of at most 256 values of each.

    Adapters of PEFT that are active count with their factors. It costs milliseconds where a hash of all bytes costs as
    long as loading. A change of single values may escape it; a training, an adapter or other weights do not.
    """
    digest = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        if not isinstance(value, Tensor) or value.is_meta:
            continue
        flat = value.detach().reshape(-1)
        places = torch.linspace(0, max(0, len(flat) - 1), min(len(flat), SAMPLED), dtype=torch.float64).long()
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(flat[places.to(flat.device)].contiguous().view(torch.uint8).cpu().numpy().tobytes())
    for name, module in model.named_modules():
        if getattr(module, "disable_adapters", None) is False:  # a layer of PEFT
            factors = getattr(module, "scaling", {})
            digest.update(f"{name} {[(adapter, factors.get(adapter)) for adapter in module.active_adapters]}".encode())
    return digest.hexdigest()


def tokenizer_hash(tokenizer: Any) -> str:
    """SHA-256 of a tokenizer's vocabulary and of the ids of a text with spaces, accents, kanji and emoji."""
    ids = tokenizer(_PROBE, add_special_tokens=False)["input_ids"]
    return hashlib.sha256(json.dumps([sorted(tokenizer.get_vocab().items()), list(ids)]).encode()).hexdigest()


def prefix_hash(tokens: Tensor | np.ndarray, before: str = NO_TOKENS) -> str:
    """The hash of a text after `tokens` (B, n), from the hash `before` them.

    h_t = SHA-256(h_{t-1} + the ids of the B rows at t as little-endian int64), so a text can be continued without its
    earlier tokens, and the chunks in which it is read do not matter.
    """
    ids = np.asarray(tokens.numpy(force=True) if isinstance(tokens, Tensor) else tokens)
    data, width = np.ascontiguousarray(ids.T, dtype="<i8").tobytes(), 8 * len(ids)
    digest = bytes.fromhex(before)
    for start in range(0, len(data), width):
        digest = hashlib.sha256(digest + data[start : start + width]).digest()
    return digest.hex()


def check_origin(stored: Origin, model: Any, tokenizer: Any, name: str) -> Origin:
    """The origin of a model, or a `ValueError` that names in what that of a text state differs.

    Args:
        stored: The origin of the text state.
        model: The model that is to continue.
        tokenizer: Its tokenizer; None to compare none.
        name: Name of the text state in errors.
    """
    here = origin_of(model, tokenizer)
    differing = []
    if fields := differing_fields(stored.config, base_of(model).config):
        differing.append(f"the config ({', '.join(fields)})")
    if stored.dtype != here.dtype:
        differing.append(f"the dtype of the weights ({stored.dtype}, here {here.dtype})")
    elif stored.weights != here.weights:
        differing.append("the weights")
    if stored.revision and here.revision and stored.revision != here.revision:
        differing.append(f"the revision ({stored.revision[:12]}, here {here.revision[:12]})")
    if stored.tokenizer and here.tokenizer and stored.tokenizer != here.tokenizer:
        differing.append("the tokenizer")
    if differing:
        other = "which has the same name" if stored.name == here.name else here.name
        raise ValueError(
            f"{name} was read with {stored.name}, which differs from this model, {other}, in "
            f"{' and '.join(differing)}: give the model that read it, or read the text again."
        )
    return here


def differing_fields(stored: Mapping[str, Any], config: Any) -> list[str]:
    """Names of the fields in which a stored config differs from another one.

    A field that only one of both has, as after an update of Transformers, counts if it is not the default.
    """
    here = _fields(config)
    if stored.get("model_type") != here.get("model_type"):
        return ["model_type"]
    both = {*stored, *here}
    defaults = {} if both == {*stored} == {*here} else _fields(type(config)())
    return sorted(key for key in both if stored.get(key, defaults.get(key)) != here.get(key, defaults.get(key)))


def _fields(config: Any) -> dict[str, Any]:
    """The fields of a config, as JSON gives them back."""
    fields = json.loads(config.to_json_string(use_diff=False))
    return {key: value for key, value in fields.items() if key not in _NOT_OF_STATES}
