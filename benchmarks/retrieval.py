"""Passkeys by depth and length: time of the whole grid, and of reading what prompts share once against each anew."""

import time
from collections.abc import Callable, Sequence

import torch
from measure import take_turns
from trainer_steps import SMALL

from hf_recurrent_lengthgen.data import byte_tokenizer
from hf_recurrent_lengthgen.data.tasks import PasskeyGrid
from hf_recurrent_lengthgen.evaluation import shared_prefixes
from hf_recurrent_lengthgen.evaluation.settings import EvaluationSettings
from hf_recurrent_lengthgen.metrics.retrieval.measure import retrieval_accuracy
from hf_recurrent_lengthgen.models import StatefulMamba2Config, StatefulMamba2ForCausalLM

DEPTHS = [place / 9 for place in range(10)]


def small_model() -> StatefulMamba2ForCausalLM:
    """A model of width 96 with random weights and a vocabulary of bytes."""
    torch.manual_seed(0)
    return StatefulMamba2ForCausalLM(StatefulMamba2Config(**{**SMALL, "vocab_size": 384})).eval()


def reading(model: StatefulMamba2ForCausalLM, lengths: Sequence[int], samples: int, least: int) -> Callable[[], None]:
    """One grid of 10 depths; what would save fewer than `least` tokens is not shared."""
    grid = PasskeyGrid(byte_tokenizer(), DEPTHS, samples)

    def read() -> None:
        before, shared_prefixes.WORTH_A_CALL = shared_prefixes.WORTH_A_CALL, least
        try:
            retrieval_accuracy(model, grid, lengths, settings=EvaluationSettings(progress=False))
        finally:
            shared_prefixes.WORTH_A_CALL = before

    return read


def bench_retrieval(rounds: int) -> dict[str, float]:
    """Passkeys at 10 depths: 1k to 128k with 1 sample, once; 1k to 4k with 2, shared against each prompt anew."""
    model, usual = small_model(), shared_prefixes.WORTH_A_CALL
    lengths = [2**power for power in range(10, 18)]
    began = time.perf_counter()
    reading(model, lengths, 1, usual)()
    whole = time.perf_counter() - began
    short = [1024, 2048, 4096]
    seconds, ratio = take_turns(
        rounds, {"ours": reading(model, short, 2, usual), "theirs": reading(model, short, 2, 2**40)}
    )
    return {
        "1k_to_128k_seconds": whole,
        "1k_to_128k_prompt_tokens_per_second": sum(lengths) * len(DEPTHS) / whole,
        "1k_to_4k_shared_seconds": seconds["ours"],
        "1k_to_4k_each_anew_seconds": seconds["theirs"],
        "speed_ratio": ratio,
    }
