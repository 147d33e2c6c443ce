"""A push is there as a whole or not at all, and what must not leave a machine does not."""

from collections.abc import Callable
from pathlib import Path

import pytest

from hf_recurrent_lengthgen.checkpoints.card_mark import card_mark
from hf_recurrent_lengthgen.checkpoints.hub.push import plan_push
from hf_recurrent_lengthgen.checkpoints.records import verified_files

from .checkpoints import CARD, NEVER_PUSHED, push, pushed_files, verify
from .client import connect
from .endpoint import Endpoint


def commits(hub: Endpoint, branch: str = "main") -> list[str]:
    return [commit.title for commit in hub.repositories["user/name"].history(branch)]


def test_one_commit_holds_the_whole_checkpoint_and_nothing_else(hub: Endpoint, folder: Path) -> None:
    address = push(folder, "user/name")
    assert hub.files("user/name") == pushed_files(folder)
    assert commits(hub) == ["Upload checkpoint", "initial commit"]
    assert hub.repositories["user/name"].private
    assert address == f"{hub.url}/user/name/commit/{hub.repositories['user/name'].branches['main']}"
    assert set(plan_push(folder).left_out) == NEVER_PUSHED | {"checkpoint-10/"}


def test_pushing_the_same_again_commits_and_sends_nothing(hub: Endpoint, folder: Path) -> None:
    first = push(folder, "user/name")
    done = len(hub.requests)
    again = push(folder, "name")
    assert again == first
    assert not [request for request in hub.requests[done:] if "/commit/" in request.path or request.method == "PUT"]


def test_a_later_push_keeps_what_is_not_in_the_folder_or_deletes_what_is_of_a_checkpoint(
    hub: Endpoint, folder: Path
) -> None:
    push(folder, "user/name")
    hub.put("user/name", {"results/theirs.json": b"{}", "notes.md": b"theirs"})
    (folder / "README.md").write_text(CARD + "More.\n")
    old = {"results/comparison.json": (folder / "results" / "comparison.json").read_bytes()}
    (folder / "results" / "comparison.json").unlink()
    push(folder, "user/name")
    assert hub.files("user/name") == pushed_files(folder) | old | {"results/theirs.json": b"{}", "notes.md": b"theirs"}
    assert len(commits(hub)) == 4
    push(folder, "user/name", overwrite=True)
    assert hub.files("user/name") == pushed_files(folder) | {"notes.md": b"theirs"}  # no part of a checkpoint


def test_files_of_others_that_would_be_loaded_are_refused_or_deleted(hub: Endpoint, folder: Path) -> None:
    theirs = {"model-00001-of-00002.safetensors": b"other", "adapter_config.json": b"{}", "notes.md": b"theirs"}
    head = hub.put("user/name", theirs)
    pattern = r"would be loaded with it \(adapter_config.json, model-00001-of-00002.safetensors\)"
    with pytest.raises(ValueError, match=pattern):
        push(folder, "user/name")
    assert hub.repositories["user/name"].branches["main"] == head
    push(folder, "user/name", overwrite=True)
    assert hub.files("user/name") == pushed_files(folder) | {"notes.md": b"theirs"}


@pytest.mark.parametrize(
    ("method", "pattern", "what", "message"),
    [("POST", "/commit/", {"status": 503}, "503"), ("POST", "/batch", {"cut": True, "times": 99}, "Pushing to")],
    ids=["busy", "cut"],
)
def test_what_stops_a_push_leaves_the_branch_as_it_was_and_the_next_push_goes_on(
    method: str, pattern: str, what: dict[str, object], message: str, hub: Endpoint, folder: Path
) -> None:
    hub.create("user/name")
    hub.fail(method, pattern, **what)
    with pytest.raises(ValueError, match=f"{message}.*Run the command again"):
        push(folder, "user/name")
    assert commits(hub) == ["initial commit"]
    hub.faults.clear()
    push(folder, "user/name")
    assert hub.files("user/name") == pushed_files(folder)


def test_what_somebody_else_commits_meanwhile_is_not_overwritten(hub: Endpoint, folder: Path) -> None:
    hub.create("user/name")
    theirs: Callable[[], object] = lambda: hub.put("user/name", {"README.md": b"theirs"})  # noqa: E731
    hub.fail("POST", "/commit/", call=theirs)
    with pytest.raises(ValueError, match="A commit has happened since"):
        push(folder, "user/name")
    assert hub.files("user/name") == {"README.md": b"theirs"}
    push(folder, "user/name")
    assert hub.files("user/name") == pushed_files(folder)


