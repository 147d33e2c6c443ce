"""What stands beside the weights of a converted checkpoint, and what is left when something breaks."""

import errno
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, ByT5Tokenizer, PreTrainedTokenizerFast

from hf_recurrent_lengthgen import load_model
from hf_recurrent_lengthgen.checkpoints.conversion import tensor_writing
from hf_recurrent_lengthgen.checkpoints.conversion.convert import convert_checkpoint
from hf_recurrent_lengthgen.checkpoints.conversion.export import export_checkpoint
from hf_recurrent_lengthgen.checkpoints.conversion.tiny_random_models import write_tiny_random_model
from hf_recurrent_lengthgen.checkpoints.records import file_digest, read_lineage
from tests.cli.training import trained_config as read_config

CARD = "---\nlicense: apache-2.0\nlibrary_name: transformers\n---\n\n# A model\n"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A checkpoint in the layout of mamba-ssm."""
    return write_tiny_random_model("mamba-ssm", "mamba2", tmp_path / "theirs")


def word_tokenizer(folder: Path, words: int = 5) -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    vocabulary = {"<|endoftext|>": 0} | {f"word{number}": number + 1 for number in range(words)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(vocabulary, unk_token="<|endoftext|>")),
        bos_token="<|endoftext|>",
        eos_token="<|endoftext|>",
    )
    tokenizer.save_pretrained(folder)
    return tokenizer


def test_config_and_code_are_what_save_pretrained_writes(source: Path, tmp_path: Path) -> None:
    convert_checkpoint(str(source), tmp_path / "ours")
    load_model(str(tmp_path / "ours")).save_pretrained(tmp_path / "saved")
    ours, saved = ({path.name: path for path in (tmp_path / name).iterdir()} for name in ("ours", "saved"))
    assert ours.keys() - {"lineage.json"} == saved.keys()
    for name, path in saved.items():
        if name.endswith(".py"):
            assert path.read_bytes() == ours[name].read_bytes()
    assert read_config(tmp_path / "ours") == read_config(tmp_path / "saved")


def test_the_lineage_reports_source_licence_digests_and_command(source: Path, tmp_path: Path) -> None:
    (source / "README.md").write_text(CARD)
    convert_checkpoint(str(source), tmp_path / "ours", command="lengthgen convert theirs --output ours")
    lineage: Any = read_lineage(tmp_path / "ours")
    assert (lineage.source.name, lineage.source.on_hub, lineage.source.revision) == ("theirs", False, None)
    assert (lineage.source.format, lineage.source.license) == ("mamba-ssm", "apache-2.0")
    assert lineage.source.files == {"pytorch_model.bin": file_digest(source / "pytorch_model.bin")}
    (step,) = lineage.steps
    assert (step.kind, step.command) == ("convert", "lengthgen convert theirs --output ours")


def test_a_snapshot_of_the_hub_reports_its_name_commit_and_training_length(source: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "hub" / "models--state-spaces--mamba2-130m" / "snapshots" / COMMIT
    shutil.copytree(source, snapshot)
    convert_checkpoint(str(snapshot), tmp_path / "ours")
    lineage: Any = read_lineage(tmp_path / "ours")
    assert (lineage.source.name, lineage.source.on_hub) == ("state-spaces/mamba2-130m", True)
    assert lineage.source.revision == COMMIT
    assert read_config(tmp_path / "ours")["training_length"] == 2048


def test_tokenizers_are_copied_and_give_the_ids_that_the_config_lacks(source: Path, tmp_path: Path) -> None:
    word_tokenizer(source)
    convert_checkpoint(str(source), tmp_path / "ours")
    assert read_config(tmp_path / "ours")["eos_token_id"] == 0
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "ours" / name).read_bytes() == (source / name).read_bytes()
    assert AutoTokenizer.from_pretrained(tmp_path / "ours").tokenize("word1")
    export_checkpoint(str(tmp_path / "ours"), tmp_path / "back", "mamba-ssm")
    assert (tmp_path / "back" / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()


def test_a_tokenizer_can_come_from_elsewhere(source: Path, tmp_path: Path) -> None:
    word_tokenizer(tmp_path / "words")
    convert_checkpoint(str(source), tmp_path / "ours", tokenizer=str(tmp_path / "words"))
    assert (tmp_path / "ours" / "tokenizer.json").is_file()
    convert_checkpoint(str(source), tmp_path / "bytes", tokenizer=ByT5Tokenizer())
    assert read_config(tmp_path / "bytes")["eos_token_id"] == 1


def test_the_code_of_a_tokenizer_comes_along_and_does_not_run(source: Path, tmp_path: Path) -> None:
    (source / "tokenizer_config.json").write_text(
        json.dumps({"auto_map": {"AutoTokenizer": ["hf_tokenizer.Slow", None]}, "tokenizer_class": "Slow"})
    )
    (source / "rwkv_vocab_v20230424.txt").write_text("1 'a' 1\n")
    (source / "hf_tokenizer.py").write_text("from .parts import Trie\nraise RuntimeError('ran')\n")
    (source / "parts.py").write_text("raise RuntimeError('ran')\n")
    (source / "modeling_other.py").write_text("raise RuntimeError('ran')\n")
    convert_checkpoint(str(source), tmp_path / "ours")
    names = {path.name for path in (tmp_path / "ours").iterdir()}
    assert {"hf_tokenizer.py", "parts.py", "rwkv_vocab_v20230424.txt", "tokenizer_config.json"} <= names
    assert "modeling_other.py" not in names


def test_tokenizer_code_may_not_replace_ours(source: Path, tmp_path: Path) -> None:
    (source / "tokenizer_config.json").write_text(json.dumps({"auto_map": {"AutoTokenizer": ["rows.Slow", None]}}))
    (source / "rows.py").write_text("")
    with pytest.raises(ValueError, match=r"rows\.py"):
        convert_checkpoint(str(source), tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


def test_a_tokenizer_of_another_model_is_refused(source: Path, tmp_path: Path) -> None:
    word_tokenizer(source, words=400)
    with pytest.raises(ValueError, match="ids up to 400, but the model only 384 embeddings"):
        convert_checkpoint(str(source), tmp_path / "ours")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="holds no tokenizer files"):
        convert_checkpoint(str(source), tmp_path / "ours", tokenizer=str(tmp_path / "empty"))


def test_generation_settings_are_kept(tmp_path: Path) -> None:
    write_tiny_random_model("transformers", "mamba", tmp_path / "theirs")
    (tmp_path / "theirs" / "generation_config.json").write_text('{"temperature": 0.3, "do_sample": true}')
    convert_checkpoint(str(tmp_path / "theirs"), tmp_path / "ours")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "ours").generation_config.temperature == 0.3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"format": "transformers"}, "is no checkpoint of the Mamba, Mamba-2 and FalconMamba"),
        ({"revision": "main"}, "has no revision"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_options_are_checked(options: dict[str, Any], message: str, source: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        convert_checkpoint(str(source), tmp_path / "ours", **options)
    assert not (tmp_path / "ours").exists()


def break_after(monkeypatch: pytest.MonkeyPatch, tensors: int, error: BaseException) -> None:
    """The disk is full, or the user interrupts, once so many tensors are written."""
    read, done = tensor_writing._tensor, []

    def failing(entry: tensor_writing.Entry) -> torch.Tensor:
        if len(done) == tensors:
            raise error
        done.append(entry.name)
        return read(entry)

    monkeypatch.setattr(tensor_writing, "_tensor", failing)


@pytest.mark.parametrize("there", [False, True], ids=["new", "empty folder"])
@pytest.mark.parametrize("direction", ["convert", "mamba-ssm", "transformers"])
def test_what_breaks_in_the_middle_leaves_nothing(
    direction: str, there: bool, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert_checkpoint(str(source), tmp_path / "ours")
    before = sorted(tmp_path.iterdir())
    if there:
        (tmp_path / "new").mkdir()
    break_after(monkeypatch, 5, OSError(errno.ENOSPC, "No space left on device"))
    write = {
        "convert": lambda: convert_checkpoint(str(source), tmp_path / "new"),
        "export": lambda: export_checkpoint(str(tmp_path / "ours"), tmp_path / "new", direction),
    }["convert" if direction == "convert" else "export"]
    with pytest.raises(OSError, match="No space left"):
        write()
    assert sorted(path for path in tmp_path.iterdir() if path.name != "new") == before
    assert (list((tmp_path / "new").iterdir()) == []) if there else not (tmp_path / "new").exists()
