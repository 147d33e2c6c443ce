"""No figure has anything outside its canvas, whatever the models are called."""

import inspect
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest
from matplotlib.figure import Figure

from hf_recurrent_lengthgen import metrics
from hf_recurrent_lengthgen.metrics.states.result import StateRank
from hf_recurrent_lengthgen.plotting.images import PNG_DOTS_PER_INCH
from hf_recurrent_lengthgen.plotting.style import fitted
from tests.metrics.conftest import compared
from tests.metrics.diagnoses import hybrid
from tests.metrics.test_maps_files import maps_of
from tests.metrics.test_remembrance import prompt, remembrance
from tests.metrics.test_retrieval_figures import RESULT
from tests.metrics.test_states_figures import diagnosis

Names = Sequence[str]
TYPICAL = ("mamba2-state-passing", "rwkv7-g1-0.4b-state-passing-seed-3-final")
WIDE = ("W" * 40, "M" * 39 + "a", "m_" * 20, "W" * 12)
ROLES: Any = ("base", "intervention", "control", "other")


def of_models(figure: Callable[..., Figure]) -> Callable[[Names], Figure]:
    return lambda names: figure([compared("other", name, 0.3 * place) for place, name in enumerate(names)])


def of_states(figure: Callable[..., Figure]) -> Callable[[Names], Figure]:
    return lambda names: figure({name: diagnosis([[0.0, 0.8], [1.0] + [0.0] * 40], 1.0) for name in names})


def ranked() -> Any:
    found = diagnosis([[0.0, 0.8], [1.0] + [0.0] * 40], 1.0)
    curves = [tuple(share * 8 for _ in found.positions) for share in (1.0, 0.3)]
    return replace(found, ranks=tuple(StateRank(layer, 40, 8, *curves) for layer in (0, 10)))


def of_retrieval(figure: Callable[..., Figure]) -> Callable[[Names], Figure]:
    return lambda names: figure([replace(RESULT, model=name) for name in names])


MISTAKEN = replace(
    RESULT,
    cells=tuple(
        tuple(replace(cell, mistakes={"another key": cell.samples - cell.right, "other": 0}) for cell in row)
        for row in RESULT.cells
    ),
)


def attended(names: Names) -> dict[str, Any]:
    return dict.fromkeys(names, hybrid())


DRAWN: dict[str, Callable[[Callable[..., Figure]], Callable[[Names], Figure]]] = {
    **dict.fromkeys(("position_wise_figure", "context_harm_figure", "in_window_figure"), of_models),
    "mean_perplexity_figure": of_models,
    **dict.fromkeys(("state_std_figure", "retention_figure", "distance_map_figure", "patching_figure"), of_states),
    **dict.fromkeys(("state_mean_figure", "state_inputs_figure"), of_states),
    "rank_figure": lambda figure: lambda names: figure({name: ranked() for name in names}),
    **dict.fromkeys(("heat_map_figure", "retrieval_accuracy_figure"), of_retrieval),
    "mistakes_figure": lambda figure: lambda names: figure([replace(MISTAKEN, model=name) for name in names]),
    **dict.fromkeys(
        ("attention_harm_figure", "attention_windows_figure"),
        lambda figure: lambda names: figure(attended(names), "byte"),
    ),
    "attention_maps_figure": lambda figure: lambda names: figure(*(maps_of(2, list("abc"), name) for name in names)),
    "accuracy_figure": lambda figure: (
        lambda names: figure(
            {name: {8: (1.0, 0.5), 512: (0.5 + 0.1 * place, 0.0)} for place, name in enumerate(names)}, "symbols", 400
        )
    ),
    "accuracy_over_steps_figure": lambda figure: (
        lambda names: figure(
            {name: {100: {8: 0.1, 512: 0.0}, 90_000: {8: 1.0, 512: 0.1 * place}} for place, name in enumerate(names)},
            "symbols",
        )
    ),
    "remembrance_figure": lambda figure: (
        lambda names: figure({name: remembrance([0, 0.3, 0.4, 0.5, 0.6, 0.7]) for name in names}, ROLES[: len(names)])
    ),
    "constant_prompt_figure": lambda figure: (
        lambda names: figure({name: prompt() for name in names}, ROLES[: len(names)])
    ),
}


def all_figures() -> dict[str, Callable[..., Figure]]:
    modules = [import_module(found.name) for found in pkgutil.walk_packages(metrics.__path__, f"{metrics.__name__}.")]
    return {
        name: function
        for module in modules
        for name, function in inspect.getmembers(module, inspect.isfunction)
        if name.endswith("_figure") and not name.startswith("_") and function.__module__ == module.__name__
    }


@pytest.mark.thinned(7)
@pytest.mark.parametrize("names", [TYPICAL, WIDE], ids=["typical", "wide"])
@pytest.mark.parametrize("name", all_figures())
def test_nothing_is_outside_the_canvas(name: str, names: Names) -> None:
    figure = DRAWN[name](all_figures()[name])(names)
    figure.set_dpi(PNG_DOTS_PER_INCH)
    width, height = figure.get_size_inches()
    box = figure.get_tightbbox()  # of all that is drawn, in inches
    assert box.x0 >= 0
    assert box.y0 >= 0
    assert box.x1 <= width
    assert box.y1 <= height


def test_a_name_is_whole_if_it_fits_and_is_cut_in_the_middle_otherwise() -> None:
    assert fitted("mamba2-state-passing", 85, 10.5, 3, "bold") == ("mamba2-\nstate-passing", 10.5)
    assert fitted(TYPICAL[1], 85, 10.5, 4, "bold")[0].replace("\n", "") == TYPICAL[1]
    cut, size = fitted("a" * 30 + "b" * 30, 60, 10.5, 1)
    assert (cut.strip("ab"), cut[0], cut[-1], size) == ("…", "a", "b", 7.5)
    assert fitted("", 60, 10.5, 1) == ("", 10.5)
