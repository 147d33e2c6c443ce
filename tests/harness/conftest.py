"""Models for lm_eval: one of random weights, and one whose predictions are known."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lm_eval.tasks import TaskManager
from transformers import Mamba2Config, Mamba2ForCausalLM

from hf_recurrent_lengthgen.data import byte_tokenizer
from hf_recurrent_lengthgen.harness import TASKS, StateLM
from hf_recurrent_lengthgen.models import StatefulMamba2Config, StatefulMamba2ForCausalLM

VOCABULARY = 384
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_heads": 4,
    "head_dim": 8,
    "state_size": 8,
    "n_groups": 1,
    "num_hidden_layers": 2,
    "chunk_size": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 1,
}
PEAK = 300.0
"""Logit of the token that the counting model expects; that of one d ids away is PEAK cos(2 pi d / V)."""


@pytest.fixture(scope="session")
def stock() -> Mamba2ForCausalLM:
    """Transformers' Mamba-2 with random weights, large enough that predictions depend on the text."""
    torch.manual_seed(0)
    model = Mamba2ForCausalLM(Mamba2Config(**SIZES)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
    return model


@pytest.fixture(scope="session")
def checkpoint(stock: Mamba2ForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The stock model with the byte tokenizer."""
    folder = tmp_path_factory.mktemp("stock") / "checkpoint"
    stock.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def counting() -> StateLM:
    """A model that expects the next id: after "a" comes "b"; its log-probabilities are those of `log_probability`."""
    sizes = SIZES | {"hidden_size": 16, "num_hidden_layers": 1, "tie_word_embeddings": False}
    model = StatefulMamba2ForCausalLM(StatefulMamba2Config(**sizes, layer_norm_epsilon=1e-12)).eval()
    angles = torch.arange(VOCABULARY) * 2 * math.pi / VOCABULARY
    circle = torch.zeros(VOCABULARY, 16)
    circle[:, 0], circle[:, 1] = angles.cos(), angles.sin()
    with torch.no_grad():
        for parameter in model.backbone.layers.parameters():
            parameter.zero_()
        model.backbone.embeddings.weight.copy_(circle)
        model.backbone.norm_f.weight.fill_(1)
        # the norm gives the 16 numbers of a token a length of 4
        model.lm_head.weight.copy_(circle.roll(1, 0) * PEAK / 4)
    return StateLM(model, tokenizer=byte_tokenizer(), batch_size=2)


def log_probability(text: str, before: str = "") -> float:
    """Of a text after another, or after the end of text, under the counting model, from its definition."""
    ids = np.array([*([] if before else [1]), *(byte + 3 for byte in (before + text).encode())])
    scored = len(text.encode())
    logits = PEAK * np.cos(2 * np.pi * (np.diff(ids)[-scored:] - 1) / VOCABULARY)
    normalizer = np.log(np.exp(PEAK * (np.cos(2 * np.pi * np.arange(VOCABULARY) / VOCABULARY) - 1)).sum()) + PEAK
    return float((logits - normalizer).sum())


@pytest.fixture
def known() -> Callable[..., float]:
    """`log_probability`."""
    return log_probability


@pytest.fixture(scope="session")
def task_manager() -> Callable[..., TaskManager]:
    """A manager of our tasks and some of lm_eval's: to index all of its 13,000 files takes half a minute."""
    theirs = Path(__import__("lm_eval").__file__).parent / "tasks"
    names = ["arc", "commonsense_qa", "glue", "hellaswag", "longbench", "piqa", "siqa", "super_glue", "winogrande"]

    def manager(**metadata: Any) -> TaskManager:
        paths = [*(theirs / name for name in names), TASKS]
        return TaskManager(include_path=paths, include_defaults=False, metadata=metadata)

    return manager


@pytest.fixture(autouse=True)
def quick_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """lm_eval runs pip and others for its record of the environment, which takes seconds."""
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)
