"""T_forget with the authors' initializer: TBTT over 12 chunks, a learning rate for each state size.

First each size is trained with each learning rate at one length; the rate of the least training loss is that of all
its runs. Runs that have a result in --results are not run again. At the end, the tables of
README.md, law.json and forgetting.png are written from all results.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

import torch
from scaling_laws import forget_threshold, loss_ratio

from hf_recurrent_lengthgen.evaluation.files import write_result
from hf_recurrent_lengthgen.evaluation.results import Curve
from hf_recurrent_lengthgen.plotting.images import save_png

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))
from arm_results import ArmResults
from law import fit_law
from law_figure import law_figure
from law_tables import formulas, short
from study_pages import fill, markdown
from training import Result, Run, result_of, trained

HERE = Path(__file__).resolve().parent
SIZES = (4, 8, 16, 32, 64)
LENGTHS = (16, 23, 32, 45, 64, 91, 128, 181, 256)
"""Training lengths, factors of sqrt 2 apart."""
RATES = (3e-3, 1e-2, 3e-2)
RUN = Run("text", state_size=4, length=16, seed=0, mimetic_c=None, initialization="mamba-ssm", chunks=12, steps=3500)
TINY = replace(RUN, hidden_size=16, head_dim=16, steps=3, rows=4, window_tokens=512, positions=256)
SWEPT = 64
"""Training length, of seed 0, at which learning rates are compared."""
SKIP = 1 / 8
RULE = (
    "fails if the loss in any bin (a factor of sqrt 2 wide) up to 8,192 bytes is above twice the greatest one in the "
    "last 7/8 of the training length"
)


class ForgettingStudy:
    """Runs by state size, training length and seed, with the learning rate of the size."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.run = replace(TINY if options.tiny else RUN, **({"steps": options.steps} if options.steps else {}))
        self.results, self.device = Path(options.results), options.device
        self.kept = ArmResults(self.results, "forgetting")
        self.report_only: bool = options.report
        if self.report_only:
            self.kept.merge()

    def result(self, run: Run) -> Result | None:
        """Of a run, which is trained if it has none; None if only a report is wanted and there is none."""
        result = result_of(run, self.kept)
        if result is None and not self.report_only:
            result = trained(run, self.kept, self.device)
            words = f"loss {result['training_loss']}, {result['seconds']} s"
            print(f"{run.label} lr={run.learning_rate:g}: {words}", flush=True)
        return result

    def rate(self, size: int) -> float | None:
        """The learning rate of the least training loss; None if one was not tried."""
        swept = [replace(self.run, state_size=size, length=SWEPT, learning_rate=rate) for rate in RATES]
        losses = [result["training_loss"] for run in swept if (result := self.result(run)) is not None]
        return RATES[losses.index(min(losses))] if len(losses) == len(RATES) else None

    def runs(self, size: int, seed: int, lengths: Sequence[int]) -> dict[int, Result]:
        """Results by training length; none without a learning rate."""
        rate = self.rate(size)
        if rate is None:
            return {}
        settings = replace(self.run, state_size=size, seed=seed, learning_rate=rate)
        results = {length: self.result(replace(settings, length=length)) for length in lengths}
        return {length: result for length, result in results.items() if result is not None}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", default=str(HERE / "results"), help="folder of the results (%(default)s)")
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), help="state sizes N (all)")
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS), help="training lengths (all)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="seeds in this order (0 1 2)")
    parser.add_argument("--steps", type=int, help=f"steps of 1,024 bytes of each run ({RUN.steps})")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (%(default)s)")
    parser.add_argument("--report", action="store_true", help="train nothing, report on the results")
    parser.add_argument("--tiny", action="store_true", help="sizes that show in seconds that the command works")
    options = parser.parse_args()
    if options.tiny and options.results == parser.get_default("results"):
        options.results = "demo-output/tiny_scaling_laws"  # apart from those of the README
    torch.set_num_threads(1)  # rounding changes the results of small runs
    study = ForgettingStudy(options)
    rows, thresholds, seconds = [], [], 0.0
    for seed, size in product(options.seeds, options.sizes):
        results = study.runs(size, seed, options.lengths)
        if not results:
            continue
        curves = {n: Curve(tuple(result["edges"]), tuple(result["mean"]), None, None) for n, result in results.items()}
        elements = next(iter(results.values()))["state_elements"]
        thresholds.append(forget_threshold(elements, curves, skip=SKIP))
        ratios = [f"{loss_ratio(curves[n], n, SKIP):.2f}" if n in curves else "" for n in options.lengths]
        rate = next(iter(results.values()))["run"]["learning_rate"]
        rows.append([str(size), f"{elements:,}", f"{rate:g}", str(seed), *ratios, short(thresholds[-1])])
        seconds += sum(result["seconds"] for result in results.values())
    if not rows:
        print("No size has a learning rate and a run yet.")
        return
    law = fit_law("forget", thresholds, RULE, size_unit=1000, length_unit=1)
    head = ["N", "state elements", "rate", "seed", *map(str, options.lengths), "T_forget"]
    table, line = markdown(head, rows), formulas([law])
    print(f"{table}\n{line}\n{sum(len(t.tried) for t in thresholds)} runs took {seconds:,.0f} s.")
    study.results.mkdir(parents=True, exist_ok=True)
    write_result(study.results / "law.json", law)
    save_png(law_figure(law), study.results / "forgetting.png")
    if study.results == HERE / "results":
        fill(HERE / "README.md", {"forgetting": table, "forgetting law": line})


if __name__ == "__main__":
    main()
