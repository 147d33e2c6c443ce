"""Collections: made once, each model in it once, never at the cost of the push."""

from pathlib import Path

import pytest
from huggingface_hub import HfApi, get_collection

from hf_recurrent_lengthgen.hub.collections import add_to_collection
from hf_recurrent_lengthgen.hub.push import push_checkpoint
from hf_recurrent_lengthgen.hub.remote import hub_api

from .client import TOKEN
from .endpoint import Endpoint


def test_a_collection_is_made_once_and_holds_the_model_once(hub: Endpoint, folder: Path) -> None:
    first = push_checkpoint(folder, "user/name", collection="Cured models")
    push_checkpoint(folder, "user/name", collection="Cured models")
    (slug,) = hub.collections
    push_checkpoint(folder, "user/other", collection=slug)
    found = get_collection(slug)
    assert [item.item_id for item in found.items] == ["user/name", "user/other"]
    assert (found.title, found.private, found.url) == ("Cured models", True, first.collection)


def test_a_collection_that_fails_leaves_the_push_done(hub: Endpoint, folder: Path) -> None:
    result = push_checkpoint(folder, "user/name", collection="other/list-0")
    assert result.collection is None
    assert "Adding user/name to the collection other/list-0 failed: it is not there" in str(result.collection_problem)
    assert HfApi().model_info("user/name").sha == result.commit


def test_a_cut_answer_makes_no_second_collection_and_no_second_item(hub: Endpoint) -> None:
    hub.create("team/name")
    hub.fail("POST", "/api/collections$", cut="answer")
    hub.fail("POST", "/items$", cut="answer")
    add_to_collection(hub_api(TOKEN), "Cured models", "team/name")
    (found,) = hub.collections.values()
    assert (found.slug.partition("/")[0], found.items) == ("team", [("model", "team/name")])


def test_nobody_elses_collection_is_touched(hub: Endpoint) -> None:
    hub.create("user/name")
    hub.accounts["hf_reads"] = type(hub.accounts[TOKEN])("user", may_write=False)
    with pytest.raises(ValueError, match="Making the collection Mine of user failed: the token may not do this"):
        add_to_collection(hub_api("hf_reads"), "Mine", "user/name")
    assert hub.collections == {}
