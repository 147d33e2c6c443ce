"""Checkpoints of mamba-ssm's `MambaLMHeadModel`: Mamba-1 to Mamba-3, config.json and pytorch_model.bin.

Their config has the size of the vocabulary before it is padded to a multiple of `pad_vocab_size_multiple`; ours has
the number of rows of the weights. Our config.json keeps theirs under "source_config", with the settings that matter
for initialization and the choice of kernels only. `MambaLMHeadModel` supports Mamba-3 since June 2026, a week after
the activation of its decays became "heavy_tail".
"""

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedConfig

from hf_recurrent_lengthgen.checkpoints.conversion.formats import Format, Settings, check_settings, plain, same_names
from hf_recurrent_lengthgen.checkpoints.tensor_files import Meta
from hf_recurrent_lengthgen.models import StatefulMamba2Config, StatefulMamba3Config, StatefulMambaConfig

NORM_EPSILON = 1e-5  # `create_block` has no setting for it
MLP_MULTIPLE = 128  # to which `GatedMLP` rounds its width up

DEFAULTS: Settings = {  # of `MambaConfig`, for entries that a config.json lacks
    "d_model": 2560,
    "d_intermediate": 0,
    "n_layer": 64,
    "vocab_size": 50277,
    "ssm_cfg": {},
    "attn_layer_idx": [],
    "attn_cfg": {},
    "rms_norm": True,
    "residual_in_fp32": True,
    "fused_add_norm": True,
    "pad_vocab_size_multiple": 8,
    "tie_embeddings": True,
}
STEPS: Settings = {"expand": 2, "dt_min": 0.001, "dt_max": 0.1, "dt_init_floor": 1e-4}  # of both
CONVOLUTION: Settings = {"d_conv": 4, "conv_bias": True, "bias": False}
MAMBA1: Settings = STEPS | CONVOLUTION  # of `Mamba`
MAMBA1 |= {"d_state": 16, "dt_rank": "auto", "dt_init": "random", "dt_scale": 1.0, "use_fast_path": True}
MAMBA2: Settings = {  # of `Mamba2`
    **STEPS,
    **CONVOLUTION,
    "d_state": 128,
    "conv_init": None,
    "headdim": 64,
    "d_ssm": None,
    "ngroups": 1,
    "A_init_range": (1, 16),
    "D_has_hdim": False,
    "rmsnorm": True,
    "norm_before_gate": False,
    "dt_limit": (0.0, float("inf")),
    "chunk_size": 256,
    "use_mem_eff_path": True,
}
MAMBA3: Settings = {  # of `Mamba3`
    **STEPS,
    "d_state": 128,
    "headdim": 64,
    "ngroups": 1,
    "rope_fraction": 0.5,
    "A_floor": 1e-4,
    "is_outproj_norm": False,
    "is_mimo": False,
    "mimo_rank": 4,
    "fuse_pregate_headwise_norm": True,
    "chunk_size": 64,
    "dropout": 0.0,
}
SHARED_FIELDS = {
    "d_state": "state_size",
    "d_conv": "conv_kernel",
    "expand": "expand",
    "bias": "use_bias",
    "conv_bias": "use_conv_bias",
    "dt_min": "time_step_min",
    "dt_max": "time_step_max",
    "dt_init_floor": "time_step_floor",
}
FIELDS = {  # from settings of the layer to fields of our config
    "Mamba1": SHARED_FIELDS
    | {"dt_rank": "time_step_rank", "dt_init": "time_step_init_scheme", "dt_scale": "time_step_scale"},
    "Mamba2": SHARED_FIELDS
    | {"headdim": "head_dim", "ngroups": "n_groups", "dt_limit": "time_step_limit", "chunk_size": "chunk_size"},
    "Mamba3": {"d_state": "state_size", "headdim": "head_dim", "ngroups": "n_groups"}
    | {name: name for name in MAMBA3 if hasattr(StatefulMamba3Config, name)},
}
LAYERS = {"Mamba1": MAMBA1, "Mamba2": MAMBA2, "Mamba3": MAMBA3}
CONFIGS: dict[str, Any] = {
    "Mamba1": StatefulMambaConfig,
    "Mamba2": StatefulMamba2Config,
    "Mamba3": StatefulMamba3Config,
}
NEEDED: dict[str, Any] = {"D_has_hdim": (False,), "rmsnorm": (True,), "norm_before_gate": (False,)}
"""The only values of settings of the layer that can be converted."""
WHERE = "This mamba-ssm checkpoint"


