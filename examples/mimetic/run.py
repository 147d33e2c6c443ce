"""Does mimetic initialization help small Mambas to copy and recall, and which part of it?

An arm is one training from scratch on strings of 5 to 10 symbols, and its accuracy at up to 4 times that length. Arms
that have a result in --results are not run again, so an interrupted study continues, and several commands with
different --studies, --families or --seeds can share the work. The studies:

rates          five initializations at four learning rates, copying
switches       all 16 combinations of the four switches in one layer, copying (Fig. 3)
tasks          four tasks at two learning rates (Fig. 2 and 4)
linear         linear attention in place of one layer, copying (Fig. 5)
teacher        all layers from one layer of a trained model, copying (section 6)
sweeps         vocabulary, state, width, layers, length and steps, copying (Fig. 6 to 9)
state_passing  copying with state passing (Buitrago Ruiz and Gu, 2025, Table 1)

At the end, tables.md and the figures in the folder of the results are written from all results.
"""

import sys
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path

import torch

from hf_recurrent_lengthgen.models.state_on_disk import replacing
from hf_recurrent_lengthgen.plotting.images import save_png
from hf_recurrent_lengthgen.surgery.mimetic import PAPER_SWITCHES, SWITCHES

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))
from reports import Layout, Measured, figure, table
from small_setting import options_of, parsed
from starts import FAMILIES, TASKS, Arm, Sizes, StringStudy
from study_pages import fill

HERE = Path(__file__).resolve().parent
RATES = (1e-2, 1e-3, 5e-4, 1e-4)
"""The paper's three, and ten times their largest for models of this size."""
RATE = 1e-2
"""The best of the default initialization in `rates`, used by studies with one learning rate."""
RATES_OF_TASKS = (1e-2, 1e-3)
"""The best two of `rates`; `RATE` is among them, so teachers are trained once."""
STARTS = {
    "default": "default",
    "one": "one layer mimetic",
    "all": "all layers mimetic",
    "outside": "one layer mimetic, c outside A_log",
    "attention": "one attention layer",
}
HEAD_DIMS = (8, 32, 128)
SWEEPS = {
    "vocabulary": (8, 16, 64),
    "state_size": (8, 32, 128),
    "width": (24, 48, 96),
    "layers": (2, 4, 8),
    "longest": (5, 10, 20),
    "steps": (1000, 4000),
}
Row = tuple[tuple[str, ...], Arm]
"""Labels of an arm in a table, and the arm."""


def rates(family: str) -> Iterator[Row]:
    for start, rate in product(STARTS, RATES):
        if start == "outside" and rate not in RATES_OF_TASKS:
            continue
        yield (STARTS[start], f"{rate:g}"), Arm(start, rate, family=family)


def switches(family: str) -> Iterator[Row]:
    for on in product((False, True), repeat=len(SWITCHES)):
        chosen = tuple(switch for switch, is_on in zip(SWITCHES, on, strict=True) if is_on)
        start = {(): "default", PAPER_SWITCHES[FAMILIES[family]]: "one"}.get(chosen, "+".join(chosen))
        yield tuple("x" if is_on else "" for is_on in on), Arm(start, RATE, family=family)


def tasks(family: str) -> Iterator[Row]:
    for task, start, rate in product(TASKS, ("default", "one", "attention"), RATES_OF_TASKS):
        yield (task.replace("_", " "), STARTS[start], f"{rate:g}"), Arm(start, rate, task, family)


def linear(family: str) -> Iterator[Row]:
    layers = {start: STARTS[start] for start in ("default", "one", "attention")}
    layers |= {f"linear {size}": f"linear attention, head dim {size}" for size in HEAD_DIMS}
    for start, rate in product(layers, RATES_OF_TASKS):
        yield (layers[start], f"{rate:g}"), Arm(start, rate, family=family)


def teacher(family: str) -> Iterator[Row]:
    for start in ("default", "one"):
        yield (STARTS[start], "the teacher, on recall"), Arm(start, RATE, "recall", family)
        for layer in range(Sizes().layers):
            yield (STARTS[start], f"layer {layer}"), Arm(f"layer {layer} of {start}", RATE, family=family)
    for layer in range(Sizes().layers):
        row = ("default", f"layer {layer}, trained on text")
        yield row, Arm(f"layer {layer} of default on text", RATE, family=family)


