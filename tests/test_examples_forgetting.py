"""The study of forgetting runs from end to end in miniature; its page holds its numbers."""

import json
import statistics
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

STUDY = Path(__file__).parents[1] / "examples" / "forgetting"


@pytest.mark.slow
@pytest.mark.usefixtures("small_corpus")
def test_the_settings_are_compared(example: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    example("forgetting/run.py", "--tiny", "--output", out, "--seeds", 3)
    printed, text = capsys.readouterr().out, (out / "forgetting.md").read_text()
    assert text in printed
    assert (out / "forgetting.png").read_bytes().startswith(b"\x89PNG")
    stages = json.loads((out / "forgetting.json").read_text())["stages"]
    assert [found["3"]["setting"] for found in stages.values()][:2] == [
        "no forgetting",
        "retention 0.9999, insertion 0.75",
    ]
    assert len(text.splitlines()) == 2 * (2 + len(stages)) + 1 == 2 * (2 + 9) + 1
    searched = stages["rri_searched"]["3"]
    assert searched["setting"] == min(searched["search"], key=searched["search"].get)
    assert len(searched["search"]) == 6 * 4
    # a window is what the model sees anyway where the text is no longer than it
    for name, window in (("window_1", 16), ("window_4", 64)):
        kept, plain = stages[name]["3"]["nll"], stages["base"]["3"]["nll"]
        inside = sum(edge <= window for edge in kept["edges"][1:])
        assert kept["mean"][:inside] == plain["mean"][:inside]
        assert kept["mean"][inside:] != plain["mean"][inside:]


def test_the_tables_of_the_page_hold_the_numbers_of_the_result_file() -> None:
    rows = [line for line in (STUDY / "README.md").read_text().splitlines() if line.startswith("| ")]
    stages = json.loads((STUDY / "forgetting.json").read_text())["stages"]
    tables = rows[2 : 2 + len(stages)], rows[-len(stages) :]
    for line, by_octave, seeds in zip(*tables, stages.values(), strict=True):
        for quantity in ("harm_last", "in_window", "context_use"):
            mean = statistics.fmean(found[quantity]["mean"] for found in seeds.values())
            assert f"| {mean:{'+' if quantity == 'harm_last' else ''}.3f} " in line
        assert f"| {', '.join(seeds)} |" in line
        curves = [found["nll"] for found in seeds.values()]
        octave = by_octave.split(" | ")[1:]
        assert len(octave) == 7  # 64 to 8,192
        for number, shown in enumerate(octave):
            start = 64 * 2**number
            weights = [(b - a) * (start <= a < 2 * start) for a, b in pairwise(curves[0]["edges"])]
            means = [
                sum(w * x for w, x in zip(weights, curve["mean"], strict=True)) / sum(weights) for curve in curves
            ]
            assert shown.rstrip(" |") == f"{statistics.fmean(means):.3f}"
