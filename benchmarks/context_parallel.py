"""One sequence shared by processes (gloo): memory of each, bytes sent, and what the maps and their gather cost.

    OMP_NUM_THREADS=1 python benchmarks/context_parallel.py              # all families, a table
    OMP_NUM_THREADS=1 python benchmarks/context_parallel.py --families mamba2 --length 16384
    python benchmarks/context_parallel.py --model           # when the gathers matter on GPUs: a calculation

Two layers at the dimensions of a model of 130 million parameters, small vocabulary, float32, one row, forward and
backward. "Memory" is the growth of the peak of a process of its own over that of one token, against the whole row on
one process. "Compute" is the processor seconds of all processes without those of gathers, against the whole row: what
is above 1 is the cost of the maps. "Sent" is counted at the collectives, by layer and process, and compared with the
formula of `bytes_per_layer`.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from typing import Any

import torch
import torch.distributed as dist

from hf_recurrent_lengthgen.models import FAMILIES

PROCESSES = 4
SHARED = {"hidden_size": 768, "num_hidden_layers": 2, "vocab_size": 256, "tie_word_embeddings": True}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
MODELS: dict[str, dict[str, Any]] = {
    "mamba2": {"num_heads": 24, "head_dim": 64, "state_size": 128, "n_groups": 1},
    "mamba": {"state_size": 16},
    "gla": {"num_heads": 4},
    "rwkv6": {"num_heads": 12, "expand_k": 1.0, "expand_v": 1.0},
    "gated_deltanet": {"num_heads": 6, "head_dim": 128, "expand_v": 1.0},
    "rwkv7": {"head_dim": 64},
}


def model_of(family: str) -> Any:
    """With random weights."""
    torch.manual_seed(0)
    made: Any = FAMILIES[f"stateful_{family}"]
    return made(made.config_class(**SHARED, **SPECIAL, **MODELS[family])).train()


def bytes_per_layer(family: str, processes: int) -> int:
    """What a process sends in the forward pass of a layer with one row, to each of the others:

    the state that its piece wrote, the factor of the state before it and whether the sequence ended, the last inputs
    of convolutions or token shifts, and how many of these are real. In the backward pass it sends as much.
    """
    shape = model_of(family).state_shapes()[0]
    recurrent, conv = torch.Size(shape.recurrent), torch.Size(shape.conv)
    factor = {
        "mamba2": recurrent[0],
        "mamba": recurrent.numel(),
        "gla": recurrent[0] * recurrent[-1],
        "rwkv6": recurrent[0] * recurrent[-1],
    }.get(family, recurrent[0] * recurrent[-1] ** 2)
    history = 0 if conv.numel() == 0 else conv.numel() + (2 if family.startswith("rwkv") else 1)
    return 4 * (processes - 1) * (recurrent.numel() + factor + 1 + history)


LARGE = {  # parameters of a layer, and its state with the factor, in numbers
    "Mamba-2 130M": (130e6 / 24, 24 * (64 * 128 + 1)),
    "Mamba-2 1.3B": (1.3e9 / 48, 64 * (64 * 128 + 1)),
    "GLA 1.3B": (1.3e9 / 24, 4 * (512 * 256 + 256)),
    "Gated DeltaNet 1.3B": (1.3e9 / 24, 6 * (512 * 256 + 256 * 256)),
    "RWKV-7 2.9B": (2.9e9 / 32, 40 * (64 * 64 + 64 * 64)),
    "Mamba-2 7B": (7e9 / 64, 128 * (64 * 128 + 1)),
}
RATE, INSIDE, BETWEEN = 4e14, 450e9, 50e9
"""Of an H100: FLOP/s in bf16 at 40 % of its peak, bytes/s to others in its machine (NVLink) and in other machines
(400 Gbit/s each)."""


def model_table(processes: int = 8) -> str:
    """Share of the forward pass of a layer that its gather takes: bytes received over bandwidth, FLOP over rate."""
    tokens = (65_536, 262_144, 1_048_576)
    head = ["", "received per layer (MiB)", *(f"{count // 1024}k tokens" for count in tokens)]
    lines = [head, ["---"] * len(head)]
    for name, (parameters, numbers) in LARGE.items():
        received = 4 * numbers * (processes - 1)
        shares = []
        for count in tokens:
            compute = 2 * parameters * count / processes / RATE
            shares.append(" / ".join(f"{received / speed / compute:.1%}" for speed in (INSIDE, BETWEEN)))
        lines.append([name, f"{received / 2**20:.1f}", *shares])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def training_pass(family: str, length: int, group: Any = None) -> dict[str, float]:
    """Growth of the peak (MiB), processor seconds, seconds in gathers and bytes sent, of this process."""
    from torch.distributed import _functional_collectives as collectives

    model, waited, sent = model_of(family), [0.0], [0]
    size, rank = (1, 0) if group is None else (dist.get_world_size(group), dist.get_rank(group))
    ids = torch.arange(length)[None] % 251
    first, last = (length * place // size for place in (rank, rank + 1))
    given: dict[str, Any] = {} if group is None else {"sequence_group": group}

    def step(tokens: torch.Tensor) -> None:
        output = model(input_ids=tokens, shift_labels=tokens, num_items_in_batch=length, use_cache=False, **given)
        output.loss.backward()

    gather = collectives.all_gather_single_autograd

    def counted(x: torch.Tensor, *arguments: Any) -> torch.Tensor:
        sent[0] += x.nbytes * (size - 1)
        began = time.process_time()
        gathered = collectives.wait_tensor(gather(x, *arguments))
        waited[0] += time.process_time() - began
        return gathered

    collectives.all_gather_single_autograd = counted
    step(ids[:, first : first + 1])
    before, waited[0], sent[0] = peak_mib(), 0.0, 0
    model.zero_grad(set_to_none=True)
    began = time.process_time()
    step(ids[:, first:last])
    seconds = time.process_time() - began
    layers = model.config.num_hidden_layers
    return {"mib": peak_mib() - before, "seconds": seconds, "waited": waited[0], "sent": sent[0] / layers}


def run_process(family: str, length: int, rank: int, size: int, store: str) -> None:
    torch.set_num_threads(1)
    group = None
    if size > 1:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
        group = dist.group.WORLD
    print(json.dumps(training_pass(family, length, group)), flush=True)
    if size > 1:
        dist.destroy_process_group()


def measured(family: str, length: int, size: int) -> list[dict[str, float]]:
    """By process."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            __file__,
            "--families",
            family,
            "--length",
            str(length),
            "--store",
            f"{folder}/store",
        ]
        running = [
            subprocess.Popen([*command, "--rank", f"{rank}/{size}"], stdout=subprocess.PIPE, text=True)
            for rank in range(size)
        ]
        return [json.loads(process.communicate()[0].splitlines()[-1]) for process in running]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", choices=MODELS, default=list(MODELS), help="which (all)")
    parser.add_argument("--length", type=int, default=8192, help="tokens of the row (%(default)s)")
    parser.add_argument("--model", action="store_true", help="a calculation for GPUs in place of measurements")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.model:
        print(model_table())
        return
    if options.rank:
        rank, size = map(int, options.rank.split("/"))
        run_process(options.families[0], options.length, rank, size, options.store)
        return
    os.environ["OMP_NUM_THREADS"] = "1"
    form = "{:16} {:>12} {:>12} {:>8} {:>9} {:>12} {:>12}"
    print(form.format("family", "one (MiB)", "most (MiB)", "memory", "compute", "sent (MiB)", "formula"))
    for family in options.families:
        (one,) = measured(family, options.length, 1)
        pieces = measured(family, options.length, PROCESSES)
        most = max(piece["mib"] for piece in pieces)
        compute = sum(piece["seconds"] - piece["waited"] for piece in pieces) / one["seconds"]
        sent, formula = pieces[0]["sent"] / 2**20, bytes_per_layer(family, PROCESSES) / 2**20
        cells = f"{one['mib']:,.0f}", f"{most:,.0f}", f"{most / one['mib']:.2f}x", f"{compute:.2f}x"
        print(form.format(family, *cells, f"{sent:.2f}", f"{formula:.2f}"), flush=True)


if __name__ == "__main__":
    main()
