"""`lengthgen card` and `lengthgen push`: what they write, say, refuse and do."""

from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import metadata_load

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
    assert {"left out optimizer.pt", "left out checkpoint-10/", "left out notes.txt"} <= {*lines}
    assert any(line.startswith(f"{len(pushed_files(folder))} files, ") for line in lines)
    assert lines[-1] == "Nothing was pushed (--dry-run)."
    assert "\n".join(lines).count("\n".join(CARD.splitlines())) == 1
    assert hub.requests == []


def test_a_push_says_where_it_is(hub: Endpoint, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["push", str(folder), "user/name"]) == 0
    head = hub.repositories["user/name"].at("main")
    assert f"Pushed: {hub.url}/user/name/commit/{head.id}" in shown(capsys)


def test_refusals_are_listed_one_a_line_and_nothing_is_requested(
    hub: Endpoint, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "README.md").unlink()
    (folder / "results" / "comparison.json").write_text('{"data": "/home/somebody/texts"}')
    (folder / "verification.json").unlink()
    assert main(["push", str(folder), "user/name"]) == 1
    printed = capsys.readouterr().err.splitlines()
    assert [line for line in printed if line.startswith("- ")] == [
        "- results/comparison.json, line 1: a path of your machine: /home/somebody/texts",
        f"- it has no card: lengthgen card {folder} writes README.md",
        f"- it has not been verified: run lengthgen verify {folder}",
    ]
    assert f"lengthgen push: {folder} cannot be pushed:" in printed
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


def test_what_cannot_be_is_refused_in_one_line(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["push", str(tmp_path / "none"), "user/name"]) == 1
    assert main(["push", str(folder), "a/b/c"]) == 1
    first, second = capsys.readouterr().err.splitlines()
    assert "No such file or directory" in first
    assert "Repo id must be in the form" in second


def test_the_card_is_written(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    for path in checkpoint.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    options = ["--license", "mit", "--language", "en", "de", "--datasets", "owner/texts", "--authors", "A. Person"]
    assert main(["card", str(folder), *options, "--repo", "me/mine"]) == 0
    shown = capsys.readouterr().out
    assert shown == f"Written: {folder / 'README.md'} (without numbers: --results adds them)\n"
    data: Any = metadata_load(folder / "README.md")
    assert (data["license"], data["language"], data["datasets"]) == ("mit", ["en", "de"], ["owner/texts"])
    text = (folder / "README.md").read_text()
    assert "By A. Person." in text
    assert 'from_pretrained("me/mine", trust_remote_code=True)' in text
    assert "`revision=` with a commit" in text
