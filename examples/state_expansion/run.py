"""Larger states after training (StateX, arXiv:2509.22630) on associative recall, against plain further training.

A base with a state that is too small is trained from nothing. Each arm then trains it on with the same sequences: as
it is ("vanilla"), or with a larger state in its first recurrent layer, whose recurrence is kept ("inherit") or starts
anew ("reinit"). "Large from the start" is a base whose first layer was large before its first step, trained on alike.
"heads" are models of GLA with different numbers of heads, trained from nothing.

Arms that have a result in --results are not run again, so an interrupted study continues, and several commands with
different --bases or --seeds share the work. Weights of bases are written to --output. At the end, the tables of
README.md and state_expansion.png beside --results are written anew, from all arms that are there.
"""

import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from hf_recurrent_lengthgen.checkpoints.loading import quiet_transformers
from hf_recurrent_lengthgen.models.state_on_disk import replacing
from hf_recurrent_lengthgen.plotting.images import save_png
from hf_recurrent_lengthgen.plotting.style import FONT_SIZE

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))
from arm_results import ArmResults
from arms import ARMS, BASES, TINY, Result, Settings, expanded, fit, new_gla, new_model, without_recall
from small_setting import options_of, parsed
from study_pages import fill, legend_below, markdown, panels

HERE = Path(__file__).resolve().parent
HEADS = "heads"


class Study:
    """Trains and measures stages; a stage of a base is named base, large_base or ARM_STEPS, and of "heads" by them."""

    def __init__(self, output: Path, results: Path, settings: Settings) -> None:
        self.output, self.results, self.settings = output, results, settings
        self.kept = ArmResults(results)

    def settings_of(self, name: str) -> Settings:
        """Those of a base, or of "heads"."""
        return self.settings if name == HEADS else BASES[name].settings(self.settings)

    def key(self, name: str) -> Any:
        """The settings as results have them."""
        return json.loads(json.dumps(asdict(self.settings_of(name))))

    def arms(self, name: str) -> dict[str, Callable[[int], Any]]:
        """The stages of a base, without the bases, or of "heads", and what trains them for a seed."""
        settings = self.settings_of(name)
        if name == HEADS:
            return {str(heads): lambda seed, heads=heads: self._heads(heads, seed) for heads in settings.head_counts}  # type: ignore[misc]
        return {
            f"{arm}_{steps}": lambda seed, arm=arm, steps=steps: self._arm(name, arm, steps, seed)  # type: ignore[misc]
            for steps in settings.steps
            for arm in BASES[name].arms
        }

    def measured(self, name: str, stage: str) -> dict[int, Result]:
        """Results of a stage with these settings, by seed."""
        arm = f"{name}/{stage}"
        results = {seed: result for seed in self.kept.seeds(arm) if (result := self.kept.get(arm, seed))}
        return {seed: result for seed, result in results.items() if result["settings"] == self.key(name)}

    def _write(self, name: str, stage: str, seed: int, result: Result) -> Result:
        self.kept.put(f"{name}/{stage}", seed, {**result, "settings": self.key(name)})
        print(f"seed {seed} {name}/{stage}: {result['accuracy']}, {result['seconds']} s", flush=True)
        return result

    def base(self, name: str, seed: int, large: bool) -> Any:
        """A trained base, from its weights in --output if they and its result are there."""
        stage = "large_base" if large else "base"
        file = self.output / name / stage / f"seed{seed}.pt"
        settings = self.settings_of(name)
        model = new_model(BASES[name], settings, seed, large)
        kept = torch.load(file, weights_only=True) if seed in self.measured(name, stage) and file.is_file() else {}
        if kept.get("settings") == self.key(name):
            model.load_state_dict(kept["weights"])
            return model
        result = fit(model, settings, settings.base_steps, 2 * seed)
        file.parent.mkdir(parents=True, exist_ok=True)
        with replacing(file) as temporary:
            torch.save({"weights": model.state_dict(), "settings": self.key(name)}, temporary)
        self._write(name, stage, seed, result)
        return model

    def _arm(self, name: str, arm: str, steps: int, seed: int) -> None:
        base, chosen, settings = BASES[name], ARMS[arm], self.settings_of(name)
        model = expanded(self.base(name, seed, chosen.large), base, chosen, settings, seed)
        self._write(name, f"{arm}_{steps}", seed, fit(model, settings, steps, 2 * seed + 1))

    def _heads(self, heads: int, seed: int) -> None:
        torch.manual_seed(seed)
        model = new_gla(self.settings, heads)
        self._write(HEADS, str(heads), seed, fit(model, self.settings, self.settings.heads_steps, 2 * seed))

    def run(self, name: str, arms: list[str], seed: int) -> None:
        """Train the arms that have no result."""
        for stage, train in self.arms(name).items():
            if (name == HEADS or stage.rpartition("_")[0] in arms) and seed not in self.measured(name, stage):
                with quiet_transformers():
                    train(seed)


def spread(values: list[float], form: str = ".3f") -> str:
    """Mean, and from two values on their standard deviation."""
    text = format(statistics.fmean(values), form)
    return text if len(values) < 2 else f"{text} ± {statistics.stdev(values):.3f}"


def cells(seeds: dict[int, Result], pairs: list[str]) -> list[str]:
    """Seeds, parameters, state, and accuracies of a stage."""
    first = next(iter(seeds.values()))
    accuracies = [spread([result["accuracy"][number] for result in seeds.values()]) for number in pairs]
    return [", ".join(map(str, seeds)), f"{first['parameters']:,}", f"{first['state']:,}", *accuracies]


