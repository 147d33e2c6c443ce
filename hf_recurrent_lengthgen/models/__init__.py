"""Models, scans and the state value; these files travel inside checkpoints.

Importing this package makes our model types known to the Auto classes of Transformers.
"""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from .configuration_stateful_mamba2 import StatefulMamba2Config
from .modeling_stateful_mamba2 import StatefulMamba2ForCausalLM, StatefulMamba2Model

AutoConfig.register(StatefulMamba2Config.model_type, StatefulMamba2Config)
AutoModel.register(StatefulMamba2Config, StatefulMamba2Model)
AutoModelForCausalLM.register(StatefulMamba2Config, StatefulMamba2ForCausalLM)