def sweeps(family: str) -> Iterator[Row]:
    for name, values in SWEEPS.items():
        for value, start in product(values, ("default", "one")):
            is_base = value == getattr(Arm(family=family).sizes, name)
            changes = () if is_base else ((name, value),)
            yield (name.replace("_", " "), str(value), STARTS[start]), Arm(start, RATE, family=family, changes=changes)


def state_passing(family: str) -> Iterator[Row]:
    for begin, passed in product((False, True), (False, True)):
        changes = {"steps": 2 * Sizes().steps, "passed": passed, "begin": begin}
        row = ("yes" if begin else "no", "yes" if passed else "no")
        yield row, Arm("default", RATE, family=family, changes=tuple(changes.items()))


ON = ("A ~ 1", "Delta ~ 1", "W_C ~ W_B", "identity conv")
LENGTHS = ("1x", "2x", "3x", "4x")
STUDIES: dict[str, tuple[Callable[[str], Iterator[Row]], Layout]] = {
    "rates": (rates, Layout(("initialization", "learning rate"), drawn=("1x", "2x"), x=1)),
    "switches": (switches, Layout(ON)),
    "tasks": (tasks, Layout(("task", "initialization", "learning rate"), drawn=LENGTHS, panel=0)),
    "linear": (linear, Layout(("second layer", "learning rate"), drawn=LENGTHS, panel=1)),
    "teacher": (teacher, Layout(("initialization of the teacher", "all layers from"))),
    "sweeps": (sweeps, Layout(("swept", "value", "initialization"), ("area", "1x", "2x", "4x"), ("area",), 1, 0)),
    "state_passing": (
        state_passing,
        Layout(("begin token", "state passing"), ("1x", "2x", "3x", "in a stream")),
    ),
}


ALTERNATIVES = {
    "rates": "Accuracy by learning rate: mimetic initialization is above the default at each rate, in all layers "
    "most; one attention layer is highest at most rates",
    "tasks": "Accuracy by length, a panel for each task: mimetic initialization is above the default in copying and, "
    "at twice the length, in sorting; in recall of Mamba-2 it is below the best default. All lines fall with the "
    "length, but that of attention in recall of Mamba-1",
    "linear": "Accuracy by length: at a rate of 0.01, linear attention and mimetic initialization start near 1 and "
    "fall together, the default starts at 0.3, attention falls least",
    "sweeps": "Area under accuracy, a panel for each swept size: one mimetic layer is above the default everywhere "
    "except at 4,000 steps, where both meet",
}
"""What the lines of the figures do."""


def measured(study: StringStudy, name: str) -> Measured:
    """Measurements of the arms that have any, of all seeds."""
    seeds = sorted({seed for _, seed in study.kept.arms()})
    of_arms = {
        (family, labels): {seed: result for seed in seeds if (result := study.measured_of(arm, seed))}
        for family in FAMILIES
        for labels, arm in STUDIES[name][0](family)
    }
    return {key: results for key, results in of_arms.items() if results}


def report(study: StringStudy) -> None:
    """Tables and figures in the folder of the results, and the figures in README.md above it, if there is one."""
    study.report_only = True
    tables, shown = {}, {}
    for name, (_, layout) in STUDIES.items():
        results = measured(study, name)
        if results:
            tables[name] = table(layout, results)
        print(f"{name}:\n\n{tables[name]}" if results else f"{name}: no results yet.\n")
        if layout.drawn:
            shown[f"{name} figure"] = f"![{ALTERNATIVES[name]}](results/{name}.png)\n" if results else ""
            if results:
                save_png(figure(layout, results), study.results / f"{name}.png")
    with replacing(study.results / "tables.md") as file:
        file.write_text("\n".join(f"## {name}\n\n{text}" for name, text in tables.items()), encoding="utf-8")
    page = study.results.parent / "README.md"
    if page.is_file():
        fill(page, shown)


def main() -> None:
    parser = options_of(__doc__, HERE / "results")
    parser.add_argument("--studies", nargs="+", choices=STUDIES, default=list(STUDIES), help="which (all)")
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=["mamba2"], help="which (mamba2)")
    options = parsed(parser)
    torch.set_num_threads(1)  # the order of sums changes the results of small trainings
    study = StringStudy(options)
    if not options.report:
        for seed, name, family in product(options.seeds, options.studies, options.families):
            for _, arm in STUDIES[name][0](family):
                study.arm(arm, seed)
    report(study)


if __name__ == "__main__":
    main()
