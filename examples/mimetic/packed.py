"""Does copying from packed sequences reproduce the papers' results on state passing and mimetic initialization?

Sequences hold several strings, as in the code of Jelassi et al., 2024 (arXiv:2402.01032), which both papers use. All
else is as in `run.py`, whose arms with one string per sequence are shown for comparison. Arms that have a result in
--results are not run again. At the end, the tables and the figure of README.md are written from all results.

table    from the zero state or from passed states (arXiv:2507.02782, Table 1)
mimetic  the same in two layers, of which one is mimetic, over steps (arXiv:2410.11135, Fig. 1)
more     passed states for three times the steps
control  the zero state for as many
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))
from arm_results import ArmResults
from reports import COLORS
from run import RATE
from small_setting import Result, Training, options_of, parsed
from starts import Arm, Sizes, StringStudy
from study_pages import band, fill, legend_below, markdown, over_seeds, panels

from hf_recurrent_lengthgen.data.tasks import EVALUATION_SEED, PackedStrings, string_task
from hf_recurrent_lengthgen.plotting.images import save_png
from hf_recurrent_lengthgen.plotting.style import FONT_SIZE
from hf_recurrent_lengthgen.trainers import InitialStateTrainer, StatePassingTrainer, ZeroStateTrainer

HERE = Path(__file__).resolve().parent
SNAPSHOTS = (125, 250, 500, 1000)
MEASURES = ("1x", "2x", "3x", "3x beyond", "in a stream")


@dataclass(frozen=True)
class Run:
    """One training run but for its seed.

    Attributes:
        packed: Whether a sequence holds several strings: 220 tokens for 103 of the longest string, as for 50 symbols
        in
            the code above. A step has as many tokens as with one string per sequence, so about as many strings.
    """

    packed: bool = True
    passed: bool = False
    steps: int = 2 * Sizes.steps
    start: str = "default"
    layers: int = Sizes.layers

    @property
    def row_length(self) -> int:
        return (2 * Sizes.longest + 3) * 220 // 103

    @property
    def arm(self) -> Arm:
        """With one string per sequence, that of `run.py`."""
        changes: dict[str, Any] = {"steps": self.steps, "passed": self.passed, "begin": True}
        if self.packed:
            changes |= {"longest": Sizes.longest, "rows": Sizes.rows * 2 * (Sizes.longest + 1) // self.row_length}
        if self.layers != Sizes.layers:
            changes["layers"] = self.layers
        return Arm(self.start, RATE, changes=tuple(changes.items()))

    @property
    def name(self) -> str:
        """Of its files."""
        return f"packed/{self.arm.name}" if self.packed else self.arm.name


def two_layers(passed: bool, times: int = 1) -> Run:
    """One of them mimetic."""
    return Run(True, passed, times * Sizes.steps, "one", layers=2)


STUDIES = {
    "table": [Run(passed=passed) for passed in (False, True)],
    "mimetic": [two_layers(passed) for passed in (False, True)],
    "more": [two_layers(True, 3)],
    "control": [two_layers(False, 3)],
}
TABLE = [Run(packed, passed) for packed, passed in product((False, True), repeat=2)]


class PackedStudy(StringStudy):
    """Stages are runs."""

    def __init__(self, options: Any) -> None:
        super().__init__(options)
        self.others = ArmResults(HERE / "results")

    def train(self, run: Run, seed: int) -> Result | None:
        """Train and measure one, or read its result."""
        arm = self.arms[run.name] = replace(run.arm, tiny=self.tiny)
        sizes, strings = arm.sizes, arm.data(seed)
        data: Any = PackedStrings(strings, run.row_length, len(strings)) if run.packed else strings
        trainer: type[InitialStateTrainer] = StatePassingTrainer if run.passed else ZeroStateTrainer
        steps = tuple(step for step in SNAPSHOTS if step < sizes.steps)
        training = Training(sizes.steps, RATE, batch_size=sizes.rows, training_length=data.row_length, snapshots=steps)
        return self.run(run.name, seed, training, trainer, data)

    def measure(self, model: Any, length: int, seed: int) -> Result:
        """Also the share of right symbols after the first `longest` ones of strings three times as long."""
        measured = super().measure(model, length, seed)
        task, samples = string_task(**model.config.task), self.settings.samples
        batch = task.resized(3 * task.longest, samples, EVALUATION_SEED).batch(range(samples))
        with torch.no_grad():
            hits = model.eval()(input_ids=batch["input_ids"]).logits[:, :-1].argmax(-1) == batch["labels"][:, 1:]
        beyond = hits[:, -1 - 2 * task.longest : -1]  # the last is the end
        return measured | {"3x beyond": round(float(beyond.float().mean()), 4)}

    def by_step(self, run: Run) -> dict[int, list[Result]]:
        """Measurements of all seeds by step, from these results or from those of `run.py`."""
        found: dict[int, list[Result]] = {}
        for kept in (self.kept, self.others):
            for seed in kept.seeds(run.name):
                result = kept.get(run.name, seed)
                assert result is not None
                after = {int(key.split()[1]): result[key] for key in result if key.startswith("after")}
                for step, measured in (after | {result["key"]["training"]["steps"]: result["measured"]}).items():
                    found.setdefault(step, []).append(measured)
        return found


def row(words: Sequence[str], found: dict[int, list[Result]]) -> list[str]:
    """Means over seeds after the last step, least and most."""
    step = max(found)
    numbers = [over_seeds(found[step], name, ".2f") if name in found[step][0] else "-" for name in MEASURES]
    return [*words, f"{step:,}", str(len(found[step])), *numbers]


def tables(study: PackedStudy) -> dict[str, str]:
    """Table 1 of the paper, with default and with mimetic initialization."""
    states = ("zero", "passed states")
    first = [
        row(["several" if run.packed else "one", states[run.passed]], found)
        for run in TABLE
        if (found := study.by_step(run))
    ]
    second = [
        row([states[run.passed]], found)
        for run in STUDIES["mimetic"] + STUDIES["control"] + STUDIES["more"]
        if (found := study.by_step(run))
    ]
    return {
        "packed table": markdown(["strings per sequence", "trained from", "steps", "seeds", *MEASURES], first),
        "packed mimetic": markdown(["trained from", "steps", "seeds", *MEASURES], second),
    }


def figure(study: PackedStudy) -> Figure:
    """Accuracy over steps, means over seeds with bands from least to most."""
    shown = ("1x", "2x", "3x", "in a stream")
    lines = {
        f"{words}, from {'passed states' if passed else 'zero'}": run
        for passed in (False, True)
        for words, run in (
            ("four layers, default initialization", Run(passed=passed)),
            ("two layers, one mimetic", two_layers(passed, 3)),
        )
    }
    picture, axes = panels(shown, 2)
    for axis, measure in zip(axes, shown, strict=True):
        for (label, run), color in zip(lines.items(), COLORS, strict=False):
            if found := study.by_step(run):
                columns = [[result[measure] for result in results] for results in found.values()]
                band(axis, list(found), columns, 0.12, color=color, marker="o", markersize=3, label=label)
        ticks = (*SNAPSHOTS, 2 * Sizes.steps, 3 * Sizes.steps)
        axis.set_xscale("log")
        axis.set_xticks(ticks, [f"{step:,}" for step in ticks])
        axis.minorticks_off()
        axis.set_ylim(-0.02, 1.04)
        axis.set_xlabel("steps", fontsize=FONT_SIZE)
        axis.set_ylabel("accuracy", fontsize=FONT_SIZE)
    legend_below(picture, axes, 2)
    return picture


ALTERNATIVE = (
    "Accuracy over steps on packed sequences, a panel for each length: two layers, one mimetic, trained from zero, "
    "rise within a few hundred steps, all others after 500; in a stream they stay below 0.2, and all others rise"
)


def main() -> None:
    parser = options_of(__doc__, HERE / "results/packed")
    parser.set_defaults(output="demo-output/mimetic_packed")
    parser.add_argument("--studies", nargs="+", choices=STUDIES, default=list(STUDIES), help="which (all)")
    options = parsed(parser)
    torch.set_num_threads(1)  # the order of sums changes the results of small trainings
    study = PackedStudy(options)
    for name, seed in () if options.report else product(options.studies, options.seeds):
        for run in STUDIES[name]:
            study.train(run, seed)
    parts = tables(study)
    print("\n".join(parts.values()))
    save_png(figure(study), study.results / "packed.png")
    page = study.results.parents[1] / "README.md"
    if page.is_file():
        picture = f"![{ALTERNATIVE}](results/packed/packed.png)\n"
        fill(page, {**parts, "packed figure": picture})


if __name__ == "__main__":
    main()
