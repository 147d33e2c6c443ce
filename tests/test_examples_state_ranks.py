"""The tables of the shipped pairs: they are made from the result files, and the studies run."""

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
    shipped = {path.name for kind in ("base", "state-passing") for path in (ROOT / "model_cards").glob(f"*-{kind}")}
    assert {*results} == shipped - {"passkey-base"}


@pytest.mark.slow
@pytest.mark.usefixtures("small_corpus")
def test_a_pair_is_measured_and_kept(example: Any, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- state ranks -->\n<!-- end -->\n")
    for pairs in (["gla"], ["gla", "mamba"]):  # what was measured is not measured again
        example("families/state_ranks.py", "--pairs", *pairs, "--lengths", 2, "--results", tmp_path, "--page", page)
    results = json.loads((tmp_path / "state_ranks.json").read_text())
    assert {*results} == {"gla-base", "gla-state-passing", "mamba-base", "mamba-state-passing"}
    assert [results[f"{name}-base"]["matrices"] for name in ("gla", "mamba")] == [6, 2]
    assert all(0 < value <= found["most"] for found in results.values() for value in found["entropy"])
    assert [line.split("|")[1].strip() for line in page.read_text().splitlines()[3:-1]] == ["gla", "mamba"]


def tables_of(page: Path) -> dict[str, str]:
    return dict(re.findall(r"<!-- (distances|newlines) -->\n(.*?)<!-- end -->", page.read_text(), flags=re.DOTALL))


def test_the_tables_of_distances_and_newlines_are_those_of_the_results(example: Any) -> None:
    results = json.loads((ROOT / "examples/families/results/shipped.json").read_text())
    study = example("families/shipped.py")
    assert tables_of(ROOT / "examples/families/README.md") == study["tables"](results)
    assert {*results} == {
        path.name for kind in ("base", "state-passing") for path in (ROOT / "model_cards").glob(f"*-{kind}")
    } - {"passkey-base"}


def test_rank_correlation_is_spearmans_over_the_points_of_all_models(example: Any) -> None:
    study = example("families/shipped.py")
    curves = [([0.1, 0.2, 0.4, 0.3], [0.3, 0.1, 0.9, 0.5])]
    results = [{"remembrance": {"total_variation": a, "cosine": b}} for a, b in curves]
    # ranks 1 2 4 3 and 2 1 4 3: 1 - 6 * (1 + 1) / (4 * 15)
    assert study["rank_correlation"](results, "cosine") == pytest.approx(0.8)


@pytest.mark.slow
@pytest.mark.usefixtures("small_corpus")
def test_a_checkpoint_is_measured_again_only_if_its_weights_changed(
    example: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page, file = tmp_path / "page.md", tmp_path / "shipped.json"
    page.write_text("".join(f"<!-- {name} -->\n<!-- end -->\n" for name in ("distances", "newlines", "rule")))
    options = ("--pairs", "gla", "--lengths", 2, "--results", tmp_path, "--page", page)
    example("families/shipped.py", *options)
    first = json.loads(file.read_text())
    assert {*first} == {"gla-base", "gla-state-passing"}
    assert len(first["gla-base"]["remembrance"]["cosine"]) == 32
    changed = {**first, "gla-base": {**first["gla-base"], "parameters": 1, "weights": "others"}}
    changed["gla-state-passing"] = {**first["gla-state-passing"], "parameters": 2}
    file.write_text(json.dumps(changed))
    example("families/shipped.py", *options)
    again = json.loads(file.read_text())
    assert again["gla-base"] == first["gla-base"]
    assert again["gla-state-passing"]["parameters"] == 2
    assert [row.split(" | ")[0] for row in tables_of(page)["newlines"].splitlines()[2:]] == ["| gla"]
