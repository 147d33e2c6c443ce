"""What models give whose rows several processes (gloo) share: `python -m tests.models.chunks_in_processes FILE JOBS`.

JOBS is a JSON list of keywords of `run_job` and numbers of processes. FILE gets what it returned, by number of
processes: [rank][job], None where the job does not run on so many.
"""

import gc
import json
import os
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from hf_recurrent_lengthgen.models.state_value import LayerState, map_state

from .families import FAMILIES, Family, build, random_state, random_tokens
from .law import checkpointed as with_checkpointing
from .law import weights_like

PROCESSES = (2, 3, 4)
BY_NAME = {family.name: family for family in FAMILIES}
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.float32}  # bfloat16: autocast
LENGTH = 45
CUTS = {1: [], 2: [30], 3: [9, 33], 4: [16, 17, 44]}
"""Where chunks begin: also chunks of one token, and a last one that is shorter than the convolution."""
PADDED = ["." * 5 + "x" * 40, "x" * 43 + "..", "x" * 8 + "." * 27 + "x" * 10, "." * 45, "x" * 45, "." * 44 + "x"]
SEQUENCES = [
    "0" * 45,
    "0" * 9 + "1" * 36,
    "0" * 5 + "1" * 2 + "2" * 23 + "3" * 15,
    "".join(str(number) for number in range(9) for _ in range(5)),
    "0" * 16 + "1" + "2" * 28,
    "0" * 32 + "1" * 12 + "2",
]
"""Packed rows: sequences that begin with a chunk, within one, and several in one."""


def rows_of(rows: str) -> tuple[Tensor | None, Tensor | None]:
    """Mask (B, T) and numbers of sequences (B, T) for "whole", "padded", "packed" and "packed, padded" rows."""
    mask = torch.tensor([[letter == "x" for letter in word] for word in PADDED]).long()
    numbers = torch.tensor([[int(digit) for digit in word] for word in SEQUENCES])
    return (mask if "padded" in rows else None), (numbers if "packed" in rows else None)


def model_of(name: str, variant: str, dtype: str, checkpointed: bool) -> Any:
    """Of a family, with activation checkpointing if requested."""
    family: Family = BY_NAME[name]
    model = build(family, DTYPES[dtype], **family.variants[variant])
    return with_checkpointing(model) if checkpointed else model


def run_job(
    name: str,
    rows: str,
    dtype: str,
    variant: str = "",
    checkpointed: bool = False,
    sharded: bool = False,
    group: Any = None,
) -> dict[str, Tensor]:
    """Logits, loss, final state and all gradients of a random functional of them, of one chunk or of the whole; the
    weights may be sharded by FSDP2 over the same processes.

    In "broken" rows there is a NaN in the first sequence of the last row, which ends in a later chunk, and in the last
    one of the second row, which begins in a later chunk.
    """
    variant = variant or next(iter(BY_NAME[name].variants))
    size, rank = (1, 0) if group is None else (dist.get_world_size(group), dist.get_rank(group))
    start, stop = list(pairwise([0, *CUTS[size], LENGTH]))[rank]
    chunk = slice(start, stop)
    mask, numbers = rows_of(rows)
    model = model_of(name, variant, dtype, checkpointed)
    embeds = model.get_input_embeddings()(random_tokens(len(PADDED), LENGTH)).detach()
    if "broken" in rows:
        embeds[-1, 3] = embeds[1, 40] = torch.nan
    sharded = sharded and group is not None
    if sharded:
        mesh = init_device_mesh("cpu", (size,))
        for module in [*model.base_model.layers, model]:
            fully_shard(module, mesh=mesh)
    parameters = dict(model.named_parameters())
    inputs = embeds[:, chunk].clone().requires_grad_()
    state = map_state(lambda part: part.detach().clone().requires_grad_(), random_state(model, len(PADDED)))
    targets = random_tokens(len(PADDED), LENGTH, seed=7)
    shown = torch.ones(len(PADDED), LENGTH, dtype=torch.bool) if mask is None else mask.bool()
    targets = targets.masked_fill(~shown, -100)
    arguments: dict[str, Any] = {} if group is None else {"sequence_group": group}
    if mask is not None:
        arguments["attention_mask"] = mask[:, chunk]
    if numbers is not None:
        arguments["seq_idx"] = numbers[:, chunk]
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16"):
        output = model(
            inputs_embeds=inputs,
            initial_state=state,
            shift_labels=targets[:, chunk],
            num_items_in_batch=int((targets != -100).sum()),
            **arguments,
        )
    logits = output.logits * shown[:, chunk, None]
    objective = (
        output.loss + (logits * weights_like(embeds.new_zeros(*shown.shape, logits.shape[2]), 0)[:, chunk]).sum()
    )
    found = {"logits": logits, "loss": output.loss[None]}
    for index, layer in enumerate(output.final_state):
        for part_name, part in zip(LayerState._fields, layer, strict=True):
            found[f"final {part_name} {index}"] = part
            if rank == size - 1:
                objective = objective + (part * weights_like(part, 10 + index)).sum()
    leaves = {"inputs": inputs} | parameters
    for index, layer in enumerate(state):
        leaves |= {f"initial {part_name} {index}": x for part_name, x in zip(LayerState._fields, layer, strict=True)}
    objective.backward()
    gradients = {key: leaf.grad for key, leaf in leaves.items() if leaf.grad is not None}
    if sharded:  # the mean over processes, of which one reports
        whole = {key: grad.full_tensor() * size for key, grad in gradients.items() if isinstance(grad, DTensor)}
        gradients = {key: grad for key, grad in gradients.items() if key not in whole} | (whole if rank == 0 else {})
    found |= {f"gradient of {key}": grad for key, grad in gradients.items()}
    return {key: value.detach().clone() for key, value in found.items()}


def run_process(rank: int, size: int, folder: Path, jobs: list[Any]) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store{size}", rank=rank, world_size=size)
    found = [run_job(**job, group=dist.group.WORLD) if size == own else None for job, own in jobs]
    torch.save(found, folder / f"{size}_{rank}.pt")
    dist.destroy_process_group()


def main() -> None:
    """Run jobs, each in its number of processes."""
    file, jobs = sys.argv[1], json.loads(sys.argv[2])
    torch.set_num_threads(1)
    gc.freeze()
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        for size in PROCESSES:
            children = []
            for rank in range(size):
                child = os.fork()
                if not child:
                    run_process(rank, size, Path(folder), jobs)
                    os._exit(0)
                children.append(child)
            codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
            if any(codes):
                sys.exit(f"{size} processes ended with {codes}")
            results[size] = [torch.load(f"{folder}/{size}_{rank}.pt") for rank in range(size)]
    torch.save(results, file)


if __name__ == "__main__":
    main()
