"""Which ways of training lead to failure beyond the training length, and what restores length generalization?

After Fig. 1 to 4 and 11 of arXiv:2507.02782: training length at equal tokens, tokens seen, warm-up, and few steps of
state passing. The model is that of `lengthgen demo`; one setting is changed at a time. Writes to the output folder:
failure.png, failure.md, failure.json, and a checkpoint per stage and seed. An interrupted run continues.
"""

import sys
from pathlib import Path
from typing import Any

import torch

from hf_recurrent_lengthgen.evaluation.settings import EvaluationSettings
from hf_recurrent_lengthgen.metrics.remembrance.measure import effective_remembrance
from hf_recurrent_lengthgen.plotting.images import save_png
from hf_recurrent_lengthgen.plotting.style import FONT_SIZE, INK, mark_training_lengths, perplexity_axis, position_axis
from hf_recurrent_lengthgen.trainers import StatePassingTrainer, ZeroStateTrainer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from small_setting import Result, Study, Training, options_of
from study_pages import band, draw, markdown, over_seeds, panels, perplexities, read_stages

HERE = Path(__file__).resolve().parent
COLORS = ("#56b4e9", "#009e73", "#d55e00", "#7a3b9c", "#a8780f")
LINES = ("solid", (0, (5, 2)), "solid", (0, (1, 1)), "solid")
MULTIPLES = (0.25, 0.5, 1, 2)
"""Training lengths, in those of the demo."""
WARMUPS = (0.02, 0.1, 0.25)
"""Shares of all steps; the demo's is the middle one."""
SHARES = (0.1, 0.25, 1)
"""Steps of state passing after the base, in those of a full post-training."""


class FailureStudy(Study):
    """Its stages have Effective Remembrance after 4 training lengths of the base, too."""

    def measure(self, model: Any, length: int, seed: int, misalignment: bool = False) -> Result:
        measured = super().measure(model, length, seed, misalignment)
        settings, read = EvaluationSettings(progress=False), 4 * self.settings.training_length
        result = effective_remembrance(model, self.texts, length, settings, length=read)
        kept = [result.length - start for start in result.starts]
        values = [round(value.mean, 4) for value in result.total_variation]
        beyond = result.beyond_training
        return measured | {"remembrance": {"kept": kept, "mean": values}, "forgotten": beyond and beyond.mean}


def post_trainings(study: Study) -> dict[str, str]:
    """Stages that continue the base, with their labels: a few steps of state passing, and of plain training."""
    steps = sorted({max(1, int(share * study.settings.post_training_steps)) for share in SHARES})
    labels = {f"state_passing_{n}": f"{n} of state passing" for n in steps}
    return labels | {f"plain_{steps[-1]}": f"{steps[-1]} of plain training"}


def train_and_post_train(study: Study, seed: int) -> None:
    """The base of the demo, which is one of each series, and a few steps more."""
    study.base(seed)
    for name in post_trainings(study):
        trainer = ZeroStateTrainer if name.startswith("plain") else StatePassingTrainer
        steps = int(name.rpartition("_")[2])
        training = Training(steps, study.settings.post_training_learning_rate, "base", study.settings.batch_size)
        study.run(name, seed, training, trainer, study.blocks())


def train_variations(study: Study, seed: int) -> None:
    """Other training lengths and warm-ups, the most important first."""
    for multiple, warmup in ((0.5, None), (2, None), (None, 0.25), (0.25, None), (None, 0.02)):
        if multiple is None:
            train_with(study, seed, f"warmup_{warmup}", 1, warmup)
        else:
            train_with(study, seed, f"length_{int(multiple * study.settings.training_length)}", multiple, 0.1)


def train_with(study: Study, seed: int, name: str, multiple: float, warmup: float) -> None:
    """One stage: training length in those of the demo, at equally many tokens a step, and warm-up."""
    settings = study.settings
    length, batch = int(settings.training_length * multiple), int(settings.batch_size / multiple)
    steps, rate = settings.base_steps, settings.base_learning_rate
    training = Training(steps, rate, batch_size=batch, training_length=length, warmup=warmup)
    study.run(name, seed, training, ZeroStateTrainer, study.blocks(length))


