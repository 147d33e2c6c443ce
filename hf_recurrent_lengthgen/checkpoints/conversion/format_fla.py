"""Checkpoints of flash-linear-attention (fla): its linear attention, delta rule and RWKV classes, Mamba-1 to Mamba-3.

Parameter names are those of this package. So are the config fields, except for settings that choose an
implementation. But fla's Mamba classes have the model types of Transformers, with other names for some fields.
Checkpoints from before February 2025 hold `mlp.gate_proj` and `mlp.up_proj` as one tensor, the first ones of RWKV-7
the six token shifts of a layer; they can be read, too.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedConfig

from hf_recurrent_lengthgen.checkpoints.conversion.formats import (
    GENERIC_SETTINGS,
    OUR_FIELDS,
    Format,
    Settings,
    check_settings,
    plain,
    same_names,
)
from hf_recurrent_lengthgen.checkpoints.conversion.key_maps import Rename, Transform
from hf_recurrent_lengthgen.checkpoints.tensor_files import Meta
from hf_recurrent_lengthgen.models import STATEFUL_CLASSES
from hf_recurrent_lengthgen.models.configuration_stateful_mamba import FLA_NAMES

WHERE = "This fla checkpoint"
LOSSES: Settings = {"fuse_cross_entropy": True, "fuse_linear_cross_entropy": False}
FLAGS: Settings = LOSSES | {"attn_mode": "chunk", "max_position_embeddings": 2048}
MAMBA_FLAGS: Settings = LOSSES | {"fuse_norm": True, "use_l2warp": False}
MAMBA_NAMES = {"layer_norm_epsilon": "norm_eps", "time_step_floor": "dt_init_floor"} | {
    f"time_step_{name}": f"dt_{name}" for name in ("min", "max")
}
STEP_SIZES = {"dt_min": 0.001, "dt_max": 0.1, "dt_init_floor": 1e-4, "norm_eps": 1e-5, "expand": 2, "conv_kernel": 4}


class Kind(NamedTuple):
    """What is special about a model type of fla.

    Attributes:
        implementation: Fields of fla 0.6 that our config lacks, with their defaults.
        aliases: From names of fields in earlier versions to those of fla 0.6; for the Mamba classes also from ours.
        neutral: Required values of settings that our config lacks; our configs of the other types check them.
        defaults: Defaults of fla's Mamba classes, if ours differ or have other names.
        fixed: Fields of ours with a fixed value in fla's code.
    """

    implementation: Mapping[str, Any] = FLAGS
    aliases: Mapping[str, str] = MappingProxyType({})
    neutral: Mapping[str, Any] = MappingProxyType({})
    defaults: Mapping[str, Any] = MappingProxyType({})
    fixed: tuple[str, ...] = ()


SWIGLU: Settings = FLAGS | {"fuse_swiglu": True}
KINDS = {
    "delta_net": Kind(SWIGLU),
    "gated_deltanet": Kind(SWIGLU),
    "kda": Kind({name: value for name, value in SWIGLU.items() if name != "fuse_linear_cross_entropy"}),
    "gla": Kind(SWIGLU | {"use_gk": True, "use_gv": False}, fixed=("gate_low_rank_dim",)),
    "hgrn2": Kind(SWIGLU),
    "linear_attn": Kind(SWIGLU | {"attn_mode": "fused_chunk"}),
    "rwkv6": Kind(aliases={"eps": "norm_eps", "rms_norm_eps": "norm_eps"}),
    "rwkv7": Kind(),
    "mamba": Kind(
        MAMBA_FLAGS,
        {ours: theirs for theirs, ours in FLA_NAMES.items()},
        {"use_l2warp": False},
        STEP_SIZES
        | {"state_size": 16, "residual_in_fp32": False}
        | {"dt_rank": "auto", "dt_scale": 1.0, "dt_init_scheme": "random"},
        ("use_mambapy", "use_associative_scan"),
    ),
    "mamba2": Kind(
        MAMBA_FLAGS | {"conv_init": None, "A_init_range": [1, 16]},
        MAMBA_NAMES | {"rms_norm": "rmsnorm", "time_step_limit": "dt_limit"},
        {"use_l2warp": False, "D_has_hdim": False, "rmsnorm": True, "norm_before_gate": False},
        STEP_SIZES
        | {"state_size": 128, "residual_in_fp32": True}
        | {"head_dim": 64, "n_groups": 1, "dt_limit": [0.0, float("inf")]},
        ("time_step_rank",),
    ),
    "mamba3": Kind(LOSSES, neutral={"use_l2warp": False}, fixed=("decay_activation", "intermediate_size")),
}
OURS_ONLY = OUR_FIELDS | {"gate_logit_normalizer", "group_norm_eps", "mixer_rms_eps"}
"""Fields of ours that fla lacks; `exported_config` checks that they have no effect."""

GATE_AND_UP = Transform(lambda gate_and_up: gate_and_up.chunk(2), lambda gate, up: torch.cat([gate, up]))
SHIFTS = Transform(
    lambda shifts: tuple(shift.view(1, 1, -1) for shift in shifts),
    lambda *shifts: torch.cat([shift.flatten(0, 1) for shift in shifts]),
)


def _recognizes(settings: Settings | None, metas: Mapping[str, Meta]) -> bool:
    kind = (settings or {}).get("model_type")
    if settings is None or kind not in KINDS:
        return False
    if KINDS[kind].defaults:  # also a model type of Transformers, which has none of these
        return not {"fuse_norm", "fuse_cross_entropy", "norm_eps"}.isdisjoint(settings)
    of_authors = ("rwkv.embeddings.weight", *(f"{prefix}.blocks.0.att.r_k" for prefix in ("rwkv7", "model", "rwkv")))
    return metas.keys().isdisjoint(of_authors)


def _to_config(settings: Settings | None, metas: Mapping[str, Meta]) -> PreTrainedConfig:
    kind = (settings or {}).get("model_type", "")
    aliases = {"rms_norm_eps": "norm_eps", **KINDS[kind].aliases}
    theirs = {aliases.get(name, name): value for name, value in (settings or {}).items()}  # by the names of fla 0.6
    needed: dict[str, tuple[Any, ...]] = {name: (neutral,) for name, neutral in KINDS[kind].neutral.items()}
    if theirs.get("use_short_conv"):
        needed["share_conv_kernel"] = (False, None)  # one convolution for q, k and v
    if KINDS[kind].defaults:
        needed["intermediate_size"] = (None, theirs.get("expand", 2) * theirs.get("hidden_size", 2048))
    check_settings(theirs, _known(kind), WHERE, needed)
    theirs.pop("share_conv_kernel", None)
    config_class = STATEFUL_CLASSES[kind].config_class
    return config_class.from_dict(_our_fields(theirs, kind) | {"model_type": config_class.model_type})


def _known(kind: str) -> set[str]:
    special = KINDS[kind]
    names = _field_names(kind) | special.implementation.keys() | special.aliases.keys() | special.neutral.keys()
    of_mamba, of_others = {"intermediate_size", "num_heads", "time_step_rank"}, {"rms_norm_eps", "share_conv_kernel"}
    return names | GENERIC_SETTINGS | (of_mamba if special.defaults else of_others)


def _field_names(kind: str) -> set[str]:
    """fla's names of the fields of our config."""
    special = KINDS[kind]
    ours = set(STATEFUL_CLASSES[kind].config_class().to_dict()) - OURS_ONLY - GENERIC_SETTINGS - {*special.fixed}
    if not special.defaults:
        return ours
    return {special.aliases.get(name, name) for name in ours} | special.defaults.keys()


