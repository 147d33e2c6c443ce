"""`lengthgen push` and `lengthgen pull`: what they say, refuse and do."""

from pathlib import Path

import pytest

from hf_recurrent_lengthgen.cli.main import main
from tests.checkpoints.hub.checkpoints import CARD, pushed_files
from tests.checkpoints.hub.conftest import folder as folder
from tests.checkpoints.hub.conftest import hub as hub
from tests.checkpoints.hub.endpoint import Endpoint


def shown(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]


def test_a_dry_run_shows_all_and_asks_nothing(hub: Endpoint, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["push", str(folder), "name", "--dry-run", "--public"]) == 0
    lines = shown(capsys)
    assert lines[0] == f"{folder}:"
    assert f"config.json {(folder / 'config.json').stat().st_size / 1e6:.3f} MB" in lines
    assert "left out optimizer.pt of the trainer" in lines
    assert "left out checkpoint-10/ of the trainer" in lines
    assert "left out notes.txt no part of a checkpoint" in lines
    assert any(line.startswith(f"{len(pushed_files(folder))} files, ") for line in lines)
    assert lines[-1] == "Nothing was pushed (--dry-run)."
    assert "\n".join(lines).count("\n".join(CARD.splitlines())) == 1
    assert hub.requests == []


def test_a_push_says_where_it_is_and_the_next_one_that_all_is_there(
    hub: Endpoint, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["push", str(folder), "user/name"]) == 0
    lines = shown(capsys)
    head = hub.repositories["user/name"].at("main")
    assert f"Pushed: {hub.url}/user/name/commit/{head.id}" in lines
    assert main(["push", str(folder), "user/name"]) == 0
    assert f"Nothing to push: the Hub has all of it, {hub.url}/user/name/commit/{head.id}" in shown(capsys)


def test_refusals_are_listed_one_a_line_and_nothing_is_asked(
    hub: Endpoint, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "README.md").unlink()
    (folder / "results" / "comparison.json").write_text('{"data": "/home/somebody/texts"}')
    (folder / "verification.json").unlink()
    assert main(["push", str(folder), "user/name"]) == 1
    told = capsys.readouterr().err.splitlines()
    assert [line for line in told if line.startswith("- ")] == [
        "- results/comparison.json, line 1: a path of your machine: /home/somebody/texts",
        f"- it has no card: lengthgen card {folder} writes README.md",
        f"- it has not been verified: run lengthgen verify {folder}",
    ]
    assert f"lengthgen push: {folder} cannot be pushed:" in told
    assert hub.requests == []


def test_an_interrupted_push_says_how_to_go_on(
    hub: Endpoint, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("huggingface_hub.HfApi.create_commit", interrupt)
    assert main(["push", str(folder), "user/name"]) == 130
    assert "interrupted: the same command continues with what is left" in capsys.readouterr().err
    assert hub.files("user/name") == {}


def test_a_pull_names_the_commit_the_verification_and_how_to_load(
    hub: Endpoint, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["push", str(folder), "user/name"]) == 0
    capsys.readouterr()
    output = tmp_path / "out"
    assert main(["pull", "user/name", "--output", str(output)]) == 0
    commit = hub.repositories["user/name"].branches["main"]
    assert shown(capsys) == [
        f"user/name at commit {commit}: {len(pushed_files(folder))} files in {output}",
        "Verified: its verification.json belongs to these files.",
    ]
    assert main(["pull", "user/name", "--output", str(output)]) == 1
    assert "exists already and is not an empty folder" in capsys.readouterr().err


def test_code_that_differs_and_what_is_not_verified_is_named(
    hub: Endpoint, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["push", str(folder), "user/name"]) == 0
    code = (folder / "modeling_stateful_mamba2.py").read_bytes() + b"\n# changed\n"
    hub.put("user/name", {"modeling_stateful_mamba2.py": code, "extra.py": b"pass\n"})
    capsys.readouterr()
    output = tmp_path / "out"
    assert main(["pull", "user/name", "--revision", "main", "--output", str(output)]) == 0
    lines = shown(capsys)
    names = "extra.py, modeling_stateful_mamba2.py"
    assert lines[1] == f"Not verified: it has changed since it was verified ({names}). Next: lengthgen verify {output}"
    assert lines[2].startswith(f"Code that differs from the installed package: {names}. ")


def test_what_cannot_be_is_refused_in_one_line(
    hub: Endpoint, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["push", str(tmp_path / "none"), "user/name"]) == 1
    assert main(["push", str(folder), "a/b/c"]) == 1
    assert main(["pull", "user/none", "--output", str(tmp_path / "out")]) == 1
    first, second, third = capsys.readouterr().err.splitlines()
    assert first.endswith("none is no folder: give the folder of a checkpoint.")
    assert "Repo id must be in the form" in second
    assert "Looking for revision main of user/none failed: it does not exist" in third
    assert not (tmp_path / "out").exists()
