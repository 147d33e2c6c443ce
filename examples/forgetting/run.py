"""Let one small model forget at inference, without training, and compare: position-wise loss and excess loss.

After Fig. 4 of arXiv:2410.07145: less retention and insertion (RRI), a sliding window on the states, and LongMamba's
smaller steps. The model is a Mamba-2 with slow-decay initialization, one per seed; state passing, which trains, is
shown for comparison. RRI is searched for on texts of the training split. Writes into the output folder:
forgetting.png, forgetting.md, forgetting.json, both checkpoints and the searches of each seed, and the results. An
interrupted run continues.
"""

import json
import sys
from copy import copy
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from hf_recurrent_lengthgen import Forgetting, forgetting, load_model
from hf_recurrent_lengthgen.checkpoints.loading import quiet_transformers
from hf_recurrent_lengthgen.cli.inputs import load_stream
from hf_recurrent_lengthgen.data import byte_tokenizer, evaluation_sequences
from hf_recurrent_lengthgen.evaluation.results import DataRecord, DataSource
from hf_recurrent_lengthgen.evaluation.settings import EvaluationSettings
from hf_recurrent_lengthgen.models.scan_forgetting import in_words
from hf_recurrent_lengthgen.plotting.images import save_png
from hf_recurrent_lengthgen.plotting.style import FONT_SIZE, INK, mark_training_lengths, perplexity_axis, position_axis
from hf_recurrent_lengthgen.trainers import StatePassingTrainer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))
from forgetting_search import INSERTIONS, PAPER, forgetting_grid, rule_of, search_forgetting
from small_setting import Result, SlowStudy, Training, parse
from study_pages import draw, markdown, nll_last, over_seeds, panels, perplexities, read_stages

HERE = Path(__file__).resolve().parent
WINDOWS = (0.5, 1, 2, 4)
"""In training lengths."""
RETENTIONS = (1.0, 0.9999, 0.999, 0.99, 0.97, 0.9)
"""For the search: the last one halves a state within 7 bytes."""


def on_longer_texts(study: SlowStudy) -> SlowStudy:
    """The study with half as many texts of twice the length, to measure on."""
    settings = study.settings
    longer = copy(study)
    longer.settings = replace(
        settings, evaluation_multiple=2 * settings.evaluation_multiple, sequences=settings.sequences // 2
    )
    longer.length = longer.settings.evaluation_multiple * settings.training_length
    held_out = load_stream("stdlib", "validation", byte_tokenizer())
    longer.texts = evaluation_sequences(held_out.tokens, longer.settings.sequences, longer.length + 1)
    longer.description = f"{longer.settings.sequences} texts of {longer.length} bytes of {held_out.source.description}"
    return longer


def fixed_settings(length: int) -> dict[str, Forgetting]:
    """Those that are the same for all seeds, by their name in the results; T = length."""
    windows = {f"window_{x:g}": Forgetting(window=max(1, int(x * length))) for x in WINDOWS}
    return {"base": Forgetting(), "rri_paper": PAPER, **windows, "delta_scale": Forgetting(delta_scale=0.5)}


def run_seed(study: SlowStudy, longer: SlowStudy, seed: int) -> None:
    """Train the base and post-train it, search, and measure under each setting; results are not repeated."""
    settings = study.settings
    study.base(seed)
    post_training = Training(
        settings.post_training_steps, settings.post_training_learning_rate, "base", settings.batch_size
    )
    study.run("state_passing", seed, post_training, StatePassingTrainer, study.blocks())
    for name, rule in fixed_settings(settings.training_length).items():
        measure(longer, "base", name, rule, seed)
    best, losses = search(longer, seed)
    measure(longer, "base", "rri_searched", best, seed, {"search": losses})
    measure(longer, "state_passing", "state_passing", Forgetting(), seed)


