"""Training under torch.compile: what a step of each family gains, and what compiling takes.

    OMP_NUM_THREADS=1 python benchmarks/compiled_training.py [FAMILY ...] [--rounds 5] [--layers 2]

Two layers of width 512, two rows of 512 tokens, vocabulary of 8,192, float32, forward and backward: as it is, compiled
as a whole (`torch_compile=True` in a Trainer) and layer by layer (the same with accelerate's regional compilation);
beside it Transformers' Mamba-2. Seconds are of the processor, of this process and the compilers it starts, so that
other work on the machine changes ratios little. Nothing of an earlier compilation is used.
"""

import argparse
import copy
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # in this process, whose children are counted

import torch
from accelerate.utils import compile_regions
from measure import times_of_turns
from torch import nn
from torch._dynamo.utils import counters
from transformers import Mamba2Config, Mamba2ForCausalLM
from transformers.utils import logging

from hf_recurrent_lengthgen.models import FAMILIES

ROWS, LENGTH = 2, 512
SIZES = {"vocab_size": 8192, "hidden_size": 512, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
MAMBA2 = {"num_heads": 16, "head_dim": 64, "state_size": 128, "n_groups": 1}
HEADS: dict[str, dict[str, Any]] = {"mamba2": MAMBA2, "mamba3": {"num_heads": 16, "head_dim": 64}}
COLUMNS = ("eager (ms)", "whole", "layers", "whole (s)", "layers (s)", "graphs", "graphs")


def model_of(family: str, layers: int) -> nn.Module:
    """A model for training; "stock" is Transformers' Mamba-2."""
    torch.manual_seed(0)
    sizes = {**SIZES, "num_hidden_layers": layers}
    if family == "stock":
        return Mamba2ForCausalLM(Mamba2Config(**sizes, **MAMBA2)).train()
    made = FAMILIES[f"stateful_{family}"]
    return made(made.config_class(**sizes, **HEADS.get(family, {}))).train()


def seconds() -> float:
    """Of the processor: this process, and the compilers that it waited for."""
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system


def step(model: nn.Module) -> Callable[[], None]:
    """Forward and backward of one batch."""
    tokens = torch.randint(3, SIZES["vocab_size"], (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))

    def run() -> None:
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()

    return run


def measured(family: str, layers: int, rounds: int) -> list[str]:
    """The columns of a family."""
    torch._dynamo.reset()  # torch makes at most 8 graphs of one function
    model = model_of(family, layers)
    runs, compiling, graphs = {"eager": step(model)}, [], []
    runs["eager"]()
    for name, compile_it in (("whole", torch.compile), ("layers", compile_regions)):
        counters.clear()
        runs[name] = step(compile_it(copy.deepcopy(model)))
        began = seconds()
        runs[name]()
        compiling.append(f"{seconds() - began:.0f}")
        graphs.append(str(counters["stats"]["unique_graphs"] + len(counters["graph_break"])))
    times = times_of_turns(rounds, runs, time.process_time)
    gains = []
    for name in ("whole", "layers"):
        ratios = [a / b for a, b in zip(times["eager"], times[name], strict=True)]
        gains.append(f"{statistics.median(ratios):.2f}x ({min(ratios):.2f} to {max(ratios):.2f})")
    return [f"{1000 * statistics.median(times['eager']):,.0f}", *gains, *compiling, *graphs]


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [name.removeprefix("stateful_") for name in FAMILIES]
    parser.add_argument("families", nargs="*", metavar="FAMILY", help=f"of {', '.join(names)}, stock (default: all)")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=2, help="(default: %(default)s)")
    options = parser.parse_args()
    if unknown := set(options.families) - {*names, "stock"}:
        parser.error(f"unknown families {sorted(unknown)}")
    logging.set_verbosity_error()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, load {os.getloadavg()[0]:.1f}\n")
    form = "{:18}{:>11}{:>23}{:>23}{:>11}{:>12}{:>8}{:>8}"
    print(form.format("", *COLUMNS))
    for family in options.families or (*names, "stock"):
        print(form.format(family, *measured(family, options.layers, options.rounds)), flush=True)


if __name__ == "__main__":
    main()