def test_visibility_is_that_requested_or_refused(hub: Endpoint, folder: Path) -> None:
    push(folder, "user/name", private=False)
    assert not hub.repositories["user/name"].private
    done = len(hub.requested("POST", "/commit/"))
    with pytest.raises(ValueError, match="user/name is public: push with --public, or change it"):
        push(folder, "user/name")
    hub.create("user/closed")
    with pytest.raises(ValueError, match="user/closed is private: push without --public, or"):
        push(folder, "user/closed", private=False)
    assert len(hub.requested("POST", "/commit/")) == done


@pytest.mark.parametrize(
    ("token", "name", "message"),
    [
        (None, "user/name", "no token for the Hub: set one with hf auth login"),
        ("hf_wrong", "user/name", "Pushing to user/name failed: .*Invalid username"),
        ("hf_test", "other/name", "You don't have the rights to create a model under this namespace"),
    ],
)
def test_who_may_not_push_is_reported(
    token: str | None, name: str, message: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Endpoint() as hub:
        connect(hub, tmp_path / "hf", monkeypatch, token)
        with pytest.raises(ValueError, match=message):
            push(folder, name)
        assert hub.repositories == {}


def test_a_card_of_other_weights_is_refused(hub: Endpoint, folder: Path) -> None:
    (folder / "README.md").write_text(CARD + card_mark(verified_files(folder)) + "\n")
    assert plan_push(folder).refusals == ()
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\1")
    verify(folder)
    (refusal,) = plan_push(folder).refusals
    assert "card is of other weights or another config" in refusal


def test_everything_that_is_wrong_with_a_folder_is_reported_at_once(
    hub: Endpoint, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_TOKEN")
    secret = "hf_" + "a" * 34
    (folder / "results" / "run.json").write_text(f'{{"data": "/home/somebody/texts",\n "key": "{secret}"}}')
    (folder / "README.md").unlink()
    (folder / "verification.json").unlink()
    with pytest.raises(ValueError, match="cannot be pushed") as caught:
        push(folder, "user/name")
    for part in (
        "results/run.json, line 1: a path of your machine: /home/somebody/texts",
        "results/run.json, line 2: a token or password: take it out",
        f"it has no card: lengthgen card {folder}",
        f"it has not been verified: run lengthgen verify {folder}",
        "there is no token for the Hub",
    ):
        assert part in str(caught.value)
    assert secret not in str(caught.value)
    assert hub.requests == []


def damage(name: str, content: str | bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)


REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "your token": (damage("results/a.json", '"hf_test"'), r"results/a.json, line 1: your Hub token"),
    "header": (
        damage("states/b.safetensors", (40).to_bytes(8, "little") + b'{"__metadata__":{"a":"/home/me/texts"}} '),
        r"states/b.safetensors, line 1: a path of your machine: /home/me/texts",
    ),
    "failed": (lambda folder: verify(folder, 1.0), "its verification did not pass .logits against itself"),
    "damaged verification": (damage("verification.json", "{"), "its verification is damaged"),
    "code added": (damage("more.py", "pass"), r"changed since it was verified .more.py"),
    "weights": (damage("model.safetensors", b"x" * 9), r"changed since it was verified .model.safetensors"),
    "no metadata": (damage("README.md", "# No metadata"), "README.md has no metadata"),
    "bad metadata": (damage("README.md", "---\na: [\n---\n"), "the metadata of README.md cannot be read"),
    "adapter": (damage("adapter_config.json", "{}"), "holds an adapter.*lengthgen merge"),
    "no code": (
        lambda folder: [code.unlink() for code in folder.glob("*.py")],
        "it lacks the code that was verified: run lengthgen verify",
    ),
    "only pickles": (
        lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"),
        "it holds no weights as safetensors: lengthgen convert",
    ),
}


@pytest.mark.thinned(2)
@pytest.mark.parametrize(("change", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_a_folder_with_this_is_refused_before_the_hub_is_queried(
    change: Callable[[Path], object], message: str, hub: Endpoint, folder: Path
) -> None:
    change(folder)
    with pytest.raises(ValueError, match=message):
        push(folder, "user/name")
    assert hub.requests == []
