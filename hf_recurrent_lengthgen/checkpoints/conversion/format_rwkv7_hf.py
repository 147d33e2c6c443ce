"""Checkpoints of RWKV-7 in the layouts that its authors propose for Transformers (`Rwkv7ForCausalLM`, no code).

Two have been published, both with the model type `rwkv7`, which fla has, too: the names of tensors tell them apart.
They are those of the .pth files after a prefix (huggingface/transformers#47780, August 2026): `rwkv7.` with their
shapes, or `model.` with the low-rank maps as linear layers (`att.w1.weight`, transposed), an embedding of another name
and the epsilon of the heads in the config.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor
from transformers import PreTrainedConfig

from hf_recurrent_lengthgen.checkpoints.conversion.format_rwkv import UNUSED, rwkv7_sizes
from hf_recurrent_lengthgen.checkpoints.conversion.formats import (
    GENERIC_SETTINGS,
    SOURCE_CONFIG,
    Format,
    Settings,
    check_settings,
    expected_shapes,
)
from hf_recurrent_lengthgen.checkpoints.conversion.key_maps import SAME, Rename, Transform, expand
from hf_recurrent_lengthgen.checkpoints.conversion.rwkv_maps import rwkv7_map
from hf_recurrent_lengthgen.checkpoints.tensor_files import Meta
from hf_recurrent_lengthgen.models import StatefulRWKV7Config

WHERE = "This RWKV-7 of the authors' layout for Transformers"
LOW_RANK = re.compile(r"att\.[wavg][12]$")
FIRST_VALUES = "blocks.0.att.value.weight"
RANKS = ("decay_low_rank_dim", "a_low_rank_dim", "v_low_rank_dim", "gate_low_rank_dim")
SIZES = {"hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size", *RANKS}
NEUTRAL: Settings = {
    "architecture_version": "rwkv7",
    "embedding_layer_norm_fused": False,
    "number_of_conv_states": 2,
    "rescale_every": 0,
    "use_deep_embed": False,
    "wkv_state_dtype": "float32",
}
"""Settings with the only value that can be converted."""
WITHOUT_EFFECT = {"context_length", "max_position_embeddings", "num_attention_heads", "wkv_backend", "num_heads"}
WITHOUT_EFFECT |= {"wkv_implementation"}


class Names(NamedTuple):
    """How a checkpoint names tensors: a prefix, that of the embeddings, whether low-rank maps are linear layers."""

    prefix: str = "rwkv7."
    embeddings: str = "emb"
    linear: bool = False
    unused: bool = True
    """Whether the first layer holds the map of values that it never reads, as the class of the first layout does."""


SECOND = Names("model.", "embeddings", True, False)


def _names(metas: Mapping[str, Meta]) -> Names | None:
    """How the tensors of a checkpoint are named; None if it has another layout."""
    if f"{SECOND.prefix}blocks.0.att.r_k" in metas:
        return SECOND
    if "rwkv7.blocks.0.att.r_k" in metas:
        return Names(unused="rwkv7.blocks.0.att.v0" in metas)
    return None


def _recognizes(settings: Settings | None, metas: Mapping[str, Meta]) -> bool:
    return (settings or {}).get("model_type") == "rwkv7" and _names(metas) is not None


def _to_config(settings: Settings | None, metas: Mapping[str, Meta]) -> PreTrainedConfig:
    known = GENERIC_SETTINGS | SIZES | WITHOUT_EFFECT | NEUTRAL.keys()
    known |= {"head_dim", "head_size", "norm_bias", "norm_eps", "layer_norm_epsilon", "group_norm_epsilon"}
    given, names = check_settings(settings, known, WHERE), _names(metas)
    for name, value in NEUTRAL.items():
        if given.get(name, value) != value:
            more = ": convert it again with the norm apart" if name == "embedding_layer_norm_fused" else ""
            raise ValueError(f"{WHERE} has {name} {given[name]!r}, but only {value!r} can be converted{more}.")
    if names is None:
        raise ValueError(f"{WHERE} must hold tensors such as rwkv7.blocks.0.att.r_k.")
    raw = {
        _raw(name, names): Meta(meta.shape[::-1], meta.dtype) if _is_linear(name) else meta
        for name, meta in metas.items()
    }
    vocab_size, hidden_size = raw["emb.weight"].shape
    head_size = raw["blocks.0.att.r_k"].shape[1]
    norm_eps: float = given.get("norm_eps") or given.get("layer_norm_epsilon") or 1e-5
    head_eps = given.get("group_norm_epsilon", 64e-5 if "head_size" in given else None)
    fields = {
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "num_hidden_layers": given["num_hidden_layers"],
        "intermediate_size": raw["blocks.0.ffn.key.weight"].shape[0],
        **rwkv7_sizes(raw, head_size),
        "norm_eps": norm_eps,
        "norm_bias": given.get("norm_bias", True),
        "group_norm_eps": None if head_eps in (None, head_size * norm_eps) else head_eps,
    }
    kept = {name: given[name] for name in given if name in GENERIC_SETTINGS - {"architectures", "auto_map"}}
    config: PreTrainedConfig = StatefulRWKV7Config.from_dict(kept | fields | {"model_type": "stateful_rwkv7"})
    setattr(config, SOURCE_CONFIG, {"format": "rwkv7-hf", "config": settings, "names": list(names)})
    return config


def _is_linear(name: str) -> bool:
    return bool(LOW_RANK.search(name.removesuffix(".weight"))) and name.endswith(".weight")


def _raw(name: str, names: Names) -> str:
    """The name in a .pth file."""
    plain = name.removeprefix(names.prefix).removesuffix(".weight" if _is_linear(name) else "")
    return "emb.weight" if plain == f"{names.embeddings}.weight" else plain


def _of(config: Any) -> Names:
    """How the checkpoint was named that ours was converted from; else the first layout."""
    kept = getattr(config, SOURCE_CONFIG, None) or {}
    return Names(*kept["names"]) if kept.get("format") == "rwkv7-hf" else Names()


def _from_config(config: Any) -> Settings:
    names = _of(config)
    heads, head_size, values = config.heads_of(0)
    if values != head_size:
        raise ValueError(f"{WHERE} has values as wide as keys, and this model has value_dim {config.value_dim}.")
    settings: Settings = {
        "architectures": ["Rwkv7ForCausalLM"],
        "model_type": "rwkv7",
        **{name: getattr(config, name) for name in sorted(SIZES)},
        "intermediate_size": _width(config),
        "tie_word_embeddings": bool(config.tie_word_embeddings),
        "use_cache": config.use_cache,
        "wkv_state_dtype": "float32",
        **{name: getattr(config, name, None) for name in ("bos_token_id", "eos_token_id", "pad_token_id")},
    }
    length = {} if config.training_length is None else {"context_length": config.training_length}
    if names.linear or names.embeddings != "emb":
        eps = head_size * config.norm_eps if config.group_norm_eps is None else config.group_norm_eps
        own = {"head_size": head_size, "layer_norm_epsilon": config.norm_eps, "group_norm_epsilon": eps}
        return settings | own | {"num_attention_heads": heads, "embedding_layer_norm_fused": False} | length
    own = {"head_dim": head_size, "num_heads": heads, "norm_eps": config.norm_eps, "norm_bias": config.norm_bias}
    length = {} if config.training_length is None else {"max_position_embeddings": config.training_length}
    return settings | own | {"use_deep_embed": False} | length


def _width(config: Any) -> int:
    """Of the channel mixing."""
    return next(shape[0] for name, shape in expected_shapes(config).items() if name.endswith("ffn.key.weight"))


def _renames(config: Any) -> Sequence[Rename]:
    names, ours = _of(config), expected_shapes(config)
    renames = [rename for rename in expand(rwkv7_map(config), config.num_hidden_layers) if rename.our_names[0] in ours]
    if names.unused:
        renames = [
            _with_unused(rename, config) if rename.their_names == (FIRST_VALUES,) else rename for rename in renames
        ]
    return [_renamed(rename, names) for rename in renames]


def _with_unused(rename: Rename, config: Any) -> Rename:
    """With the map of values that the first layer never reads, which is left out here, and written as zeros."""
    hidden_size, rank = config.hidden_size, config.v_low_rank_dim

    def to_ours(values: Tensor, *unused: Tensor) -> Tensor:
        return values

    def to_theirs(values: Tensor) -> list[Tensor]:
        return [
            values,
            *(values.new_zeros(shape) for shape in ((1, 1, hidden_size), (hidden_size, rank), (rank, hidden_size))),
        ]

    return replace(rename, theirs=(FIRST_VALUES, *UNUSED), transform=Transform(to_ours, to_theirs))


def _renamed(rename: Rename, names: Names) -> Rename:
    turned = names.linear and all(LOW_RANK.search(name) for name in rename.their_names)
    theirs = tuple(_full(name, names) for name in rename.their_names)
    return replace(rename, theirs=theirs, transform=SAME if turned else rename.transform)


def _full(name: str, names: Names) -> str:
    """The name here of a tensor of a .pth file."""
    if name == "head.weight":
        return name
    name = f"{names.embeddings}.weight" if name == "emb.weight" else name
    return names.prefix + name + (".weight" if names.linear and LOW_RANK.search(name) else "")


RWKV7_HF = Format(
    name="rwkv7-hf",
    title="the RWKV-7 authors' layout for Transformers",
    container="safetensors",
    recognizes=_recognizes,
    to_config=_to_config,
    from_config=_from_config,
    renames=_renames,
    tied_head="head.weight",
    keeps_config=False,
    from_shapes=("hidden_ratio", "intermediate_size", "num_heads", "v_low_rank_dim", "value_dim"),
)
