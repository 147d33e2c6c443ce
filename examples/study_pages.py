"""Tables and figures of the studies, and the parts of a README between markers."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from arm_results import Result, read_json
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from hf_recurrent_lengthgen.evaluation.statistics import perplexity
from hf_recurrent_lengthgen.models.state_on_disk import replacing
from hf_recurrent_lengthgen.plotting.style import FONT_SIZE, GRID, INK, MUTED


def fill(readme: Path, parts: Mapping[str, str]) -> None:
    """Replace the text between `<!-- NAME -->` and `<!-- end -->` for each name.

    Raises:
        ValueError: unless the README has each pair of markers once.
    """
    text = readme.read_text(encoding="utf-8")
    for name, part in parts.items():
        marked = rf"(<!-- {re.escape(name)} -->\n).*?(<!-- end -->\n)"
        escaped = part.replace("\\", r"\\")  # a replacement reads backslashes
        text, places = re.subn(marked, rf"\g<1>{escaped}\g<2>", text, flags=re.DOTALL)
        if places != 1:
            raise ValueError(
                f"{readme} has {places} places for {name!r}, but must have one: a line <!-- {name} --> and a line "
                "<!-- end -->."
            )
    with replacing(readme) as file:
        file.write_text(text, encoding="utf-8")


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def mean_and_range(values: Iterable[float], form: str = ".3f") -> str:
    """Mean and, from two values on, least and most."""
    numbers = list(values)
    text = format(sum(numbers) / len(numbers), form)
    return text if len(numbers) < 2 else f"{text} ({min(numbers):{form}} to {max(numbers):{form}})"


def over_seeds(results: Sequence[Result], quantity: str, form: str = ".3f") -> str:
    """Mean and range of a measured number, or of "nll_last"."""
    values = [nll_last(result) if quantity == "nll_last" else result[quantity] for result in results]
    return mean_and_range([value["mean"] if isinstance(value, dict) else value for value in values], form)


def nll_last(result: Result) -> float:
    """Mean loss in the last doubling of the position."""
    curve, (start, stop) = result["nll"], result["harm_range"]
    bins = [
        (b - a, mean)
        for (a, b), mean in zip(pairwise(curve["edges"]), curve["mean"], strict=True)
        if start <= a < stop
    ]
    return sum(size * mean for size, mean in bins) / sum(size for size, _ in bins)


def write_stages(path: Path, setting: Result, results: Mapping[str, Mapping[int, Result]]) -> None:
    """A setting, and results by stage and seed, as JSON: one seed of a stage a line."""
    stages = []
    for name, seeds in results.items():
        rows = ",\n".join(f"{json.dumps(str(seed))}: {json.dumps(result)}" for seed, result in seeds.items())
        stages.append(f"{json.dumps(name)}: {{\n{rows}}}")
    everything = ",\n".join(stages)
    with replacing(path) as file:
        file.write_text(f'{{"setting": {json.dumps(setting)},\n"stages": {{\n{everything}}}}}\n', encoding="utf-8")


def read_stages(path: Path) -> dict[str, dict[int, Result]]:
    """The results that `write_stages` wrote."""
    stages = read_json(path)["stages"]
    return {name: {int(seed): result for seed, result in seeds.items()} for name, seeds in stages.items()}


def panels(titles: Sequence[str], columns: int) -> tuple[Figure, list[Axes]]:
    """Panels in the look of the package's figures."""
    rows = -(-len(titles) // columns)
    figure = Figure(figsize=(4.4 * columns, 3.3 * rows + 0.8), layout="constrained")
    FigureCanvasAgg(figure)
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for spare in axes[len(titles) :]:
        spare.remove()
    axes = axes[: len(titles)]
    for axis, title in zip(axes, titles, strict=True):
        axis.spines[["top", "right"]].set_visible(False)
        axis.spines[["left", "bottom"]].set_color(MUTED)
        axis.tick_params(colors=MUTED, labelcolor=INK, labelsize=FONT_SIZE - 1)
        axis.grid(axis="y", color=GRID, linewidth=0.7)
        axis.set_title(title, loc="left", fontsize=FONT_SIZE, color=INK)
    return figure, axes


def legend_below(picture: Figure, axes: Sequence[Axes], columns: int) -> None:
    """One legend of the lines of all panels."""
    handles: dict[str, Any] = {}
    for axis in axes:
        handles |= dict(zip(*reversed(axis.get_legend_handles_labels()), strict=True))
    picture.legend(handles.values(), handles, loc="outside lower center", ncols=columns, fontsize=FONT_SIZE - 1)


def band(axis: Axes, x: Sequence[float], columns: Sequence[Sequence[float]], alpha: float, **style: Any) -> None:
    """A line through the means of `columns`, the values of all seeds at each x, and a band of their range."""
    axis.plot(x, [sum(column) / len(column) for column in columns], linewidth=2, **style)
    axis.fill_between(x, list(map(min, columns)), list(map(max, columns)), color=style["color"], alpha=alpha, lw=0)


def perplexities(results: Iterable[Result]) -> list[Result]:
    """Results with "perplexity" for `draw`: exp of the mean loss by position, as in the package's figures."""
    return [{"perplexity": {**each["nll"], "mean": perplexity(each["nll"]["mean"]).tolist()}} for each in results]


def draw(axis: Axes, results: Sequence[Result], curve: str, first: int, **style: Any) -> None:
    """Mean over seeds of "nll", "harm" or "perplexity" from `first` tokens of context on, with a band of the range."""
    edges = results[0][curve]["edges"]
    skipped = sum(edge < first - 1 for edge in edges[:-1])
    x = [((a + 1) * b) ** 0.5 for a, b in pairwise(edges)][skipped:]
    band(axis, x, list(zip(*(result[curve]["mean"][skipped:] for result in results), strict=True)), 0.18, **style)
