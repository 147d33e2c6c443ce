"""Pushes to repositories that somebody else has a hand in."""

from pathlib import Path

import pytest

from hf_recurrent_lengthgen.hub.pull import pull_checkpoint
from hf_recurrent_lengthgen.hub.push import plan_push
from hf_recurrent_lengthgen.records import CardMark, cards_digest, verified_files

from .checkpoints import CARD, push, pushed_files, verify
from .endpoint import Endpoint

THEIRS = {"model-00001-of-00002.safetensors": b"other weights", "adapter_config.json": b"{}", "notes.md": b"theirs"}


def test_files_of_others_that_would_be_loaded_are_refused_or_deleted(hub: Endpoint, folder: Path) -> None:
    hub.create("user/name")
    head = hub.put("user/name", THEIRS)
    told = r"would be loaded with it \(adapter_config.json, model-00001-of-00002.safetensors\)"
    with pytest.raises(ValueError, match=told):
        push(folder, "user/name")
    assert hub.repositories["user/name"].branches["main"] == head
    push(folder, "user/name", overwrite=True)
    assert hub.files("user/name") == pushed_files(folder) | {"notes.md": b"theirs"}


def test_nothing_is_committed_to_what_became_public_during_the_upload(hub: Endpoint, folder: Path) -> None:
    push(folder, "user/name")
    head = hub.repositories["user/name"].branches["main"]
    (folder / "README.md").write_text((folder / "README.md").read_text() + "More.\n")

    def publish() -> None:
        hub.repositories["user/name"].private = False

    hub.fail("POST", "/preupload/", call=publish)
    with pytest.raises(ValueError, match="is not private as asked for"):
        push(folder, "user/name")
    assert hub.repositories["user/name"].branches["main"] == head


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
    hub.create("user/name")
    hub.put("user/name", files)
    with pytest.raises(ValueError, match=told):
        pull_checkpoint("user/name", None, tmp_path / "pulled")
    assert not (tmp_path / "pulled").exists()


def test_a_card_of_other_weights_is_refused(hub: Endpoint, folder: Path) -> None:
    (folder / "README.md").write_text(CARD + CardMark(cards_digest(verified_files(folder))).comment() + "\n")
    assert plan_push(folder, "user/name").refusals == ()
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\1")
    verify(folder)
    (refusal,) = plan_push(folder, "user/name").refusals
    assert "card is of other weights or another config" in refusal