def series(study: Study, seeds: list[int]) -> dict[str, dict[str, dict[int, Result]]]:
    """All results: panel -> label -> seed -> measurement, of panels with two or more labels."""
    settings = study.settings
    step = settings.batch_size * settings.training_length
    whole = settings.base_steps * step
    steps = [(f"after {n} steps", f"{n * step / 1e6:.2g} M tokens") for n in study.snapshots]
    stages = {
        "Training length": {
            f"{int(settings.training_length * m)} bytes": (
                "base" if m == 1 else f"length_{int(settings.training_length * m)}",
                "measured",
            )
            for m in MULTIPLES
        },
        "Tokens seen": {label: ("base", key) for key, label in steps}
        | {f"{whole / 1e6:.2g} M tokens": ("base", "measured")},
        "Further steps": {"base": ("base", "measured")}
        | {label: (name, "measured") for name, label in post_trainings(study).items()},
        "Warm-up": {f"{100 * w:g} % of steps": ("base" if w == 0.1 else f"warmup_{w}", "measured") for w in WARMUPS},
    }
    measured: dict[str, dict[str, dict[int, Result]]] = {}
    for panel, labels in stages.items():
        measured[panel] = {}
        for label, (stage, key) in labels.items():
            kept = {seed: study.result(stage, seed) for seed in seeds}
            measured[panel][label] = {seed: result[key] for seed, result in kept.items() if result is not None}
    return {panel: labels for panel, labels in measured.items() if sum(map(bool, labels.values())) > 1}


def figure(study: Study, measured: dict[str, dict[str, dict[int, Result]]]) -> None:
    """Perplexity, excess loss and Effective Remembrance, one column per series."""
    quantities = {"perplexity": "perplexity", "harm": "excess loss", "remembrance": "remembrance"}
    units = {
        "perplexity": "perplexity per byte",
        "harm": "excess loss (nats per byte)",
        "remembrance": "total variation",
    }
    titles = [f"{panel}: {quantity}" for quantity in quantities.values() for panel in measured]
    picture, axes = panels(titles, len(measured))
    length = study.settings.training_length
    places = [(curve, panel) for curve in quantities for panel in measured]
    for axis, (curve, panel) in zip(axes, places, strict=True):
        first = length // 8 if curve == "perplexity" else length // 4
        axis.set_ylabel(units[curve], fontsize=FONT_SIZE - 1, color=INK)
        for (label, results), color, line in zip(measured[panel].items(), COLORS, LINES, strict=False):
            values, style = list(results.values()), {"color": color, "linestyle": line, "label": label}
            if values and curve == "remembrance":
                x = values[0]["remembrance"]["kept"]
                band(axis, x, list(zip(*(each["remembrance"]["mean"] for each in values), strict=True)), 0.18, **style)
            elif values:
                draw(axis, perplexities(values) if curve == "perplexity" else values, curve, first, **style)
        if curve == "remembrance":
            position_axis(axis, 1, 4 * length)
            axis.set_xlabel(f"number of last bytes, of {4 * length}", fontsize=FONT_SIZE)
            axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=2, fontsize=FONT_SIZE - 1)
        else:
            position_axis(axis, first, study.length)
        if panel == "Training length":
            for multiple, color in zip(MULTIPLES, COLORS, strict=False):
                axis.axvline(multiple * length, color=color, linewidth=1, linestyle=(0, (2, 2)))
        else:
            mark_training_lengths(axis, [length])
        if curve == "perplexity":
            perplexity_axis(axis)
        if curve == "harm":
            axis.axhline(0, color=INK, linewidth=1, zorder=0)
    save_png(picture, study.output / "failure.png")


def report(study: Study, seeds: list[int]) -> None:
    """Figure, table and numbers of all results."""
    study.output.mkdir(parents=True, exist_ok=True)
    measured = series(study, seeds)
    if not measured:
        for name, results in read_stages(HERE / "failure.json").items():
            panel, _, label = name.partition(": ")
            measured.setdefault(panel, {})[label] = results
    figure(study, measured)
    rows = []
    for panel, curves in measured.items():
        for label, results in curves.items():
            values = list(results.values())
            if values:
                numbers = [over_seeds(values, "harm_last", "+.3f"), over_seeds(values, "nll_last")]
                numbers += [over_seeds(values, key) for key in ("in_window", "context_use", "forgotten")]
                rows.append([panel.lower(), label, ", ".join(map(str, results)), *numbers])
    start, stop = next(iter(measured["Tokens seen"].values()))[seeds[0]]["harm_range"]
    head = ["varied", "value", "seeds", f"excess loss at {start:,}-{stop:,}", f"loss at {start:,}-{stop:,}"]
    table = markdown([*head, "loss within the training length", "context use", "remembrance"], rows)
    (study.output / "failure.md").write_text(table, encoding="utf-8")
    study.write_results(
        study.output / "failure.json",
        {
            f"{panel}: {label}": results
            for panel, curves in measured.items()
            for label, results in curves.items()
            if results
        },
    )
    print(table)


if __name__ == "__main__":
    parser = options_of(__doc__)
    parser.set_defaults(output="demo-output/failure")  # other studies have a stage "base", too
    options = parser.parse_args()
    torch.set_num_threads(1)  # rounding changes the results of small runs
    study = FailureStudy(options)
    if not options.report:
        for stages in (train_and_post_train, train_variations):
            for seed in options.seeds:
                stages(study, seed)
    report(study, options.seeds)
