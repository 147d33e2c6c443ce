from hf_recurrent_lengthgen.plotting.names import LONGEST, figure_names, short_names, with_names
from tests.metrics.diagnoses import expected


def test_paths_are_called_by_as_few_parts_as_separate_them() -> None:
    assert short_names(["/tmp/demo/base/", "demo/intervention"]) == ["base", "intervention"]
    assert short_names(["a/1/base", "a/2/base", "other"]) == ["1/base", "2/base", "other"]
    assert short_names(["org/base (retention 0.9)", "org/base"]) == ["base (retention 0.9)", "base"]
    assert short_names(["base", "./base", "/"]) == ["base", "./base", "/"]
    assert short_names(["one"]) == ["one"]


def test_names_for_figures_fit_and_differ() -> None:
    names = ["state-passing-of-mamba2-2.7b", "short", "state-passing-of-mamba2-130m"]
    assert figure_names(names) == ["state-pa…mba2-2.7b", "short", "state-pa…mba2-130m"]
    alike = ["the same beginning and 1 the same end", "the same beginning and 2 the same end"]
    assert figure_names(alike) == ["1: the same begin", "2: the same begin"]
    assert all(len(name) <= LONGEST for found in (names, alike) for name in figure_names(found))


def test_models_are_renamed_in_all_their_parts() -> None:
    renamed = with_names(expected(), ["x", "y"])
    assert [model.evaluation.model for model in renamed.models] == ["x", "y"]
    assert renamed.models[0].evaluation.harm == expected().models[0].evaluation.harm
