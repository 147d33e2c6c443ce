"""Speed and memory against Transformers' own CPU path, as ratios within one run.

    python benchmarks/run.py [NAME ...] [--rounds 7]    the names are those of BENCHMARKS; without one, all

guard.py beside it measures the most important ratios in minutes, and says which of them fell.

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
from decoding import bench_decode, bench_steps
from effective_remembrance import bench_remembrance, peak_of_remembrance
from families import bench_gla, bench_mamba1, bench_rwkv6, peak_of_mamba1, peak_of_scan
from forgetting import bench_window, peak_of_window
from hybrid_rows import bench_hybrid_rows, steps_on_rows
from hybrids import bench_compiled_delta, bench_delta, bench_hybrid
from long_examples import bench_long_examples, peak_of_examples
from mamba2 import bench_model, bench_scan, peak_of_pass
from measure import in_own_process, peak_mib
from memory import bench_memory, make_checkpoint, peak_of_deep, peak_of_use
from reading import bench_reading
from retrieval import bench_retrieval
from states import bench_states, peak_of_states
from statex import bench_statex
from trainer_steps import SMALL, bench_checkpoints, bench_trainer

from hf_recurrent_lengthgen.evaluation.streaming import stream_nll
from hf_recurrent_lengthgen.models import StatefulMamba2Config, StatefulMamba2ForCausalLM


def bench_stream(rounds: int) -> dict[str, float]:
    """One stream of 1,048,576 tokens against one of 65,536: peak memory and speed."""
    runs: dict[str, list[dict[str, float]]] = {"65536": [], "1048576": []}
    for _ in range(min(rounds, 3)):
        for length, measured in runs.items():
            measured.append(in_own_process("stream_of", length))
    middle = {
        length: {key: statistics.median(run[key] for run in measured) for key in measured[0]}
        for length, measured in runs.items()
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
    """Evaluate one random stream with a model of width 96."""
    torch.manual_seed(0)
    model = StatefulMamba2ForCausalLM(StatefulMamba2Config(**SMALL))
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
    "compiled_delta": bench_compiled_delta,
    "hybrid": bench_hybrid,
    "hybrid_rows": bench_hybrid_rows,
    "trainer": bench_trainer,
    "checkpoints": bench_checkpoints,
    "alignment": bench_alignment,
    "chunked_backprop": bench_chunked_backprop,
    "long_examples": bench_long_examples,
    "decode": bench_decode,
    "steps": bench_steps,
    "statex": bench_statex,
    "stream": bench_stream,
    "reading": bench_reading,
    "states": bench_states,
    "memory": bench_memory,
    "window": bench_window,
    "retrieval": bench_retrieval,
    "remembrance": bench_remembrance,
}
CALLS = {
    "peak_of_pass": peak_of_pass,
    "peak_of_remembrance": peak_of_remembrance,
    "peak_of_states": peak_of_states,
    "steps_on_rows": steps_on_rows,
    "stream_of": stream_of,
    "make_checkpoint": make_checkpoint,
    "peak_of_use": peak_of_use,
    "peak_of_deep": peak_of_deep,
    "peak_of_alignment": peak_of_alignment,
    "peak_of_chunks": peak_of_chunks,
    "peak_of_examples": peak_of_examples,
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
