"""What several processes (gloo) measure that read together: `python -m tests.evaluation.reading_in_processes FILE`."""

import os
import sys
import tempfile
from typing import Any

import torch
import torch.distributed as dist

from hf_recurrent_lengthgen.evaluation.json_schema import to_plain
from hf_recurrent_lengthgen.metrics import (
    EvaluationSettings,
    effective_remembrance,
    evaluate_model,
    reading_together,
    stream_nll,
)
from tests.models.families import FAMILIES, build, random_tokens

PROCESSES = 3
LENGTH, TRAINING = 70, 16


def measured() -> dict[str, Any]:
    """Of a model of each of four families; chunks of 23 tokens, of 7 and 8 in each process, and a last one of 1."""
    found: dict[str, Any] = {}
    for family in FAMILIES:
        if family.name not in ("mamba2", "mamba", "rwkv7", "gla"):
            continue
        model = build(family)
        tokens = random_tokens(2, LENGTH + 1).numpy()
        streamed = stream_nll(model, tokens, chunk_length=23, progress=False)
        found[family.name] = [
            torch.from_numpy(streamed.nll),
            *(part for layer in streamed.final_state for part in layer),
        ]
    settings = EvaluationSettings(progress=False)
    results = [
        evaluate_model(model, tokens, TRAINING, settings=settings),
        effective_remembrance(model, tokens, TRAINING, settings, length=48),
    ]
    found["results"] = [torch.tensor(numbers_in(to_plain(result))) for result in results]
    return found


def numbers_in(result: Any) -> list[float]:
    """All numbers of a result."""
    if isinstance(result, dict):
        result = [part for name, part in result.items() if name != "wall_seconds"]
    if isinstance(result, list):
        return [number for part in result for number in numbers_in(part)]
    return [float(result)] if isinstance(result, int | float) else []


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        children = []
        for rank in range(PROCESSES):
            child = os.fork()
            if not child:
                torch.set_num_threads(1)
                dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=PROCESSES)
                with reading_together(dist.group.WORLD):
                    torch.save(measured(), f"{sys.argv[1]}.{rank}")
                os._exit(0)
            children.append(child)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert not any(codes), codes


if __name__ == "__main__":
    main()
