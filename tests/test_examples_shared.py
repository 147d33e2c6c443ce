"""What the studies share: `make evidence`, results of arms, settings, and pages that are filled."""

import argparse
import json
import math
import shlex
import sys
from argparse import Namespace
from dataclasses import make_dataclass
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
SCRIPT = EXAMPLES / "evidence.py"


@pytest.fixture
def arm_results(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import arm_results

    return arm_results


def test_small_files_are_merged_into_one_sorted_file(arm_results: Any, tmp_path: Path) -> None:
    running, other = (arm_results.ArmResults(tmp_path) for _ in range(2))
    running.merge()
    assert not list(tmp_path.iterdir())
    values = {("mamba/base", 1): {"loss": 0.5}, ("mamba/base", 0): {"loss": 1.5}, ("gla/base", 10): {"x": [1, 2]}}
    for (arm, seed), result in values.items():
        running.put(arm, seed, result)
    assert other.arms() == sorted(values)
    assert other.seeds("mamba/base") == [0, 1]
    other.merge()
    assert [file.name for file in tmp_path.iterdir()] == ["arms.jsonl"]
    lines = [json.loads(line) for line in (tmp_path / "arms.jsonl").read_text().splitlines()]
    assert [(line["arm"], line["seed"]) for line in lines] == sorted(values)
    for (arm, seed), result in values.items():
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


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import small_setting

    return small_setting


def test_stages_are_read_as_they_were_written_and_perplexity_is_exp_of_the_loss(shared: Any, tmp_path: Path) -> None:
    import study_pages

    curve = {"edges": [0, 8, 16], "mean": [0.0, math.log(5)]}
    stages = {"base": {0: {"nll": curve}, 2: {"nll": curve | {"mean": [1.0, 2.0]}}}}
    study_pages.write_stages(tmp_path / "stages.json", {"steps": 2}, stages)
    assert study_pages.read_stages(tmp_path / "stages.json") == stages
    first, second = study_pages.perplexities(stages["base"].values())
    assert first["perplexity"] == {"edges": [0, 8, 16], "mean": pytest.approx([1, 5])}
    assert second["perplexity"]["mean"] == pytest.approx([math.e, math.e**2])
    assert stages["base"][0]["nll"]["mean"] == [0.0, math.log(5)]


@pytest.mark.parametrize("study", ["failure", "forgetting", "interventions"])
def test_results_that_a_figure_is_drawn_from_are_kept_beside_it(shared: Any, study: str) -> None:
    import study_pages

    stages = study_pages.read_stages(EXAMPLES / study / f"{study}.json")
    assert all(len(study_pages.perplexities(seeds.values())) == len(seeds) for seeds in stages.values())


def test_results_of_other_settings_are_none(shared: Any, tmp_path: Path) -> None:
    settings = make_dataclass("Settings", [("steps", tuple[int, ...])])
    studies = [
        shared.Stages(Namespace(output=tmp_path, results=tmp_path / "results", report=True), settings(steps), "")
        for steps in ((1, 2), (1, 3))
    ]
    studies[0].kept.put("base", 0, {"key": {"settings": {"steps": [1, 2]}}, "measured": {"share": 0.5}})
    assert [study.measured(["base", "other"], [0, 1]) for study in studies] == [{"base": {0: {"share": 0.5}}}, {}]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([], "study/results"),
        (["--tiny"], "out/tiny_study"),
        (["--tiny", "--results", "elsewhere"], "elsewhere"),
    ],
)
def test_tiny_runs_have_results_of_their_own(
    options: list[str], expected: str, shared: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["run.py", "--output", "out", *options])
    parser: argparse.ArgumentParser = shared.options_of("", Path("study/results"))
    assert shared.parsed(parser).results == expected


def test_a_readme_is_filled_between_its_markers(shared: Any, tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text("a\n<!-- one -->\nold\n<!-- end -->\nb\n<!-- two -->\n<!-- end -->\n")
    shared.fill(readme, {"one": "| 1 \\1 |\n", "two": "new\n"})
    assert readme.read_text() == "a\n<!-- one -->\n| 1 \\1 |\n<!-- end -->\nb\n<!-- two -->\nnew\n<!-- end -->\n"
    with pytest.raises(ValueError, match="0 places for 'three'"):
        shared.fill(readme, {"three": ""})


@pytest.fixture
def evidence(example: Any) -> Any:
    return example("evidence.py")


def test_every_command_is_a_script_with_these_options(evidence: dict[str, Any]) -> None:
    shared = (SCRIPT.parent / "small_setting.py").read_text()
    for name, study in evidence["STUDIES"].items():
        for words in (*study.commands, study.report):
            script, *options = shlex.split(words)
            assert script.startswith(f"{name}/")
            code = (SCRIPT.parent / script).read_text()
            for option in options:
                assert not option.startswith("--") or f'"{option}"' in code + shared, words
    folders = {path.parent.name for path in SCRIPT.parent.glob("*/run.py")} - {"output_representations"}
    assert folders <= evidence["STUDIES"].keys()


@pytest.fixture
def scripts(evidence: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A study of three commands: each writes a file with its threads and times, and the third fails.

    The first two wait for each other, so they end only if they run side by side.
    """
    (tmp_path / "work.py").write_text(
        "import os, pathlib, sys, time\n"
        "name, other = sys.argv[1:]\n"
        "began = time.time()\n"
        "pathlib.Path(name + '.began').touch()\n"
        "while not pathlib.Path(other + '.began').exists():\n"
        "    time.sleep(0.01)\n"
        "pathlib.Path(name).write_text(f\"{os.environ['OMP_NUM_THREADS']} {began} {time.time()}\")\n"
        "print('said')\n"
        "sys.exit(name == 'c')\n"
    )
    monkeypatch.chdir(tmp_path)
    names = evidence["main"].__globals__
    names["EXAMPLES"] = tmp_path
    commands = ["work.py a b", "work.py b a", "work.py c c"]
    names["STUDIES"] = {"one": evidence["Study"]("?", commands, "work.py report report", 0.1)}
    return evidence


def test_two_commands_run_at_a_time_with_one_thread_each(
    scripts: dict[str, Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert scripts["main"]() == 1
    said = capfd.readouterr().out
    assert "work.py c c failed with code 1: see demo-output/evidence/one-2.log" in said
    assert "Not finished: one. The same command runs what is missing." in said
    (a, b, c) = ([float(number) for number in (tmp_path / name).read_text().split()] for name in "abc")
    assert a[0] == b[0] == c[0] == 1
    assert min(a[2], b[2]) <= c[1]
    assert (tmp_path / "report").is_file()
    assert (tmp_path / "demo-output/evidence/one-0.log").read_text() == "said\n"
