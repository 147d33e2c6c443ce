"""Compare training interventions on one base model: position-wise loss, excess loss, output alignment.

Each base (one per seed) is that of `lengthgen demo`, which fails with its default initialization. Every method trains
it further with the same number of steps and tokens a step. Writes into the output folder: interventions.png,
interventions.md, interventions.json, and a checkpoint per method and seed. An interrupted run continues.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

from hf_recurrent_lengthgen.data import ContinuedChunks
from hf_recurrent_lengthgen.plotting.images import save_png
from hf_recurrent_lengthgen.plotting.style import INK, mark_training_lengths, perplexity_axis, position_axis
from hf_recurrent_lengthgen.trainers import (
    AlignmentTrainer,
    FittedNoiseTrainer,
    InitialStateTrainer,
    MixedStatesTrainer,
    RandomNoiseTrainer,
    StatePassingTrainer,
    TbttTrainer,
    ZeroStateTrainer,
)

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from small_setting import Result, Study, Training, options_of
from study_pages import draw, legend_below, markdown, over_seeds, panels, perplexities, read_stages

HERE = Path(__file__).resolve().parent
NOISE = (0.1, 0.3, 1.0, 3.0, 10.0)
"""Standard deviations of random noise, as fractions of the final states' root mean square under plain training."""


@dataclass(frozen=True)
class Method:
    """A trainer and its options; TBTT reads chunks that continue each other, `chunks` of them before a reset."""

    label: str
    trainer: type[InitialStateTrainer]
    options: dict[str, Any] = field(default_factory=dict)
    chunks: int | None = 12


def aligned(alpha: float = 0.1, low: int = 1, high: int | None = None) -> dict[str, Any]:
    """Options of the alignment loss: its weight and the range of l_extra in tokens."""
    return {"alignment_alpha": alpha, "alignment_min_extra": low, "alignment_max_extra": high}


MIXTURE = {"zero": 0.1, "state_passing": 0.45, "fitted_noise": 0.45}
FIGURE = {
    "control": Method("plain training", ZeroStateTrainer),
    "fitted_noise": Method("fitted noise", FittedNoiseTrainer),
    "state_passing": Method("state passing", StatePassingTrainer),
    "tbtt": Method("TBTT, reset after 12 chunks", TbttTrainer),
}


def noises() -> dict[str, Method]:
    """Random noise; sigma is set when the size of the states is known."""
    return {f"random_noise_{x}": Method(f"random noise, {x:g} x RMS", RandomNoiseTrainer) for x in NOISE}


def others(length: int) -> dict[str, Method]:
    """The mixture, and the alignment loss alone and combined; T = length."""
    quarter, half = length // 4, length // 2 - 1
    far, near = aligned(0.1, quarter, half), aligned(0.1, 1, quarter)
    return {
        "tbtt_endless": Method("TBTT without reset", TbttTrainer, chunks=None),
        "mixture": Method("mixture: 10 % zero, 45 % passed, 45 % fitted", MixedStatesTrainer, {"mixture": MIXTURE}),
        "align_0.1": Method("alignment 0.1", AlignmentTrainer, aligned(0.1)),
        "sp_align": Method("state passing + alignment 0.1", StatePassingTrainer, aligned()),
        "tbtt_align": Method("TBTT + alignment 0.1", TbttTrainer, aligned()),
        "align_0.3": Method("alignment 0.3", AlignmentTrainer, aligned(0.3)),
        "align_0.5": Method("alignment 0.5", AlignmentTrainer, aligned(0.5)),
        "align_near": Method(f"alignment 0.1, shifts 1 to {quarter}", AlignmentTrainer, near),
        "align_far": Method(f"alignment 0.1, shifts {quarter} to {half}", AlignmentTrainer, far),
    }


def train(study: Study, name: str, method: Method, seed: int) -> Result | None:
    """One stage. Rows with two crops come in half as large batches: equally many tokens a step."""
    settings, length = study.settings, study.settings.training_length
    options, batch = dict(method.options), settings.batch_size
    extra = 0
    if "alignment_alpha" in options:
        options["alignment_length"], batch = length, batch // 2
        extra = options["alignment_max_extra"] or length // 2 - 1
    data: Dataset = study.blocks(length + extra - 1 if extra else length)
    if method.trainer is TbttTrainer:
        data = ContinuedChunks(study.stream, length, method.chunks, lookahead=extra)
    training = Training(settings.post_training_steps, settings.post_training_learning_rate, "base", batch)
    return study.run(name, seed, training, method.trainer, data, **options)


