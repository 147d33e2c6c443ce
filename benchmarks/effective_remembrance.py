"""Tokens, time and memory of Effective Remembrance against single-stream forward passes."""

import os
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from measure import in_own_process, peak_mib, take_turns
from torch import nn
from trainer_steps import SMALL

from hf_recurrent_lengthgen.evaluation.streaming import TOKENS_PER_FORWARD
from hf_recurrent_lengthgen.metrics.remembrance.measure import START_POINTS, remembrance_values, start_points
from hf_recurrent_lengthgen.models import StatefulMamba2Config, StatefulMamba2ForCausalLM

LENGTH, LENGTHS = 8192, (2048, 8192, 32_768)


def model_and_tokens(length: int) -> tuple[StatefulMamba2ForCausalLM, np.ndarray]:
    """A model of width 96, random, and one random text."""
    torch.manual_seed(0)
    tokens = np.random.default_rng(0).integers(0, 256, (1, length), dtype=np.uint8)
    return StatefulMamba2ForCausalLM(StatefulMamba2Config(**SMALL)).eval(), tokens


def tokens_fed(model: nn.Module, run: Callable[[], object]) -> int:
    """Tokens that the model is given while something runs."""
    fed: list[int] = []
    count = model.register_forward_pre_hook(
        lambda _, args, kwargs: fed.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    run()
    count.remove()
    return sum(fed)


def bench_remembrance(rounds: int) -> dict[str, float]:
    """64 evenly spaced start points at T = 8192 against forward passes over single texts of as many tokens."""
    model, tokens = model_and_tokens(LENGTH)
    even = range(0, LENGTH, LENGTH // START_POINTS)
    default = start_points(LENGTH, LENGTH // 4)
    fed, fed_by_default = (
        tokens_fed(model, partial(remembrance_values, model, tokens, LENGTH, starts, progress=False))
        for starts in (even, default)
    )
    ids = torch.from_numpy(tokens.astype(np.int64))

    def sweep() -> None:
        remembrance_values(model, tokens, LENGTH, even, progress=False)

    @torch.inference_mode()
    def single_streams() -> None:
        left = fed
        while left:
            state, text = None, ids[:, : min(left, LENGTH)]
            for piece in text.split(TOKENS_PER_FORWARD, dim=1):
                state = model(piece, initial_state=state, logits_to_keep=1).final_state
            left -= text.numel()

    seconds, ratio = take_turns(rounds, {"ours": single_streams, "theirs": sweep})
    peak = {length: in_own_process("peak_of_remembrance", str(length))["peak_mib"] for length in LENGTHS}
    return {
        "forwards_in_tokens": fed / LENGTH,
        "forwards_in_tokens_default_starts": fed_by_default / LENGTH,
        "tokens_per_second": fed / seconds["theirs"],
        "single_stream_tokens_per_second": fed / seconds["ours"],
        "sweep_to_single_stream_time": ratio,
        **{f"peak_mib_at_{length}": value for length, value in peak.items()},
    }


def peak_of_remembrance(length: str) -> dict[str, float]:
    """Peak memory of a process that measures all start points of one text."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    model, tokens = model_and_tokens(int(length))
    remembrance_values(model, tokens, int(length), start_points(int(length), int(length) // 4), progress=False)
    return {"peak_mib": peak_mib()}
