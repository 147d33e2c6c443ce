"""Checkpoints of Transformers' own Mamba, Mamba-2 and FalconMamba, whose names and config fields are ours."""

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hf_recurrent_lengthgen.checkpoints.conversion.formats import OUR_FIELDS, Format, Settings, same_names
from hf_recurrent_lengthgen.checkpoints.tensor_files import Meta
from hf_recurrent_lengthgen.models import STATEFUL_CLASSES

OF_SERVERS = ("intermediate_size", "rms_norm")
"""Entries of a Mamba-2 that Transformers does not write; SGLang needs both, and mlx-lm the first."""


def _recognizes(settings: Settings | None, metas: Mapping[str, Meta]) -> bool:
    kinds = [name for name, model in STATEFUL_CLASSES.items() if model.config_class.layouts[:1] == ("transformers",)]
    return settings is not None and settings.get("model_type") in kinds


def _to_config(settings: Settings | None, metas: Mapping[str, Meta]) -> PreTrainedConfig:
    assert settings is not None
    if settings["model_type"] == "mamba2":
        settings = {name: value for name, value in settings.items() if name not in OF_SERVERS}
    return STATEFUL_CLASSES[settings["model_type"]].config_class.from_dict(settings)


def _from_config(config: Any) -> Settings:
    model_type = config.model_type.removeprefix("stateful_")
    if getattr(config, "mixer_rms_eps", None) is not None:
        model_type = "falcon_mamba"
    settings = {name: value for name, value in config.to_diff_dict().items() if name not in OUR_FIELDS}
    if model_type == "mamba":
        settings.pop("mixer_rms_eps", None)
    if model_type == "mamba2":
        settings |= zip(OF_SERVERS, (config.num_heads * config.head_dim, True), strict=True)
    settings["rescale_prenorm_residual"] = False  # of initialization; Transformers 5 rescales loaded weights, too
    architecture = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]
    return settings | {"model_type": model_type, "architectures": [architecture]}


TRANSFORMERS = Format(
    name="transformers",
    title="the Mamba, Mamba-2 and FalconMamba of Transformers",
    container="safetensors",
    recognizes=_recognizes,
    to_config=_to_config,
    from_config=_from_config,
    renames=same_names,
    keeps_config=False,
)
