"""The config of another layout from ours, if that layout can hold the same architecture."""

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from transformers import CONFIG_MAPPING

from hf_recurrent_lengthgen.checkpoints.conversion.formats import (
    SOURCE_CONFIG,
    Format,
    Settings,
    plain,
    told_settings,
    with_settings,
)
from hf_recurrent_lengthgen.checkpoints.conversion.registry import FORMATS
from hf_recurrent_lengthgen.checkpoints.tensor_files import Meta
from hf_recurrent_lengthgen.models.scan_forgetting import Forgetting
from hf_recurrent_lengthgen.models.state_learned import recorded

NOT_ARCHITECTURE = {
    *("_attn_implementation", "_name_or_path", "architectures", "auto_map", "code_format_version", "dtype"),
    *("expanded_layers", "interventions", "model_type", "scan_backend", "torch_dtype", "training_length"),
    "transformers_version",
    # of initialization
    *("initialization", "initializer_range", "rescale_prenorm_residual", "time_step_floor", "time_step_init_scheme"),
    *("time_step_max", "time_step_min", "time_step_scale"),
    # of generation
    *("bos_token_id", "eos_token_id", "pad_token_id", "use_cache"),
    # of implementations that give the same
    *("attn_mode", "chunk_size", "fuse_cross_entropy", "fuse_linear_cross_entropy", "fuse_swiglu"),
    *("max_position_embeddings", "rescale_every", "use_associative_scan", "use_mambapy"),
    "use_l2warp",  # of training
}
"""Entries of our config that do not affect predictions."""

WITHOUT_EFFECT = {"stateful_mamba2": {"time_step_rank"}, "stateful_rwkv7": {"fuse_norm"}}
"""Of some families: Mamba-2 has no such rank, and RWKV-7 the same norms either way."""

UNIFORM_FIELDS = {"layer_state_sizes": "state_size", "layer_num_heads": "num_heads"}
"""Fields with the size of each layer, and the field with the size of all layers."""

SLIDING = {"full_attention": "sliding_attention", "hybrid": "hybrid_sliding"}
"""Kinds of attention layers of Transformers that see all keys, and those that see `sliding_window`."""


def with_sliding_window(settings: Settings, where: str) -> Settings:
    """The config of a hybrid whose `attention_window` its class in Transformers keeps, too, as `sliding_window`: both
    count the token itself.

    LFM3, Lara and Zaya have it for attention layers of a kind of their own. In LFM3 and Zaya the kinds differ in their
    entry of `rope_parameters` alone, so all layers can become of that kind.

    Raises:
        ValueError: if the class would compute something else, and for learned states.
    """
    config: Any = CONFIG_MAPPING[settings["model_type"]].from_dict(settings)
    _refuse_learned(config)
    config = config.get_text_config(decoder=True)  # that of a model with images is refused
    types = () if "text_config" in settings else getattr(config, "layer_types", None) or ()
    window, kinds = config.attention_window, {*types}
    if type(window) is not int or window < 1:
        raise ValueError(f"attention_window of {where} must be a number of tokens of at least 1, got {window!r}.")
    full, sliding = kinds & SLIDING.keys(), kinds & {*SLIDING.values()}
    changed: Settings = {}
    if config.model_type in ("lfm3", "zaya") and full and not sliding:
        ropes = {SLIDING[kind]: config.rope_parameters[kind] for kind in full}
        changed = {"layer_types": [SLIDING.get(kind, kind) for kind in config.layer_types], "sliding_window": window}
        changed["rope_parameters"] = config.rope_parameters | ropes
    elif sliding and not full:
        changed = {"sliding_window": min(config.sliding_window, window)}
    if window == 1 or not changed:
        known = {"minimax": "masks other keys when it generates from its cache, if sliding_window is set"}
        why = known.get(config.model_type, "attends to all keys in some of its layers")
        raise ValueError(
            f"attention_window {window} of {where} would be lost: in Transformers alone, {config.model_type} "
            f"{'keeps all keys in its cache for a window of 1' if changed else why}. Load it with load_model, or save "
            'it without the window first, load_model(MODEL, attention_window="none").save_pretrained(FOLDER).'
        )
    return {name: value for name, value in settings.items() if name != "attention_window"} | changed


