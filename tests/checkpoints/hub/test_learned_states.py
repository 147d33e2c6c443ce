"""A learned state that was uploaded comes back from the Hub bit for bit by name."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import HfApi, snapshot_download

from hf_recurrent_lengthgen.checkpoints.adapters import base_of_learned_state
from hf_recurrent_lengthgen.checkpoints.hub.push import plan_push
from hf_recurrent_lengthgen.checkpoints.loading import load_model

from .checkpoints import push
from .endpoint import Endpoint


def test_it_is_uploaded_downloaded_and_loaded_by_name(hub: Endpoint, folder: Path, tmp_path: Path) -> None:
    push(folder, "user/base", private=False)
    model: Any = load_model("user/base").eval()
    state = tuple(type(layer)(*(torch.randn(part.shape) for part in layer)) for layer in model.zero_state(1))
    model.add_learned_state("formal", state)
    model.save_learned_state(tmp_path / "state")
    HfApi(token="hf_test").create_repo("user/formal")
    HfApi(token="hf_test").upload_folder(repo_id="user/formal", folder_path=tmp_path / "state")
    snapshot_download("user/formal", local_dir=tmp_path / "mine")
    assert base_of_learned_state(tmp_path / "mine") == "user/base"
    ids = torch.tensor([[3, 4, 5]])
    expected = model(ids).logits
    torch.testing.assert_close(load_model(str(tmp_path / "mine")).eval()(ids).logits, expected, rtol=0, atol=0)
    other = copy.deepcopy(model)
    other.learned_states.delete_adapter("formal")
    other.load_learned_state("user/formal", "from-hub")
    torch.testing.assert_close(other(ids).logits, expected, rtol=0, atol=0)
    with pytest.raises(ValueError, match="no learned state on the Hub"):
        other.load_learned_state("user/base", "no-state")
    other.learned_states.delete_adapter("from-hub")
    with torch.no_grad():
        other.backbone.embeddings.weight[0] += 1.0
    with pytest.raises(ValueError, match="belongs to user/base"):
        other.load_learned_state("user/formal")
    assert any("it has not been verified" in refusal for refusal in plan_push(tmp_path / "state").refusals)