def search(study: SlowStudy, seed: int) -> tuple[Forgetting, dict[str, float]]:
    """The best multipliers on texts of the training split, and the mean loss under all that were tried."""
    texts = evaluation_sequences(study.stream, max(1, study.settings.sequences // 2), study.length + 1)
    folder = study.folder("base", seed)
    with quiet_transformers():
        searched = search_forgetting(
            load_model(str(folder)),
            texts,
            forgetting_grid(RETENTIONS, INSERTIONS),
            "base",
            DataRecord(DataSource("training split"), token_unit="byte"),
            EvaluationSettings(progress=False),
            file=folder / "forgetting_search.json",
        )
    return rule_of(searched.best), {in_words(rule_of(trial)): round(trial.loss.mean, 4) for trial in searched.trials}


def measure(
    study: SlowStudy, stage: str, name: str, rule: Forgetting, seed: int, more: dict[str, Any] | None = None
) -> None:
    """Measure the model of a stage under a setting."""
    folder, trained = study.folder(stage, seed), study.kept.get(stage, seed)
    assert trained is not None
    key = {"trained": trained["key"], "texts": study.description, "forgetting": rule._asdict(), **(more or {})}
    kept = study.kept.get(f"forgetting/{name}", seed)
    if kept is not None and kept["key"] == json.loads(json.dumps(key)):
        return
    with quiet_transformers():
        model = load_model(str(folder))
        with forgetting(model, **rule._asdict()):
            results = study.measure(model, study.settings.training_length, seed, misalignment=False)
    result = {"key": key, "measured": {"setting": in_words(rule), **results, **(more or {})}}
    study.kept.put(f"forgetting/{name}", seed, result)
    print(f"seed {seed} {name} ({in_words(rule)}): excess loss {results['harm_last']['mean']:+.3f}", flush=True)


def labels(study: SlowStudy) -> dict[str, str]:
    """Settings in the order of the table."""
    length = study.settings.training_length
    windows = {f"window_{x:g}": f"window of {max(1, int(x * length))}" for x in WINDOWS}
    first = {"base": "none (base)", "rri_paper": f"RRI of the paper: {in_words(PAPER)}"}
    last = {"delta_scale": "steps x 0.5", "state_passing": "none, after 200 steps of state passing"}
    return {**first, "rri_searched": "RRI, searched", **windows, **last}


def octaves(result: Result, length: int) -> dict[int, float]:
    """Mean loss of the positions [T/2, T), [T, 2T) and so on, by where they begin."""
    curve = result["nll"]
    bins = list(zip(pairwise(curve["edges"]), curve["mean"], strict=True))
    losses, start = {}, length // 2
    while start < curve["edges"][-1]:
        inside = [(b - a, mean) for (a, b), mean in bins if start <= a < 2 * start]
        losses[start] = sum(size * mean for size, mean in inside) / sum(size for size, _ in inside)
        start *= 2
    return losses


def tables(study: SlowStudy, measured: dict[str, dict[int, Result]]) -> str:
    """Excess loss and losses; and the loss by doubling of the position, as means over seeds."""
    length = study.settings.training_length
    rows, by_octave = [], []
    for name, results in measured.items():
        values = [result | {"cut_off": nll_last(result) - result["harm_last"]["mean"]} for result in results.values()]
        numbers = [over_seeds(values, "harm_last", "+.3f"), over_seeds(values, "nll_last")]
        numbers.append(over_seeds(values, "cut_off"))
        numbers += [over_seeds(values, key) for key in ("in_window", "context_use")]
        rows.append([labels(study)[name], ", ".join(map(str, results)), *numbers])
        losses = [octaves(result, length) for result in values]
        means = [sum(loss[start] for loss in losses) / len(losses) for start in losses[0]]
        by_octave.append([labels(study)[name], *(f"{mean:.3f}" for mean in means)])
    first = next(iter(measured["base"].values()))
    start, stop = first["harm_range"]
    head = ["forgetting", "seeds", f"excess loss at {start:,}-{stop:,}", f"loss at {start:,}-{stop:,}"]
    head += [f"loss with at most {length} bytes", f"loss within {length}", "context use"]
    starts = [f"{start:,}-{2 * start:,}" for start in octaves(first, length)]
    return f"{markdown(head, rows)}\n{markdown(['loss at positions', *starts], by_octave)}"


def figure(study: SlowStudy, measured: dict[str, dict[int, Result]]) -> None:
    """Perplexity and excess loss against position, after Fig. 4 of arXiv:2410.07145; perplexity with each window."""
    length = study.settings.training_length
    methods = {
        "base": ("base", "#d55e00", "solid"),
        "rri_paper": ("RRI of the paper", "#a8780f", (0, (5, 2))),
        "rri_searched": ("RRI, searched", "#aa4499", "solid"),
        "delta_scale": ("steps x 0.5", "#5b636d", (0, (1, 1))),
        "window_1": (f"window of {length}", "#009e73", "solid"),
        "state_passing": ("state passing (training)", "#0072b2", (0, (5, 2))),
    }
    looks = (("#56b4e9", "solid"), ("#009e73", "solid"), ("#7a5cc8", (0, (5, 2))), ("#5b636d", (0, (1, 1))))
    windows = {
        f"window_{x:g}": (labels(study)[f"window_{x:g}"], *look) for x, look in zip(WINDOWS, looks, strict=True)
    }
    picture, axes = panels(["Base and methods", "Excess loss from context", "Windows on the base"], 3)
    units = ["perplexity per byte", "nats per byte", "perplexity per byte"]
    shown = [("perplexity", methods), ("harm", methods), ("perplexity", {"base": methods["base"], **windows})]
    for axis, unit, (curve, lines) in zip(axes, units, shown, strict=True):
        axis.set_ylabel(unit, fontsize=FONT_SIZE - 1, color=INK)
        first = length // 8 if curve == "perplexity" else length // 2
        for name, (label, color, line) in lines.items():
            results = list(measured[name].values())
            values = perplexities(results) if curve == "perplexity" else results
            draw(axis, values, curve, first, color=color, linestyle=line, label=label)
        position_axis(axis, first, study.length)
        mark_training_lengths(axis, [length])
    axes[1].axhline(0, color=INK, linewidth=1, zorder=0)
    for axis in (axes[0], axes[2]):
        perplexity_axis(axis)
        axis.legend(loc="upper left", bbox_to_anchor=(0, -0.2), ncols=2, fontsize=FONT_SIZE - 1.5, frameon=False)
    save_png(picture, study.output / "forgetting.png")


def report(study: SlowStudy, seeds: list[int]) -> None:
    """Figure, tables and numbers of all results."""
    measured: dict[str, dict[int, Result]] = {}
    for name in labels(study):
        kept = {seed: study.kept.get(f"forgetting/{name}", seed) for seed in seeds}
        measured[name] = {seed: result["measured"] for seed, result in kept.items() if result is not None}
    if not any(measured.values()):
        measured = read_stages(HERE / "forgetting.json")
    missing = [name for name, results in measured.items() if not results]
    if missing:
        raise SystemExit(f"Nothing is measured yet of {', '.join(missing)}: run without --report.")
    study.output.mkdir(parents=True, exist_ok=True)
    text = tables(study, measured)
    (study.output / "forgetting.md").write_text(text, encoding="utf-8")
    study.write_results(study.output / "forgetting.json", measured)
    figure(study, measured)
    print(text)
    for seed, result in measured["rri_searched"].items():
        print(f"searched, seed {seed}: {result['setting']}")


if __name__ == "__main__":
    options = parse(__doc__)
    study = SlowStudy(options)
    longer = on_longer_texts(study)
    if not options.report:
        for seed in options.seeds:
            run_seed(study, longer, seed)
    report(longer, options.seeds)
