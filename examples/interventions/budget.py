"""How few steps restore length generalization, at which learning rate, and what do they cost inside?

After Fig. 5 of arXiv:2507.02782, which post-trains at a tenth of the base's learning rate. Each base is trained on by
each intervention for 2, 5 and 20 % of the base's steps, at a tenth of its peak learning rate and at that of the other
studies (2.5e-3). Arms of a base and seed have the same start and the same rows in the same order, except that TBTT
reads texts in order. Arms that have a result in --results are not run again; checkpoints go to --output. At the end
the table of README.md, and budget.png beside the results, are made of all arms that are there.
"""

import sys
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

from hf_recurrent_lengthgen.data import ContinuedChunks
from hf_recurrent_lengthgen.plotting.images import save_png
from hf_recurrent_lengthgen.plotting.style import FONT_SIZE, INK, mark_training_lengths, perplexity_axis, position_axis
from hf_recurrent_lengthgen.trainers import (
    FittedNoiseTrainer,
    InitialStateTrainer,
    RandomNoiseTrainer,
    StatePassingTrainer,
    TbttTrainer,
    ZeroStateTrainer,
)

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from small_setting import Result, SlowStudy, Study, Training, options_of, parsed
from study_pages import draw, legend_below, markdown, mean_and_range, nll_last, panels, perplexities

HERE = Path(__file__).resolve().parent
SHARES = (0.02, 0.05, 0.2)
"""Further steps, as shares of the base's."""
RATES = {"tenth": 0.1, "now": 0.625}
"""Peak learning rates, as shares of the base's: the paper's, and 2.5e-3 of the other studies."""
RECIPE = {
    "lr_scheduler_type": "cosine_with_min_lr",
    "lr_scheduler_kwargs": {"min_lr_rate": 1 / 3},
    "weight_decay": 0.01,
}
"""B.1, B.2, Table 2: the cosine ends at 1e-5, a third of the peak of 3e-5 with which Mamba-2 370m is post-trained."""
SCALES = (1, 3, 10)
"""Standard deviations of random noise, as multiples of the RMS of final states at the end of the base's training."""
SWEPT, SWEEP_SEED = ("tenth", 0.05), 0
"""Where the scale of random noise is chosen, by the least loss beyond on the texts that are reported."""
PANELS = (*product(("tenth",), SHARES), ("now", 0.2))
"""Rate and share of steps of each column of the figure."""


@dataclass(frozen=True)
class Method:
    """A trainer and its look in the figure."""

    label: str
    trainer: type[InitialStateTrainer]
    color: str
    line: Any = "solid"


METHODS = {
    "plain": Method("plain training", ZeroStateTrainer, "#a8780f", (0, (5, 2))),
    "random_noise": Method("random noise", RandomNoiseTrainer, "#5b636d", (0, (1, 1))),
    "fitted_noise": Method("fitted noise", FittedNoiseTrainer, "#aa4499"),
    "state_passing": Method("state passing", StatePassingTrainer, "#0072b2"),
    "tbtt": Method("TBTT", TbttTrainer, "#009e73", (0, (5, 2))),
}


class BudgetStudy(Study):
    """The DeltaNet of `lengthgen demo`, with its default initialization."""

    family, label = "delta_net", "DeltaNet"
    full = replace(Study.full, evaluation_multiple=64, sequences=8)

    @property
    def base_name(self) -> str:
        return f"{self.family}/base"

    def base(self, seed: int, checkpoint: bool = False) -> Result | None:
        training = Training(self.settings.base_steps, self.settings.base_learning_rate)
        return self.run(self.base_name, seed, training, ZeroStateTrainer, self.blocks(), checkpoint)

    def start(self, name: str, seed: int) -> Path:
        """The checkpoint of the base, which is trained again where it was not kept."""
        self.base(seed, checkpoint=True)
        return self.folder(name, seed)

    def measure(self, model: Any, length: int, seed: int, misalignment: bool = False) -> Result:
        return super().measure(model, length, seed, misalignment)

    def name(self, method: str, rate: str, share: float, scale: float | None = None) -> str:
        """Of a stage; `scale` of random noise."""
        scaled = method if scale is None else f"{method}_{scale:g}"
        return f"{self.family}/{rate}/{scaled}_{self.steps(share)}"

    def steps(self, share: float) -> int:
        return max(1, round(share * self.settings.base_steps))

    def arm(self, method: str, rate: str, share: float, seed: int, scale: float | None = None) -> Result | None:
        """Train and measure one, or read its result."""
        base, options = self.base(seed), dict(RECIPE)
        if scale is not None and base is not None:
            options["noise_sigma"] = float(f"{scale * base['log'][-1]['state_rms']:.2g}")
        data: Dataset = self.blocks()
        if method == "tbtt":
            data = ContinuedChunks(self.stream, self.settings.training_length, 12)
        peak = RATES[rate] * self.settings.base_learning_rate
        training = Training(self.steps(share), peak, self.base_name, self.settings.batch_size)
        return self.run(
            self.name(method, rate, share, scale), seed, training, METHODS[method].trainer, data, **options
        )

    def scale(self) -> float | None:
        """The best of the sweep; None before it ended."""
        swept = {scale: self.result(self.name("random_noise", *SWEPT, scale), SWEEP_SEED) for scale in SCALES}
        losses = {scale: loss_beyond(result["measured"]) for scale, result in swept.items() if result is not None}
        return min(losses, key=lambda scale: losses[scale]) if len(losses) == len(SCALES) else None


