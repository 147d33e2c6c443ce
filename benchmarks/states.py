"""What statistics of states add to an evaluation: processor time, which other work on the machine changes little."""

import os
import statistics
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from measure import in_own_process, peak_mib
from torch import nn
from trainer_steps import SMALL, WIDE

from hf_recurrent_lengthgen.evaluation.settings import EvaluationSettings
from hf_recurrent_lengthgen.evaluation.streaming import stream_nll
from hf_recurrent_lengthgen.metrics.context_harm.measure import evaluate_model
from hf_recurrent_lengthgen.metrics.states.distance import state_drift
from hf_recurrent_lengthgen.metrics.states.trajectory import StateObserver, sample_positions
from hf_recurrent_lengthgen.models import StatefulMamba2Config, StatefulMamba2ForCausalLM

STREAMS = (65_536, 1_048_576)


def read(model: nn.Module, tokens: np.ndarray, training_length: int, states: bool) -> None:
    """One pass over the texts, with statistics, inputs of the recurrence and distances of all heads or without."""
    if not states:
        stream_nll(model, tokens, progress=False)
        return
    positions = sample_positions(tokens.shape[1] - 1, training_length)
    observer = StateObserver(model, len(tokens), positions)
    with observer:
        stream_nll(model, tokens, observer=observer, progress=False)
    state_drift(observer.trajectory(), training_length)


def bench_states(rounds: int) -> dict[str, float]:
    """An evaluation (NLL, harm, verdict) and its first pass, without and with state statistics of all heads.

    A model of width 96, 8 texts of 32 training lengths of 128; and two layers of 130m's, 2 texts of 8 of 256.
    """
    result = {}
    for name, sizes, training_length, shape in (("small", SMALL, 128, (8, 4097)), ("wide", WIDE, 256, (2, 2049))):
        torch.manual_seed(0)
        model = StatefulMamba2ForCausalLM(StatefulMamba2Config(**sizes)).eval()
        tokens = np.random.default_rng(0).integers(0, 251, shape)
        evaluate = partial(evaluate_model, model, tokens, training_length, settings=EvaluationSettings(progress=False))
        turns: dict[str, Callable[[], object]] = {
            "plain": partial(read, model, tokens, training_length, states=False),
            "states": partial(read, model, tokens, training_length, states=True),
            "evaluation": evaluate,
        }
        seconds: dict[str, list[float]] = {turn: [] for turn in turns}
        for _ in range(rounds):
            for turn, run in turns.items():
                began = time.process_time()
                run()
                seconds[turn].append(time.process_time() - began)
        plain, states, evaluation = (np.array(times) for times in seconds.values())
        result |= {
            f"{name}_pass_cpu_seconds": statistics.median(plain),
            f"{name}_pass_with_to_without": statistics.median(states / plain),
            f"{name}_evaluation_with_to_without": statistics.median((evaluation + states - plain) / evaluation),
        }
    for length in STREAMS:
        peak = in_own_process("peak_of_states", str(length))
        result[f"peak_mib_at_{length}"] = peak["peak_mib"]
    return result


def peak_of_states(length: str) -> dict[str, float]:
    """Peak memory of a process that takes the statistics along one stream with width 96."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.manual_seed(0)
    model = StatefulMamba2ForCausalLM(StatefulMamba2Config(**SMALL)).eval()
    tokens = np.random.default_rng(0).integers(0, 251, (1, int(length) + 1), dtype=np.int32)
    positions = sample_positions(int(length), 128)
    observer = StateObserver(model, 1, positions)
    with observer:
        stream_nll(model, tokens, observer=observer, progress=False)
    return {"peak_mib": peak_mib()}
