"""Models, scans and the state value; these files travel inside checkpoints.

Importing this package makes our model types known to the Auto classes of Transformers.
"""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

from .configuration_stateful_gla import StatefulGLAConfig
from .configuration_stateful_hgrn2 import StatefulHGRN2Config
from .configuration_stateful_linear_attention import StatefulLinearAttentionConfig
from .configuration_stateful_mamba import StatefulMambaConfig
from .configuration_stateful_mamba2 import StatefulMamba2Config
from .configuration_stateful_rwkv5 import StatefulRWKV5Config
from .configuration_stateful_rwkv6 import StatefulRWKV6Config
from .modeling_stateful_gla import StatefulGLAForCausalLM, StatefulGLAForSequenceClassification, StatefulGLAModel
from .modeling_stateful_hgrn2 import (
    StatefulHGRN2ForCausalLM,
    StatefulHGRN2ForSequenceClassification,
    StatefulHGRN2Model,
)
from .modeling_stateful_linear_attention import (
    StatefulLinearAttentionForCausalLM,
    StatefulLinearAttentionForSequenceClassification,
    StatefulLinearAttentionModel,
)
from .modeling_stateful_mamba import (
    StatefulMambaForCausalLM,
    StatefulMambaForSequenceClassification,
    StatefulMambaModel,
)
from .modeling_stateful_mamba2 import (
    StatefulMamba2ForCausalLM,
    StatefulMamba2ForSequenceClassification,
    StatefulMamba2Model,
)
from .modeling_stateful_rwkv5 import (
    StatefulRWKV5ForCausalLM,
    StatefulRWKV5ForSequenceClassification,
    StatefulRWKV5Model,
)
from .modeling_stateful_rwkv6 import (
    StatefulRWKV6ForCausalLM,
    StatefulRWKV6ForSequenceClassification,
    StatefulRWKV6Model,
)

CAUSAL_LM_CLASSES = (
    StatefulGLAForCausalLM,
    StatefulHGRN2ForCausalLM,
    StatefulLinearAttentionForCausalLM,
    StatefulMambaForCausalLM,
    StatefulMamba2ForCausalLM,
    StatefulRWKV5ForCausalLM,
    StatefulRWKV6ForCausalLM,
)

SEQUENCE_CLASSIFICATION_CLASSES = (
    StatefulGLAForSequenceClassification,
    StatefulHGRN2ForSequenceClassification,
    StatefulLinearAttentionForSequenceClassification,
    StatefulMambaForSequenceClassification,
    StatefulMamba2ForSequenceClassification,
    StatefulRWKV5ForSequenceClassification,
    StatefulRWKV6ForSequenceClassification,
)

# Upstream checkpoints whose parameters our class takes as they are, by the model type in their config.json.
STATEFUL_CLASSES = {upstream: cls for cls in CAUSAL_LM_CLASSES for upstream in cls.config_class.upstream_types}

for _class in CAUSAL_LM_CLASSES:
    AutoConfig.register(_class.config_class.model_type, _class.config_class)
    AutoModel.register(_class.config_class, _class.backbone_class)
    AutoModelForCausalLM.register(_class.config_class, _class)
for _classifier in SEQUENCE_CLASSIFICATION_CLASSES:
    AutoModelForSequenceClassification.register(_classifier.config_class, _classifier)

__all__ = [
    "CAUSAL_LM_CLASSES",
    "SEQUENCE_CLASSIFICATION_CLASSES",
    "STATEFUL_CLASSES",
    "StatefulGLAConfig",
    "StatefulGLAForCausalLM",
    "StatefulGLAForSequenceClassification",
    "StatefulGLAModel",
    "StatefulHGRN2Config",
    "StatefulHGRN2ForCausalLM",
    "StatefulHGRN2ForSequenceClassification",
    "StatefulHGRN2Model",
    "StatefulLinearAttentionConfig",
    "StatefulLinearAttentionForCausalLM",
    "StatefulLinearAttentionForSequenceClassification",
    "StatefulLinearAttentionModel",
    "StatefulMamba2Config",
    "StatefulMamba2ForCausalLM",
    "StatefulMamba2ForSequenceClassification",
    "StatefulMamba2Model",
    "StatefulMambaConfig",
    "StatefulMambaForCausalLM",
    "StatefulMambaForSequenceClassification",
    "StatefulMambaModel",
    "StatefulRWKV5Config",
    "StatefulRWKV5ForCausalLM",
    "StatefulRWKV5ForSequenceClassification",
    "StatefulRWKV5Model",
    "StatefulRWKV6Config",
    "StatefulRWKV6ForCausalLM",
    "StatefulRWKV6ForSequenceClassification",
    "StatefulRWKV6Model",
]
