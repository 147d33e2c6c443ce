"""DDP and FSDP2 (`fully_shard` on every layer and the model) in two processes (gloo), with states.

Rows are read whole, in chunks and in windows.
"""

import subprocess
import sys
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_recurrent_lengthgen.models.state_value import map_state
from tests.trainers import chunks_in_processes

pytestmark = pytest.mark.slow
WAYS = ["whole", "chunks", "without logits", "windows"]


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, dict[str, Tensor]]]:
    """For each kind and way to read the sequence, the gradients in two processes."""
    file = tmp_path_factory.mktemp("fsdp") / "gradients"
    kinds = (
        "ddp",
        "fsdp",
        "fsdp_checkpointed",
        "fsdp_bfloat16",
        "ddp_hybrid",
        "fsdp_hybrid",
        "fsdp_checkpointed_hybrid",
    )
    command = [sys.executable, str(chunks_in_processes.__file__), str(file), *kinds]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    gradients: Any = torch.load(file)
    return gradients


@cache
def in_one_process(hybrid: bool = False) -> dict[str, dict[str, Tensor]]:
    """The same gradients in one process, with plain calls of the model."""
    model, inputs = chunks_in_processes.model_and_inputs(hybrid=hybrid)
    initial_state = map_state(lambda part: part.detach().clone().requires_grad_(), inputs["initial_state"])
    inputs["initial_state"] = initial_state
    loss, state = chunks_in_processes.loop(model, inputs, chunks_in_processes.CHUNK_LENGTH)
    whole = chunks_in_processes.gradients(model, loss, state, initial_state)
    return {
        "whole": whole,
        "chunks": whole,
        "without logits": whole,
        "windows": chunks_in_processes.in_windows(model, inputs),
    }


@pytest.mark.parametrize(
    ("kind", "way"),
    [("ddp", "chunks"), ("ddp", "without logits"), *product(["fsdp", "fsdp_checkpointed"], WAYS)],
)
@pytest.mark.parametrize("hybrid", [False, True], ids=["family", "hybrid"])
def test_a_wrapped_model_has_the_gradients_of_one_process(
    sharded: dict[str, dict[str, dict[str, Tensor]]], kind: str, way: str, hybrid: bool
) -> None:
    expected, kind = in_one_process(hybrid)[way], kind + "_hybrid" * hybrid
    assert any("k_proj" in name for name in expected) if hybrid else len(expected) == (21 if way == "windows" else 25)
    in_float32 = hybrid or way == "without logits"  # norms there, the loss here
    close = {"rtol": 1e-5, "atol": 1e-7} if in_float32 else {"rtol": 1e-9, "atol": 1e-9}
    torch.testing.assert_close(sharded[kind][way], expected, **close)


@pytest.mark.parametrize("way", WAYS)
def test_weights_in_bfloat16_leave_the_states_in_full_precision(
    sharded: dict[str, dict[str, dict[str, Tensor]]], way: str
) -> None:
    # Were the states rounded, too, the model would refuse them.
    for name, expected in in_one_process()[way].items():
        error = (sharded["fsdp_bfloat16"][way][name] - expected).norm() / expected.norm()
        assert error < 0.15, (name, error)
