"""Does a published model fail beyond its training length, and does training with carried states restore it?

RWKV-7 of two layers, trained by its author to reverse numbers, one per sequence (see README.md for the file, which
--weights names). Each method post-trains it, with the same problems, steps and seeds. It is measured on single
problems, from the zero state, and on streams of 64 problems with carried state. An arm is one training and its
measurement. Arms that have a result in --results are not run again, so an interrupted study continues.

    python examples/published/run.py --weights 260123_reverse_L2_only_rwkv7.pth
    python examples/published/run.py --report          # table and figure from the results
"""

import hashlib
import os
import sys
from dataclasses import asdict, dataclass, replace
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch.utils.data import Dataset

from hf_recurrent_lengthgen.evaluation.settings import EvaluationSettings
from hf_recurrent_lengthgen.metrics.states.measure import diagnose_states
from hf_recurrent_lengthgen.models import StatefulRWKV7ForCausalLM
from hf_recurrent_lengthgen.plotting.images import save_png
from hf_recurrent_lengthgen.plotting.style import FONT_SIZE, INK
from hf_recurrent_lengthgen.trainers import (
    InitialStateTrainer,
    MixedStatesTrainer,
    StatePassingTrainer,
    TbttTrainer,
    ZeroStateTrainer,
)

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from reversal import ROW, WEIGHTS, ContinuedProblems, Problems, in_folder, published, right, streams, with_bias
from small_setting import Result, Stages, Training, options_of, parsed
from study_pages import band, legend_below, markdown, mean_and_range, panels

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Settings:
    """Sequences are of `ROW` tokens; a share `zero` of them starts from the zero state, in TBTT one of `chunks`."""

    steps: int = 3000
    batch_size: int = 8
    learning_rate: float = 1e-3
    zero: float = 0.1
    chunks: int = 12
    alone: tuple[int, ...] = (1, 2, 5, 10, 20, 30, 40, 50, 60)
    rows: int = 200
    digits: int = 30
    problems: int = 64
    streams: int = 50
    diagnosed: int = 16
    training_length: int = ROW


TINY = Settings(steps=2, batch_size=2, alone=(1, 60), rows=2, problems=4, streams=2, diagnosed=8)


class Method(NamedTuple):
    label: str
    color: str
    trainer: type[InitialStateTrainer] | None = None


METHODS = {
    "published": Method("published", "#d55e00"),
    "plain": Method("plain training", "#a8780f", ZeroStateTrainer),
    "state_passing": Method("state passing", "#0072b2", StatePassingTrainer),
    "tbtt": Method("TBTT", "#009e73", TbttTrainer),
    "fitted_noise": Method("fitted noise", "#aa4499", MixedStatesTrainer),
}


class Reversal(Stages):
    """Arms that start from the published weights."""

    def __init__(self, options: Any) -> None:
        self.weights = None if options.report else Path(options.weights)
        settings = TINY if options.tiny else Settings()
        super().__init__(options, replace(settings, steps=options.steps or settings.steps), "random digits")

    def made_of(self, name: str) -> dict[str, Any]:
        assert self.weights is not None
        return {"weights": hashlib.sha256(self.weights.read_bytes()).hexdigest()}

    def new_model(self, name: str, length: int, seed: int) -> Any:
        assert self.weights is not None
        return published(self.weights)

    def loaded(self, folder: Path) -> Any:
        config = StatefulRWKV7ForCausalLM.config_class.from_pretrained(folder)
        model = with_bias(StatefulRWKV7ForCausalLM(config))
        model.load_state_dict(load_file(folder / "model.safetensors"))
        return model

    @torch.no_grad()
    def measure(self, model: Any, length: int, seed: int) -> Result:
        model.eval()
        settings = self.settings
        alone = {str(n): round(right(model, 1, n, settings.rows, seed)[0], 4) for n in settings.alone}
        shares = right(model, settings.problems, settings.digits, settings.streams, seed)
        after = shares[1:]
        states = diagnose_states(
            model,
            streams(8, settings.diagnosed, settings.digits, seed),
            length,
            EvaluationSettings(seed=seed, progress=False),
            patched_heads=0,
        )
        return {
            "alone": alone,
            "stream": [round(share, 4) for share in shares],
            "after the first": round(sum(after) / len(after), 4),
            "worst alone": min(alone.values()),
            "drifting": [[head.layer, head.head] for head in states.drifting],
            "distances": {f"{head.layer}.{head.head}": round(head.late_distance, 3) for head in states.ranking},
        }

    def shown(self, measured: Result) -> str:
        return f"alone {measured['alone']}, after the first problem {measured['after the first']:.3f}"

    def arm(self, name: str, seed: int) -> None:
        """Train and measure an arm, if it has no result yet."""
        trainer, settings = METHODS[name].trainer, self.settings
        if trainer is None:
            self.as_published(name, seed)
            return
        rows = settings.steps * settings.batch_size
        data: Dataset = Problems(rows, seed)
        options: dict[str, Any] = {}
        if name == "tbtt":
            data = ContinuedProblems(rows, seed, settings.chunks)
        elif name == "state_passing":
            options = {"state_drop_probability": settings.zero}
        elif name == "fitted_noise":
            options = {"mixture": {"zero": settings.zero, "fitted_noise": 1 - settings.zero}}
        self.run(name, seed, Training(settings.steps, settings.learning_rate), trainer, data, **options)

    def as_published(self, name: str, seed: int) -> None:
        """Measure the published weights on the problems of a seed."""
        if self.result(name, seed) is None:
            measured = self.measure(self.new_model(name, ROW, seed), ROW, seed)
            key = {"settings": asdict(self.settings), **self.made_of(name)}
            self.kept.put(name, seed, {"key": key, "measured": measured})


