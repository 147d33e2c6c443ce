"""Generation, token by token, against Transformers and against reading the weights."""

import statistics
import time
from itertools import pairwise
from typing import Any

import torch
from measure import take_turns
from torch import nn
from torch.nn.functional import linear
from transformers import Mamba2Config, Mamba2ForCausalLM, MambaConfig, MambaForCausalLM

from hf_recurrent_lengthgen.models import FAMILIES

ROWS, PROMPT, NEW = (1, 8, 32), 8, 16
SIZES = {"vocab_size": 8192, "hidden_size": 768, "num_hidden_layers": 4}
IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
MODELS = {
    "mamba2": {"num_heads": 24, "head_dim": 64, "state_size": 128, "n_groups": 1},
    "mamba": {"state_size": 16},
    "gla": {"num_heads": 4},
    "rwkv6": {"num_heads": 12, "expand_k": 1.0, "expand_v": 1.0},
    "rwkv7": {"head_dim": 64},
    "gated_deltanet": {"num_heads": 6, "head_dim": 128},
}
STOCK = {"mamba2": (Mamba2ForCausalLM, Mamba2Config), "mamba": (MambaForCausalLM, MambaConfig)}


def models(name: str) -> dict[str, nn.Module]:
    """Four layers at 130m's dimensions, float32: ours, and Transformers' if it has one."""
    torch.manual_seed(0)
    settings = {**SIZES, **IDS, **MODELS[name]}
    made = FAMILIES[f"stateful_{name}"]
    competitors = {"ours": made(made.config_class(**settings)).eval()}
    if name in STOCK:
        stock, config = STOCK[name]
        competitors["theirs"] = stock(config(**settings)).eval()
    return competitors


def bench_decode(rounds: int) -> dict[str, float]:
    """Tokens/s of `generate` after a prompt, four layers at 130m's dimensions, fp32; the limit reads all matrices."""
    result = {}
    for name in MODELS:
        competitors = models(name)
        for rows in ROWS:
            runs = {who: Generating(model, rows) for who, model in competitors.items()}
            runs |= {"limit": WeightReading(competitors["ours"], rows), "theirs": runs.get("theirs", runs["ours"])}
            seconds, ratio = take_turns(rounds, runs)
            prefix = f"{name}_{rows}_rows"
            result[f"{prefix}_tokens_per_second"] = rows * NEW / seconds["ours"]
            result[f"{prefix}_limit"] = rows * NEW / seconds["limit"]
            if name in STOCK:
                result[f"{prefix}_ratio"] = ratio
    return result


def bench_steps(rounds: int) -> dict[str, float]:
    """Milliseconds of a step inside `generate`, prompts apart: stock and ours.

    Medians over `NEW` - 1 steps of each round, in turns; ratios are medians over rounds.
    """
    result = {}
    for name in STOCK:
        competitors = models(name)
        for rows in ROWS[:2]:
            times: dict[str, list[float]] = {who: [] for who in ("theirs", "ours")}
            for _ in range(rounds):
                for who, seconds in times.items():
                    seconds.append(step_seconds(competitors[who], rows))
            prefix = f"{name}_{rows}_rows"
            result |= {f"{prefix}_{who}_ms": 1000 * statistics.median(seconds) for who, seconds in times.items()}
            ratios = [theirs / ours for theirs, ours in zip(times["theirs"], times["ours"], strict=True)]
            result |= {
                f"{prefix}_ratio{end}": of(ratios)
                for end, of in (("", statistics.median), ("_min", min), ("_max", max))
            }
    return result


def step_seconds(model: nn.Module, rows: int, **options: Any) -> float:
    """Median seconds of a step of greedy generation after the prompt."""
    marks: list[float] = []

    def mark(_: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        marks.append(time.perf_counter())
        return scores

    Generating(model, rows, logits_processor=[mark], **options)()
    return statistics.median(after - before for before, after in pairwise(marks))


class Generating:
    """Greedy generation of `new` tokens after a prompt, when called; `options` are those of `generate`."""

    def __init__(self, model: nn.Module, rows: int, prompt: int = PROMPT, new: int = NEW, **options: Any) -> None:
        self.model = model
        self.options = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, **options}
        self.ids = torch.arange(rows * prompt).view(rows, prompt) % 251 + 3

    def __call__(self) -> None:
        self.model.generate(self.ids, **self.options)  # type: ignore[operator]


class WeightReading:
    """`NEW` products of each matrix of a model with one vector per row, when called."""

    def __init__(self, model: nn.Module, rows: int) -> None:
        weights = [module.weight for module in model.modules() if isinstance(module, nn.Linear)]
        self.pairs = [(torch.randn(rows, weight.shape[1]), weight) for weight in weights]

    @torch.no_grad()
    def __call__(self) -> None:
        for _ in range(NEW):
            for x, weight in self.pairs:
                linear(x, weight)
