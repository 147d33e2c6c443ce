"""What records say: of the last training, of the commit on the Hub, of the files that were verified, of papers."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hf_recurrent_lengthgen.checkpoints import sources
from hf_recurrent_lengthgen.checkpoints.records import last_training, verified_files


def steps(*kinds: str) -> Any:
    settings = SimpleNamespace(method={"state_drop_probability": 0.1}, learning_rate=0.01)
    method = SimpleNamespace(title="state passing")
    run = SimpleNamespace(methods=(method,), settings=(settings,), steps=7, seconds=2.0, loss=3.0)
    made = [SimpleNamespace(kind=kind, training=run if kind == "train" else None) for kind in kinds]
    return SimpleNamespace(steps=tuple(made))


def test_the_last_training_is_told_if_nothing_but_a_merge_follows() -> None:
    for kinds in (("train",), ("train", "merge"), ("expand", "train", "merge")):
        found = last_training(steps(*kinds))
        assert found is not None
        assert (found.methods, found.steps, found.learning_rate) == (("state passing",), 7, 0.01)
    for kinds in ((), ("merge",), ("train", "forget"), ("train", "expand", "merge")):
        assert last_training(steps(*kinds)) is None


def test_lineage_and_card_are_those_of_the_commit_that_was_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, Any]] = []

    def download(name: str, file: str, revision: str | None = None, **_: Any) -> str:
        asked.append((file, revision))
        return str(tmp_path / "snapshots" / "abc" / file)

    monkeypatch.setattr(sources, "hf_hub_download", download)
    assert sources._loaded_commit("user/name") == tmp_path / "snapshots" / "abc"
    assert asked == [("config.json", None), ("lineage.json", "abc"), ("README.md", "abc")]


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
