"""What `lengthgen evaluate` reads, in passes: the time of the stream and all windows against the stream alone."""

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from trainer_steps import SMALL, WIDE
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3NextConfig, Qwen3NextForCausalLM

from hf_recurrent_lengthgen.evaluation.streaming import stream_nll
from hf_recurrent_lengthgen.hybrids import stateful
from hf_recurrent_lengthgen.metrics.context_harm.windows import window_nll
from hf_recurrent_lengthgen.models import StatefulMamba2Config, StatefulMamba2ForCausalLM

MIDDLE: dict[str, Any] = {"vocab_size": 256, "hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8}


def hybrid() -> nn.Module:
    """Four layers of Qwen3-Next at a width of 512, the last with attention, wrapped."""
    delta: dict[str, Any] = {"linear_num_key_heads": 4, "linear_num_value_heads": 8}
    experts: dict[str, Any] = {"num_experts": 0, "mlp_only_layers": [0, 1, 2, 3]}
    config = Qwen3NextConfig(**MIDDLE, **delta, **experts, num_hidden_layers=4, num_key_value_heads=2, head_dim=64)
    return stateful(Qwen3NextForCausalLM(config))


def llama() -> nn.Module:
    return LlamaForCausalLM(LlamaConfig(**MIDDLE, num_hidden_layers=4, max_position_embeddings=8192))


def mamba2(sizes: dict[str, Any]) -> nn.Module:
    return StatefulMamba2ForCausalLM(StatefulMamba2Config(**sizes))


MODELS: dict[str, tuple[Callable[[], nn.Module], int, tuple[int, int]]] = {
    "small": (partial(mamba2, SMALL), 128, (8, 4097)),
    "wide": (partial(mamba2, WIDE), 256, (2, 2049)),
    "wide_50k": (partial(mamba2, WIDE | {"vocab_size": 50_288}), 256, (2, 1025)),
    "hybrid": (hybrid, 256, (2, 2049)),
    "llama": (llama, 256, (2, 2049)),
}
"""Model, training length, and texts: a row of each has 32, 8 or 4 training lengths."""


def bench_reading(rounds: int) -> dict[str, float]:
    """The whole stream and all windows of T, as an evaluation reads them: processor seconds, and in passes."""
    result: dict[str, float] = {}
    for name, (make, training_length, shape) in MODELS.items():
        torch.manual_seed(0)
        model = make().eval()
        tokens = np.random.default_rng(0).integers(0, 251, shape)
        reads: dict[str, Callable[[], object]] = {
            "stream": partial(stream_nll, model, tokens, progress=False),
            "windows": partial(window_nll, model, tokens, training_length, progress=False),
        }
        seconds: dict[str, list[float]] = {part: [] for part in reads}
        for _ in range(rounds):
            for part, read in reads.items():
                began = time.process_time()
                read()
                seconds[part].append(time.process_time() - began)
        stream, windows = (np.array(times) for times in seconds.values())
        result |= {
            f"{name}_stream_cpu_seconds": statistics.median(stream),
            f"{name}_windows_cpu_seconds": statistics.median(windows),
            f"{name}_passes": statistics.median((stream + windows) / stream),
        }
    return result
