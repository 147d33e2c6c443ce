"""Tables and figures of the studies."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from learning import Result
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from small_setting import markdown, panels

from hf_recurrent_lengthgen.plotting.style import FONT_SIZE, INK, MUTED
from hf_recurrent_lengthgen.surgery.mimetic import SWITCHES

FAMILIES = {"mamba2": "Mamba-2", "mamba": "Mamba-1"}
STARTS = {"default": "#d55e00", "mimetic": "#0072b2", "hybrid": "#009e73"}
LABELS = {"default": "default", "mimetic": "mimetic", "hybrid": "one attention layer"}
LINES: tuple[Any, ...] = ("solid", (0, (5, 2)), (0, (1, 1.5)))
Report = tuple[str, Figure | None]
"""A table, and a figure."""


def grouped(results: Sequence[Result], *names: str) -> list[tuple[tuple[Any, ...], list[Result]]]:
    """Results by the values of these settings, in the order in which the values first appear."""
    found: dict[tuple[Any, ...], list[Result]] = {}
    for result in results:
        found.setdefault(tuple(result["run"][name] for name in names), []).append(result)
    return list(found.items())


def accuracies(results: Sequence[Result], place: int) -> list[float]:
    """At the end of training; place 1 is the training length, others those of `multiples`."""
    return [result["curve"][-1][place] for result in results]


def area(result: Result) -> float:
    """Under the curve of accuracy against length, from the training length on."""
    run = result["run"]
    lengths = [round(multiple * run["length"]) for multiple in run["multiples"]]
    return area_under_curve(dict(zip(lengths, result["curve"][-1][1:], strict=True)))


def area_under_curve(accuracy: Mapping[int, float]) -> float:
    """Area under the generalization curve, accuracy against length, over its width: the mean accuracy, 0 to 1.

    The measure of arXiv:2410.11135, Figure 7; lengths need not be evenly spaced (trapezoidal rule). The paper does not
    say how it is scaled.

    Raises:
        ValueError: for fewer than two lengths.
    """
    points = sorted(accuracy.items())
    if len(points) < 2:
        raise ValueError(f"A curve needs at least two lengths, got {len(points)}.")
    area = sum((right - left) * (low + high) / 2 for (left, low), (right, high) in pairwise(points))
    return area / (points[-1][0] - points[0][0])


def mean_and_range(values: Sequence[float]) -> str:
    """Mean, and from two values on the least and the most."""
    mean = f"{statistics.fmean(values):.2f}"
    return mean if len(values) < 2 else f"{mean} ({min(values):.2f} to {max(values):.2f})"


def mean_and_deviation(values: Sequence[float]) -> str:
    """Mean, and from two values on the standard deviation of a sample."""
    mean = f"{statistics.fmean(values):.2f}"
    return mean if len(values) < 2 else f"{mean} +- {statistics.stdev(values):.2f}"


def seeds(results: Sequence[Result]) -> str:
    """Those of some results."""
    return ", ".join(str(seed) for seed in sorted(result["run"]["seed"] for result in results))


def curves(results: Sequence[Result]) -> Report:
    """Accuracy against steps: rows of panels are models, columns tasks, colors starts, lines lengths."""
    groups = grouped(results, "family", "task", "start")
    rows = [
        [FAMILIES[family], task.replace("_", " "), LABELS[start], seeds(found)]
        + [mean_and_range(accuracies(found, place)) for place in (1, 2, 3)]
        for (family, task, start), found in groups
    ]
    table = markdown(["model", "task", "start", "seeds", "1x", "2x", "4x"], rows)
    places = list(dict.fromkeys((family, task) for (family, task, _), _ in groups))
    titles = [f"{FAMILIES[family]}, {task.replace('_', ' ')}" for family, task in places]
    columns = min(4, len(titles))
    figure, axes = panels(titles + [""] * (-len(titles) % columns), columns)
    for axis in axes[len(titles) :]:
        axis.set_visible(False)
    for (family, task, start), found in groups:
        axis = axes[places.index((family, task))]
        steps = [0] + [point[0] for point in found[0]["curve"]]
        for place, line in zip((1, 2, 3), LINES, strict=True):
            points = [[0.0] + [point[place] for point in result["curve"]] for result in found]
            values = list(zip(*points, strict=True))
            label = f"{LABELS[start]}, {2 ** (place - 1)}x"
            means = [statistics.fmean(column) for column in values]
            axis.plot(steps, means, color=STARTS[start], linestyle=line, linewidth=1.8, label=label)
            least, most = list(map(min, values)), list(map(max, values))
            axis.fill_between(steps, least, most, color=STARTS[start], alpha=0.08, lw=0)
    _finish(figure, axes, "Steps")
    return table, figure


def switches(results: Sequence[Result]) -> Report:
    """Accuracy of each of the 16 combinations."""
    groups = grouped(results, "start")
    marks = [_switches_on(start) for (start,), _ in groups]
    rows = [
        [*("x" if switch in on else "" for switch in SWITCHES), seeds(found)]
        + [mean_and_range(accuracies(found, place)) for place in (1, 2, 3)]
        for on, (_, found) in zip(marks, groups, strict=True)
    ]
    table = markdown(["A ~ 1", "Delta ~ 1", "W_C ~ W_B", "identity conv", "seeds", "1x", "2x", "4x"], rows)
    figure, (axis,) = panels(["Copying, Mamba-2"], 1)
    figure.set_size_inches(8.4, 3.8)
    for offset, (place, color) in enumerate(zip((1, 2, 3), ("#0072b2", "#56b4e9", "#b9bfc7"), strict=True)):
        means = [statistics.fmean(accuracies(found, place)) for _, found in groups]
        x = [index + 0.28 * (offset - 1) for index in range(len(groups))]
        axis.bar(x, means, 0.26, color=color, label=f"{2**offset}x")
    names = dict(zip(SWITCHES, ("A", "Δ", "CB", "conv"), strict=True))
    labels = ["\n".join(names[switch] for switch in SWITCHES if switch in on) or "none" for on in marks]
    axis.set_xticks(range(len(groups)), labels)
    axis.set_axisbelow(True)
    axis.set_ylim(0, 1.15)
    axis.legend(loc="upper right", frameon=False, ncols=3, fontsize=FONT_SIZE - 1)
    return table, figure


def _switches_on(start: str) -> tuple[str, ...]:
    known: dict[str, tuple[str, ...]] = {"default": (), "mimetic": SWITCHES}
    return known[start] if start in known else tuple(start.split("+"))


def state_size(results: Sequence[Result]) -> Report:
    """Area under the generalization curve, and accuracy by length, against N."""
    groups = grouped(results, "state_size", "start")
    multiples = results[0]["run"]["multiples"]
    places = [multiples.index(multiple) + 1 for multiple in (1, 2, 4)]
    rows = [
        [str(size), LABELS[start], seeds(found), mean_and_range([area(result) for result in found])]
        + [mean_and_range(accuracies(found, place)) for place in places]
        for (size, start), found in groups
    ]
    table = markdown(["N", "start", "seeds", "area", "1x", "2x", "4x"], rows)
    quantities: list[tuple[str, Callable[[Result], float]]] = [("Area under the curve", area)]
    quantities += [
        (f"Accuracy at {multiple}x", lambda result, place=place: result["curve"][-1][place])
        for multiple, place in zip((1, 2), places, strict=False)
    ]
    figure, axes = panels([title for title, _ in quantities], len(quantities))
    for axis, (_, quantity) in zip(axes, quantities, strict=True):
        for start in dict.fromkeys(start for (_, start), _ in groups):
            points = [(size, [quantity(r) for r in found]) for (size, s), found in groups if s == start]
            x, columns = [size for size, _ in points], [values for _, values in points]
            means = [statistics.fmean(column) for column in columns]
            axis.plot(x, means, "o-", color=STARTS[start], label=LABELS[start], markersize=4)
            axis.fill_between(x, list(map(min, columns)), list(map(max, columns)), color=STARTS[start], alpha=0.15)
        axis.set_xscale("log", base=2)
        axis.set_xticks(x, [str(size) for size in x])
    _finish(figure, axes, "State size N")
    return table, figure


def state_passing(results: Sequence[Result]) -> Report:
    """A table only, as in the paper."""
    passed = {"zero": "no", "passed": "yes"}
    rows = [
        [LABELS[start], passed[states], seeds(found), *(mean_and_deviation(accuracies(found, at)) for at in (1, 2))]
        for (start, states), found in grouped(results, "start", "states")
    ]
    run = results[0]["run"]
    tested = [f"length {round(multiple * run['length'])}" for multiple in run["multiples"]]
    return markdown(["start", "state passing", "seeds", *tested], rows), None


def patience(results: Sequence[Result]) -> Report:
    """Accuracy by start and step."""
    rows = [
        [LABELS.get(start, start), seeds(found), str(point[0])]
        + [mean_and_range([result["curve"][index][place] for result in found]) for place in (1, 2, 3)]
        for (start,), found in grouped(results, "start")
        for index, point in enumerate(found[0]["curve"])
    ]
    return markdown(["start", "seeds", "step", "1x", "2x", "4x"], rows), None


def _finish(figure: Figure, axes: Sequence[Axes], x_label: str) -> None:
    """Accuracy from 0 to 1, and one legend below all panels."""
    for axis in axes:
        axis.set_ylim(0, 1.02)
        if axis.get_subplotspec().is_first_col() and x_label == "Steps":  # type: ignore[union-attr]
            axis.set_ylabel("Accuracy by character", fontsize=FONT_SIZE - 0.5, color=MUTED)
        axis.set_xlabel(x_label, fontsize=FONT_SIZE - 0.5, color=MUTED)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=FONT_SIZE, labelcolor=INK
    )
