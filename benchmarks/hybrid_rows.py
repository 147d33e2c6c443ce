"""Memory and time of a training step of a hybrid on one long row: at once, with activation checkpointing, in chunks.

All take the states, so that all run the same scans. Falcon-H1 attends in each layer, Qwen3.5 in one of four.
"""

import math
import resource
import statistics
import time
from contextlib import nullcontext
from typing import Any

import torch
from measure import in_own_process, peak_mib
from transformers import FalconH1Config, FalconH1ForCausalLM, Qwen3_5ForCausalLM, Qwen3_5TextConfig
from transformers.utils import logging

from hf_recurrent_lengthgen import stateful
from hf_recurrent_lengthgen.trainers.chunked_backprop import forward_in_chunks

CHUNK_LENGTH, WINDOW = 256, 256
CHUNKS = 1, 4, 16, 64  # of a row
WAYS = "whole", "checkpointed", "chunks", "window"  # the last: in chunks, with an attention_window
LIMIT_MIB = 8 * 1024  # of a process; infinite figures say that it was not enough
SIZES = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
MAMBA = {"mamba_d_ssm": 512, "mamba_n_heads": 8, "mamba_d_head": 64, "mamba_d_state": 64}
DELTA = {"linear_num_key_heads": 8, "linear_num_value_heads": 8, "linear_key_head_dim": 64}
MODELS: dict[str, Any] = {
    "falcon_h1": lambda: FalconH1ForCausalLM(FalconH1Config(**SIZES, **HEADS, **MAMBA)),
    "qwen3_5_text": lambda: Qwen3_5ForCausalLM(Qwen3_5TextConfig(**SIZES, **HEADS, **DELTA, linear_value_head_dim=64)),
}


def bench_hybrid_rows(rounds: int) -> dict[str, float]:
    """Rows of 1 to 64 chunks of 256 tokens, two hybrids of four layers, forward and backward, one thread, sdpa."""
    result = {}
    for name in MODELS:
        measured: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
        for _ in range(min(rounds, 3)):
            for way, runs in measured.items():
                runs.append(in_own_process("steps_on_rows", f"{name} {way}"))
        for chunks in CHUNKS:
            for way, runs in measured.items():
                seconds = f"{chunks}_seconds"
                ratios = [run[seconds] / whole[seconds] for run, whole in zip(runs, measured["whole"], strict=True)]
                result |= {
                    f"{name}_{chunks}_{way}_mib": statistics.median(run[f"{chunks}_mib"] for run in runs),
                    f"{name}_{chunks}_{way}_seconds": statistics.median(run[seconds] for run in runs),
                    f"{name}_{chunks}_{way}_time_over_whole": statistics.median(ratios),
                }
    return result


def steps_on_rows(of: str) -> dict[str, float]:
    """Growth of the peak memory of a process, and processor seconds of a step, on longer and longer rows."""
    name, way = of.split()
    resource.setrlimit(resource.RLIMIT_DATA, (LIMIT_MIB * 2**20,) * 2)
    logging.set_verbosity_error()  # of kernels that a CPU has not
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = stateful(MODELS[name](), WINDOW if way == "window" else None).train()
    if way == "checkpointed":
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    model_alone, result = peak_mib(), {}
    for chunks in (CHUNKS[0], *CHUNKS):  # the first, to warm up
        ids = torch.arange(chunks * CHUNK_LENGTH)[None] * 7 % 509
        began = time.process_time()
        try:
            with forward_in_chunks(model, CHUNK_LENGTH) if way in ("chunks", "window") else nullcontext():
                model(input_ids=ids, labels=ids, output_final_state=True).loss.backward()
        except (MemoryError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and "allocate" not in str(error):
                raise
            result |= {f"{chunks}_mib": math.inf, f"{chunks}_seconds": math.inf}
        else:
            result |= {f"{chunks}_mib": peak_mib() - model_alone, f"{chunks}_seconds": time.process_time() - began}
    return result
