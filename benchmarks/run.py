"""Speed and memory against Transformers' own CPU path, as ratios within one run.

    python benchmarks/run.py [NAME ...] [--rounds 7]    the names are those of BENCHMARKS; without one, all

Competitors take turns and a ratio is the median over rounds of the ratios, so that a busy machine slows both.
Memory is measured in processes of their own. README.md in this folder records figures.
"""

import argparse
import json
import os
import platform
import statistics
import time

import numpy as np
import torch
from alignment import bench_alignment, peak_of_alignment
from chunked_backprop import bench_chunked_backprop, peak_of_chunks
from decoding import bench_decode
from effective_remembrance import bench_remembrance, peak_of_remembrance
from families import bench_gla, bench_mamba1, bench_rwkv6, peak_of_mamba1, peak_of_scan
from forgetting import bench_window, peak_of_window
from hybrids import bench_delta, bench_hybrid
from measure import in_own_process, peak_mib, saved_bytes, take_turns
from retrieval import bench_retrieval
from states import bench_states, peak_of_states
from statex import bench_statex
from torch import nn
from trainer_steps import DEMO, LENGTH, WIDE, bench_trainer
from transformers import Mamba2Config, Mamba2ForCausalLM
from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan

from hf_recurrent_lengthgen.evaluation.streaming import stream_nll
from hf_recurrent_lengthgen.models import StatefulMamba2Config, StatefulMamba2ForCausalLM
from hf_recurrent_lengthgen.models.scan_ssd import scan_ssd


def bench_scan(rounds: int) -> dict[str, float]:
    """The scan alone, forward and backward, B 1, T 2048, 24 heads of 64, N 128, float32."""
    torch.manual_seed(0)
    x, B, C = torch.randn(1, LENGTH, 24, 64), torch.randn(1, LENGTH, 1, 128), torch.randn(1, LENGTH, 1, 128)
    dt, A, D, state = torch.rand(1, LENGTH, 24) * 0.1, -torch.rand(24), torch.randn(24), torch.randn(1, 24, 64, 128)
    for tensor in (x, dt, A, B, C, D, state):
        tensor.requires_grad_()

    def ours() -> None:
        y, final = scan_ssd(x, dt, A, B, C, D, state)
        (y.sum() + final.sum()).backward()

    def theirs() -> None:
        y, final = mamba2_chunk_scan(x, dt, A, B, C, 256, D=D, initial_states=state, return_final_states=True)
        (y.sum() + final.sum()).backward()

    seconds, ratio = take_turns(rounds, {"ours": ours, "theirs": theirs})
    return {f"{name}_tokens_per_second": LENGTH / value for name, value in seconds.items()} | {"speed_ratio": ratio}


def two_layers(name: str) -> nn.Module:
    """The two-layer model, ours or Transformers'."""
    torch.manual_seed(0)
    if name == "ours":
        return StatefulMamba2ForCausalLM(StatefulMamba2Config(**WIDE)).train()
    return Mamba2ForCausalLM(Mamba2Config(**WIDE)).train()


def training_pass(model: nn.Module) -> None:
    """Forward and backward of one sequence."""
    ids = torch.arange(LENGTH)[None] % 251
    model.zero_grad()
    model(input_ids=ids, labels=ids).loss.backward()


def bench_model(rounds: int) -> dict[str, float]:
    """A whole two-layer model at the dimensions of Mamba-2 130m, and where its time goes."""
    ours, theirs = two_layers("ours"), two_layers("theirs")
    mixer = ours.backbone.layers[0].mixer  # type: ignore[union-attr, index]
    hidden, inner = torch.randn(LENGTH, 768, requires_grad=True), torch.randn(LENGTH, 1536, requires_grad=True)

    def projections() -> None:
        for _ in range(2):
            mixer.in_proj(hidden).sum().backward()
            mixer.out_proj(inner).sum().backward()

    square = torch.randn(2048, 2048)

    def matmul() -> None:
        torch.mm(square, square)

    seconds, ratio = take_turns(
        rounds,
        {
            "ours": lambda: training_pass(ours),
            "theirs": lambda: training_pass(theirs),
            "projections": projections,
            "matmul": matmul,
        },
    )
    ids = torch.arange(LENGTH)[None] % 251
    saved = {
        name: saved_bytes(lambda model=model: model(input_ids=ids, labels=ids).loss, model.parameters())
        for name, model in (("ours", ours), ("theirs", theirs))
    }
    peak = {name: in_own_process("peak_of_pass", name)["peak_mib"] for name in ("none", "ours", "theirs")}
    return {
        "ours_tokens_per_second": LENGTH / seconds["ours"],
        "theirs_tokens_per_second": LENGTH / seconds["theirs"],
        "speed_ratio": ratio,
        "projections_alone_tokens_per_second": LENGTH / seconds["projections"],
        "matmul_gflops": 2 * 2048**3 / seconds["matmul"] / 1e9,
        "ours_saved_mib": saved["ours"] / 2**20,
        "theirs_saved_mib": saved["theirs"] / 2**20,
        "saved_ratio": saved["ours"] / saved["theirs"],
        "ours_peak_growth_mib": peak["ours"] - peak["none"],
        "theirs_peak_growth_mib": peak["theirs"] - peak["none"],
        "peak_growth_ratio": (peak["ours"] - peak["none"]) / (peak["theirs"] - peak["none"]),
    }


