"""`lengthgen harness`, with and without lm-evaluation-harness."""

import re
import sys
from pathlib import Path

import pytest

from hf_recurrent_lengthgen.cli.main import main
from hf_recurrent_lengthgen.harness import TASKS


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The arguments that lm_eval would have got."""
    found: list[list[str]] = []
    monkeypatch.setattr("runpy.run_module", lambda *_, **__: found.append(sys.argv[1:]))
    return found


def test_the_model_and_our_tasks_are_there_unless_others_are_named(run: list[list[str]], tmp_path: Path) -> None:
    before = list(sys.argv)
    ours = ["--tasks", "lengthgen_recall", "--model_args=pretrained=m", "--metadata", "data_dir=d"]
    others = ["-M", "hf", "--include_path", "mine", "--device", "meta"]
    (tmp_path / "run.yaml").write_text("tasks: piqa\nmodel: dummy\ninclude_path: mine\n")
    config = ["--config", str(tmp_path / "run.yaml")]
    for words in (
        [*ours, "--device", "meta"],
        ["run", *ours, *others],
        [*config, "--device", "cpu"],
        ["ls", "groups"],
    ):
        assert main(["harness", *words]) == 0
    paths = ["--include_path", str(TASKS)]
    assert run == [
        ["run", *ours, "--device", "meta", *paths, "--model", "lengthgen"],
        ["run", *ours, *others],
        ["run", *config, "--device", "cpu"],
        ["ls", "groups", *paths],
    ]
    assert main(["harness", *ours]) == 0
    assert run[-1][-1] in ("cpu", "cuda:0")
    assert sys.argv == before


def test_a_key_that_stands_twice_in_a_config_file_is_refused(
    run: list[list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.yaml").write_text("tasks: piqa\nmodel_args:\n  pretrained: a\n  pretrained: b\n")
    assert main(["harness", "--config", str(tmp_path / "run.yaml")]) == 1
    assert "pretrained stands twice, in line 3 and line 4: leave one out." in capsys.readouterr().err
    assert run == []


@pytest.mark.parametrize("arguments", [[], ["--help"]])
def test_help_names_every_group(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["harness", *arguments]) == 0
    shown = capsys.readouterr().out
    groups = [path.stem for path in (TASKS / "groups").glob("*.yaml")]
    assert len(groups) == 8
    assert [group for group in groups if group not in shown] == []


def test_without_lm_eval_the_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.startswith(("lm_eval", "hf_recurrent_lengthgen.harness"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "lm_eval", None)  # what an import finds that is not installed
    monkeypatch.delattr("hf_recurrent_lengthgen.harness")
    assert main(["harness", "--tasks", "piqa"]) == 1
    shown = capsys.readouterr().err
    assert "lengthgen harness needs lm-evaluation-harness" in shown
    assert 'pip install "hf_recurrent_lengthgen[eval]"' in shown


def test_nothing_else_imports_lm_eval() -> None:
    package = TASKS.parents[1]
    imports = re.compile(r"^\s*(?:from|import) lm_eval", re.MULTILINE)
    files = [path for path in package.rglob("*.py") if imports.search(path.read_text(encoding="utf-8"))]
    outside = {path.relative_to(package).as_posix() for path in files if TASKS.parent not in path.parents}
    assert outside == set()
