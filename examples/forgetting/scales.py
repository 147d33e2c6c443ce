"""Compare calibrated scales of Delta and A with state passing, on the same number of bytes.

Shipped bases get LongMamba's smaller steps, the RRI of Chen et al., or a scale for each layer of its steps
(MambaExtend) or decays (Mamba Modulation) that `surgery.calibrate` finds; or they are trained by state passing, on as
many bytes as the texts of the calibration. Fills the table of README.md, and writes scales.json and scales.png
beside it. An interrupted run continues.
"""

import argparse
import json
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any

from torch import Tensor

from hf_recurrent_lengthgen import forgetting, load_model
from hf_recurrent_lengthgen.checkpoints.loading import quiet_transformers
from hf_recurrent_lengthgen.cli.inputs import load_stream
from hf_recurrent_lengthgen.data import PackedBlocks, byte_tokenizer, evaluation_sequences
from hf_recurrent_lengthgen.evaluation.settings import EvaluationSettings
from hf_recurrent_lengthgen.metrics.context_harm.measure import evaluate_model
from hf_recurrent_lengthgen.plotting.images import save_png
from hf_recurrent_lengthgen.plotting.style import mark_training_lengths, position_axis
from hf_recurrent_lengthgen.surgery import calibrate
from hf_recurrent_lengthgen.trainers import StatePassingTrainer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from small_setting import options_of
from study_pages import Result, draw, fill, legend_below, markdown, nll_last, over_seeds, panels

ROOT, HERE = Path(__file__).resolve().parents[2], Path(__file__).resolve().parent
FAMILIES = {"mamba2": "Mamba-2", "gla": "GLA", "rwkv6": "RWKV-6"}
ARMS = {
    "base": ("base", "#d55e00", "solid"),
    "delta_half": ("LongMamba: steps x 0.5", "#5b636d", (0, (1, 1))),
    "rri": ("RRI of the paper", "#a8780f", (0, (5, 2))),
    "delta_scale": ("calibrated Delta", "#aa4499", "solid"),
    "decay_scale": ("calibrated A", "#009e73", "solid"),
    "state_passing": ("state passing (trained)", "#0072b2", (0, (5, 2))),
}
"""Label, color and line of each arm. Deterministic arms have one result for all seeds."""
FIXED: dict[str, dict[str, float]] = {
    "base": {},
    "delta_half": {"delta_scale": 0.5},
    "rri": {"retention": 0.9999, "insertion": 0.75},
}
LENGTH, BATCH, RATE = 128, 16, 0.0025  # training length, sequences of a step, learning rate


@cache
def stream(split: str) -> Tensor:
    return load_stream("stdlib", split, byte_tokenizer()).tokens


def arms_of(config: Any) -> dict[str, dict[str, float] | None]:
    """The arms of a family, with the settings of fixed ones. Insertion is left out where it would change nothing."""
    arms: dict[str, dict[str, float] | None] = {}
    for arm in ARMS:
        fixed = {name: value for name, value in FIXED.get(arm, {}).items() if name in config.forgets_by}
        if fixed or arm in ("base", "state_passing") or arm in config.forgets_by:
            arms[arm] = fixed if arm in FIXED else None
    return arms


