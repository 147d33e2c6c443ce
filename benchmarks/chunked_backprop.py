"""Memory and time of one long sequence in chunks, against a sequence of one chunk and against the whole at once."""

import statistics
import time
from contextlib import nullcontext

import torch
from measure import in_own_process, peak_mib

from hf_recurrent_lengthgen.models import StatefulMamba2Config, StatefulMamba2ForCausalLM
from hf_recurrent_lengthgen.trainers.chunked_backprop import forward_in_chunks

CHUNK_LENGTH, CHUNKS = 512, 8
LENGTHS = {"none": 0, "chunk": CHUNK_LENGTH, "chunks": CHUNKS * CHUNK_LENGTH, "whole": CHUNKS * CHUNK_LENGTH}


def four_layers() -> StatefulMamba2ForCausalLM:
    """The dimensions of Mamba-2 130m in four layers, with gradients, which Trainer has from the second step on."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 768, "num_heads": 24, "head_dim": 64, "state_size": 128, "n_groups": 1}
    special = {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
    config = StatefulMamba2Config(**sizes, **special, num_hidden_layers=4, vocab_size=4096)
    model = StatefulMamba2ForCausalLM(config).train()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return model


def training_pass(model: StatefulMamba2ForCausalLM, name: str) -> None:
    """Forward and backward of one row: "chunk" has one chunk, "chunks" and "whole" have eight, in turn or at once."""
    ids = torch.arange(LENGTHS[name])[None] % 4093
    with forward_in_chunks(model, CHUNK_LENGTH) if name == "chunks" else nullcontext():
        loss = model(input_ids=ids, labels=ids).loss
    loss.backward()


def bench_chunked_backprop(rounds: int) -> dict[str, float]:
    """8 chunks of 512 tokens with exact gradients, against 1 chunk and against 4096 tokens at once."""
    model = four_layers()
    seconds: dict[str, list[float]] = {"chunk": [], "chunks": [], "whole": []}
    for _ in range(rounds + 1):
        for name, rounds_of_one in seconds.items():
            began = time.perf_counter()
            training_pass(model, name)
            rounds_of_one.append(time.perf_counter() - began)

    def time_ratio(name: str, other: str) -> float:
        return statistics.median(a / b for a, b in zip(seconds[name][1:], seconds[other][1:], strict=True))

    peak = {name: in_own_process("peak_of_chunks", name)["peak_mib"] for name in LENGTHS}
    growth = {name: value - peak["none"] for name, value in peak.items()}
    state_mib = sum(part.nbytes for layer in model.zero_state(1) for part in layer) / 2**20
    stored_mib = (CHUNKS - 1) * state_mib
    return (
        {f"{name}_seconds": statistics.median(values[1:]) for name, values in seconds.items()}
        | {"time_over_whole": time_ratio("chunks", "whole"), "time_over_one_chunk": time_ratio("chunks", "chunk")}
        | {f"{name}_peak_mib": value for name, value in peak.items()}
        | {
            "stored_states_mib": stored_mib,
            "peak_over_one_chunk": (peak["chunks"] - stored_mib) / peak["chunk"],
            "peak_growth_over_one_chunk": (growth["chunks"] - stored_mib) / growth["chunk"],
            "peak_growth_over_whole": growth["chunks"] / growth["whole"],
        }
    )


def peak_of_chunks(name: str) -> dict[str, float]:
    """Peak memory of a process that makes the model and, unless `name` is "none", one training pass."""
    model = four_layers()
    if name != "none":
        training_pass(model, name)
    return {"peak_mib": peak_mib()}
