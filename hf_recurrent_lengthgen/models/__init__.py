"""Models, scans and the state value; these files travel inside checkpoints, so the folder is flat.

The first part of a name says what is in a file:

    configuration_   the fields of a family and their checks; configuration_stateful.py has what all share
    modeling_        a family, from its mixer to its classes; modeling_stateful.py is the backbone of all,
                     modeling_heads.py the language model, modeling_generation.py `generate`
    layers_          what several families put into a layer; layers_mixer.py is the base of all mixers
    scan_            a recurrence over time, or what its scans share; scan_backends.py is the base of all
    rows_            which tokens of a call belong together (rows.py), and how layers and processes get them
    state_           the state as a value (state_value.py), learned, and on disk

A checkpoint carries what its entry file imports. What few models need (`EXTRAS` in configuration_stateful.py) it
carries only if its configuration asks for it. state_on_disk.py, state_learned_files.py, rows_shared.py,
scan_affine.py, layers_known.py, modeling_loss.py and modeling_protocols.py stay in the package. Importing this package
makes our model types known to the Auto classes of Transformers.
"""

from typing import Any

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from .configuration_stateful_delta_net import StatefulDeltaNetConfig
from .configuration_stateful_gated_deltanet import StatefulGatedDeltaNetConfig
from .configuration_stateful_gla import StatefulGLAConfig
from .configuration_stateful_hgrn2 import StatefulHGRN2Config
from .configuration_stateful_kda import StatefulKDAConfig
from .configuration_stateful_linear_attention import StatefulLinearAttentionConfig
from .configuration_stateful_mamba import StatefulMambaConfig
from .configuration_stateful_mamba2 import StatefulMamba2Config
from .configuration_stateful_mamba3 import StatefulMamba3Config
from .configuration_stateful_rwkv5 import StatefulRWKV5Config
from .configuration_stateful_rwkv6 import StatefulRWKV6Config
from .configuration_stateful_rwkv7 import StatefulRWKV7Config
from .modeling_stateful_delta_net import StatefulDeltaNetForCausalLM, StatefulDeltaNetModel
from .modeling_stateful_gated_deltanet import StatefulGatedDeltaNetForCausalLM, StatefulGatedDeltaNetModel
from .modeling_stateful_gla import StatefulGLAForCausalLM, StatefulGLAModel
from .modeling_stateful_hgrn2 import StatefulHGRN2ForCausalLM, StatefulHGRN2Model
from .modeling_stateful_kda import StatefulKDAForCausalLM, StatefulKDAModel
from .modeling_stateful_linear_attention import StatefulLinearAttentionForCausalLM, StatefulLinearAttentionModel
from .modeling_stateful_mamba import StatefulMambaForCausalLM, StatefulMambaModel
from .modeling_stateful_mamba2 import StatefulMamba2ForCausalLM, StatefulMamba2Model
from .modeling_stateful_mamba3 import StatefulMamba3ForCausalLM, StatefulMamba3Model
from .modeling_stateful_rwkv5 import StatefulRWKV5ForCausalLM, StatefulRWKV5Model
from .modeling_stateful_rwkv6 import StatefulRWKV6ForCausalLM, StatefulRWKV6Model
from .modeling_stateful_rwkv7 import StatefulRWKV7ForCausalLM, StatefulRWKV7Model

FAMILIES: dict[str, Any] = {}
"""The language model of each family, by our model type."""
STATEFUL_CLASSES: dict[str, Any] = {}
"""Upstream checkpoints whose parameters our class takes as they are, by the model type in their config.json."""


def register_family(causal_lm_class: Any) -> None:
    """Make a family known to the Auto classes of Transformers, and to the whole package by way of `FAMILIES`.

    Raises:
        ValueError: for a model type that does not begin with "stateful_", or that belongs to another family.
    """
    config_class = causal_lm_class.config_class
    own = config_class.model_type
    if not own.startswith("stateful_"):
        raise ValueError(f"The model_type of a family must begin with 'stateful_', got {own!r}.")
    for known, names in ((FAMILIES, [own]), (STATEFUL_CLASSES, config_class.upstream_types)):
        for other in (known[name] for name in names if name in known):
            if (other.__module__, other.__qualname__) != (causal_lm_class.__module__, causal_lm_class.__qualname__):
                raise ValueError(
                    f"{causal_lm_class.__name__} takes {own} and {list(config_class.upstream_types)}, of which "
                    f"{other.__name__} takes one already: give other model types."
                )
    AutoConfig.register(config_class.model_type, config_class)
    AutoModel.register(config_class, causal_lm_class.backbone_class)
    AutoModelForCausalLM.register(config_class, causal_lm_class)
    FAMILIES[config_class.model_type] = causal_lm_class
    STATEFUL_CLASSES.update(dict.fromkeys(config_class.upstream_types, causal_lm_class))


def family_config(model_type: str | None) -> Any:
    """The configuration class of one of our model types, or of an upstream one that it takes; None for others."""
    family = FAMILIES.get(str(model_type)) or STATEFUL_CLASSES.get(str(model_type))
    return None if family is None else family.config_class


for _class in (
    StatefulDeltaNetForCausalLM,
    StatefulGatedDeltaNetForCausalLM,
    StatefulKDAForCausalLM,
    StatefulGLAForCausalLM,
    StatefulHGRN2ForCausalLM,
    StatefulLinearAttentionForCausalLM,
    StatefulMambaForCausalLM,
    StatefulMamba2ForCausalLM,
    StatefulMamba3ForCausalLM,
    StatefulRWKV5ForCausalLM,
    StatefulRWKV6ForCausalLM,
    StatefulRWKV7ForCausalLM,
):
    register_family(_class)

__all__ = [
    "FAMILIES",
    "STATEFUL_CLASSES",
    "StatefulDeltaNetConfig",
    "StatefulDeltaNetForCausalLM",
    "StatefulDeltaNetModel",
    "StatefulGLAConfig",
    "StatefulGLAForCausalLM",
    "StatefulGLAModel",
    "StatefulGatedDeltaNetConfig",
    "StatefulGatedDeltaNetForCausalLM",
    "StatefulGatedDeltaNetModel",
    "StatefulHGRN2Config",
    "StatefulHGRN2ForCausalLM",
    "StatefulHGRN2Model",
    "StatefulKDAConfig",
    "StatefulKDAForCausalLM",
    "StatefulKDAModel",
    "StatefulLinearAttentionConfig",
    "StatefulLinearAttentionForCausalLM",
    "StatefulLinearAttentionModel",
    "StatefulMamba2Config",
    "StatefulMamba2ForCausalLM",
    "StatefulMamba2Model",
    "StatefulMamba3Config",
    "StatefulMamba3ForCausalLM",
    "StatefulMamba3Model",
    "StatefulMambaConfig",
    "StatefulMambaForCausalLM",
    "StatefulMambaModel",
    "StatefulRWKV5Config",
    "StatefulRWKV5ForCausalLM",
    "StatefulRWKV5Model",
    "StatefulRWKV6Config",
    "StatefulRWKV6ForCausalLM",
    "StatefulRWKV6Model",
    "StatefulRWKV7Config",
    "StatefulRWKV7ForCausalLM",
    "StatefulRWKV7Model",
    "family_config",
    "register_family",
]
