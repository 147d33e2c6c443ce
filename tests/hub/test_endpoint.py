"""The endpoint of the tests against the real client: what it must get right for the other tests to mean something."""

import hashlib
import json
import subprocess
from pathlib import Path

import pytest
import torch
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, hf_hub_download, snapshot_download
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RevisionNotFoundError
from transformers import AutoModelForCausalLM

from hf_recurrent_lengthgen.models import StatefulMamba2Config, StatefulMamba2ForCausalLM

from .client import PYTHON, STRANGER, environment
from .endpoint import Endpoint

WEIGHTS = bytes(range(256)) * 40


def upload(hub: Endpoint, files: dict[str, bytes], **options: object) -> str:
    operations = [CommitOperationAdd(path, content) for path, content in files.items()]
    options = {"commit_message": "files"} | options
    return HfApi().create_commit("user/name", operations, **options).oid  # type: ignore[arg-type]


@pytest.fixture
def pushed(hub: Endpoint) -> str:
    HfApi().create_repo("user/name", private=True)
    return upload(hub, {"config.json": b"{}\n", "model.safetensors": WEIGHTS, "a/b.txt": b"b"})


def test_what_is_committed_is_listed_with_its_hashes_and_comes_back(hub: Endpoint, pushed: str) -> None:
    hub.page = 2
    entries = {entry.path: entry for entry in HfApi().list_repo_tree("user/name", recursive=True)}
    assert set(entries) == {".gitattributes", "config.json", "model.safetensors", "a/b.txt"}
    assert entries["model.safetensors"].lfs.sha256 == hashlib.sha256(WEIGHTS).hexdigest()
    # `printf '{}\n' | git hash-object --stdin`
    assert entries["config.json"].blob_id == "0967ef424bce6791893e9a57bb952f80fd536e93"
    folder = Path(snapshot_download("user/name"))
    assert folder.name == pushed
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    assert (folder / "a/b.txt").read_bytes() == b"b"
    assert all(request.token is None for request in hub.asked("GET", "^/large/"))


def test_a_name_is_taken_once_and_branches_have_their_own_commits(hub: Endpoint, pushed: str) -> None:
    with pytest.raises(HfHubHTTPError, match="409"):
        HfApi().create_repo("user/name")
    HfApi().create_branch("user/name", branch="other")
    later = upload(hub, {"config.json": b"[]\n"}, revision="other")
    assert HfApi().model_info("user/name").sha == pushed
    assert HfApi().model_info("user/name", revision="other").sha == later
    assert {branch.name for branch in HfApi().list_repo_refs("user/name").branches} == {"main", "other"}
    with pytest.raises(RevisionNotFoundError):
        HfApi().model_info("user/name", revision="nowhere")


def test_a_commit_on_an_old_parent_or_without_its_large_file_changes_nothing(hub: Endpoint, pushed: str) -> None:
    first = hub.repositories["user/name"].at("main").parent
    with pytest.raises(HfHubHTTPError, match="412"):
        upload(hub, {"config.json": b"[]\n"}, parent_commit=first)
    operations = [CommitOperationDelete("config.json"), CommitOperationDelete("none.json")]
    with pytest.raises(HfHubHTTPError, match="404"):
        HfApi().create_commit("user/name", operations, commit_message="delete")
    hub.fail("PUT", "/upload/", corrupt=True)
    with pytest.raises(RuntimeError, match=r"model\.safetensors"):
        upload(hub, {"config.json": b"1", "model.safetensors": b"other"})
    assert hub.repositories["user/name"].at("main").id == pushed


def test_content_is_sent_once_and_in_parts_where_asked_for(hub: Endpoint, pushed: str) -> None:
    upload(hub, {"copy.safetensors": WEIGHTS})
    assert len(hub.asked("PUT", "/upload/")) == 1
    hub.part_size = 1000
    upload(hub, {"larger.safetensors": WEIGHTS[1:]})
    assert len(hub.asked("PUT", "/part/")) == 11
    assert hub.files("user/name")["larger.safetensors"] == WEIGHTS[1:]


def test_who_may_not_is_told_as_by_the_hub(hub: Endpoint, pushed: str) -> None:
    for token, status in (("wrong", "401"), (False, "401")):
        with pytest.raises(HfHubHTTPError, match=status):
            HfApi(token=token).model_info("user/name")
    hub.repositories["user/name"].private = False
    hub.repositories["user/name"].gated = True
    assert HfApi(token=False).model_info("user/name").gated == "auto"
    with pytest.raises(GatedRepoError):
        hf_hub_download("user/name", "config.json", token=False)
    hub.accounts["hf_test"].may_write = False
    with pytest.raises(HfHubHTTPError, match="403"):
        upload(hub, {"config.json": b"1"})
    hub.accounts["hf_test"].expired = True
    with pytest.raises(HfHubHTTPError, match="Invalid user token"):
        HfApi().whoami()


def test_a_cut_download_goes_on_where_it_was_cut(
    hub: Endpoint, pushed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda seconds: None)
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 1000)
    hub.fail("GET", "^/large/", cut="body")
    path = hf_hub_download("user/name", "model.safetensors")
    assert Path(path).read_bytes() == WEIGHTS
    ranges = [request.headers.get("range") for request in hub.asked("GET", "^/large/")]
    assert ranges[0] is None
    assert ranges[1] == "bytes=5000-"


@pytest.mark.slow
def test_the_pushed_model_of_a_class_of_ours_runs_where_the_package_is_not(hub: Endpoint, tmp_path: Path) -> None:
    """`push_to_hub` of Transformers carries the code; from_pretrained at the commit gives the same results."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "num_heads": 2, "head_dim": 8, "state_size": 4, "n_groups": 1, "num_hidden_layers": 2}
    model = StatefulMamba2ForCausalLM(StatefulMamba2Config(vocab_size=50, **sizes))
    commit = model.push_to_hub("user/model", private=True).oid
    assert hub.repositories["user/model"].private
    tokens = torch.randint(0, 50, (2, 9))
    read = model(tokens)
    expected = model(tokens, initial_state=read.final_state)
    torch.save({"tokens": tokens, "state": [tuple(layer) for layer in read.final_state]}, tmp_path / "in.pt")
    code = f"""
import torch
from transformers import AutoModelForCausalLM
options = {{"trust_remote_code": True, "revision": {commit!r}}}
model = AutoModelForCausalLM.from_pretrained("user/model", **options)
given = torch.load("in.pt")
output = model(given["tokens"], initial_state=given["state"])
torch.save({{"logits": output.logits, "state": [tuple(layer) for layer in output.final_state]}}, "out.pt")
"""
    ran = subprocess.run(
        [*PYTHON, STRANGER + code],
        cwd=tmp_path,
        env=environment(hub, tmp_path / "home"),
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    result = torch.load(tmp_path / "out.pt")
    assert torch.equal(result["logits"], expected.logits)
    for ours, theirs in zip(expected.final_state, result["state"], strict=True):
        assert torch.equal(ours.recurrent, theirs[0])
    loaded = AutoModelForCausalLM.from_pretrained("user/model", revision=commit)
    assert torch.equal(loaded(tokens).logits, read.logits)
    assert json.loads(hub.files("user/model")["config.json"])["auto_map"]
