"""`make evidence`: studies run two commands at a time, go on after an interrupt, and name those that failed."""

import shlex
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[1] / "examples/evidence.py"


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
