"""The config of another layout from ours, if that layout can hold the same architecture."""

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from hf_recurrent_lengthgen.checkpoints.conversion.formats import (
    SOURCE_CONFIG,
    Format,
    Settings,
    plain,
    user_overrides,
    with_overrides,
)
from hf_recurrent_lengthgen.checkpoints.conversion.registry import FORMATS
from hf_recurrent_lengthgen.checkpoints.tensor_files import Meta
from hf_recurrent_lengthgen.models import FAMILIES
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


def uniform(config: Any) -> Any:
    """The config with one size for all layers in place of equal sizes of the layers."""
    config = deepcopy(config)
    for each, common in UNIFORM_FIELDS.items():
        sizes = getattr(config, each, None)
        if sizes is None:
            continue
        if config.model_type == "stateful_rwkv5":
            config.head_size = config.inner_size // sizes[0]
        else:  # `head_dim` goes with the number of heads in some families
            if config.model_type == "stateful_rwkv7":
                config.head_dim = config.hidden_size // sizes[0]
            elif config.model_type == "stateful_gated_deltanet":
                config.head_dim = config.num_heads * config.head_dim // sizes[0]
            setattr(config, common, sizes[0])
        setattr(config, each, None)
    return config


def exported_config(format: Format, config: Any, metas: Mapping[str, Meta]) -> Settings | None:
    """The config of a layout: that of the source of the conversion, with all later changes.

    `metas` are the tensors to be written, by their names in the layout. Raises a `ValueError` for an architecture that
    the layout cannot hold, naming each difference.
    """
    assert format.from_config is not None  # `check_exportable`
    settings = format.from_config(uniform(config))
    source = getattr(config, SOURCE_CONFIG, None) or {}
    same = source.get("format") == format.name
    if settings is not None and same:
        before = format.from_config(format.config_of(source["config"], metas)) or {}
        changed = {name: value for name, value in settings.items() if name not in before or before[name] != value}
        settings = {**source["config"], **changed}
    if settings is not None and "model_type" in settings:
        had_dtype = settings.get("dtype") or settings.get("torch_dtype") or not same  # without one, none is added
        if had_dtype and config.dtype is not None:
            name = "torch_dtype" if "torch_dtype" in settings else "dtype"
            settings[name] = str(config.dtype).removeprefix("torch.")
    again = format.config_of(settings, metas)
    if settings is None and same:
        again = with_overrides(again, user_overrides(config))  # which the format cannot hold, as in the source
    _check_same(format, uniform(config), again)
    return settings


def check_exportable(format: Format, config: Any) -> None:
    """Raise a `ValueError` for a family or for settings that the layout does not have."""
    if format.from_config is None or config.model_type not in format.families:
        possible = [other.name for other in FORMATS.values() if config.model_type in other.families]
        raise ValueError(
            f"{format.title} cannot hold a model of type {config.model_type}: its formats are {', '.join(possible)}."
        )
    sizes = {each: getattr(config, each, None) for each in UNIFORM_FIELDS}
    head = next(iter(FAMILIES[config.model_type]._tied_weights_keys or ()), "")
    holds_head = any(head in rename.our_names for rename in format.renames(config))
    lost = {
        "forgetting": Forgetting.of(config) != Forgetting() and config.forgetting,
        "learned_states": recorded(config)["names"],
        "attention_layers": getattr(config, "attention_layers", None),
        # the rank of KDA's gates is that of the heads before they were merged
        **{each: of for each, of in sizes.items() if of and (len({*of}) > 1 or config.model_type == "stateful_kda")},
        "tie_word_embeddings": config.tie_word_embeddings and holds_head,
    }
    if values := ", ".join(f"{name} {value}" for name, value in lost.items() if value):
        raise ValueError(
            f"{format.title} cannot hold {values} of this model: publish it as a checkpoint of this package, or "
            "export one without that."
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
