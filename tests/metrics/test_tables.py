"""Results as rows, against the JSON of the result files."""

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hf_recurrent_lengthgen.metrics.retrieval.result import RetrievalCell, RetrievalComparison, RetrievalResult
from hf_recurrent_lengthgen.metrics.tables import read_rows, rows_of, write_csv
from tests.metrics.test_retrieval_figures import RESULT

ROOT = Path(__file__).parents[2]


def kind_of(path: Path) -> Any:
    plain = json.loads(path.read_text())
    return plain.get("kind") if isinstance(plain, dict) else None


SHIPPED = sorted(
    path
    for folder in ("examples", "model_cards")
    for path in (ROOT / folder).rglob("*.json")
    if kind_of(path) in ("comparison", "diagnosis")
)


def curves(plain: dict[str, Any]) -> list[tuple[Any, ...]]:
    """What the file of a comparison or diagnosis holds, with plain loops."""
    found = []
    for model in plain["models"]:
        result = model["evaluation"]
        for metric, curve in (
            ("nll", result["position_wise"]["fine"]),
            ("harm", result["harm"]["curves"]["fine"]),
            ("in_window_nll", result["in_window"]["curve"]),
        ):
            for i, mean in enumerate(curve["mean"]):
                low, high = (curve[name][i] if curve[name] else None for name in ("low", "high"))
                found.append((result["model"], model["role"], metric, *curve["edges"][i : i + 2], mean, low, high))
    return found


@pytest.mark.parametrize("path", SHIPPED[:6], ids=lambda path: path.parent.name)
def test_rows_hold_every_bin_of_every_model(path: Path) -> None:
    rows = read_rows(path)
    names = ("model", "role", "metric", "start", "stop", "mean", "low", "high")
    evaluated = [tuple(row[name] for name in names) for row in rows if row["metric"] != "remembrance"]
    assert evaluated == curves(json.loads(path.read_text()))
    assert len({tuple(row) for row in rows}) == 1


def retrieval(model: str) -> RetrievalResult:
    first = RetrievalCell(3, 4, 100), RetrievalCell(0, 4, 200)
    second = RetrievalCell(4, 4, 10), RetrievalCell(0, 0, None)
    return replace(RESULT, model=model, lengths=(128, 256), cells=(first, second))


def test_retrieval_has_a_row_for_each_cell(tmp_path: Path) -> None:
    rows = rows_of(RetrievalComparison((retrieval("a"), retrieval("b"))))
    assert [(r["model"], r["depth"], r["length"], r["right"], r["samples"], r["accuracy"]) for r in rows[:4]] == [
        ("a", 0.0, 128, 3, 4, 0.75),
        ("a", 0.0, 256, 0, 4, 0.0),
        ("a", 1.0, 128, 4, 4, 1.0),
        ("a", 1.0, 256, 0, 0, None),
    ]
    assert rows[0]["low"] == pytest.approx(0.3006, abs=1e-4)  # Wilson's interval of 3 of 4, from a table
    assert (rows[3]["low"], len(rows)) == (None, 8)
    kinds: Any = {"another key": 1, "earlier value": 0}
    wrong = replace(retrieval("a"), cells=((RetrievalCell(3, 4, 1, kinds), RetrievalCell(0, 0, None)),), rows=("1%",))
    columns = [(row["another key"], row["earlier value"]) for row in rows_of(wrong)]
    assert columns == [(1, 0), (0, 0)]
    write_csv(tmp_path / "r.csv", rows)
    with open(tmp_path / "r.csv", newline="") as file:
        read = list(csv.DictReader(file))
    assert [{name: "" if value is None else str(value) for name, value in row.items()} for row in rows] == read


@pytest.mark.parametrize("text", ["", "[1]", '{"kind": "laws"}', "[" * 100_000, '{"kind": "comparison"}'])
def test_what_has_no_table_is_refused_by_its_path(text: str, tmp_path: Path) -> None:
    (tmp_path / "r.json").write_text(text)
    with pytest.raises(ValueError, match=r"r\.json: "):
        read_rows(tmp_path / "r.json")
    with pytest.raises(ValueError, match="A str has no table"):
        rows_of(text)
