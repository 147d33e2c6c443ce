"""Checkpoints of the study of all families are made, and its models start as they say."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch


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