def base_table(study: Study, name: str) -> str:
    """Accuracies of all arms of a base, and their gain over vanilla training on the same sequences, by seed."""
    base, settings = BASES[name], study.settings_of(name)
    pairs, last = [str(number) for number in settings.evaluated_pairs], str(settings.pairs[1])
    rows = []
    for stage, label in (("base", "base"), ("large_base", "base, large")):
        if seeds := study.measured(name, stage):
            rows.append([label, f"{settings.base_steps:,}", *cells(seeds, pairs), ""])
    for steps in settings.steps:
        vanilla = study.measured(name, f"vanilla_{steps}")
        for arm in base.arms:
            if seeds := study.measured(name, f"{arm}_{steps}"):
                both = [seed for seed in seeds if seed in vanilla and arm != "vanilla"]
                gains = [seeds[seed]["accuracy"][last] - vanilla[seed]["accuracy"][last] for seed in both]
                label = f"**{ARMS[arm].label}**" if arm == base.matched else ARMS[arm].label
                gain = spread(gains, "+.3f") if gains else ""
                rows.append([label, f"{steps:,}", *cells(seeds, pairs), gain])
    if rows:
        floor = [f"{without_recall(settings, number):.3f}" for number in settings.evaluated_pairs]
        rows.insert(0, ["without recall", "", "", "", "", *floor, ""])
    head = ["method", "steps", "seeds", "parameters", "state", *(f"{number} pairs" for number in pairs)]
    return f"{base.label}:\n\n" + markdown([*head, f"gain at {last} pairs"], rows) if rows else ""


def heads_table(study: Study) -> str:
    """Table 4 of the paper in small."""
    pairs = [str(number) for number in study.settings.evaluated_pairs]
    rows = []
    for stage in study.arms(HEADS):
        if seeds := study.measured(HEADS, stage):
            losses = spread([result["loss"][-1] for result in seeds.values()])
            rows.append([stage, *cells(seeds, pairs), losses])
    head = ["heads", "seeds", "parameters", "state", *(f"{number} pairs" for number in pairs), "training loss"]
    title = f"GLA from nothing, {study.settings.heads_steps:,} steps:\n\n"
    return title + markdown(head, rows) if rows else ""


def figure(study: Study, path: Path) -> None:
    """Accuracy of seeds and their mean: a panel for each base and number of steps in which arms can be compared."""
    settings = study.settings
    shown = {
        (name, steps): lines
        for name, base in BASES.items()
        for steps in study.settings_of(name).steps
        if len(lines := {arm: seeds for arm in base.arms if (seeds := study.measured(name, f"{arm}_{steps}"))}) > 1
    }
    if not shown:
        return
    titles = [f"{BASES[name].label}: {steps:,} steps" for name, steps in shown]
    picture, axes = panels(titles, len(settings.steps))
    pairs = settings.pairs[1]
    for axis, lines in zip(axes, shown.values(), strict=True):
        for place, (arm, seeds) in enumerate(lines.items()):
            color, recalled = ARMS[arm].color, [result["accuracy"][str(pairs)] for result in seeds.values()]
            axis.plot(recalled, [place] * len(recalled), "o", color=color, alpha=0.45, markersize=6)
            axis.plot(statistics.mean(recalled), place, "|", color=color, markersize=22, markeredgewidth=3)
        floor = without_recall(settings, pairs)
        axis.axvline(floor, linestyle="dotted", color="black", linewidth=1.5, label="without recall")
        axis.set_yticks(range(len(lines)), [ARMS[arm].label for arm in lines])
        axis.set_ylim(len(lines) - 0.5, -0.5)
        axis.set_xlim(0.25, 1.02)
        axis.grid(axis="y", visible=False)
        axis.set_xlabel(f"share of values recalled, {pairs} pairs", fontsize=FONT_SIZE)
    for axis in axes[1::2]:
        axis.tick_params(labelleft=False)
    picture.set_size_inches(11.5, 1.3 * len(axes) + 0.8)
    legend_below(picture, axes, 1)
    save_png(picture, path)


def report(study: Study) -> None:
    """Tables into README.md, if there is one, and the figure, both beside the results."""
    tables = {name: base_table(study, name) for name in BASES} | {HEADS: heads_table(study)}
    print("\n".join(filter(None, tables.values())) or "No arm has a result yet.")
    page = study.results.parent / "README.md"
    if page.is_file():
        fill(page, tables)
    figure(study, study.results.parent / "state_expansion.png")


def main() -> None:
    """Run the arms, the shortest first, and report on all that are there."""
    parser = options_of(__doc__, HERE / "results")
    parser.set_defaults(seeds=list(range(8)))
    parser.add_argument("--bases", nargs="+", choices=[*BASES, HEADS], default=[*BASES, HEADS], help="which (all)")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), help="which of their arms (all)")
    options = parsed(parser)
    torch.set_num_threads(1)  # results of small runs hang on the order of sums
    study = Study(
        Path(options.output) / "state_expansion", Path(options.results), TINY if options.tiny else Settings()
    )
    if options.report:
        study.kept.merge()
    else:
        for seed in options.seeds:
            for name in options.bases:
                study.run(name, options.arms, seed)
    report(study)


if __name__ == "__main__":
    main()
