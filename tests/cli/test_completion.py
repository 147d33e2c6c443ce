"""The script for a shell, in a shell."""

import shutil
import subprocess
from pathlib import Path

import pytest

from hf_recurrent_lengthgen.cli.main import COMMANDS, main

ASK = """\
source "$0"
COMP_WORDS=("$@") COMP_CWORD=$(($# - 1)) COMP_LINE="$*" COMP_POINT=${#COMP_LINE}
"$(complete -p lengthgen | sed 's/.* -F \\([^ ]*\\) .*/\\1/')"
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("completion") / "lengthgen.bash"
    with pytest.MonkeyPatch.context() as patch, path.open("w") as file:
        patch.setattr("sys.stdout", file)
        assert main(["completion", "bash"]) == 0
    return path


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("", {*COMMANDS}),
        ("eva", {"evaluate"}),
        ("evaluate --tr", {"--training-length", "--trust-remote-code"}),
        ("evaluate --dtype b", {"bfloat16"}),
        ("evaluate boo", {"books.txt"}),
        ("evaluate m --data boo", {"books.txt"}),
        ("train --intervention state", {"state_passing", "statex"}),
        ("train --save-st", {"--save-steps", "--save-strategy"}),
        ("recipe s", {"show"}),
        ("state read --tr", {"--trust-remote-code"}),
        ("harness --h", {"--help"}),
    ],
)
def test_bash_offers_what_may_follow(typed: str, offered: set[str], script: Path, tmp_path: Path) -> None:
    """In an environment without Python, so that completion cannot start it."""
    (tmp_path / "books.txt").touch()
    words = ["lengthgen", *typed.split(" ")]
    (tools := tmp_path / "tools").mkdir()
    (tools / "sed").symlink_to(str(shutil.which("sed")))
    given = {"cwd": tmp_path, "env": {"PATH": str(tools)}, "capture_output": True, "text": True}
    told = subprocess.run([str(shutil.which("bash")), "-c", ASK, script, *words], check=True, **given)  # type: ignore[call-overload]
    assert (set(told.stdout.split()), told.stderr) == (offered, "")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_script_is_valid_where_its_shell_is_installed(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    shown = capsys.readouterr().out
    assert all(f"--{option}" in shown or f"'{option}'" in shown for option in ("training-length", "trust-remote-code"))
    if (installed := shutil.which(shell)) is not None:
        subprocess.run([installed, "-n"], input=shown, text=True, check=True)
