"""Checkpoints of RWKV-7 in the layouts that its authors propose for Transformers (`Rwkv7ForCausalLM`), which are read.

Two have been published, both with the model type `rwkv7`, which fla has, too: the names of tensors tell them apart.
They are those of the .pth files after a prefix (huggingface/transformers#47780, August 2026): `rwkv7.` with their
shapes, or `model.` with the low-rank maps as linear layers (`att.w1.weight`, transposed), an embedding of another name
and the epsilon of the heads in the config. No library has the class, so nothing is written in these layouts.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from transformers import PreTrainedConfig

from hf_recurrent_lengthgen.checkpoints.conversion.format_rwkv import UNUSED, rwkv7_sizes
from hf_recurrent_lengthgen.checkpoints.conversion.formats import (
    GENERIC_SETTINGS,
    Format,
    Settings,
    check_settings,
    expected_shapes,
)
from hf_recurrent_lengthgen.checkpoints.conversion.key_maps import SAME, Rename, expand
from hf_recurrent_lengthgen.checkpoints.conversion.rwkv_maps import rwkv7_map
from hf_recurrent_lengthgen.checkpoints.tensor_files import Meta
from hf_recurrent_lengthgen.models import StatefulRWKV7Config

LOW_RANK = re.compile(r"att\.[wavg][12]$")
RANKS = ("decay_low_rank_dim", "a_low_rank_dim", "v_low_rank_dim", "gate_low_rank_dim")
NEEDED: dict[str, Sequence[Any]] = {
    "architecture_version": ("rwkv7",),
    "embedding_layer_norm_fused": (False,),  # else convert it again with the norm apart
    "number_of_conv_states": (2,),
    "rescale_every": (0,),
    "use_deep_embed": (False,),
    "wkv_state_dtype": ("float32",),
}
"""Settings with the only value that can be converted."""
KNOWN = {
    *("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size", *RANKS, *NEEDED),
    *("head_dim", "head_size", "norm_bias", "norm_eps", "layer_norm_epsilon", "group_norm_epsilon"),
    # without effect
    *("context_length", "max_position_embeddings", "num_attention_heads", "wkv_backend", "num_heads"),
    "wkv_implementation",
}


class Names(NamedTuple):
    """How a checkpoint names tensors: a prefix, that of the embeddings, whether low-rank maps are linear layers."""

    prefix: str
    embeddings: str
    linear: bool

    def of(self, name: str) -> str:
        """The name here of a tensor of a .pth file."""
        if name == "head.weight":
            return name
        name = f"{self.embeddings}.weight" if name == "emb.weight" else name
        return self.prefix + name + (".weight" if self.linear and LOW_RANK.search(name) else "")


LAYOUTS = (Names("rwkv7.", "emb", False), Names("model.", "embeddings", True))


def _names(metas: Mapping[str, Meta]) -> Names | None:
    return next((names for names in LAYOUTS if f"{names.prefix}blocks.0.att.r_k" in metas), None)


def _recognizes(settings: Settings | None, metas: Mapping[str, Meta]) -> bool:
    return (settings or {}).get("model_type") == "rwkv7" and _names(metas) is not None


def _to_config(settings: Settings | None, metas: Mapping[str, Meta]) -> PreTrainedConfig:
    where = "This RWKV-7 of the authors' layout for Transformers"
    theirs, names = check_settings(settings, GENERIC_SETTINGS | KNOWN, where, NEEDED), _names(metas)
    assert names is not None
    raw = {}
    for name, meta in metas.items():
        plain = name.removeprefix(names.prefix)
        if names.linear and LOW_RANK.search(plain.removesuffix(".weight")):
            plain, meta = plain.removesuffix(".weight"), meta._replace(shape=meta.shape[::-1])
        raw["emb.weight" if plain == f"{names.embeddings}.weight" else plain] = meta
    vocab_size, hidden_size = raw["emb.weight"].shape
    head_size = raw["blocks.0.att.r_k"].shape[1]
    norm_eps: float = theirs.get("norm_eps") or theirs.get("layer_norm_epsilon") or 1e-5
    head_eps = theirs.get("group_norm_epsilon", 64e-5 if "head_size" in theirs else None)
    fields = {
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "num_hidden_layers": theirs["num_hidden_layers"],
        "intermediate_size": raw["blocks.0.ffn.key.weight"].shape[0],
        **rwkv7_sizes(raw, head_size),
        "norm_eps": norm_eps,
        "norm_bias": theirs.get("norm_bias", True),
        "group_norm_eps": None if head_eps in (None, head_size * norm_eps) else head_eps,
    }
    generic = {name: theirs[name] for name in theirs if name in GENERIC_SETTINGS - {"architectures", "auto_map"}}
    return StatefulRWKV7Config.from_dict(generic | fields | {"model_type": "stateful_rwkv7"})


def _renames(config: Any, metas: Mapping[str, Meta]) -> list[Rename]:
    names, ours = _names(metas), expected_shapes(config)
    assert names is not None
    renames = []
    for rename in expand(rwkv7_map(config), config.num_hidden_layers):
        if rename.our_names[0] in ours:
            turned = names.linear and all(map(LOW_RANK.search, rename.their_names))
            theirs = tuple(map(names.of, rename.their_names))
            renames.append(replace(rename, theirs=theirs, transform=SAME if turned else rename.transform))
    return renames


RWKV7_HF = Format(
    name="rwkv7-hf",
    title="the RWKV-7 authors' layout for Transformers",
    container="safetensors",
    recognizes=_recognizes,
    to_config=_to_config,
    from_config=None,
    renames=rwkv7_map,
    older=_renames,
    tied_head="head.weight",
    unused=tuple(f"{LAYOUTS[0].prefix}{name}" for name in UNUSED),
    keeps_config=False,
)
