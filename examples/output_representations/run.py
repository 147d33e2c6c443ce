"""Output representations (OutRep): predict mean, length or sum of bit strings longer than those of training.

arXiv:2506.11769, section 3 (Figure 1) and appendices C and F, in
small: strings of 1 to 10 bits in training, up to 50 in the test. Writes into the output folder:
output_representations.png, .md and .json, and the results of runs (`ArmResults`). An interrupted study continues.
With --longest, appendix C, Figure 3, instead: sums and lengths (NoPE, target y) after training on up to so many bits.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import cycle
from pathlib import Path

from matplotlib.ticker import NullLocator
from transformers import PrinterCallback, Trainer, TrainingArguments, set_seed

from hf_recurrent_lengthgen.checkpoints.loading import quiet_transformers
from hf_recurrent_lengthgen.data import PaddingCollator
from hf_recurrent_lengthgen.models import StatefulMamba2Config, StatefulMamba2Model
from hf_recurrent_lengthgen.plotting.images import save_png
from hf_recurrent_lengthgen.plotting.style import FONT_SIZE, MUTED, mark_training_lengths

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))
from arm_results import ArmResults, Result
from baselines import DecoderTransformer, ScalarRegression
from bit_strings import BitStrings, errors_by_length
from study_pages import band, markdown, mean_and_range, panels, write_stages

LONGEST = 10


@dataclass(frozen=True)
class Setting:
    """Sizes of all runs; lengths in bits."""

    steps: int = 600
    batch_size: int = 32
    learning_rate: float = 3e-3
    hidden_size: int = 32
    layers: int = 2
    samples: int = 256
    lengths: tuple[int, ...] = (1, 2, 5, 8, 10, 12, 15, 20, 25, 30, 40, 50)


TINY = Setting(steps=2, batch_size=2, hidden_size=16, layers=1, samples=2)


@dataclass(frozen=True)
class Stage:
    """A quantity to predict, the model, f of the target, and the most bits in training."""

    quantity: str
    model: str
    target: str = "identity"
    uniform_mean: bool = False
    longest: int = LONGEST


MODELS = {"none": "NoPE", "learned": "learned positions", "rope": "RoPE", "alibi": "ALiBi", "mamba2": "Mamba-2"}
TARGETS = {"identity": "y", "sqrt": "√y", "log": "log y", "inverse_sqrt": "1/√y"}
POSITIONS = {quantity: [Stage(quantity, model) for model in MODELS] for quantity in ("mean", "length")}
OUTPUTS = {quantity: [Stage(quantity, "none", target) for target in TARGETS] for quantity in ("length", "sum")}
OTHERS = [Stage("mean", "none", uniform_mean=True), Stage("length", "mamba2", "inverse_sqrt")]
STAGES = list(dict.fromkeys([s for group in (*POSITIONS.values(), *OUTPUTS.values(), OTHERS) for s in group]))


def name_of(stage: Stage) -> str:
    """As a key and a file name."""
    others = ["uniform"] * stage.uniform_mean + [f"to{stage.longest}"] * (stage.longest != LONGEST)
    return "_".join([stage.quantity, stage.model, stage.target, *others])


def model_of(stage: Stage, setting: Setting) -> ScalarRegression:
    """About as many parameters whatever the model."""
    size = setting.hidden_size
    if stage.model != "mamba2":
        longest = max(setting.lengths) + 2
        return ScalarRegression(DecoderTransformer(5, stage.model, size, setting.layers, max_length=longest), size)
    heads = {"num_heads": 4, "head_dim": size // 2, "n_groups": 1, "state_size": 16}
    config = StatefulMamba2Config(vocab_size=5, hidden_size=size, num_hidden_layers=setting.layers, **heads)
    return ScalarRegression(StatefulMamba2Model(config), size)


def run(stage: Stage, seed: int, setting: Setting, output: Path) -> Result:
    """Train and measure, or read what is there with the same settings."""
    results, name = ArmResults(output), name_of(stage)
    key = json.loads(json.dumps({"setting": asdict(setting), "stage": asdict(stage), "seed": seed}))
    kept = results.get(name, seed)
    if kept is not None and kept["key"] == key:
        return kept
    set_seed(seed)
    model = model_of(stage, setting)
    samples = setting.steps * setting.batch_size
    data = BitStrings(stage.quantity, (1, stage.longest), samples, seed, stage.target, stage.uniform_mean)
    arguments = TrainingArguments(
        output_dir=str(output / f"seed{seed}/trainer"),
        max_steps=setting.steps,
        per_device_train_batch_size=setting.batch_size,
        learning_rate=setting.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=0.1,
        max_grad_norm=1.0,
        seed=seed,
        logging_steps=max(1, setting.steps // 4),
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        use_cpu=True,
    )
    with quiet_transformers():
        trainer = Trainer(model, arguments, PaddingCollator(), train_dataset=data)
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    errors = errors_by_length(model, data, setting.lengths, setting.samples)
    log = [float(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]
    result: Result = {"key": key, "losses": log, "parameters": sum(p.numel() for p in model.parameters())}
    result["errors"] = {str(length): float(f"{error:.4g}") for length, error in errors.items()}
    results.put(name, seed, result)
    print(f"seed {seed} {name}: loss {log[-1]:.2g}, error at 50 bits {result['errors']['50']:.2g}", flush=True)
    return result


ByStage = dict[Stage, dict[int, Result]]


def inside(result: Result, longest: int) -> float:
    """Mean error at the measured lengths of training."""
    return statistics.fmean(error for length, error in result["errors"].items() if int(length) <= longest)


def table(results: ByStage) -> str:
    """Mean squared errors in the units of the quantity."""
    beyond, others = (12, 20, 30, 50), any(stage.longest != LONGEST for stage in results)
    rows = []
    for stage, seeds in results.items():
        quantity = f"{stage.quantity}, uniform" if stage.uniform_mean else stage.quantity
        quantity += f", 1 to {stage.longest} bits" * others
        values = [[inside(result, stage.longest) for result in seeds.values()]]
        values += [[result["errors"][str(length)] for result in seeds.values()] for length in beyond]
        errors = [mean_and_range(numbers, ".2g") for numbers in values]
        rows.append([quantity, MODELS[stage.model], TARGETS[stage.target], ", ".join(map(str, seeds)), *errors])
    trained = "bits as in training" if others else "1 to 10 bits"
    return markdown(["predicted", "model", "target", "seeds", trained, *(f"{n} bits" for n in beyond)], rows)


FIGURE = {
    "Mean, by position encoding": POSITIONS["mean"],
    "Length, by position encoding": POSITIONS["length"],
    "Length, by target": OUTPUTS["length"],
    "Sum, by target": OUTPUTS["sum"],
}
"""Figures 1a, 1b, 1c and 4b."""


def picture(groups: Mapping[str, Sequence[Stage]], results: ByStage, lengths: Sequence[int], path: Path) -> None:
    """A panel for each group: error against length, the mean over seeds and the band from least to most."""
    figure, axes = panels([f"{title} (squared error)" for title in groups], 2)
    colors = ("#d55e00", "#0072b2", "#009e73", "#a8780f", "#aa4499")
    for axis, group in zip(axes, groups.values(), strict=True):
        axis.set_yscale("log")
        axis.set_xlim(1, max(lengths))
        for stage, color in zip(group, cycle(colors), strict=False):
            columns = [[seed["errors"][str(length)] for seed in results[stage].values()] for length in lengths]
            band(axis, lengths, columns, 0.18, color=color, label=line_name(stage, group))
        axis.set_ylim(bottom=1e-7)
        axis.yaxis.set_minor_locator(NullLocator())
        axis.set_xlabel("Bits", fontsize=FONT_SIZE - 1, color=MUTED)
        mark_training_lengths(axis, [stage.longest for stage in group])
        axis.legend(fontsize=FONT_SIZE - 2.5, frameon=False, loc="lower right")
    save_png(figure, path)


def line_name(stage: Stage, group: Sequence[Stage]) -> str:
    """What differs in a panel."""
    if len({one.longest for one in group}) > 1:
        return f"trained on 1 to {stage.longest} bits"
    by_target = len({one.target for one in group}) > 1
    return f"NoPE, target {TARGETS[stage.target]}" if by_target else MODELS[stage.model]


def main() -> None:
    """Run what is missing and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", default="demo-output/output_representations", help="folder (%(default)s)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="seeds in this order (0 1 2)")
    parser.add_argument("--tiny", action="store_true", help="sizes that show in seconds that the command works")
    parser.add_argument(
        "--longest",
        type=int,
        nargs="+",
        metavar="N",
        help="draw Figure 3 instead: most bits in training, such as 10 20 30",
    )
    options = parser.parse_args()
    setting, output, name = TINY if options.tiny else Setting(), Path(options.output), "output_representations"
    groups, stages = FIGURE, STAGES
    if options.longest:
        if len({*options.longest}) < len(options.longest) or not all(0 < n < 50 for n in options.longest):
            parser.error(f"--longest takes different numbers from 1 to 49 (50 are in the test), got {options.longest}")
        groups = {
            f"{quantity.capitalize()}, by bits in training": [
                Stage(quantity, "none", longest=n) for n in options.longest
            ]
            for quantity in ("sum", "length")
        }
        stages, name = [stage for group in groups.values() for stage in group], "training_lengths"
    results: ByStage = {stage: {} for stage in stages}
    for seed in options.seeds:
        for stage in stages:
            results[stage][seed] = run(stage, seed, setting, output)
    text = table(results)
    (output / f"{name}.md").write_text(text, encoding="utf-8")
    kept = {
        name_of(stage): {seed: {key: result[key] for key in ("losses", "errors")} for seed, result in seeds.items()}
        for stage, seeds in results.items()
    }
    write_stages(output / f"{name}.json", asdict(setting), kept)
    picture(groups, results, setting.lengths, output / f"{name}.png")
    print(text)


if __name__ == "__main__":
    main()
