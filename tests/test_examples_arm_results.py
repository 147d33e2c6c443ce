"""Results of arms: small files while a study runs, one sorted file when it is finished, and both are read."""

import json
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture
def arm_results(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import arm_results

    return arm_results


def test_small_files_are_merged_into_one_sorted_file(arm_results: Any, tmp_path: Path) -> None:
    running, other = (arm_results.ArmResults(tmp_path) for _ in range(2))
    running.merge()
    assert not list(tmp_path.iterdir())
    given = {("mamba/base", 1): {"loss": 0.5}, ("mamba/base", 0): {"loss": 1.5}, ("gla/base", 10): {"x": [1, 2]}}
    for (arm, seed), result in given.items():
        running.put(arm, seed, result)
    assert other.arms() == sorted(given)
    assert other.seeds("mamba/base") == [0, 1]
    other.merge()
    assert [file.name for file in tmp_path.iterdir()] == ["arms.jsonl"]
    lines = [json.loads(line) for line in (tmp_path / "arms.jsonl").read_text().splitlines()]
    assert [(line["arm"], line["seed"]) for line in lines] == sorted(given)
    for (arm, seed), result in given.items():
        assert running.get(arm, seed) == other.get(arm, seed) == result
    assert running.get("gla/base", 0) is None


def test_an_arm_that_ran_again_counts_and_replaces_its_line(arm_results: Any, tmp_path: Path) -> None:
    kept = arm_results.ArmResults(tmp_path, "study")
    for seed in (0, 1):
        kept.put("base", seed, {"loss": 1.0})
    kept.merge()
    kept.put("base", 1, {"loss": 2.0})
    assert [kept.get("base", seed)["loss"] for seed in (0, 1)] == [1.0, 2.0]
    kept.merge()
    assert (tmp_path / "study.jsonl").read_text() == (
        '{"arm": "base", "seed": 0, "loss": 1.0}\n{"arm": "base", "seed": 1, "loss": 2.0}\n'
    )


def test_two_commands_do_not_merge_at_once(arm_results: Any, tmp_path: Path) -> None:
    kept = arm_results.ArmResults(tmp_path)
    kept.put("base", 0, {"loss": 1.0})
    with arm_results.locked(tmp_path) as free:
        assert free
        kept.merge()
        assert not kept.file.exists()
    kept.merge()
    assert (kept.file.exists(), kept.running.exists(), kept.get("base", 0)) == (True, False, {"loss": 1.0})


@pytest.mark.parametrize("file", sorted(EXAMPLES.rglob("*.jsonl")), ids=lambda file: file.parts[-3])
def test_results_in_the_repository_are_sorted_and_as_they_are_written(file: Path) -> None:
    lines = file.read_text().splitlines()
    read = [json.loads(line) for line in lines]
    places = [(line["arm"], line["seed"]) for line in read]
    assert places == sorted(set(places))
    assert lines == [json.dumps(line) for line in read]
