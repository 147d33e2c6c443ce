"""Speed and memory of a sliding-window state: the scan of Mamba-2 over a text with a window against that without."""

import os
from collections.abc import Callable

import torch
from measure import in_own_process, peak_mib, take_turns

from hf_recurrent_lengthgen import Forgetting, forgetting
from hf_recurrent_lengthgen.models import StatefulMamba2Config, StatefulMamba2ForCausalLM
from hf_recurrent_lengthgen.models.scan_forgetting import with_forgetting
from hf_recurrent_lengthgen.models.scan_ssd import scan_ssd
from hf_recurrent_lengthgen.models.state_value import LayerState, WindowedLayerState

LENGTH, WINDOW = 16_384, 4096
LENGTHS = (65_536, 1_048_576)


def passes() -> dict[str, Callable[[], None]]:
    """One pass of Mamba-2 (130 million parameters) with the window, and one without, for `take_turns`."""
    torch.manual_seed(0)
    x, B, C = torch.randn(1, LENGTH, 24, 64), torch.randn(1, LENGTH, 1, 128), torch.randn(1, LENGTH, 1, 128)
    dt, A = torch.rand(1, LENGTH, 24) * 0.1, -torch.rand(24)
    inputs, zero = (x, dt, A, B, C, torch.ones(24)), torch.zeros(1, 24, 64, 128)
    none = zero.new_zeros(1, 0)
    features = sum(t[0, 0].numel() for t in (B, x, dt)) + 1
    with_window = WindowedLayerState(zero, none, zero.new_zeros(1, 1 + WINDOW, features))

    @torch.no_grad()
    def plain() -> None:
        with_forgetting(Forgetting(), scan_ssd, inputs, LayerState(zero, none))

    @torch.no_grad()
    def windowed() -> None:
        with_forgetting(Forgetting(window=WINDOW), scan_ssd, inputs, with_window)  # type: ignore[arg-type]

    return {"ours": plain, "theirs": windowed}


def bench_window(rounds: int) -> dict[str, float]:
    """Forward scans over 16,384 tokens with a window of 4096 against without, B 1; a stream of 1M tokens in memory."""
    seconds, ratio = take_turns(rounds, passes())
    result = {"mamba2_tokens_per_second": LENGTH / seconds["ours"], "mamba2_window_to_plain_time": ratio}
    peak = {n: in_own_process("peak_of_window", str(n))["peak_mib"] for n in LENGTHS}
    return result | {f"peak_mib_at_{n}": value for n, value in peak.items()}


def peak_of_window(length: str) -> dict[str, float]:
    """Peak memory of a process that streams a text through a model of width 96 with a window of 1024."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.manual_seed(0)
    sizes = {"vocab_size": 259, "hidden_size": 96, "num_heads": 6, "head_dim": 32, "state_size": 32}
    model = StatefulMamba2ForCausalLM(StatefulMamba2Config(**sizes, n_groups=1, num_hidden_layers=2)).eval()
    state = None
    with torch.no_grad(), forgetting(model, window=1024):
        for _ in range(int(length) // 4096):
            tokens = torch.randint(259, (1, 4096))
            state = model(tokens, initial_state=state, logits_to_keep=1).final_state
    return {"peak_mib": peak_mib()}
