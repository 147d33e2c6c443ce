"""S0 tuning as published (arXiv:2604.01168) on a small checkpoint: L2 penalty, scale alpha, the paper's numbers.

The Mamba-2 of `model_cards/mamba2-base`, trained on sequences of 128 bytes of Python source, learns a style: every
line is a comment. All arms are trained on 960 sequences: different ones, or, as in the paper, 48 of them 20 times. The
arms are learned states with several penalties, at the rate that run.py chose; one with all numbers of the paper (20
steps of 48 sequences, Adam at 1e-3, penalty 5e-4, clipping at 1); and state passing, which trains the weights.
Training does not use alpha, so one training serves all alphas. Losses are of held-out text in the style, within T and
beyond it.

    python examples/learned_state/s0.py           # all, about five minutes on one core
    python examples/learned_state/s0.py --report  # the table only
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_recurrent_lengthgen import load_model
from hf_recurrent_lengthgen.data import byte_tokenizer, evaluation_sequences, standard_library_corpus, token_stream
from hf_recurrent_lengthgen.trainers import (
    LearnedStateConfig,
    LearnedStateTrainer,
    StatePassingConfig,
    StatePassingTrainer,
)

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from arm_results import ArmResults
from study_pages import fill, markdown, mean_and_range

HERE = Path(__file__).resolve().parent
BASE = HERE.parents[1] / "model_cards" / "mamba2-base"
LENGTH, BEYOND, TEXTS = 128, 2048, 16
STEPS, ROWS, FEW = 120, 8, 48
ALPHAS = (0.07, 0.25, 0.65, 1.0, 2.0)
SEEDS, TUNING_SEED = (0, 1, 2), 100
PAPER = {
    "max_steps": 20,
    "per_device_train_batch_size": FEW,
    "learning_rate": 1e-3,
    "state_l2": 5e-4,
    "learn_conv_state": False,
    "lr_scheduler_type": "constant",
    "warmup_steps": 0,
}
LEARNED: dict[str, tuple[int, dict[str, Any]]] = {
    f"{rows} rows, l2 {l2:g}": (rows, {"learning_rate": 0.1, "state_l2": l2})
    for rows in (STEPS * ROWS, FEW)
    for l2 in (0.0, 5e-6, 5e-4)
}
LEARNED[f"{FEW} rows, all numbers of the paper"] = FEW, PAPER
"""Number of different sequences and settings of each learned state."""
PASSING_RATES = (1e-3, 3e-3)


def in_style(split: str, rows: int, length: int) -> Tensor:
    """Token ids (rows, length) of text whose lines are all comments."""
    texts = standard_library_corpus().texts(split)
    commented = ("".join(f"# {line}" for line in text.splitlines(keepends=True)) for text in texts)
    return torch.as_tensor(evaluation_sequences(token_stream(commented, byte_tokenizer()), rows, length)).long()


@torch.no_grad()
def measure(model: Any, texts: Tensor) -> dict[str, float]:
    """Loss in nats per byte at the first LENGTH positions, and in the second half of the texts (rows, T + 1)."""
    model.eval()
    losses = torch.cat(
        [
            torch.nn.functional.cross_entropy(model(row[None, :-1]).logits[0], row[1:], reduction="none")[None]
            for row in texts
        ]
    )
    parts = {"inside": losses[:, :LENGTH], "beyond": losses[:, losses.shape[1] // 2 :]}
    return {name: round(float(part.mean()), 4) for name, part in parts.items()}


def trained(trainer_class: Any, config: Any, seed: int, rows: Tensor, **settings: Any) -> Any:
    """The model after training on `rows`."""
    torch.manual_seed(seed)
    common = {"max_steps": len(rows) // ROWS, "per_device_train_batch_size": ROWS, "lr_scheduler_type": "cosine"}
    common |= {"warmup_steps": 0.1, "weight_decay": 0.0, "seed": seed, "report_to": "none", "save_strategy": "no"}
    common |= {"logging_strategy": "no", "disable_tqdm": True, "use_cpu": True}
    data = [{"input_ids": row, "labels": row} for row in rows]
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_class(load_model(str(BASE)), config(folder, **common | settings), train_dataset=data)
        trainer.train()
    return trainer.model


def run_learned(kept: ArmResults, seed: int, rows: Tensor, texts: Tensor) -> None:
    """Each learned state, measured with each alpha."""
    for name, (number, settings) in LEARNED.items():
        if all(kept.get(f"{name}/{alpha:g}", seed) is not None for alpha in ALPHAS):
            continue
        began = time.process_time()
        steps = {"max_steps": settings.get("max_steps", len(rows) // ROWS)}
        model = trained(LearnedStateTrainer, LearnedStateConfig, seed, rows[:number], **settings | steps)
        seconds = round(time.process_time() - began, 1)
        norm = round(float(sum(part.detach().square().sum() for part in model.learned_states.parameters())) ** 0.5, 4)
        for alpha in ALPHAS:
            model.learned_states.set_scale("default", alpha)
            kept.put(f"{name}/{alpha:g}", seed, measure(model, texts) | {"norm": norm, "cpu_seconds": seconds})
        print(f"{name}, seed {seed}: {kept.get(f'{name}/1', seed)}", flush=True)


def run_passing(kept: ArmResults, seeds: Sequence[int], rows: Tensor, texts: Tensor) -> None:
    """State passing, at the rate that is better inside the training length on a seed that is not reported."""

    def result(seed: int, rate: float) -> dict[str, float]:
        arm = f"state passing/{rate:g}"
        if kept.get(arm, seed) is None:
            model = trained(StatePassingTrainer, StatePassingConfig, seed, rows, learning_rate=rate)
            kept.put(arm, seed, measure(model, texts))
            print(f"{arm}, seed {seed}: {kept.get(arm, seed)}", flush=True)
        return kept.get(arm, seed) or {}

    best = min(PASSING_RATES, key=lambda rate: result(TUNING_SEED, rate)["inside"])
    for seed in seeds:
        result(seed, best)


def table(kept: ArmResults) -> str:
    """A row for the base and for each arm, means over seeds."""
    base = kept.get("base", 0)
    if base is None:
        raise SystemExit("Nothing is measured yet: run without --report.")

    def found(arm: str) -> list[dict[str, Any]]:
        return [kept.get(arm, seed) or {} for each, seed in kept.arms() if each == arm and seed != TUNING_SEED]

    lines = [["base", "", *[""] * 3, f"{base['inside']:.3f}", "", f"{base['beyond']:.3f}"]]
    for name in LEARNED:
        inside = [mean_and_range(result["inside"] for result in found(f"{name}/{alpha:g}")) for alpha in ALPHAS]
        one = found(f"{name}/1")
        norm = f"{sum(result['norm'] for result in one) / len(one):.1f}"
        lines.append(
            [name.replace(" rows", " sequences"), norm, *inside, mean_and_range(result["beyond"] for result in one)]
        )
    for arm in sorted({arm for arm, seed in kept.arms() if arm.startswith("state passing/") and seed != TUNING_SEED}):
        losses = [mean_and_range(result[key] for result in found(arm)) for key in ("inside", "beyond")]
        lines.append([arm.replace("/", ", rate "), "", *[""] * 3, losses[0], "", losses[1]])
    head = ["arm", "norm of the state", *(f"loss within T, alpha {alpha:g}" for alpha in ALPHAS), "beyond, alpha 1"]
    return markdown(head, lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=HERE, help="folder with README.md and results")
    parser.add_argument("--report", action="store_true", help="write the table from the results")
    parser.add_argument("--tiny", action="store_true", help="one seed, few sequences, short texts")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    kept = ArmResults(options.output, "s0")
    if not options.report:
        rows = in_style("train", FEW if options.tiny else STEPS * ROWS, LENGTH)
        texts = in_style("validation", 2 if options.tiny else TEXTS, (2 * LENGTH if options.tiny else BEYOND) + 1)
        seeds = SEEDS[:1] if options.tiny else SEEDS
        if kept.get("base", 0) is None:
            kept.put("base", 0, measure(load_model(str(BASE)), texts))
        for seed in seeds:
            run_learned(kept, seed, rows, texts)
        run_passing(kept, seeds, rows, texts)
    kept.merge()
    fill(options.output / "README.md", {"s0": table(kept)})


if __name__ == "__main__":
    main()