def run(base: Path, arm: str, fixed: dict[str, float] | None, seed: int, texts: int, length: int) -> Result:
    """Make one arm on `texts` texts of `length` bytes, and measure it on 8 held-out texts of that length."""
    began = time.process_time()
    with quiet_transformers():
        model: Any = load_model(str(base))
        rule: dict[str, Any] = dict(fixed or {})
        own = stream("train")[seed * texts * (length + 1) :]  # another text for each seed
        if arm == "state_passing":
            steps = texts * length // (BATCH * LENGTH)
            arguments = StatePassingTrainer.config_class(
                **{"output_dir": str(ROOT / "demo-output" / "scales"), "max_steps": steps, "seed": seed},
                **{"learning_rate": RATE, "per_device_train_batch_size": BATCH, "lr_scheduler_type": "cosine"},
                **{"warmup_steps": 0.1, "adam_beta2": 0.95, "save_strategy": "no", "report_to": "none"},
                **{"disable_tqdm": True, "dataloader_pin_memory": False, "state_drop_probability": 0.1},
            )
            rows = PackedBlocks(own[: steps * BATCH * (LENGTH + 1)], LENGTH)
            StatePassingTrainer(model, arguments, train_dataset=rows).train()
        elif fixed is None:
            calibrated = evaluation_sequences(own[: texts * (length + 1)], texts, length + 1)
            found = calibrate(model, calibrated, arm, seed=seed, progress=False)
            rule = {arm: [round(scale, 3) for scale in found.scales]}
        held_out = evaluation_sequences(stream("validation"), 8, length + 1)
        with forgetting(model, **rule):
            result = evaluate_model(model, held_out, LENGTH, settings=EvaluationSettings(progress=False))
    curve = result.position_wise.coarse
    return {
        "rule": rule,
        "nll": {"edges": curve.edges, "mean": [round(x, 4) for x in curve.mean]},
        "harm_range": result.harm.last_range,
        "excess": round(result.harm.last.mean, 4),
        "inside": round(result.in_window.loss.mean, 4),
        "cpu_seconds": round(time.process_time() - began),
    }


def table(results: dict[str, dict[str, dict[str, Result]]]) -> str:
    rows = []
    for family, arms in results.items():
        for arm, seeds in arms.items():
            found = [{**result, "beyond": nll_last(result)} for result in seeds.values()]
            numbers = [over_seeds(found, "inside"), over_seeds(found, "beyond"), over_seeds(found, "excess", "+.3f")]
            scales = "; ".join(
                ", ".join(f"{x:g}" for x in scale)
                if isinstance(scale, list)
                else f"{name.replace('_', ' ')} {scale:g}"
                for result in seeds.values()
                for name, scale in result["rule"].items()
            )
            rows.append([FAMILIES.get(family, family), ARMS[arm][0], *numbers, scales])
    start, stop = next(iter(results[next(iter(results))]["base"].values()))["harm_range"]
    at = f"at {start:,} to {stop:,}"
    return markdown(["family", "", f"loss within {LENGTH}", f"loss {at}", f"excess loss {at}", "settings"], rows)


def figure(results: dict[str, dict[str, dict[str, Result]]], path: Path) -> None:
    """Loss against position: means over seeds, bands from least to most."""
    picture, axes = panels([FAMILIES.get(family, family) for family in results], 3)
    for axis, arms in zip(axes, results.values(), strict=True):
        for arm, seeds in arms.items():
            label, color, style = ARMS[arm]
            draw(axis, list(seeds.values()), "nll", LENGTH // 8, label=label, color=color, linestyle=style)
        last = next(iter(arms["base"].values()))["nll"]["edges"][-1]
        position_axis(axis, LENGTH // 8, last)
        axis.set_ylabel("loss (nats per byte)")
        mark_training_lengths(axis, [LENGTH])
    legend_below(picture, axes, 3)
    save_png(picture, path)


if __name__ == "__main__":
    parser: argparse.ArgumentParser = options_of(__doc__, HERE)
    parser.add_argument("--families", nargs="+", default=list(FAMILIES), help="shipped bases (%(default)s)")
    options = parser.parse_args()
    results_folder = Path(options.output if options.tiny else options.results)
    texts, length = (5, 512) if options.tiny else (30, 4096)
    file = results_folder / "scales.json"
    kept: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    for family in options.families:
        base = ROOT / "model_cards" / f"{family}-base"
        for arm, fixed in arms_of(load_model(str(base)).config).items():
            for seed in options.seeds[:1] if fixed is not None else options.seeds:
                done = kept.setdefault(family, {}).setdefault(arm, {})
                if str(seed) not in done and not options.report:
                    done[str(seed)] = run(base, arm, fixed, seed, texts, length)
                    result = done[str(seed)]
                    print(f"{family} {arm} seed {seed}: {nll_last(result):.3f}, {result['rule']}", flush=True)
                    results_folder.mkdir(parents=True, exist_ok=True)
                    file.write_text(json.dumps(kept) + "\n", encoding="utf-8")
    figure(kept, results_folder / "scales.png")
    if options.tiny:
        print(table(kept))
    else:
        fill(HERE / "README.md", {"scales": table(kept)})
