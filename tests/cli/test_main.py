"""The command as a whole: help, versions, exit statuses and errors."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import transformers
from safetensors import SafetensorError
from transformers.utils import logging

from hf_recurrent_lengthgen.cli import demo
from hf_recurrent_lengthgen.cli import main as command
from hf_recurrent_lengthgen.cli.main import main
from tests.small_files import small_files


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
    assert "examples:\n  lengthgen demo\n  lengthgen evaluate demo-output/base demo-output/cured" in shown


def test_version_names_what_a_bug_report_needs(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_status("--version") == 0
    shown = capsys.readouterr().out
    assert shown.startswith("lengthgen ")
    assert f"transformers {transformers.__version__}" in " ".join(shown.split())


@pytest.mark.parametrize("arguments", [["--quetzalcoatl", "1"], ["m", "--outp", "x", "--length", "0"]])
def test_nothing_is_suggested_for_what_is_near_nothing_or_the_start_of_an_option(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_status("evaluate", *arguments) == 2
    assert "did you mean" not in capsys.readouterr().err


@pytest.mark.parametrize("error", [ValueError("too\n  short"), OSError("too short"), SafetensorError("too short")])
def test_an_error_is_one_line_on_stderr(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    replace_demo(monkeypatch, error)
    assert main(["demo"]) == 1
    assert capsys.readouterr() == ("", "lengthgen demo: too short\n")


def test_debug_shows_the_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_demo(monkeypatch, ValueError("too short"))
    with pytest.raises(ValueError, match="too short"):
        main(["--debug", "demo"])


def test_a_defect_of_ours_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_demo(monkeypatch, TypeError("a bug"))
    with pytest.raises(TypeError, match="a bug"):
        main(["demo"])


def test_a_full_disk_has_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def run(arguments: Sequence[str]) -> int:
        torch.save(torch.ones(100_000), tmp_path / "optimizer.pt")
        return 0

    monkeypatch.setattr(demo, "run", run)
    with small_files():
        assert main(["demo"]) == 1
    assert "lengthgen demo: torch could not write a file; is the disk full? (" in capsys.readouterr().err
    replace_demo(monkeypatch, RuntimeError("a bug"))
    with pytest.raises(RuntimeError, match="a bug"):
        main(["demo"])


def test_an_interrupt_exits_with_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    replace_demo(monkeypatch, KeyboardInterrupt())
    assert main(["demo"]) == 130
    assert capsys.readouterr().err == "lengthgen demo: interrupted\n"


IMPORTS = {
    "of the command": "import swallowing\ndef run(arguments): return 0",
    "of its first step": "def run(arguments):\n import swallowing\n return 0",
}


@pytest.mark.parametrize("command", IMPORTS.values(), ids=IMPORTS)
def test_an_interrupt_during_imports_ends_the_command(command: str, tmp_path: Path) -> None:
    swallowing = (
        "import signal\ntry: signal.raise_signal(signal.SIGINT)\nexcept KeyboardInterrupt: pass"  # as numpy does
    )
    (tmp_path / "swallowing.py").write_text(swallowing)
    (tmp_path / "demo.py").write_text(f"import sys\nsys.path.append({str(tmp_path)!r})\n{command}")
    code = f"""
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs in the background inherit that it is ignored
from hf_recurrent_lengthgen import cli
from hf_recurrent_lengthgen.cli.main import main
cli.__path__.insert(0, {str(tmp_path)!r})
sys.argv = ["lengthgen", "demo"]
sys.exit(main())
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (130, "lengthgen: interrupted\n")


def test_bars_are_off_in_a_log_and_on_again_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def run(arguments: Sequence[str]) -> int:
        seen.append(logging.is_progress_bar_enabled())
        return 0

    monkeypatch.setattr(demo, "run", run)
    logging.enable_progress_bar()  # a Trainer of another test may have switched them off for good
    assert main(["demo"]) == 0
    assert seen == [False]
    assert logging.is_progress_bar_enabled()
