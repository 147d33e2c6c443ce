"""Mamba-2: the scan alone, and a whole model at the dimensions of Mamba-2 130m, against Transformers."""

from collections.abc import Callable

import torch
from measure import in_own_process, peak_mib, saved_bytes, take_turns
from torch import Tensor, nn
from trainer_steps import LENGTH, WIDE
from transformers import Mamba2Config, Mamba2ForCausalLM
from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan

from hf_recurrent_lengthgen.models import StatefulMamba2Config, StatefulMamba2ForCausalLM
from hf_recurrent_lengthgen.models.scan_ssd import scan_ssd


def scans() -> tuple[dict[str, Callable[[], Tensor]], list[Tensor]]:
    """The functional of both scans, B 1, T 2048, 24 heads of 64, N 128, and their inputs."""
    torch.manual_seed(0)
    x, B, C = torch.randn(1, LENGTH, 24, 64), torch.randn(1, LENGTH, 1, 128), torch.randn(1, LENGTH, 1, 128)
    dt, A, D, state = torch.rand(1, LENGTH, 24) * 0.1, -torch.rand(24), torch.randn(24), torch.randn(1, 24, 64, 128)
    inputs = [tensor.requires_grad_() for tensor in (x, dt, A, B, C, D, state)]

    def ours() -> Tensor:
        y, final = scan_ssd(x, dt, A, B, C, D, state)
        return y.sum() + final.sum()

    def theirs() -> Tensor:
        y, final = mamba2_chunk_scan(x, dt, A, B, C, 256, D=D, initial_states=state, return_final_states=True)
        return y.sum() + final.sum()

    return {"ours": ours, "theirs": theirs}, inputs


def bench_scan(rounds: int) -> dict[str, float]:
    """The scan alone, forward and backward, B 1, T 2048, 24 heads of 64, N 128, float32."""
    losses, _ = scans()
    seconds, ratio = take_turns(rounds, {name: lambda loss=loss: loss().backward() for name, loss in losses.items()})
    return {f"{name}_tokens_per_second": LENGTH / value for name, value in seconds.items()} | {"speed_ratio": ratio}


def two_layers(name: str) -> nn.Module:
    """The two-layer model, ours or Transformers'."""
    torch.manual_seed(0)
    if name == "ours":
        return StatefulMamba2ForCausalLM(StatefulMamba2Config(**WIDE)).train()
    return Mamba2ForCausalLM(Mamba2Config(**WIDE)).train()


def loss_of(model: nn.Module) -> Tensor:
    """The loss of one sequence."""
    ids = torch.arange(LENGTH)[None] % 251
    loss: Tensor = model(input_ids=ids, labels=ids).loss
    return loss


def training_passes() -> tuple[dict[str, Callable[[], None]], dict[str, nn.Module]]:
    """Forward and backward of one sequence in both models, and of the projections of their mixers alone."""
    models = {name: two_layers(name) for name in ("ours", "theirs")}
    mixer = models["ours"].backbone.layers[0].mixer  # type: ignore[union-attr, index]
    hidden, inner = torch.randn(LENGTH, 768, requires_grad=True), torch.randn(LENGTH, 1536, requires_grad=True)

    def train(model: nn.Module) -> None:
        model.zero_grad()
        loss_of(model).backward()

    def projections() -> None:
        for _ in range(2):
            mixer.in_proj(hidden).sum().backward()
            mixer.out_proj(inner).sum().backward()

    passes = {name: lambda model=model: train(model) for name, model in models.items()}
    return passes | {"projections": projections}, models


def bench_model(rounds: int) -> dict[str, float]:
    """A whole two-layer model at the dimensions of Mamba-2 130m, and where its time goes."""
    passes, models = training_passes()
    square = torch.randn(2048, 2048)

    def matmul() -> None:
        torch.mm(square, square)

    seconds, ratio = take_turns(rounds, passes | {"matmul": matmul})
    saved = {
        name: saved_bytes(lambda model=model: loss_of(model), model.parameters()) for name, model in models.items()
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
        loss_of(model).backward()
    return {"peak_mib": peak_mib()}