def _recognizes(settings: Settings | None, metas: Mapping[str, Meta]) -> bool:
    return settings is not None and {"d_model", "n_layer"} <= settings.keys() and "model_type" not in settings


def _to_config(settings: Settings | None, metas: Mapping[str, Meta]) -> PreTrainedConfig:
    layer_settings = (settings or {}).get("ssm_cfg") or {}
    layer = layer_settings.get("layer", "Mamba1")
    needed: dict[str, Any] = {"attn_layer_idx": ([], None), "rms_norm": (True,)}
    if layer != "Mamba3":  # an MLP
        needed["d_intermediate"] = (0,)
    theirs = DEFAULTS | check_settings(settings, DEFAULTS, WHERE, needed)
    inner = layer_settings.get("expand", STEPS["expand"]) * theirs["d_model"]
    needed = NEEDED | {"layer": tuple(LAYERS), "d_ssm": (None, inner)}
    known = {"layer", *LAYERS.get(layer, ())}
    mixer = LAYERS.get(layer, {}) | check_settings(layer_settings, known, f"ssm_cfg of {WHERE.lower()}", needed)
    if "dt_limit" in mixer:
        mixer["dt_limit"] = [float(limit) for limit in mixer["dt_limit"]]
    fields: Settings = {ours: mixer[theirs] for theirs, ours in FIELDS[layer].items()}
    fields |= {
        "hidden_size": theirs["d_model"],
        "num_hidden_layers": theirs["n_layer"],
        "vocab_size": theirs["vocab_size"] + -theirs["vocab_size"] % theirs["pad_vocab_size_multiple"],
        "residual_in_fp32": theirs["residual_in_fp32"],
        "tie_word_embeddings": theirs["tie_embeddings"],
        # known to the tokenizer only
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    if layer == "Mamba3":
        width = theirs["d_intermediate"] + -theirs["d_intermediate"] % MLP_MULTIPLE or None
        fields |= {"norm_eps": NORM_EPSILON, "intermediate_size": width, "decay_activation": "heavy_tail"}
    else:
        fields |= {"layer_norm_epsilon": NORM_EPSILON, "initialization": "mamba-ssm"}
    if layer == "Mamba2":
        fields["num_heads"] = inner // mixer["headdim"]
    return CONFIGS[layer](**fields)


def _from_config(config: Any) -> Settings:
    layer = next(name for name, config_class in CONFIGS.items() if config_class.model_type == config.model_type)
    mixer = {theirs: getattr(config, ours) for theirs, ours in FIELDS[layer].items()}
    changed = {name: plain(value) for name, value in mixer.items() if plain(value) != plain(LAYERS[layer][name])}
    return DEFAULTS | {
        "d_model": config.hidden_size,
        "d_intermediate": getattr(config, "intermediate_size", None) or 0 if layer == "Mamba3" else 0,
        "n_layer": config.num_hidden_layers,
        "vocab_size": config.vocab_size,
        "ssm_cfg": {"layer": layer} | changed,
        "residual_in_fp32": config.residual_in_fp32,
        # the largest power of 2 that needs no further padding
        "pad_vocab_size_multiple": config.vocab_size & -config.vocab_size,
        "tie_embeddings": bool(config.tie_word_embeddings),
    }


MAMBA_SSM = Format(
    name="mamba-ssm",
    title="mamba-ssm, the library of the Mamba authors",
    container="torch",
    recognizes=_recognizes,
    to_config=_to_config,
    from_config=_from_config,
    renames=lambda config: same_names(config, {"backbone.embeddings.weight": "backbone.embedding.weight"}),
    writes_tied_head=True,
    fixed=(("decay_activation", "heavy_tail"),),
    tokenizer="EleutherAI/gpt-neox-20b",
)
