"""Models, scans and the state value; these files travel inside checkpoints.

Importing this package makes our model types known to the Auto classes of Transformers.
"""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from .configuration_stateful_gla import StatefulGLAConfig
from .configuration_stateful_hgrn2 import StatefulHGRN2Config
from .configuration_stateful_linear_attention import StatefulLinearAttentionConfig
from .configuration_stateful_mamba import StatefulMambaConfig
from .configuration_stateful_mamba2 import StatefulMamba2Config
from .configuration_stateful_rwkv5 import StatefulRWKV5Config
from .configuration_stateful_rwkv6 import StatefulRWKV6Config
from .modeling_stateful_gla import StatefulGLAForCausalLM, StatefulGLAModel
from .modeling_stateful_hgrn2 import StatefulHGRN2ForCausalLM, StatefulHGRN2Model
from .modeling_stateful_linear_attention import StatefulLinearAttentionForCausalLM, StatefulLinearAttentionModel
from .modeling_stateful_mamba import StatefulMambaForCausalLM, StatefulMambaModel
from .modeling_stateful_mamba2 import StatefulMamba2ForCausalLM, StatefulMamba2Model
from .modeling_stateful_rwkv5 import StatefulRWKV5ForCausalLM, StatefulRWKV5Model
from .modeling_stateful_rwkv6 import StatefulRWKV6ForCausalLM, StatefulRWKV6Model

for _config, _model, _causal_lm in (
    (StatefulGLAConfig, StatefulGLAModel, StatefulGLAForCausalLM),
    (StatefulHGRN2Config, StatefulHGRN2Model, StatefulHGRN2ForCausalLM),
    (StatefulLinearAttentionConfig, StatefulLinearAttentionModel, StatefulLinearAttentionForCausalLM),
    (StatefulMambaConfig, StatefulMambaModel, StatefulMambaForCausalLM),
    (StatefulMamba2Config, StatefulMamba2Model, StatefulMamba2ForCausalLM),
    (StatefulRWKV5Config, StatefulRWKV5Model, StatefulRWKV5ForCausalLM),
    (StatefulRWKV6Config, StatefulRWKV6Model, StatefulRWKV6ForCausalLM),
):
    AutoConfig.register(_config.model_type, _config)
    AutoModel.register(_config, _model)
    AutoModelForCausalLM.register(_config, _causal_lm)