def peak_of_pass(name: str) -> dict[str, float]:
    """Peak memory of a process that makes the model and, unless `name` is "none", one training pass."""
    model = two_layers("ours" if name == "none" else name)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    if name != "none":
        ids = torch.arange(LENGTH)[None] % 251
        model(input_ids=ids, labels=ids).loss.backward()
    return {"peak_mib": peak_mib()}


def bench_stream(rounds: int) -> dict[str, float]:
    """One stream of 1,048,576 tokens against one of 65,536: peak memory and speed."""
    runs: dict[str, list[dict[str, float]]] = {"65536": [], "1048576": []}
    for _ in range(min(rounds, 3)):
        for length, found in runs.items():
            found.append(in_own_process("stream_of", length))
    middle = {
        length: {key: statistics.median(run[key] for run in found) for key in found[0]}
        for length, found in runs.items()
    }
    short, long = middle["65536"], middle["1048576"]
    return {
        "short_peak_mib": short["peak_mib"],
        "long_peak_mib": long["peak_mib"],
        "peak_ratio": long["peak_mib"] / short["peak_mib"],
        "short_tokens_per_second": short["tokens_per_second"],
        "long_tokens_per_second": long["tokens_per_second"],
        "speed_ratio": long["tokens_per_second"] / short["tokens_per_second"],
    }


def stream_of(length: str) -> dict[str, float]:
    """Evaluate one random stream with the demo's model."""
    torch.manual_seed(0)
    model = StatefulMamba2ForCausalLM(StatefulMamba2Config(**DEMO))
    tokens = np.random.default_rng(0).integers(0, 256, (1, int(length) + 1), dtype=np.uint8)
    stream_nll(model, tokens[:, :16385], progress=False)  # warm-up
    began = time.perf_counter()
    nll = stream_nll(model, tokens, progress=False).nll
    seconds = time.perf_counter() - began
    assert nll.shape == (1, int(length))
    return {"peak_mib": peak_mib(), "tokens_per_second": int(length) / seconds}


BENCHMARKS = {
    "scan": bench_scan,
    "model": bench_model,
    "mamba1": bench_mamba1,
    "gla": bench_gla,
    "rwkv6": bench_rwkv6,
    "delta": bench_delta,
    "hybrid": bench_hybrid,
    "trainer": bench_trainer,
    "alignment": bench_alignment,
    "chunked_backprop": bench_chunked_backprop,
    "decode": bench_decode,
    "statex": bench_statex,
    "stream": bench_stream,
    "states": bench_states,
    "window": bench_window,
    "retrieval": bench_retrieval,
    "remembrance": bench_remembrance,
}
CALLS = {
    "peak_of_pass": peak_of_pass,
    "peak_of_remembrance": peak_of_remembrance,
    "peak_of_states": peak_of_states,
    "stream_of": stream_of,
    "peak_of_alignment": peak_of_alignment,
    "peak_of_chunks": peak_of_chunks,
    "peak_of_mamba1": peak_of_mamba1,
    "peak_of_scan": peak_of_scan,
    "peak_of_window": peak_of_window,
}


def main() -> None:
    """Run the chosen benchmarks and print their figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"which of {', '.join(BENCHMARKS)} (default: all)")
    parser.add_argument("--rounds", type=int, default=7, help="turns of each competitor (default: %(default)s)")
    parser.add_argument("--call", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if unknown := set(options.names) - set(BENCHMARKS):
        parser.error(f"unknown benchmarks {sorted(unknown)}, choose from {', '.join(BENCHMARKS)}")
    if options.call:
        print(json.dumps(CALLS[options.call[0]](options.call[1])))
        return
    print(
        f"torch {torch.__version__}, {torch.get_num_threads()} threads, {platform.processor() or platform.machine()}"
    )
    print(f"load average before: {os.getloadavg()[0]:.1f}")
    for name in options.names or BENCHMARKS:
        print(f"\n{name}: {(BENCHMARKS[name].__doc__ or '').splitlines()[0]}")
        for key, value in BENCHMARKS[name](options.rounds).items():
            print(f"  {key:36} {value:12,.3f}", flush=True)


if __name__ == "__main__":
    main()
