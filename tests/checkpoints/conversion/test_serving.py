"""The server of Transformers loads what `export` writes, and hybrids, but no checkpoint of this package."""

from pathlib import Path
from typing import Any

import pytest
import torch

from hf_recurrent_lengthgen import load_model
from hf_recurrent_lengthgen.checkpoints.conversion.export import export_checkpoint
from hf_recurrent_lengthgen.data import byte_tokenizer
from hf_recurrent_lengthgen.models import StatefulMamba2Config, StatefulMamba2ForCausalLM
from tests.hybrids.tiny_models import tiny_model

SIZES = {"vocab_size": 384, "hidden_size": 8, "num_heads": 2, "head_dim": 8, "state_size": 4, "n_groups": 1}
SPECIAL = {"pad_token_id": 0, "eos_token_id": 1}
GREEDY = {"max_new_tokens": 6, "do_sample": False}


def saved(model: Any, folder: Path) -> Path:
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def answer_of_server(checkpoint: Path) -> list[int]:
    """The tokens that the server generates for a question, loaded and called as its handlers do."""
    from transformers.cli.serving.model_manager import ModelManager

    manager = ModelManager(force_model=str(checkpoint), device="cpu")
    try:
        model, tokenizer = manager.load_model_and_processor(manager.process_model_name(str(checkpoint)))
        return answer_of(model, tokenizer)
    finally:
        manager.shutdown()


def answer_of(model: Any, tokenizer: Any) -> list[int]:
    inputs = tokenizer("what?", return_tensors="pt")
    assert inputs.input_ids[0, -1] == tokenizer.eos_token_id  # what the server adds with this tokenizer
    return list(model.generate(**inputs, **GREEDY)[0, inputs.input_ids.shape[1] :].tolist())


def test_the_server_answers_for_an_exported_checkpoint(tmp_path: Path) -> None:
    torch.manual_seed(0)
    own = saved(
        StatefulMamba2ForCausalLM(StatefulMamba2Config(**SIZES, **SPECIAL, num_hidden_layers=2)), tmp_path / "a"
    )
    with pytest.raises(AttributeError, match="transformers has no attribute StatefulMamba2ForCausalLM"):
        answer_of_server(own)
    exported = export_checkpoint(str(own), tmp_path / "exported", "transformers")
    assert answer_of_server(exported) == answer_of(load_model(str(own)).eval(), byte_tokenizer())


def test_the_server_answers_for_a_hybrid(tmp_path: Path) -> None:
    folder = saved(tiny_model("falcon_h1", vocab_size=384, **SPECIAL), tmp_path / "hybrid")
    assert answer_of_server(folder) == answer_of(load_model(str(folder)).eval(), byte_tokenizer())
