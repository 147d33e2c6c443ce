"""The study of state expansion runs in miniature; its page holds its numbers."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

STUDY = Path(__file__).parents[1] / "examples" / "state_expansion"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("base", "arms", "larger"),
    [
        ("mamba2_mimetic", ["vanilla", "reinit_mimetic", "large"], 7 * 16 * 2),
        ("gla", ["vanilla", "reinit", "large"], 24),
    ],
)
def test_arms_are_compared(base: str, arms: list[str], larger: int, example: Any, tmp_path: Path) -> None:
    """The state of the first layer grows by `larger`."""
    shutil.copy(STUDY / "README.md", tmp_path)
    places = ("--output", tmp_path / "out", "--results", tmp_path / "results")
    example("state_expansion/run.py", "--tiny", *places, "--bases", base, "--seeds", 3, "--arms", *arms)
    stages = {
        file.parent.name: json.loads(file.read_text())
        for file in tmp_path.glob(f"results/running/{base}/*/seed3.json")
    }
    assert set(stages) == {"base", "large_base", *(f"{arm}_{steps}" for arm in arms for steps in (1, 2))}
    states = {name: result["state"] - stages["base"]["state"] for name, result in stages.items()}
    assert [states[f"{arm}_2"] // larger for arm in arms] == [0, 1, 1]
    page = (tmp_path / "README.md").read_text()
    table = page.partition(f"<!-- {base} -->\n")[2].partition("<!-- end -->")[0]
    assert table.count("\n| ") == 2 + 3 + 2 * len(arms)
    assert (tmp_path / "state_expansion.png").read_bytes().startswith(b"\x89PNG")


def test_starts_differ_where_they_should_only(example: Any) -> None:
    names = example("state_expansion/run.py")
    settings, bases, arms = names["TINY"], names["BASES"], names["ARMS"]
    new_model, expanded = names["new_model"], names["expanded"]
    base = bases["mamba2_mimetic"]
    small, large = (dict(new_model(base, settings, 3, size).named_parameters()) for size in (False, True))
    different = {
        key for key in small if small[key].shape != large[key].shape or bool((small[key] != large[key]).any())
    }
    drawn = ("in_proj.weight", "conv1d.weight", "conv1d.bias", "A_log")
    assert different == {f"backbone.layers.0.mixer.{key}" for key in drawn}
    model = new_model(base, settings, 3, False)
    with torch.no_grad():  # as after training
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    plain, mimetic = (
        expanded(model, base, arms[arm], settings, 3).backbone.layers[0].mixer for arm in ("reinit", "reinit_mimetic")
    )
    inner, old = 16, model.backbone.layers[0].mixer
    for mixer in (plain, mimetic):
        assert torch.equal(mixer.in_proj.weight[: 2 * inner], old.in_proj.weight[: 2 * inner])
        assert torch.equal(mixer.conv1d.weight[:inner], old.conv1d.weight[:inner])
        assert torch.equal(mixer.conv1d.bias[:inner], old.conv1d.bias[:inner])
    start = new_model(base, settings, 3, True).backbone.layers[0].mixer
    for key in ("A_log", "dt_bias"):
        assert torch.equal(mimetic.get_parameter(key), start.get_parameter(key))
        assert not torch.equal(mimetic.get_parameter(key), plain.get_parameter(key))
    assert torch.equal(mimetic.conv1d.weight[inner:], start.conv1d.weight[inner:])


def test_four_heads_hold_as_large_a_state_as_two(example: Any) -> None:
    names = example("state_expansion/run.py")
    states, rates = [], []
    for name in ("mamba2_mimetic", "mamba2_heads"):
        base = names["BASES"][name]
        model = names["new_model"](base, base.settings(names["Settings"]()), 0, False)
        states.append(sum(torch.Size(shape.recurrent).numel() for shape in model.state_shapes()))
        rates.append(torch.stack([layer.mixer.A_log.exp() for layer in model.backbone.layers]))
    assert states[0] == states[1]
    assert [of.shape[1] for of in rates] == [2, 4]
    assert all(of.max() < 1 for of in rates)  # no head is left at exp(-1) per token


def test_without_recall_a_value_is_guessed_among_those_that_are_left(example: Any) -> None:
    names = example("state_expansion/run.py")
    settings, without_recall = names["Settings"](), names["without_recall"]
    assert without_recall(settings, 1) == 1
    equal = 1 / (settings.vocabulary // 2)  # both values of two pairs are the same
    assert without_recall(settings, 2) == pytest.approx((equal + (1 - equal) / 2 + 1) / 2, abs=0.02)


@pytest.mark.slow
def test_arms_of_the_deep_models_differ_in_start_and_layers_only(example: Any, tmp_path: Path) -> None:
    """1, 2 and 4 of 8 layers, evenly from the first; the copies of the code's baseline stay copies."""
    names = example("state_expansion/depth.py")
    settings, new_mamba2, fit = names["TINY"], names["new_mamba2"], names["fit"]
    settings = names["replace"](settings, **names["SIZES"])
    base = new_mamba2(settings)
    for count, layers in ((1, [0]), (2, [0, 4]), (4, [0, 2, 4, 6])):
        model = names["expand_state"](base, count=count, factor=4, initialization="merge-copy")
        sizes = model.config.layer_state_sizes
        assert [layer for layer, size in enumerate(sizes) if size == 16] == layers
        assert names["spread_of_copies"](model, count, 4) == 0
        fit(model, settings, 3, 1, 2)
        assert names["spread_of_copies"](model, count, 4) < 1e-4
    with torch.no_grad():
        model.backbone.layers[6].mixer.in_proj.weight[2 * 64] += 10  # a row of B, of one copy
    assert names["spread_of_copies"](model, 4, 4) > 1


@pytest.mark.slow
def test_a_study_of_deep_models_goes_on_where_it_stopped(example: Any, tmp_path: Path, capsys: Any) -> None:
    command = ("state_expansion/depth.py", "--tiny", "--families", "gla", "--seeds", 3, "--results", tmp_path / "r")
    shutil.copy(STUDY / "README.md", tmp_path)
    example(*command, "--counts", 1)
    assert capsys.readouterr().out.count("seed 3 gla/") == 1 + 1 + 4
    example(*command, "--counts", 1, 4)
    assert capsys.readouterr().out.count("seed 3 gla/") == 1 + 4  # the base again, as its weights are not kept
    table = (tmp_path / "README.md").read_text().partition("<!-- depth_gla -->\n")[2].partition("<!-- end -->")[0]
    assert table.count("\n| ") == 2 + 2 + 8
    assert (tmp_path / "depth.png").read_bytes().startswith(b"\x89PNG")