class SlowBudgetStudy(BudgetStudy, SlowStudy):
    """The Mamba-2 that starts with heads that forget almost nothing."""

    family, label = "mamba2", "Mamba-2, slow decay"
    full = replace(SlowStudy.full, evaluation_multiple=64, sequences=8)
    tiny = SlowStudy.tiny


BASES = {study.family: study for study in (BudgetStudy, SlowBudgetStudy)}


def loss_beyond(measured: Result) -> float:
    """Mean over the last doubling of the position, 32 to 64 training lengths."""
    return nll_last(measured)


def harm_beyond(measured: Result) -> float:
    """The same of the excess loss."""
    return float(measured["harm_last"]["mean"])


def inside(measured: Result) -> float:
    """Mean loss of the first training length."""
    return float(measured["in_window"]["mean"])


def train(study: BudgetStudy, seeds: list[int], rates: list[str], shares: list[float]) -> None:
    """Everything that has no result yet, few steps first."""
    for scale in SCALES:
        study.arm("random_noise", *SWEPT, SWEEP_SEED, scale)
    for rate, share, seed, method in product(rates, shares, seeds, METHODS):
        study.arm(method, rate, share, seed, study.scale() if method == "random_noise" else None)


Arms = dict[tuple[str, str, float], dict[int, Result]]
"""Measurements by rate, method, share of steps, and seed."""


def arms_of(study: BudgetStudy, seeds: list[int]) -> tuple[dict[int, Result], Arms]:
    """Measurements of a base, and of what was trained on from it."""
    measured: Arms = {}
    for rate, method, share in product(RATES, METHODS, SHARES):
        scale = study.scale() if method == "random_noise" else None
        name = study.name(method, rate, share, scale)
        if results := study.measured([name], seeds).get(name):
            measured[rate, method, share] = results
    return study.measured([study.base_name], seeds).get(study.base_name, {}), measured


def table(studies: list[BudgetStudy], seeds: list[int]) -> str:
    """Loss and excess loss beyond and the change of the loss inside, a row for each base, rate and method."""
    quantities = {"loss beyond": loss_beyond, "excess loss": harm_beyond, "change inside": inside}
    rows = []
    for study in studies:
        base, measured = arms_of(study, seeds)
        if not base:
            continue
        start = [mean_and_range(map(number, base.values()), ".2f") for number in quantities.values()]
        start[-1] = f"loss {start[-1]}"
        rows.append([study.label, "", "base", *(cell for number in start for cell in (number, "", ""))])
        for rate, method in product(RATES, METHODS):
            cells = []
            for name, number in quantities.items():
                for share in SHARES:
                    results = measured.get((rate, method, share), {})
                    before = {seed: inside(base[seed]) if name == "change inside" else 0.0 for seed in results}
                    values = [number(result) - before[seed] for seed, result in results.items()]
                    form = "+.3f" if name == "change inside" else ".2f"
                    cells.append(mean_and_range(values, form) if values else "")
            if any(cells):
                label = METHODS[method].label
                if method == "random_noise":
                    label += f", {study.scale():g} x RMS"
                rows.append([study.label, f"{RATES[rate]:g}", label, *cells])
    head = [f"{name}, {share:.0%}" for name in quantities for share in SHARES]
    return markdown(["base", "rate", "method", *head], rows)


def figure(studies: list[BudgetStudy], seeds: list[int]) -> None:
    """Position-wise perplexity as in Fig. 5: a row for each base, a column for each rate and number of steps."""
    titles = [f"{share:.0%} of the steps, {RATES[rate]:g} of the rate" for _ in studies for rate, share in PANELS]
    picture, axes = panels(titles, len(PANELS))
    places = [(study, *panel) for study in studies for panel in PANELS]
    looks = {"base": ("base", "#d55e00", "solid")}
    looks |= {name: (method.label, method.color, method.line) for name, method in METHODS.items()}
    for axis, (study, rate, share) in zip(axes, places, strict=True):
        base, measured = arms_of(study, seeds)
        length = study.settings.training_length
        for name, (label, color, line) in looks.items():
            results = base if name == "base" else measured.get((rate, name, share), {})
            if results:
                curves = perplexities(results.values())
                draw(axis, curves, "perplexity", length // 8, color=color, linestyle=line, label=label)
        position_axis(axis, length // 8, study.length)
        perplexity_axis(axis)
        mark_training_lengths(axis, [length])
    for axis, study in zip(axes[:: len(PANELS)], studies, strict=True):
        axis.set_ylabel(f"{study.label}: perplexity per byte", fontsize=FONT_SIZE - 1, color=INK)
    legend_below(picture, axes, 6)
    save_png(picture, studies[0].results / "budget.png")


def main() -> None:
    parser = options_of(__doc__, HERE / "results")
    parser.add_argument("--bases", nargs="+", choices=BASES, default=list(BASES), help="which (all)")
    parser.add_argument("--rates", nargs="+", choices=RATES, default=list(RATES), help="which learning rates (all)")
    parser.add_argument("--shares", nargs="+", type=float, choices=SHARES, default=SHARES, help="of the steps (all)")
    options = parsed(parser)
    torch.set_num_threads(1)  # results of small runs hang on rounding
    studies = {name: base(options) for name, base in BASES.items()}
    if not options.report:
        for name in options.bases:
            train(studies[name], options.seeds, options.rates, options.shares)
    seeds = sorted({0, 1, 2, *options.seeds})  # all, whichever this command ran
    shown = [study for study in studies.values() if study.measured([study.base_name], seeds)]
    if not shown:
        print("No arm has a result yet.")
        return
    shown[0].kept.merge()
    figure(shown, seeds)
    text = table(shown, seeds)
    shown[0].show(HERE / "README.md", {"budget": text})
    print(text)


if __name__ == "__main__":
    main()
