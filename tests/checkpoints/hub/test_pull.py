"""A pull is a whole commit, checked, or nothing; and what was downloaded is not downloaded again."""

import dataclasses
import hashlib
from pathlib import Path

import pytest

from hf_recurrent_lengthgen.checkpoints.hub.pull import pull_checkpoint
from hf_recurrent_lengthgen.checkpoints.records import unverified

from .checkpoints import push, pushed_files
from .client import TOKEN
from .endpoint import Endpoint
from .store import Blob


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if not path.is_dir()}


def pulled(place: Path, name: str = "user/name", revision: str | None = None) -> dict[str, bytes]:
    """The files that a pull writes."""
    pull_checkpoint(name, revision, place)
    return files_of(place)


@pytest.fixture
def commit(hub: Endpoint, folder: Path) -> str:
    return push(folder, "user/name").commit


def replaced(hub: Endpoint, name: str, blob: Blob) -> None:
    """Let the latest commit hold another content, as no client could have put it there."""
    repository = hub.repositories["user/name"]
    now = repository.at("main")
    repository.commits[now.id] = dataclasses.replace(now, files=now.files | {name: blob})


def test_what_was_pushed_comes_back_and_its_verification_holds(
    hub: Endpoint, folder: Path, commit: str, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    assert pull_checkpoint("user/name", None, output) == commit
    assert files_of(output) == pushed_files(folder)
    assert unverified(output) is None
    assert not any(path.is_symlink() for path in output.rglob("*"))
    (output / "model.safetensors").write_bytes(b"other")
    assert unverified(output) == "it has changed since it was verified (model.safetensors)"
    (output / "verification.json").unlink()
    assert unverified(output) == "it has not been verified"


def test_a_commit_stays_what_it_was_and_a_branch_moves(hub: Endpoint, commit: str, tmp_path: Path) -> None:
    later = hub.put("user/name", {"README.md": b"later"})
    hub.repositories["user/name"].branches["other"] = commit
    assert pull_checkpoint("user/name", "main", tmp_path / "main") == later
    assert (tmp_path / "main" / "README.md").read_bytes() == b"later"
    for number, revision in enumerate((commit, commit[:8], "other")):
        assert pull_checkpoint("user/name", revision, tmp_path / f"{number}") == commit
        assert (tmp_path / f"{number}" / "README.md").read_bytes() != b"later"


def test_a_branch_that_moves_during_the_pull_mixes_nothing(hub: Endpoint, commit: str, tmp_path: Path) -> None:
    first = hub.files("user/name")
    other = {"model.safetensors": b"other weights", "config.json": b"{}"}
    hub.fail("GET", "/tree/", call=lambda: hub.put("user/name", other))
    assert pulled(tmp_path / "out") == first


def test_only_the_files_of_a_checkpoint_are_taken(hub: Endpoint, commit: str, tmp_path: Path) -> None:
    before = hub.files("user/name")
    others = ("pytorch_model.bin", "training_args.bin", "setup.sh", "initial_states_1.safetensors", "deep/er.py")
    hub.put("user/name", dict.fromkeys(others, b"x"))
    assert pulled(tmp_path / "out") == before


@pytest.mark.thinned(5)
@pytest.mark.parametrize(
    "name",
    ["../evil.py", "../../evil.json", "figures/../../evil.png", "/evil.py", "figures//evil.png", "..\\evil.py"],
)
def test_names_that_lead_out_of_the_folder_write_nothing_there(
    name: str, hub: Endpoint, commit: str, tmp_path: Path
) -> None:
    before = hub.files("user/name")
    replaced(hub, name, Blob(b"evil"))
    try:
        written = pulled(tmp_path / "a" / "b" / "out")
    except ValueError:
        written = before
        assert not (tmp_path / "a").exists()
    assert written.items() >= before.items()
    evil = [path for path in tmp_path.rglob("*evil*") if (tmp_path / "a" / "b" / "out") not in path.parents]
    assert evil == []
    assert not Path("/evil.py").exists()


def test_content_that_is_not_what_was_verified_is_told(hub: Endpoint, commit: str, tmp_path: Path) -> None:
    weights = hub.files("user/name")["model.safetensors"]
    hub.large_files[hashlib.sha256(weights).hexdigest()] = weights[:-1] + b"?"
    pulled(tmp_path / "out")
    assert unverified(tmp_path / "out") == "it has changed since it was verified (model.safetensors)"


def test_a_cut_pull_leaves_nothing_and_the_next_one_goes_on(
    hub: Endpoint, folder: Path, commit: str, tmp_path: Path
) -> None:
    digest = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    hub.fail("GET", f"/large/{digest}", cut=True, times=1000)
    with pytest.raises(
        ValueError, match=r"Downloading user/name \(files that are complete are kept\) failed: the conn"
    ):
        pull_checkpoint("user/name", None, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    hub.faults.clear()
    assert pulled(tmp_path / "out") == pushed_files(folder)


@pytest.mark.slow
def test_a_second_pull_downloads_no_file_again(hub: Endpoint, commit: str, tmp_path: Path) -> None:
    pull_checkpoint("user/name", None, tmp_path / "one")
    done = len(hub.requests)
    pull_checkpoint("user/name", None, tmp_path / "two")
    assert files_of(tmp_path / "one") == files_of(tmp_path / "two")
    assert [
        request.path for request in hub.requests[done:] if request.method == "GET" and "/large/" in request.path
    ] == []


def test_what_is_there_already_stays_and_nothing_is_asked(hub: Endpoint, commit: str, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("mine")
    done = len(hub.requests)
    with pytest.raises(ValueError, match="exists already and is not an empty folder"):
        pull_checkpoint("user/name", None, tmp_path / "out")
    assert files_of(tmp_path / "out") == {"mine.txt": b"mine"}
    assert len(hub.requests) == done
    (tmp_path / "empty").mkdir()
    assert "config.json" in pulled(tmp_path / "empty")


def test_a_full_disk_leaves_nothing(
    hub: Endpoint, commit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(source: Path, target: Path) -> None:
        target.write_bytes(b"part")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("shutil.copyfile", full)
    with pytest.raises(OSError, match="No space left"):
        pull_checkpoint("user/name", None, tmp_path / "out")
    assert [path for path in tmp_path.iterdir() if "out" in path.name] == []


@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    ("name", "revision", "message"),
    [
        ("a/b/c", None, "Repo id must be in the form"),
        ("user/none", None, "Looking for revision main of user/none failed: it does not exist"),
        ("user/name", "nowhere", "Looking for revision nowhere of user/name failed: it does not exist"),
        ("user/name", "0" * 40, "Looking for revision 0{40} of user/name failed: it does not exist"),
        ("user/pickles", None, r"no weights as safetensors, only pytorch_model.bin: lengthgen convert user/pickles"),
        ("user/texts", None, "user/texts holds no config.json or learned_state_config.json, so it is no checkpoint"),
    ],
)
def test_what_cannot_be_pulled_is_told(
    name: str, revision: str | None, message: str, hub: Endpoint, commit: str, tmp_path: Path
) -> None:
    hub.put("user/pickles", {"config.json": b"{}", "pytorch_model.bin": b"x"})
    hub.put("user/texts", {"train.jsonl": b"{}"})
    with pytest.raises(ValueError, match=message):
        pull_checkpoint(name, revision, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_who_may_not_read_is_told(hub: Endpoint, commit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.accounts["hf_other"] = type(hub.accounts[TOKEN])("other")
    for token, message in (("hf_other", "does not exist"), ("hf_wrong", "does not accept the token")):
        with pytest.raises(ValueError, match=message):
            pull_checkpoint("user/name", None, tmp_path / "out", token=token)
    hub.repositories["user/name"].private, hub.repositories["user/name"].gated = False, True
    with pytest.raises(ValueError, match="access to it must be requested on its page"):
        pull_checkpoint("user/name", None, tmp_path / "out", token="hf_other")
    monkeypatch.delenv("HF_TOKEN")
    hub.repositories["user/name"].gated = False
    pull_checkpoint("user/name", None, tmp_path / "public")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("files", "told"),
    [
        ({"README.md": b"text"}, "holds no config.json"),
        ({"config.json": b"{}", "states/a.safetensors": b"x"}, "holds no weights as safetensors"),
        ({"config.json": b"[1]", "model.safetensors": b"x"}, "must hold a JSON object"),
    ],
)
def test_what_is_no_checkpoint_is_not_pulled(
    hub: Endpoint, tmp_path: Path, files: dict[str, bytes], told: str
) -> None:
    hub.put("user/name", files)
    with pytest.raises(ValueError, match=told):
        pull_checkpoint("user/name", None, tmp_path / "pulled")
    assert not (tmp_path / "pulled").exists()
