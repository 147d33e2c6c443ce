"""The study of all families runs in miniature, arm by arm, and continues where it was stopped."""

import json
import math
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

RUN = Path(__file__).parents[1] / "examples/families/run.py"
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
def test_a_family_is_studied(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    methods = METHODS if family in WHOLE else ("base", "state_passing")
    output, results = tmp_path / "out", tmp_path / "results"
    arguments = ["--tiny", "--families", family, "--seeds", "3", "--output", output, "--results", results]
    arguments += ["--methods", *methods]
    monkeypatch.setattr(sys, "argv", ["run.py", *map(str, arguments)])
    monkeypatch.setattr(sys, "path", [*sys.path])
    runpy.run_path(str(RUN), run_name="__main__")
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
def test_checkpoints_are_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = tmp_path / "cards"
    made.mkdir()
    (made / "README.md").write_text("<!-- table -->\n<!-- end -->\n")
    arguments = ["--tiny", "--families", "gla", "--output", tmp_path / "out", "--checkpoints", made]
    monkeypatch.setattr(sys, "argv", ["checkpoints.py", *map(str, arguments)])
    monkeypatch.setattr(sys, "path", [*sys.path])
    runpy.run_path(str(RUN.with_name("checkpoints.py")), run_name="__main__")
    assert {"gla-base", "gla-cured"} == {path.name for path in made.iterdir() if path.is_dir()}
    (row,) = (line for line in (made / "README.md").read_text().splitlines() if line.startswith("| GLA"))
    assert "[base](gla-base/README.md), [cured](gla-cured/README.md)" in row


@pytest.mark.parametrize("family", ["rwkv6", "rwkv7"])
def test_slow_starts_of_rwkv_decay_by_powers_of_the_place_of_a_key(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    run = runpy.run_path(str(RUN))
    study = SimpleNamespace(vocabulary=256)
    mixer = run["FamilyStudy"].new_model(study, f"{family}/base", 128, 0).model.layers[1].attn
    bias = (mixer.w_proj.linear if family == "rwkv6" else mixer.w_lora).lora[2].bias.double()
    rates = bias.exp() if family == "rwkv6" else math.exp(-0.5) * bias.sigmoid()
    expected = torch.tensor([[(n + 1) ** -5.0 for n in range(1, 33)]] * 3, dtype=torch.float64)
    torch.testing.assert_close(rates.view(3, 32), expected, rtol=1e-5, atol=0)
