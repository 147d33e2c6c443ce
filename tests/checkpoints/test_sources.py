"""Checkpoints on the Hub, by the real client against an endpoint of the tests, and what records say."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hf_recurrent_lengthgen.checkpoints import sources
from hf_recurrent_lengthgen.checkpoints.conversion.convert import convert_checkpoint
from hf_recurrent_lengthgen.checkpoints.conversion.tiny_random_models import write_tiny_random_model
from hf_recurrent_lengthgen.checkpoints.records import last_training, read_lineage, verified_files
from hf_recurrent_lengthgen.checkpoints.sources import locate
from tests.checkpoints.hub.conftest import hub
from tests.checkpoints.hub.endpoint import Endpoint

__all__ = ["hub"]
CARD = b"---\nlicense: mit\n---\n# A model\n"


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_one_container_of_the_commit_is_downloaded_and_recorded(hub: Endpoint, tmp_path: Path) -> None:
    files = contents(write_tiny_random_model("transformers", "mamba2", tmp_path / "theirs"))
    extra = {
        "README.md": CARD,
        "pytorch_model.bin": b"the same again",
        "images/large.png": b"x",
        "modeling_x.py": b"1",
    }
    first = hub.put("user/name", files | extra)
    hub.put("user/name", {"config.json": b"{}"})
    convert_checkpoint("user/name", tmp_path / "ours", revision=first)
    lineage: Any = read_lineage(tmp_path / "ours")
    assert (lineage.source.name, lineage.source.on_hub, lineage.source.revision) == ("user/name", True, first)
    assert (lineage.source.license, set(lineage.source.files)) == ("mit", {"model.safetensors"})
    for name in ("pytorch_model.bin", "large.png"):
        assert hub.requested("GET", name) == []


def test_pickles_and_a_named_file_are_downloaded_where_there_is_no_safetensors(hub: Endpoint, tmp_path: Path) -> None:
    files = contents(write_tiny_random_model("mamba-ssm", "mamba", tmp_path / "theirs"))
    commit = hub.put("user/name", files)
    assert (locate("user/name").path / "pytorch_model.bin").is_file()
    assert locate("user/name").revision == commit
    torch.save({}, tmp_path / "a.pth")
    hub.put("user/several", {f"{name}.pth": (tmp_path / "a.pth").read_bytes() for name in "ab"})
    with pytest.raises(ValueError, match=r"if it holds \.pth files, give one, as user/several/FILE\.pth"):
        locate("user/several")
    assert hub.requested("GET", r"/resolve/.*\.pth") == []
    source = locate("user/several/b.pth")
    assert (source.path.name, source.name) == ("b.pth", "user/several")
    with pytest.raises(ValueError, match=r"user/several/c\.pth is no local checkpoint, and cannot be downloaded"):
        locate("user/several/c.pth")


@pytest.mark.parametrize(
    ("name", "revision", "message"),
    [
        ("user/missing", None, "user/missing is no local checkpoint, and cannot be downloaded from the Hub"),
        ("user/name", "no-such-branch", "cannot be downloaded from the Hub"),
        ("user/empty", None, "user/empty holds none of"),
    ],
)
def test_what_is_not_on_the_hub_is_reported(
    name: str, revision: str | None, message: str, hub: Endpoint, tmp_path: Path
) -> None:
    hub.put("user/name", contents(write_tiny_random_model("transformers", "mamba", tmp_path / "theirs")))
    hub.put("user/empty", {"config.json": b"{}"})
    with pytest.raises(ValueError, match=message):
        convert_checkpoint(name, tmp_path / "ours", revision=revision)


def test_a_file_in_the_cache_of_the_hub_keeps_its_name_and_neighbours(tmp_path: Path) -> None:
    write_tiny_random_model("mamba-ssm", "mamba", tmp_path / "theirs")
    model = tmp_path / "models--user--name"
    (model / "blobs").mkdir(parents=True)
    snapshot = model / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    for number, path in enumerate((tmp_path / "theirs").iterdir()):
        path.rename(model / "blobs" / str(number))
        (snapshot / path.name).symlink_to(f"../../blobs/{number}")
    convert_checkpoint(str(snapshot / "pytorch_model.bin"), tmp_path / "ours")
    lineage: Any = read_lineage(tmp_path / "ours")
    assert (lineage.source.name, lineage.source.revision) == ("user/name", "0" * 40)
    assert set(lineage.source.files) == {"pytorch_model.bin"}


def steps(*kinds: str) -> Any:
    settings = SimpleNamespace(method={"state_drop_probability": 0.1}, learning_rate=0.01)
    method = SimpleNamespace(title="state passing")
    run = SimpleNamespace(methods=(method,), settings=(settings,), steps=7, seconds=2.0, loss=3.0)
    made = [SimpleNamespace(kind=kind, training=run if kind == "train" else None) for kind in kinds]
    return SimpleNamespace(steps=tuple(made))


def test_the_last_training_is_reported_if_nothing_but_a_merge_follows() -> None:
    for kinds in (("train",), ("train", "merge"), ("expand", "train", "merge")):
        found: Any = last_training(steps(*kinds))
        assert (found.methods, found.steps, found.learning_rate) == (("state passing",), 7, 0.01)
    for kinds in ((), ("merge",), ("train", "forget"), ("train", "expand", "merge")):
        assert last_training(steps(*kinds)) is None


def test_lineage_and_card_are_those_of_the_commit_that_was_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requested: list[tuple[str, Any]] = []

    def download(name: str, file: str, revision: str | None = None, **_: Any) -> str:
        requested.append((file, revision))
        return str(tmp_path / "snapshots" / "abc" / file)

    monkeypatch.setattr(sources, "hf_hub_download", download)
    assert sources._loaded_commit("user/name") == tmp_path / "snapshots" / "abc"
    assert requested == [("config.json", None), ("lineage.json", "abc"), ("README.md", "abc")]


def test_a_verification_speaks_for_tokenizer_and_generation_too(tmp_path: Path) -> None:
    names = {
        *("config.json", "model.safetensors", "modeling.py", "generation_config.json", "tokenizer.json"),
        *("tokenizer_config.json", "added_tokens.json", "special_tokens_map.json", "vocab.json", "merges.txt"),
        *("rwkv_vocab_v20230424.txt", "tokenizer.model", "chat_template.jinja", "additional_chat_templates/a.jinja"),
    }
    (tmp_path / "additional_chat_templates").mkdir()
    for name in (*names, "README.md", "lineage.json", "notes.txt"):
        (tmp_path / name).write_text("x")
    assert verified_files(tmp_path).keys() == names
    before = verified_files(tmp_path)
    (tmp_path / "added_tokens.json").write_text("y")
    assert {name for name, _ in before.items() ^ verified_files(tmp_path).items()} == {"added_tokens.json"}