def _our_fields(settings: Settings, kind: str) -> Settings:
    fields = {name: value for name, value in settings.items() if name not in ("architectures", "auto_map")}
    special = KINDS[kind]
    if not special.defaults:
        return fields
    fields = {**special.defaults, **fields}
    if "dt_limit" in fields:
        fields["dt_limit"] = [float(limit) for limit in fields["dt_limit"]]
    hidden, expand = fields.get("hidden_size", 2048), fields["expand"]
    fields.pop("intermediate_size", None)
    if kind == "mamba2":
        fields["num_heads"] = fields.get("num_heads", expand * hidden // fields["head_dim"])
        fields = {name: value for name, value in fields.items() if name not in special.neutral}
    back = {theirs: ours for ours, theirs in special.aliases.items() if ours != "rms_norm"}
    return {back.get(name, name): value for name, value in fields.items()}


def _from_config(config: Any) -> Settings:
    kind = next(name for name in KINDS if STATEFUL_CLASSES[name].config_class.model_type == config.model_type)
    special = KINDS[kind]
    back = {theirs: ours for ours, theirs in special.aliases.items() if special.defaults}
    settings = {name: getattr(config, back.get(name, name), None) for name in sorted(_field_names(kind))}
    settings |= {name: getattr(config, name, default) for name, default in special.implementation.items()}
    settings |= special.neutral
    if "rescale_prenorm_residual" in settings:  # of initialization; Transformers 5 rescales loaded weights, too
        settings["rescale_prenorm_residual"] = False
    settings |= {name: getattr(config, name, None) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    settings |= {"tie_word_embeddings": bool(config.tie_word_embeddings), "model_type": kind}
    return {name: plain(value) for name, value in settings.items()} | {
        "architectures": [STATEFUL_CLASSES[kind].__name__.removeprefix("Stateful")]
    }


OLDER: dict[str, tuple[tuple[str, ...], Transform]] = {
    "mlp.gate_proj.weight": (("mlp.gate_proj.weight", "mlp.up_proj.weight"), GATE_AND_UP),
    "attn.x_x": (tuple(f"attn.x_{part}" for part in "rwkvag"), SHIFTS),
}
"""Tensors of a layer that are several in newer versions."""


def _older(config: Any, metas: Mapping[str, Meta]) -> list[Rename] | None:
    """The map for checkpoints with several tensors in one."""
    for theirs, (ours, transform) in OLDER.items():
        if f"model.layers.0.{theirs}" in metas and f"model.layers.0.{ours[-1]}" not in metas:
            unchanged = [rename for rename in same_names(config) if not rename.our_names[0].endswith(ours)]
            parts = tuple(f"model.layers.{{layer}}.{part}" for part in ours)
            return [*unchanged, Rename(f"model.layers.{{layer}}.{theirs}", parts, transform)]
    return None


FLA = Format(
    name="fla",
    title="flash-linear-attention",
    container="safetensors",
    recognizes=_recognizes,
    to_config=_to_config,
    from_config=_from_config,
    renames=same_names,
    older=_older,
)
