"""Collections: made once, each model in it once, never at the cost of the push."""

from pathlib import Path

from huggingface_hub import HfApi, get_collection

from .checkpoints import push
from .endpoint import Endpoint


def test_a_collection_is_made_once_and_holds_the_model_once(hub: Endpoint, folder: Path) -> None:
    first = push(folder, "user/name", collection="Cured models")
    push(folder, "user/name", collection="Cured models")
    (slug,) = hub.collections
    push(folder, "user/other", collection=slug)
    found = get_collection(slug)
    assert [item.item_id for item in found.items] == ["user/name", "user/other"]
    assert (found.title, found.private, found.url) == ("Cured models", True, first.collection)


def test_a_collection_that_fails_leaves_the_push_done(hub: Endpoint, folder: Path) -> None:
    result = push(folder, "user/name", collection="other/list-0")
    assert result.collection is None
    assert "Adding user/name to the collection other/list-0 failed: it is not there" in str(result.collection_problem)
    assert HfApi().model_info("user/name").sha == result.commit


def test_nobody_elses_collection_is_touched(hub: Endpoint, folder: Path) -> None:
    hub.fail("POST", "/api/collections$", status=403)
    result = push(folder, "user/name", collection="Mine")
    assert "to the collection Mine failed: the token may not do this" in str(result.collection_problem)
    assert hub.collections == {}
