"""The table of effective ranks of the shipped pairs: it is made from the result file, and the study runs."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
PART = re.compile(r"<!-- state ranks -->\n(.*?)<!-- end -->", flags=re.DOTALL)


def test_the_table_of_the_page_is_that_of_the_results(example: Any) -> None:
    results = json.loads((ROOT / "examples/families/results/state_ranks.json").read_text())
    [part] = PART.findall((ROOT / "docs/read_a_diagnosis.md").read_text())
    assert part == example("families/state_ranks.py")["table"](results)
    shipped = {path.name for kind in ("base", "cured") for path in (ROOT / "model_cards").glob(f"*-{kind}")}
    assert {*results} == shipped - {"passkey-base"}


@pytest.mark.slow
@pytest.mark.usefixtures("small_corpus")
def test_a_pair_is_measured_and_kept(example: Any, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- state ranks -->\n<!-- end -->\n")
    for pairs in (["gla"], ["gla", "mamba"]):  # what was measured is not measured again
        example("families/state_ranks.py", "--pairs", *pairs, "--lengths", 2, "--results", tmp_path, "--page", page)
    results = json.loads((tmp_path / "state_ranks.json").read_text())
    assert {*results} == {"gla-base", "gla-cured", "mamba-base", "mamba-cured"}
    assert [results[f"{name}-base"]["matrices"] for name in ("gla", "mamba")] == [6, 2]
    assert all(0 < value <= found["most"] for found in results.values() for value in found["entropy"])
    assert [line.split("|")[1].strip() for line in page.read_text().splitlines()[3:-1]] == ["gla", "mamba"]
