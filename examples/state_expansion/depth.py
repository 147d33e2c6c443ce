"""From which start, and in how many layers: Figures 4, 5 and 6 of StateX (arXiv:2509.22630) in small.

A model of eight layers learns associative recall with a state that is too small: GLA from the default initialization,
Mamba-2 from the mimetic one, without which it learned no recall on two of three seeds. Each arm trains it on with the
same sequences: as it is ("vanilla"), or with a larger state in 1, 2 or 4 layers, one in every 8, 4 or 2 from the
first. Its expanded layers start as the paper's text says ("reinit", with the initialization of the base), as the
authors' code does ("released"), with trained weights whose new rows can learn ("inherit", ours), or as the code's
baseline does ("merge-copy").

Arms that have a result in --results are not run again. At the end, the tables of README.md and depth.png beside
--results are written anew.
"""

import copy
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from hf_recurrent_lengthgen.data.tasks import EVALUATION_SEED
from hf_recurrent_lengthgen.models.layers_known import key_and_query_weights, known_mixers
from hf_recurrent_lengthgen.plotting.images import save_png
from hf_recurrent_lengthgen.plotting.style import FONT_SIZE
from hf_recurrent_lengthgen.surgery import expand_state, mimetic_initialization

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))
from arm_results import ArmResults, Result
from arms import TINY, Settings, fit, new_gla, new_mamba2, recall, start_mimetically, without_recall
from small_setting import options_of, parsed
from study_pages import band, fill, legend_below, markdown, mean_and_range, panels

HERE = Path(__file__).resolve().parent
COUNTS = (1, 2, 4)
STARTS = {
    "reinit": ("reinit, as in the text", "#d55e00"),
    "released": ("released, the code's", "#aa4499"),
    "inherit": ("inherit, ours", "#0072b2"),
    "merge-copy": ("merge-copy, the code's baseline", "#56b4e9"),
}
ARMS = {"vanilla": ("vanilla training", "#a8780f"), **STARTS}
SIZES: dict[str, Any] = {"layers": 8, "hidden_size": 32, "heads": 4, "gla_heads": 4, "state_size": 4, "factor": 4}
COMMON = replace(Settings(), **SIZES, batch_size=32, evaluated_pairs=(2, 4, 8))
SETTINGS = {
    "mamba2": replace(COMMON, vocabulary=16, base_steps=800, learning_rate=1e-2, steps=(300,)),
    "gla": replace(COMMON, base_steps=1500, learning_rate=5e-3, steps=(200,)),
}


def new_mimetic_mamba2(settings: Settings) -> Any:
    """Mamba-2 with mimetic initialization."""
    model = new_mamba2(settings)
    mimetic_initialization(model)
    return model


FAMILIES: dict[str, Any] = {
    "mamba2": ("Mamba-2", new_mimetic_mamba2, {"factor": SIZES["factor"]}),
    "gla": ("GLA", new_gla, {"num_heads": 1}),
}
WINDOW = 20
"""Steps of training whose losses a point of the figure averages."""


def arm_names(counts: Sequence[int] = COUNTS) -> list[str]:
    """Vanilla training, then each start in so many layers."""
    return ["vanilla", *(f"{start}/{count}" for start in STARTS for count in counts)]


@torch.no_grad()
def held_out_loss(model: Any, settings: Settings) -> float:
    """Cross-entropy of the values in nats, on the rows of the accuracies, mean over numbers of pairs."""
    rows, losses = settings.evaluation_rows, []
    for pairs in settings.evaluated_pairs:
        batch = recall(settings, 0).resized(pairs, rows, EVALUATION_SEED).batch(range(rows))
        losses.append(float(model(**batch, use_cache=False).loss))
    return sum(losses) / len(losses)


