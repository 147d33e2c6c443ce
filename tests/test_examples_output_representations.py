"""The study of output representations runs in miniature, and its table holds the numbers of its file."""

import json
import re
import statistics
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[1] / "examples" / "output_representations"))
from bit_strings import BitStrings

FOLDER = Path(__file__).parents[1] / "examples" / "output_representations"


@pytest.mark.slow
def test_the_study_runs(example: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    example("output_representations/run.py", "--tiny", "--output", tmp_path, "--seeds", 4)
    printed = capsys.readouterr().out
    table = (tmp_path / "output_representations.md").read_text()
    assert table in printed
    results = json.loads((tmp_path / "output_representations.json").read_text())
    assert len(results["stages"]) == len(table.splitlines()) - 2 == 19
    assert set(results["stages"]["sum_none_log"]["4"]["errors"]) == set(map(str, results["setting"]["lengths"]))
    assert (tmp_path / "output_representations.png").read_bytes().startswith(b"\x89PNG")


def test_other_training_lengths(example: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: dict[int, set[int]] = {}
    original = BitStrings._rows

    def spy(self: BitStrings, rows: Any, lengths: Any) -> Any:
        if self.seed == 4:  # not those of the test
            read.setdefault(self.longest, set()).update(lengths.tolist())
        return original(self, rows, lengths)

    monkeypatch.setattr(BitStrings, "_rows", spy)
    example("output_representations/run.py", "--tiny", "--output", tmp_path, "--seeds", 4, "--longest", 3, 20)
    assert max(read[3]) <= 3
    assert 10 < max(read[20]) <= 20
    stages = json.loads((tmp_path / "training_lengths.json").read_text())["stages"]
    assert list(stages) == [f"{q}_none_identity_to{n}" for q in ("sum", "length") for n in (3, 20)]
    inside = statistics.fmean(stages["sum_none_identity_to3"]["4"]["errors"][length] for length in ("1", "2"))
    assert f"| sum, 1 to 3 bits | NoPE | y | 4 | {inside:.2g} " in (tmp_path / "training_lengths.md").read_text()
    assert (tmp_path / "training_lengths.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(SystemExit):
        example("output_representations/run.py", "--tiny", "--output", tmp_path, "--longest", 20, 50)


def test_the_table_holds_the_numbers_of_the_result_file() -> None:
    table = [line for line in (FOLDER / "README.md").read_text().splitlines() if line.startswith("| ")][2:]
    stages = json.loads((FOLDER / "output_representations.json").read_text())["stages"]
    assert len(table) == len(stages) == 19
    for line, (name, seeds) in zip(table, stages.items(), strict=True):
        cells = [cell.strip() for cell in line.strip("| ").split(" | ")]
        assert cells[0].startswith(name.partition("_")[0])
        assert cells[3] == ", ".join(seeds) == "0, 1, 2"
        for cell, length in zip(cells[5:], (12, 20, 30, 50), strict=True):
            errors = [found["errors"][str(length)] for found in seeds.values()]
            numbers = [float(number) for number in re.findall(r"[\d.]+(?:e[+-]\d+)?", cell)]
            assert numbers == [float(f"{x:.2g}") for x in (statistics.fmean(errors), min(errors), max(errors))]
