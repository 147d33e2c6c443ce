"""Rows that 2, 3 and 4 processes share give exactly what one process gives: outputs, states and all gradients."""

import json
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from .chunks_in_processes import PROCESSES, run_job
from .families import FAMILIES, SHELL_FAMILIES

Job = tuple[str, str, str, bool]
NAMES = [family.name for family in FAMILIES]
# float64 loses nothing but the order of sums; float32 and bfloat16 lose digits on one process, too
TOLERANCES = {"float64": 1e-12, "float32": 1e-5, "bfloat16": 0.05}
JOBS: list[Job] = [
    *((name, rows, "float64", False) for name in NAMES for rows in ("whole", "packed, padded")),
    *((family.name, "padded", "float64", False) for family in SHELL_FAMILIES),  # packed ones: VARIANTS
    *((name, "packed, padded", "float64", True) for name in NAMES),
    *((name, "packed, padded", dtype, False) for name in NAMES for dtype in ("float32", "bfloat16")),
]
BROKEN: list[Job] = [(name, "packed, broken", "float64", False) for name in NAMES]
VARIANTS = [(family.name, variant) for family in FAMILIES for variant in family.variants]
SHARDED = [
    {"name": name, "rows": "packed, padded", "dtype": "float64", "sharded": True}
    for name in ("mamba2", "gla", "rwkv7")
]

Results = dict[str, list[dict[str, Tensor]]]


def settings(job: Job) -> dict[str, Any]:
    return dict(zip(("name", "rows", "dtype", "checkpointed"), job, strict=True))


def of_variant(name: str, variant: str) -> dict[str, Any]:
    return {"name": name, "rows": "packed", "dtype": "float64", "variant": variant}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """By job, its number of processes, which jobs take in turn, and what each process got."""
    jobs, file = (
        [*map(settings, JOBS + BROKEN), *(of_variant(*job) for job in VARIANTS), *SHARDED],
        tmp_path_factory.mktemp("chunks") / "results",
    )
    sizes = [PROCESSES[i % len(PROCESSES)] for i in range(len(jobs))]
    arguments = json.dumps([*zip(jobs, sizes, strict=True)])
    command = [sys.executable, "-m", "tests.models.chunks_in_processes", str(file), arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    results = torch.load(file)
    return {str(job): [each[i] for each in results[n]] for i, (job, n) in enumerate(zip(jobs, sizes, strict=True))}


def errors(chunks: list[dict[str, Tensor]], whole: dict[str, Tensor]) -> dict[str, float]:
    """By result, the largest error relative to the largest entry; losses and gradients of weights are sums."""
    found = {}
    for key, expected in whole.items():
        parts = [chunk[key] for chunk in chunks if key in chunk]
        if not expected.numel():
            continue
        if key in ("logits", "gradient of inputs"):
            value = torch.cat(parts, 1)
        elif key.startswith("final"):
            value = parts[0]
            assert all(torch.equal(part, value) for part in parts), f"{key} differs between processes"
        else:
            value = torch.stack(parts).sum(0)
        scale = expected.abs().max().clamp(min=1e-30)
        found[key] = float((value - expected).abs().max() / scale)
    return found


def check(chunks: list[dict[str, Tensor]], whole: dict[str, Tensor], tolerance: float) -> None:
    limits = {"loss": max(tolerance, 1e-6)}  # Transformers computes losses in float32
    wrong = {key: error for key, error in errors(chunks, whole).items() if not error <= limits.get(key, tolerance)}
    assert not wrong, (len(chunks), wrong)


@pytest.mark.slow
@pytest.mark.parametrize("job", JOBS, ids=str)
def test_processes_that_share_rows_give_what_one_gives(job: Job, found: Results) -> None:
    check(found[str(settings(job))], run_job(**settings(job)), TOLERANCES[job[2]])


@pytest.mark.slow
@pytest.mark.parametrize("job", BROKEN, ids=str)
def test_a_broken_sequence_breaks_no_other(job: Job, found: Results) -> None:
    whole, chunks = run_job(**settings(job)), found[str(settings(job))]
    for key in ("final recurrent 0", "final recurrent 1"):
        assert bool(whole[key][-1].isfinite().all())
        torch.testing.assert_close(chunks[0][key][-1], whole[key][-1], rtol=0, atol=1e-9)
    for key in ("logits", "gradient of inputs"):
        value = torch.cat([chunk[key] for chunk in chunks], 1)
        for row, others in ((-1, slice(32, None)), (1, slice(0, 9))):
            assert bool(whole[key][row, others].isfinite().all())
            torch.testing.assert_close(value[row, others], whole[key][row, others], rtol=0, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("job", VARIANTS, ids=str)
def test_every_variant_shares_rows(job: tuple[str, str], found: Results) -> None:
    check(found[str(of_variant(*job))], run_job(**of_variant(*job)), 1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("job", SHARDED, ids=str)
def test_the_processes_that_share_rows_may_also_share_weights(job: dict[str, Any], found: Results) -> None:
    check(found[str(job)], run_job(**job), 1e-12)
