"""The study of all families runs in miniature, arm by arm, and continues where it was stopped."""

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

METHODS = (
    *("base", "control", "state_passing", "tbtt", "fitted_noise", "fitted_noise_zero"),
    *("fitted_noise_first", "fitted_noise_first_zero"),
)
WHOLE = ("mamba2", "bamba")
"""Families in which all methods run: one of ours and a hybrid of Transformers. tests/trainers has all in more."""


@pytest.mark.usefixtures("small_corpus")
@pytest.mark.slow
@pytest.mark.parametrize(
    "family",
    [
        "mamba2",
        "mamba",
        "falcon_mamba",
        "gla",
        "rwkv6",
        "rwkv5",
        "rwkv7",
        "hgrn2",
        "delta_net",
        "gated_deltanet",
        "kda",
        "bamba",
        "qwen3_next",
    ],
)
def test_a_family_is_studied(family: str, example: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    methods = METHODS if family in WHOLE else ("base", "state_passing")
    output, results = tmp_path / "out", tmp_path / "results"
    places = ["--output", output, "--results", results]
    example("families/run.py", "--tiny", "--families", family, "--seeds", 3, *places, "--methods", *methods)
    printed = capsys.readouterr().out
    assert [line.partition(":")[0] for line in printed.splitlines() if line.startswith("seed")] == [
        f"seed 3 {family}/{method}" for method in methods
    ]
    assert {path.parent.name for path in results.glob(f"running/{family}/*/seed3.json")} == {*methods}
    states = json.loads((results / "running" / family / "base/seed3.json").read_text())["measured"]["states"]
    assert list(states) == ["1", "2", "4"]
    assert all(size > 0 for layers in states.values() for size in layers)
    assert (results / "families.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.usefixtures("small_corpus")
@pytest.mark.slow
def test_checkpoints_are_made(example: Any, tmp_path: Path) -> None:
    made = tmp_path / "cards"
    made.mkdir()
    (made / "README.md").write_text("<!-- table -->\n<!-- end -->\n")
    places = ["--output", tmp_path / "out", "--checkpoints", made]
    example("families/checkpoints.py", "--tiny", "--families", "gla", *places)
    assert {"gla-base", "gla-cured"} == {path.name for path in made.iterdir() if path.is_dir()}
    (row,) = (line for line in (made / "README.md").read_text().splitlines() if line.startswith("| GLA"))
    assert "[base](gla-base/README.md), [cured](gla-cured/README.md)" in row


@pytest.mark.parametrize("family", ["rwkv6", "rwkv7"])
def test_slow_starts_of_rwkv_decay_by_powers_of_the_place_of_a_key(family: str, example: Any) -> None:
    run = example("families/run.py")
    study = SimpleNamespace(vocabulary=256)
    mixer = run["FamilyStudy"].new_model(study, f"{family}/base", 128, 0).model.layers[1].attn
    bias = (mixer.w_proj.linear if family == "rwkv6" else mixer.w_lora).lora[2].bias.double()
    rates = bias.exp() if family == "rwkv6" else math.exp(-0.5) * bias.sigmoid()
    expected = torch.tensor([[(n + 1) ** -5.0 for n in range(1, 33)]] * 3, dtype=torch.float64)
    torch.testing.assert_close(rates.view(3, 32), expected, rtol=1e-5, atol=0)
