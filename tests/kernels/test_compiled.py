"""Our kernels compile for a GPU that is not here, and keep everything in registers (benchmarks/gpu/resources.py)."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_kernels_of_this_package_compile_for_sm_90_and_spill_nothing() -> None:
    command = [sys.executable, str(ROOT / "benchmarks/gpu/resources.py"), "mamba", "--ours"]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    kernels = [line.split("|")[2].strip(" `").rpartition(".")[2] for line in done.stdout.splitlines()[2:]]
    assert kernels == ["_forward", "_backward"]