def percent(results: list[Result], *keys: Any) -> str:
    """Mean and range over seeds of a share."""
    return mean_and_range([100 * reduce(getitem, keys, result) for result in results], ".1f")


def table(arms: dict[str, dict[int, Result]]) -> str:
    """Shares of right digits in single problems and in a stream, and heads that drift."""
    first = next(iter(next(iter(arms.values())).values()))
    alone = [n for n in (20, 40, 60) if str(n) in first["alone"]]
    places = [n for n in (2, 4, 16, 64) if n <= len(first["stream"])]
    head = [
        "",
        "seeds",
        *(f"single, {n} digits" for n in alone),
        *(f"problem {n}" for n in places),
        "heads that drift",
    ]
    rows = []
    for name, results in arms.items():
        values = list(results.values())
        cells = [percent(values, "alone", str(n)) for n in alone]
        cells += [percent(values, "stream", n - 1) for n in places]
        drifting = ", ".join(str(len(result["drifting"])) for result in values)
        rows.append([METHODS[name].label, ", ".join(map(str, results)), *cells, drifting])
    return markdown(head, rows)


def report(study: Reversal, seeds: list[int]) -> None:
    """Table and figure of all results; those in README.md, too, if the results are in its folder."""
    arms = study.measured(METHODS, seeds)
    if not arms:
        print("No arm has a result yet.")
        return
    figure(study, arms)
    study.show(HERE / "README.md", {"table": table(arms)})
    print(table(arms))


def figure(study: Reversal, arms: dict[str, dict[int, Result]]) -> None:
    """Share of right digits: in single problems by digits, in a stream by problem."""
    digits = study.settings.digits
    picture, axes = panels(
        ["One problem, from the zero state", f"Stream of problems of {digits} digits, carried state"], 2
    )
    for name, results in arms.items():
        method, values = METHODS[name], list(results.values())
        lengths = [int(n) for n in values[0]["alone"]]
        curves = (
            (axes[0], lengths, [[result["alone"][str(n)] for n in lengths] for result in values]),
            (axes[1], list(range(1, len(values[0]["stream"]) + 1)), [result["stream"] for result in values]),
        )
        for axis, x, lines in curves:
            columns = list(zip(*([100 * y for y in line] for line in lines), strict=True))
            band(axis, x, columns, 0.18, color=method.color, label=method.label)
    for axis, words in zip(axes, ("digits of the problem", "number of the problem"), strict=True):
        axis.set_ylim(0, 103)
        axis.set_xlabel(words, fontsize=FONT_SIZE - 1, color=INK)
        axis.set_ylabel("right digits (%)", fontsize=FONT_SIZE - 1, color=INK)
    axes[1].set_xscale("log", base=2)
    marks = [2**n for n in range(7) if 2**n <= study.settings.problems]
    axes[1].set_xticks(marks, list(map(str, marks)))
    legend_below(picture, axes, 5)
    save_png(picture, study.results / "published.png")


def main() -> None:
    parser = options_of(__doc__, HERE / "results")
    given = os.environ.get("LENGTHGEN_PUBLISHED")
    parser.add_argument("--weights", metavar="FILE", help=f"{WEIGHTS} (default: in the folder $LENGTHGEN_PUBLISHED)")
    parser.add_argument("--steps", type=int, help=f"steps of each training ({Settings.steps})")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS), help="(all)")
    options = parsed(parser)
    options.weights = options.weights or (in_folder(Path(given)) if given else None)
    if not options.report and not options.weights:
        parser.error(f"give --weights FILE, a copy of {WEIGHTS}")
    torch.set_num_threads(1)
    study = Reversal(options)
    for seed in options.seeds if not options.report else ():
        for name in options.methods:
            study.arm(name, seed)
    report(study, options.seeds)


if __name__ == "__main__":
    main()
