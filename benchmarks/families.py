"""Speed and memory of the other families: one Mamba-1 layer, and the scans of GLA and RWKV-6."""

import statistics
import time
from collections.abc import Callable

import torch
from measure import in_own_process, peak_mib, saved_bytes, take_turns
from torch import Tensor
from transformers import MambaConfig
from transformers.models.mamba.modeling_mamba import MambaMixer

from hf_recurrent_lengthgen import LayerState
from hf_recurrent_lengthgen.models import StatefulMambaConfig
from hf_recurrent_lengthgen.models.modeling_stateful_mamba import StatefulMambaMixer
from hf_recurrent_lengthgen.models.scan_gla import scan_gla
from hf_recurrent_lengthgen.models.scan_rwkv6 import scan_rwkv6
from tests.models.scan_definitions import scan_gla_reference, scan_rwkv6_reference

LENGTH = 2048
MAMBA1_LENGTHS = (2048, 16384)


def mamba1_layer(name: str) -> tuple[Callable[[int], Tensor], list[Tensor]]:
    """The loss of one layer at the dimensions of Mamba 130m as a function of the length, and its parameters."""
    torch.manual_seed(0)
    if name == "theirs":
        theirs = MambaMixer(MambaConfig(num_hidden_layers=1), layer_idx=0).train()
        return lambda length: theirs(torch.randn(1, length, 768, requires_grad=True)).sum(), list(theirs.parameters())
    ours = StatefulMambaMixer(StatefulMambaConfig(num_hidden_layers=1), 0)
    ours.init_weights()
    zero = LayerState(torch.zeros(1, 1536, 16), torch.zeros(1, 1536, 3))

    def loss(length: int) -> Tensor:
        y, state = ours(torch.randn(1, length, 768, requires_grad=True), zero)
        return y.sum() + state.recurrent.sum()

    return loss, list(ours.parameters())


def bench_mamba1(rounds: int) -> dict[str, float]:
    """One Mamba-1 layer, forward and backward, B 1, D 768, 1536 channels, N 16, float32 (theirs once, in minutes)."""
    (ours, parameters), (theirs, _) = mamba1_layer("ours"), mamba1_layer("theirs")

    def seconds(loss: Callable[[int], Tensor], length: int) -> float:
        began = time.perf_counter()
        loss(length).backward()
        return time.perf_counter() - began

    seconds(ours, 64), seconds(theirs, 64)
    times: dict[int, list[float]] = {length: [] for length in MAMBA1_LENGTHS}
    for index in range(rounds):
        for length in MAMBA1_LENGTHS:
            times[length].append(seconds(ours, length))
        if index == rounds // 2:
            their_seconds = seconds(theirs, LENGTH)
    speed = {length: length / statistics.median(values) for length, values in times.items()}
    peak = {name: in_own_process("peak_of_mamba1", name)["peak_mib"] for name in ("none", "ours")}
    saved = saved_bytes(lambda: ours(LENGTH), parameters) / 2**20
    return {f"ours_tokens_per_second_at_{length}": value for length, value in speed.items()} | {
        "theirs_tokens_per_second": LENGTH / their_seconds,
        "speed_ratio": speed[LENGTH] * their_seconds / LENGTH,
        "long_to_short_ratio": speed[MAMBA1_LENGTHS[1]] / speed[MAMBA1_LENGTHS[0]],
        "saved_mib": saved,
        "peak_growth_mib": peak["ours"] - peak["none"],
        "peak_to_saved_ratio": (peak["ours"] - peak["none"]) / saved,
    }


def peak_of_mamba1(name: str) -> dict[str, float]:
    """Peak memory of a process that makes the layer, runs it on 64 tokens and, unless "none", on all."""
    loss, _ = mamba1_layer("ours")
    loss(64).backward()
    if name != "none":
        loss(LENGTH).backward()
    return {"peak_mib": peak_mib()}


def scan_pass(scan: str, length: int = LENGTH) -> tuple[Callable[[], Tensor], list[Tensor]]:
    """The functional of a scan with 4 heads, N 128, P 256, and its inputs; its names are below."""
    torch.manual_seed(0)
    q, k = torch.randn(1, length, 4, 128) / 11, torch.randn(1, length, 4, 128)
    v, state, u = torch.randn(1, length, 4, 256), torch.randn(1, 4, 256, 128), torch.randn(4, 128)
    g = torch.nn.functional.logsigmoid(torch.randn(1, length, 4, 128)) / 16
    inputs = [q, k, v, g, *([u] if "rwkv6" in scan else []), state]
    for tensor in inputs:
        tensor.requires_grad_()
    function = {
        "gla": scan_gla,
        "gla loop": scan_gla_reference,
        "rwkv6": scan_rwkv6,
        "rwkv6 loop": scan_rwkv6_reference,
    }[scan]

    def loss() -> Tensor:
        y, final = function(*inputs)
        return y.sum() + final.sum()

    return loss, inputs


def bench_scan_of(family: str, rounds: int) -> dict[str, float]:
    """A chunked scan against the loop over time in torch."""
    (ours, inputs), (theirs, their_inputs) = scan_pass(family), scan_pass(f"{family} loop")
    seconds, ratio = take_turns(
        min(rounds, 3), {"ours": lambda: ours().backward(), "theirs": lambda: theirs().backward()}
    )
    saved = {"ours": saved_bytes(ours, inputs), "theirs": saved_bytes(theirs, their_inputs)}
    calls = {"none": f"{family} none", "ours": family, "theirs": f"{family} loop"}
    peak = {name: in_own_process("peak_of_scan", call)["peak_mib"] for name, call in calls.items()}
    return {f"{name}_tokens_per_second": LENGTH / value for name, value in seconds.items()} | {
        "speed_ratio": ratio,
        "ours_saved_mib": saved["ours"] / 2**20,
        "theirs_saved_mib": saved["theirs"] / 2**20,
        "saved_ratio": saved["ours"] / saved["theirs"],
        "ours_peak_growth_mib": peak["ours"] - peak["none"],
        "theirs_peak_growth_mib": peak["theirs"] - peak["none"],
        "peak_growth_ratio": (peak["ours"] - peak["none"]) / (peak["theirs"] - peak["none"]),
    }


def bench_gla(rounds: int) -> dict[str, float]:
    """The scan of GLA, forward and backward, B 1, T 2048, 4 heads, N 128, P 256, against a loop over time in torch."""
    return bench_scan_of("gla", rounds)


def bench_rwkv6(rounds: int) -> dict[str, float]:
    """The scan of RWKV-6, forward and backward, at the same sizes, against a loop over time in torch."""
    return bench_scan_of("rwkv6", rounds)


def peak_of_scan(scan: str) -> dict[str, float]:
    """Peak memory of a process that makes the inputs and, unless the name ends in "none", runs both directions."""
    loss, _ = scan_pass(scan.removesuffix(" none"))
    small, _ = scan_pass(scan.removesuffix(" none"), 64)
    small().backward()
    if not scan.endswith("none"):
        loss().backward()
    return {"peak_mib": peak_mib()}