def sigma_of(study: Study, name: str, seed: int) -> float | None:
    """The standard deviation of a random-noise stage, to two digits."""
    control = study.result("control", seed)
    if control is None:
        return None
    return float(f"{float(name.rpartition('_')[2]) * control['log'][-1]['state_rms']:.2g}")


def best_noise(study: Study, seed: int) -> str | None:
    """The noise of least excess loss, on the texts that are reported: the choice is in its favor."""
    results = {name: study.result(name, seed) for name in noises()}
    if any(result is None for result in results.values()):
        return None
    return min(results, key=lambda name: results[name]["measured"]["harm_last"]["mean"])


def stages(study: Study, seeds: list[int]) -> Iterator[Callable[[], Any]]:
    """The stages, the most important first: the figure's methods of all seeds, then the rest seed by seed."""
    for number, seed in enumerate(seeds):
        yield lambda seed=seed: study.base(seed)
        for name, method in FIGURE.items():
            yield lambda name=name, method=method, seed=seed: train(study, name, method, seed)
        best = best_noise(study, seeds[0])
        for name, method in noises().items():
            if number == 0 or name == best:
                yield lambda name=name, method=method, seed=seed: train(
                    study, name, replace(method, options={"noise_sigma": sigma_of(study, name, seed)}), seed
                )
    for seed in seeds:
        for name, method in others(study.settings.training_length).items():
            yield lambda name=name, method=method, seed=seed: train(study, name, method, seed)


def labels(study: Study) -> dict[str, str]:
    """Stages as they stand in the table."""
    methods = {**noises(), **FIGURE, **others(study.settings.training_length)}
    order = ["control", *noises(), *(name for name in methods if name != "control" and name not in noises())]
    return {"base": "base"} | {name: methods[name].label for name in order}


def figure(study: Study, measured: dict[str, dict[int, Result]], noise: str) -> None:
    """Perplexity and excess loss by position, after Fig. 5 of arXiv:2507.02782."""
    looks = {
        "base": ("base", "#d55e00", "solid"),
        "control": ("plain training", "#a8780f", (0, (5, 2))),
        noise: ("random noise", "#5b636d", (0, (1, 1))),
        "fitted_noise": ("fitted noise", "#aa4499", "solid"),
        "state_passing": ("state passing", "#0072b2", "solid"),
        "tbtt": ("TBTT", "#009e73", (0, (5, 2))),
    }
    picture, axes = panels(["Perplexity per byte", "Excess loss (nats per byte)"], 2)
    length = study.settings.training_length
    for axis, curve, first in zip(axes, ("perplexity", "harm"), (length // 8, length // 2), strict=True):
        for name, (label, color, line) in looks.items():
            if measured.get(name):
                results = list(measured[name].values())
                shown = perplexities(results) if curve == "perplexity" else results
                draw(axis, shown, curve, first, color=color, linestyle=line, label=label)
        position_axis(axis, first, study.length)
        mark_training_lengths(axis, [length])
    perplexity_axis(axes[0])
    axes[1].axhline(0, color=INK, linewidth=1, zorder=0)
    legend_below(picture, axes, 6)
    save_png(picture, study.output / "interventions.png")


def report(study: Study, seeds: list[int]) -> None:
    """Figure, table and numbers of the stages that are there."""
    measured = study.measured(labels(study), seeds) or read_stages(HERE / "interventions.json")
    rows = []
    for name, results in measured.items():
        values = list(results.values())
        numbers = [over_seeds(values, "harm_last", "+.3f"), over_seeds(values, "nll_last")]
        numbers += [over_seeds(values, key) for key in ("in_window", "context_use", "misalignment")]
        rows.append([labels(study)[name], ", ".join(map(str, results)), *numbers])
    start, stop = next(iter(next(iter(measured.values())).values()))["harm_range"]
    head = ["method", "seeds", f"excess loss at {start:,}-{stop:,}", f"loss at {start:,}-{stop:,}"]
    head += [f"loss inside {study.settings.training_length}", "context use", "misalignment"]
    table = markdown(head, rows)
    study.output.mkdir(parents=True, exist_ok=True)
    (study.output / "interventions.md").write_text(table, encoding="utf-8")
    study.write_results(study.output / "interventions.json", measured)
    noisy = [name for name in noises() if seeds[0] in measured.get(name, {})]
    figure(study, measured, min(noisy, key=lambda name: measured[name][seeds[0]]["harm_last"]["mean"], default=""))
    print(table)


if __name__ == "__main__":
    parser = options_of(__doc__)
    parser.set_defaults(output="demo-output/interventions")  # other studies have a stage "base", too
    options = parser.parse_args()
    torch.set_num_threads(1)  # results of small runs hang on rounding
    study = Study(options)
    for stage in stages(study, options.seeds):
        stage()
    report(study, options.seeds)
