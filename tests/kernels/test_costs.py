"""What mixers launch and keep for the backward pass, beside mamba-ssm's own (benchmarks/gpu/costs.py)."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def costs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    file = tmp_path_factory.mktemp("costs") / "costs.json"
    command = [sys.executable, str(ROOT / "benchmarks/gpu/costs.py"), "mamba", "mamba2", "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(file.read_text())
    return found


@pytest.mark.parametrize("what", ["Mamba-1 mixer", "Mamba-1 block", "Mamba-2 mixer", "Mamba-2 block"])
def test_at_most_a_tenth_more_is_kept_than_mamba_ssm_keeps(what: str, costs: dict[str, Any]) -> None:
    """Though states are passed and returned, with gradients; for a row their own bytes are kept."""
    ours, theirs = (costs[f"{what}, {who}"] for who in ("ours", "mamba-ssm"))
    assert ours["bytes_per_token"] <= 1.1 * theirs["bytes_per_token"]
    state = {"Mamba-1": 4 * 1536 * (16 + 3), "Mamba-2": 4 * (24 * 64 * 128 + 3 * (1536 + 2 * 128))}[what[:7]]
    assert ours["bytes_per_row"] <= 1.1 * state + theirs["bytes_per_row"]


def test_a_layer_of_mamba2_launches_few_kernels_more_than_that_of_mamba_ssm(costs: dict[str, Any]) -> None:
    """What is more has to do with the states."""
    for direction, more in (("forward", 5), ("backward", 3)):
        ours, theirs = (sum(costs[f"Mamba-2 block, {who}"][direction].values()) for who in ("ours", "mamba-ssm"))
        assert 0 < theirs <= ours <= theirs + more, direction
