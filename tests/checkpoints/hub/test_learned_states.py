"""A learned state goes to the Hub with its card, and comes back bit for bit by name."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import snapshot_download

from hf_recurrent_lengthgen.checkpoints.adapters import base_of_learned_state
from hf_recurrent_lengthgen.checkpoints.cards import CardSettings, write_card
from hf_recurrent_lengthgen.checkpoints.hub.push import plan_push
from hf_recurrent_lengthgen.checkpoints.loading import load_model
from hf_recurrent_lengthgen.cli.main import main
from hf_recurrent_lengthgen.models.state_learned_files import CONFIG_FILE, STATE_FILE

from .checkpoints import push
from .endpoint import Endpoint

NAMES = {"README.md", CONFIG_FILE, STATE_FILE}


@pytest.fixture
def model(folder: Path, hub: Endpoint) -> Any:
    """The checkpoint of `folder`, which is on the Hub, with a learned state."""
    push(folder, "user/base", private=False)
    model = load_model("user/base").eval()
    state = tuple(type(layer)(*(torch.randn(part.shape) for part in layer)) for layer in model.zero_state(1))
    model.add_learned_state("formal", state)
    return model


@pytest.fixture
def state(model: Any, tmp_path: Path) -> Path:
    """The folder of the state, with a card."""
    model.save_learned_state(tmp_path / "state")
    write_card(tmp_path / "state", settings=CardSettings(repo_id="user/formal", license="mit"))
    return tmp_path / "state"


def without_state(model: Any) -> Any:
    bare = copy.deepcopy(model)
    bare.learned_states.delete_adapter("formal")
    return bare


def test_it_is_pushed_downloaded_and_loaded_by_name(hub: Endpoint, model: Any, state: Path, tmp_path: Path) -> None:
    push(state, "user/formal", private=False)
    assert set(hub.files("user/formal")) - {".gitattributes"} == NAMES
    snapshot_download("user/formal", local_dir=tmp_path / "mine")
    assert base_of_learned_state(tmp_path / "mine") == "user/base"
    ids = torch.tensor([[3, 4, 5]])
    expected = model(ids).logits
    torch.testing.assert_close(load_model(str(tmp_path / "mine")).eval()(ids).logits, expected, rtol=0, atol=0)
    by_name = without_state(model)
    by_name.load_learned_state("user/formal", "from-hub")
    torch.testing.assert_close(by_name(ids).logits, expected, rtol=0, atol=0)
    with pytest.raises(ValueError, match="no learned state on the Hub"):
        by_name.load_learned_state("user/base", "no-state")


def test_its_card_names_the_base_and_keeps_own_words(state: Path) -> None:
    text = (state / "README.md").read_text()
    for part in ("base_model: user/base", "base_model_relation: adapter", "license: mit", '"user/formal"'):
        assert part in text, part
    (state / "README.md").write_text(text.replace("keeps what stands here -->", "keeps what stands here -->\nMine."))
    assert main(["card", str(state)]) == 0
    again = (state / "README.md").read_text()
    assert "Mine." in again
    assert "license: mit" in again
    (state / "README.md").write_text("of somebody else")
    assert main(["card", str(state)]) == 1
    assert main(["card", str(state), "--overwrite"]) == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder, about: about.update(base_model_name_or_path="base"), "its base is no name on the Hub"),
        (lambda folder, about: (folder / STATE_FILE).write_bytes(b"x"), "is not what learned_state_config.json"),
        (lambda folder, about: (folder / "README.md").unlink(), "it has no card"),
        (lambda folder, about: (folder / "config.json").write_text("{}"), "holds a checkpoint beside"),
        (lambda folder, about: about.update(note="/home/somebody/base"), "/home/somebody"),
    ],
    ids=["local base", "damaged", "no card", "checkpoint", "path"],
)
def test_what_others_could_not_use_is_refused(change: Any, message: str, state: Path) -> None:
    about = json.loads((state / CONFIG_FILE).read_text())
    change(state, about)
    (state / CONFIG_FILE).write_text(json.dumps(about))
    assert message in "; ".join(plan_push(state).refusals)


def test_a_state_of_another_base_is_refused_by_name(hub: Endpoint, model: Any, state: Path) -> None:
    push(state, "user/formal", private=False)
    other = without_state(model)
    with torch.no_grad():
        other.backbone.embeddings.weight[0] += 1.0
    with pytest.raises(ValueError, match="belongs to user/base"):
        other.load_learned_state("user/formal")