def uniform(config: Any) -> Any:
    """The config with one size for all layers, if the sizes of the layers are equal."""
    config = deepcopy(config)
    for each, common in UNIFORM_FIELDS.items():
        sizes = getattr(config, each, None)
        if sizes is None:
            continue
        if len(set(sizes)) > 1:
            raise ValueError(
                f"{each} differs between the layers ({list(sizes)}), which no other layout can hold: publish the "
                "model as a checkpoint of this package."
            )
        if config.model_type == "stateful_rwkv5":
            config.head_size = config.inner_size // sizes[0]
        else:
            _merge_head_dims(config, sizes[0])
            setattr(config, common, sizes[0])
        setattr(config, each, None)
    return config


def _merge_head_dims(config: Any, heads: int) -> None:
    """Set `head_dim` where it goes with the number of heads of `layer_num_heads`."""
    if config.model_type == "stateful_rwkv7":
        config.head_dim = config.hidden_size // heads
    elif config.model_type == "stateful_gated_deltanet":
        config.head_dim = config.num_heads * config.head_dim // heads
    elif config.model_type == "stateful_kda":
        raise ValueError(
            f"layer_num_heads is {config.layer_num_heads}, and gates keep the rank {config.gate_rank}, which no other "
            "layout can hold: publish the model as a checkpoint of this package."
        )


def exported_config(format: Format, config: Any, metas: Mapping[str, Meta]) -> Settings | None:
    """The config of a layout: that of the source of the conversion, with all later changes.

    `metas` are the tensors to be written, by their names in the layout. Raises a `ValueError` for an architecture that
    the layout cannot hold, naming each difference.
    """
    settings = format.from_config(uniform(config))
    kept = getattr(config, SOURCE_CONFIG, None) or {}
    same = kept.get("format") == format.name
    if settings is not None and same:
        before = format.from_config(format.config_of(kept["config"], metas)) or {}
        changed = {name: value for name, value in settings.items() if name not in before or before[name] != value}
        settings = {**kept["config"], **changed}
    if settings is not None and "model_type" in settings:
        named = settings.get("dtype") or settings.get("torch_dtype") or not same  # if it had none, it keeps none
        if named and config.dtype is not None:
            name = "torch_dtype" if "torch_dtype" in settings else "dtype"
            settings[name] = str(config.dtype).removeprefix("torch.")
    again = format.config_of(settings, metas)
    if settings is None and same:
        again = with_settings(again, told_settings(config))  # as little said there as in the source
    _check_same(format, uniform(config), again)
    return settings


def check_exportable(format: Format, config: Any) -> None:
    """Raise a `ValueError` for settings that no other layout has, with what to do."""
    if config.model_type not in format.families:
        possible = [other.name for other in FORMATS.values() if config.model_type in other.families]
        raise ValueError(
            f"{format.title} cannot hold a model of type {config.model_type}: its formats are {', '.join(possible)}."
        )
    if Forgetting.of(config) != Forgetting():
        raise ValueError(
            f"This model forgets (forgetting: {config.forgetting}), which no other layout can hold: export the "
            "checkpoint it was made from."
        )
    _refuse_learned(config)
    uniform(config)
    if getattr(config, "attention_layers", None):
        raise ValueError(
            f"The layers {config.attention_layers} (attention_layers) of this model are attention, which "
            f"{format.title} cannot hold: publish it as a checkpoint of this package."
        )


def _refuse_learned(config: Any) -> None:
    if names := recorded(config)["names"]:
        raise ValueError(
            f"This model has the learned states {names}, which no other layout can hold: delete them first "
            "(model.learned_states.delete_adapter), or publish it as a checkpoint of this package."
        )


def _check_same(format: Format, config: Any, again: Any) -> None:
    """Raise a `ValueError` if the config changes on the way there and back."""
    ignored = NOT_ARCHITECTURE | {"forgetting", "learned_states", SOURCE_CONFIG, *format.from_shapes}
    ignored |= WITHOUT_EFFECT.get(config.model_type, set())
    names = [name for name in type(config)().to_dict() if name not in ignored]
    different = [
        f"{name} {getattr(config, name, None)!r} (there {getattr(again, name, None)!r})"
        for name in names
        if plain(getattr(config, name, None)) != plain(getattr(again, name, None))
    ]
    if different:
        raise ValueError(
            f"{format.title} cannot hold this model, which differs in {', '.join(different)}: publish it as a "
            "checkpoint of this package."
        )
