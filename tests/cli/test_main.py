"""The command as a whole: help, versions, exit statuses and errors."""

from collections.abc import Sequence

import pytest
import transformers
from safetensors import SafetensorError

from hf_recurrent_lengthgen.cli import demo
from hf_recurrent_lengthgen.cli import main as command
from hf_recurrent_lengthgen.cli.main import main


def replace_demo(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def run(arguments: Sequence[str]) -> int:
        raise error

    monkeypatch.setattr(demo, "run", run)


def exit_status(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    return int(str(ended.value.code))


def test_help_names_every_command_and_a_first_session(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_status("--help") == 0
    shown = capsys.readouterr().out
    assert all(f"\n  {name} " in shown for name in command.COMMANDS)
    assert "examples:\n  lengthgen demo\n  lengthgen evaluate demo-output/base demo-output/state-passing" in shown


def test_version_names_what_a_bug_report_needs(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_status("--version") == 0
    shown = capsys.readouterr().out
    assert shown.startswith("lengthgen ")
    assert f"transformers {transformers.__version__}" in " ".join(shown.split())


@pytest.mark.parametrize("error", [ValueError("too\n  short"), OSError("too short"), SafetensorError("too short")])
def test_an_error_is_one_line_on_stderr(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    replace_demo(monkeypatch, error)
    assert main(["demo"]) == 1
    assert capsys.readouterr() == ("", "lengthgen demo: too short\n")


@pytest.mark.parametrize(
    ("error", "words"), [(TypeError, ["demo"]), (RuntimeError, ["demo"]), (ValueError, ["--debug", "demo"])]
)
def test_a_defect_of_ours_keeps_its_traceback_and_so_does_any_error_with_debug(
    error: type[Exception], words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_demo(monkeypatch, error("a bug"))
    with pytest.raises(error, match="a bug"):
        main(words)


def test_an_interrupt_exits_with_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    replace_demo(monkeypatch, KeyboardInterrupt())
    assert main(["demo"]) == 130
    assert capsys.readouterr().err == "lengthgen demo: interrupted\n"