@torch.no_grad()
def spread_of_copies(model: Any, layers: int, factor: int) -> float:
    """The largest difference between copies of a row of B or C, over the root mean square of the rows (merge-copy)."""
    worst = 0.0
    for mixer in known_mixers(model)[:: len(known_mixers(model)) // layers]:
        for weight in key_and_query_weights(mixer):
            copies = weight.unflatten(1, (factor, -1))
            worst = max(worst, float((copies - copies[:, :1]).abs().max() / weight.square().mean().sqrt()))
    return worst


class Study:
    """Trains and measures the arms of the families."""

    def __init__(self, results: Path, settings: dict[str, Settings]) -> None:
        self.settings, self.kept = settings, ArmResults(results)
        self.keys = {family: json.loads(json.dumps(asdict(each))) for family, each in settings.items()}
        self.bases: dict[tuple[str, int], Any] = {}

    def measured(self, family: str, arm: str) -> dict[int, Result]:
        """Results of an arm with these settings, by seed."""
        name = f"deep_{family}/{arm}"
        results = {seed: self.kept.get(name, seed) or {} for seed in self.kept.seeds(name)}
        return {seed: result for seed, result in results.items() if result.get("settings") == self.keys[family]}

    def base(self, family: str, seed: int) -> Any:
        """A copy of the base, which is trained once in a command; its weights are not kept."""
        if (family, seed) not in self.bases:
            settings = self.settings[family]
            torch.manual_seed(seed)
            base = self.bases[family, seed] = FAMILIES[family][1](settings)
            self._put(family, "base", seed, base, fit(base, settings, settings.base_steps, 2 * seed))
        return copy.deepcopy(self.bases[family, seed])

    def run(self, family: str, seed: int, counts: Sequence[int]) -> None:
        """Train the arms that have no result."""
        settings, growth = self.settings[family], FAMILIES[family][2]
        for arm in (arm for arm in arm_names(counts) if seed not in self.measured(family, arm)):
            start, _, count = arm.partition("/")
            model = self.base(family, seed)
            if start in STARTS:
                how: Any = start
                model = expand_state(model, count=int(count), **growth, initialization=how, seed=seed)
                if (start, family) == ("reinit", "mamba2"):
                    start_mimetically(model, range(0, settings.layers, settings.layers // int(count)))
            steps = settings.steps[0]
            result = fit(model, settings, steps, 2 * seed + 1, -(-steps // WINDOW))
            if start == "merge-copy" and family == "mamba2":
                result["copies"] = spread_of_copies(model, int(count), growth["factor"])
            self._put(family, arm, seed, model, result)

    def _put(self, family: str, arm: str, seed: int, model: Any, result: Result) -> None:
        loss = round(held_out_loss(model, self.settings[family]), 4)
        result |= {"held_out": loss, "settings": self.keys[family]}
        self.kept.put(f"deep_{family}/{arm}", seed, result)
        print(
            f"seed {seed} {family}/{arm}: {result['accuracy']}, {result['held_out']}, {result['seconds']} s",
            flush=True,
        )


def table(study: Study, family: str) -> str:
    """Recall and loss of all arms, and the difference from vanilla training with the same seed."""
    pairs = [str(each) for each in study.settings[family].evaluated_pairs[1:]]
    rows, vanilla = [], study.measured(family, "vanilla")
    for arm in ("base", *arm_names()):
        seeds = study.measured(family, arm)
        if not seeds:
            continue
        start, _, count = arm.partition("/")
        results = seeds.values()
        accuracies = [mean_and_range(result["accuracy"][each] for result in results) for each in pairs]
        both = [seed for seed in seeds if seed in vanilla and start in STARTS]
        gains = [seeds[seed]["accuracy"][pairs[-1]] - vanilla[seed]["accuracy"][pairs[-1]] for seed in both]
        gain = mean_and_range(gains, "+.3f") if gains else ""
        held_out, last = (
            mean_and_range(losses) for losses in zip(*((r["held_out"], r["loss"][-1]) for r in results), strict=True)
        )
        label, state = ARMS.get(start, ("base",))[0], f"{next(iter(results))['state']:,}"
        rows.append([label, count, ", ".join(map(str, seeds)), state, *accuracies, gain, held_out, last])
    floor = [f"{without_recall(study.settings[family], int(each)):.3f}" for each in pairs]
    rows.insert(0, ["without recall", "", "", "", *floor, "", "", ""])
    head = ["start", "layers", "seeds", "state", *(f"{each} pairs" for each in pairs), f"gain at {pairs[-1]} pairs"]
    return markdown([*head, "held-out loss", "training loss at the end"], rows)


def figure(study: Study, families: list[str], path: Path) -> None:
    """For each family: recall against expanded layers, and loss over steps with one and with four layers expanded."""
    titles = ["recall of {} pairs", "training loss, 1 layer", "training loss, 4 layers"]
    pairs = str(study.settings[families[0]].evaluated_pairs[-1])
    picture, axes = panels([f"{FAMILIES[each][0]}: {t.format(pairs)}" for each in families for t in titles], 3)
    for family, (recalled, *losses) in zip(families, zip(*[iter(axes)] * 3, strict=True), strict=True):
        vanilla = [result["accuracy"][pairs] for result in study.measured(family, "vanilla").values()]
        band(
            recalled,
            COUNTS,
            [vanilla] * 3,
            0.12,
            color=ARMS["vanilla"][1],
            linestyle="dashed",
            label=ARMS["vanilla"][0],
        )
        for start, (label, color) in STARTS.items():
            seeds = {n: found for n in COUNTS if (found := study.measured(family, f"{start}/{n}").values())}
            columns = [[result["accuracy"][pairs] for result in each] for each in seeds.values()]
            band(recalled, list(seeds), columns, 0.12, color=color, label=label, marker="o")
        floor = without_recall(study.settings[family], int(pairs))
        recalled.axhline(floor, linestyle="dotted", color="black", linewidth=1.5, label="without recall")
        recalled.set_xticks(COUNTS)
        recalled.set_xlabel("expanded layers of eight", fontsize=FONT_SIZE)
        for axis, count in zip(losses, (COUNTS[0], COUNTS[-1]), strict=True):
            for arm, (label, color) in ARMS.items():
                seeds = study.measured(family, arm if arm == "vanilla" else f"{arm}/{count}").values()
                points = list(zip(*(result["loss"] for result in seeds), strict=True))
                style = "dashed" if arm == "vanilla" else "solid"
                steps = [WINDOW * (place + 0.5) for place in range(len(points))]
                band(axis, steps, points, 0.1, color=color, linestyle=style, label=label)
            axis.set_xlabel("steps", fontsize=FONT_SIZE)
            axis.set_ylabel("nats per value", fontsize=FONT_SIZE)
    legend_below(picture, axes, 3)
    save_png(picture, path)


def main() -> None:
    """Run the arms, and report on all that are there."""
    parser = options_of(__doc__, HERE / "results")
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES), help="which (both)")
    parser.add_argument("--counts", type=int, nargs="+", choices=COUNTS, default=list(COUNTS), help="of layers (all)")
    options = parsed(parser)
    torch.set_num_threads(1)  # results of small runs hang on the order of sums
    tiny = dict.fromkeys(FAMILIES, replace(TINY, **SIZES, evaluated_pairs=(2, 3), steps=(3,)))
    study = Study(Path(options.results), tiny if options.tiny else SETTINGS)
    if options.report:
        study.kept.merge()
    for seed in options.seeds if not options.report else ():
        for family in options.families:
            study.run(family, seed, options.counts)
    shown = [each for each in FAMILIES if all(study.measured(each, arm) for arm in arm_names((4,)))]
    tables = {f"depth_{each}": table(study, each) for each in FAMILIES if study.measured(each, "vanilla")}
    print("\n".join(tables.values()) or "No arm has a result yet.")
    beside = study.kept.file.parents[1]
    if (beside / "README.md").is_file():
        fill(beside / "README.md", tables)
    if shown:
        figure(study, shown, beside / "depth.png")


if __name__ == "__main__":
    main()
