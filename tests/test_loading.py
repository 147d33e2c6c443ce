"""Checkpoints of any causal language model, to be evaluated."""

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MambaConfig, MambaForCausalLM, T5Config, T5Model

from hf_recurrent_lengthgen import StatefulMambaForCausalLM
from hf_recurrent_lengthgen.loading import load_language_model, load_model

SIZES = {"vocab_size": 29, "hidden_size": 16, "num_hidden_layers": 1}


def test_models_without_states_load_as_they_are_where_they_may(tmp_path: Path) -> None:
    saved = LlamaForCausalLM(LlamaConfig(**SIZES, intermediate_size=16, num_attention_heads=2))
    saved.save_pretrained(tmp_path)
    model = load_language_model(str(tmp_path))
    assert type(model) is LlamaForCausalLM
    torch.testing.assert_close(model.state_dict(), saved.state_dict())
    with pytest.raises(ValueError, match="of type 'llama', which cannot be given states"):
        load_model(str(tmp_path))


def test_recurrent_models_load_with_states(tmp_path: Path) -> None:
    MambaForCausalLM(MambaConfig(**SIZES)).save_pretrained(tmp_path)
    assert type(load_language_model(str(tmp_path))) is StatefulMambaForCausalLM


def test_other_models_are_refused(tmp_path: Path) -> None:
    T5Model(T5Config(vocab_size=29, d_model=16, num_layers=1, d_kv=8, num_heads=2, d_ff=16)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="of type 't5', which is no causal language model"):
        load_language_model(str(tmp_path))


def test_weights_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    config = LlamaConfig(**SIZES, intermediate_size=16, num_attention_heads=2)
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    config.num_hidden_layers = 2
    config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"do not fit its config\.json, missing: .*layers\.1"):
        load_language_model(str(tmp_path))
