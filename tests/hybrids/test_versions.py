"""What people with an older Transformers see; runs with every version."""

import pytest
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.cache_utils import Cache

from hf_recurrent_lengthgen.hybrids import stateful


def test_older_transformers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(Cache, "get_recurrent_state", raising=False)
    config = LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    with pytest.raises(ImportError, match=r"needs Transformers 5\.21 or newer"):
        stateful(LlamaForCausalLM(config))
