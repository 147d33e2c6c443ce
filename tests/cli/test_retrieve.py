"""`lengthgen retrieve` on tiny checkpoints."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from hf_recurrent_lengthgen.cli import report, retrieve
from hf_recurrent_lengthgen.cli.main import main
from hf_recurrent_lengthgen.data import byte_tokenizer
from hf_recurrent_lengthgen.evaluation.files import read_result
from hf_recurrent_lengthgen.evaluation.provenance import weights_digest
from hf_recurrent_lengthgen.loading import load_model
from hf_recurrent_lengthgen.metrics.retrieval import measure as retrieval
from hf_recurrent_lengthgen.metrics.retrieval.result import RetrievalComparison

QA = "1 Mary moved to the bathroom.\n2 Where is Mary? \tbathroom\t1\n1 John went home.\n2 Where is John? \thome\t1\n"


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama") / "checkpoint"
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"intermediate_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1}
    LlamaForCausalLM(LlamaConfig(vocab_size=384, hidden_size=8, **sizes)).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def babi_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "babi"
    folder.mkdir()
    for name in ("qa1_single-supporting-fact", "qa2_two-supporting-facts"):
        for split in ("train", "test"):
            (folder / f"{name}_{split}.txt").write_text(QA)
    return folder


def test_models_are_compared_and_finished_cells_kept(
    checkpoint: Path, llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "found"
    arguments = ["retrieve", str(checkpoint), str(llama), "--lengths", "400,0.5k", "--depths", "2", "--samples", "2"]
    assert main([*arguments, "--output", str(output), "--within", "100"]) == 0
    shown = capsys.readouterr().out
    assert "model" in shown
    assert "0 (0 to 49)" in shown  # Wilson of 0 of 4
    assert "T_recall" in shown
    comparison = read_result(output / "retrieval.json", RetrievalComparison)
    one, other = comparison.models
    names = tuple(f"{folder.parent.name}/{folder.name}" for folder in (checkpoint, llama))
    assert (one.model, other.model) == names  # both folders have one name
    assert one.weights == weights_digest(load_model(str(checkpoint)))
    assert (one.lengths, one.depths, one.training_length, other.training_length) == ((400, 512), (0, 1), 8, None)
    assert [[cell.samples for cell in row] for row in one.cells] == [[2, 2], [2, 2]]
    assert one.command.startswith("lengthgen retrieve ")
    pictures = {"heat_map", "accuracy", "within_1", "within_2"}
    assert {path.name for path in output.iterdir()} == {
        "retrieval.json",
        *(f"{name}.{kind}" for name in pictures for kind in ("png", "svg")),
    }

    def refuse(*_: Any, **options: Any) -> None:
        raise AssertionError("read again")

    monkeypatch.setattr(retrieval, "greedy_hits", refuse)
    monkeypatch.setattr(retrieve, "_write", lambda *_: tmp_path)
    assert main([*arguments, "--output", str(output)]) == 0
    with pytest.raises(AssertionError, match="read again"):
        main([*arguments, "--output", str(output), "--no-cache"])
    with pytest.raises(AssertionError, match="read again"):
        main([*arguments, "--output", str(output), "--seed", "1"])


def test_babilong_from_local_files(
    checkpoint: Path,
    babi_folder: Path,
    text_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(report, "save_svg", lambda *_: None)  # slow, and tested above
    output = tmp_path / "found"
    arguments = ["--data", str(text_file), "--split", "train", "--lengths", "80,400", "--shots", "1"]
    arguments += ["--task-files", str(babi_folder), "--babi-tasks", "1,2", "--output", str(output)]
    assert main(["retrieve", str(checkpoint), "--task", "babilong", *arguments]) == 0
    (result,) = read_result(output / "retrieval.json", RetrievalComparison).models
    assert (result.rows, result.shots, result.model) == (("qa1", "qa2"), 1, "checkpoint")
    assert [[cell.samples for cell in row] for row in result.cells] == [[0, 2], [0, 2]]  # no room for the example
    shown = capsys.readouterr().out
    assert "babilong (sentences, 1 shots)" in shown
    assert "Cells without samples" in shown
    assert not (output / "within.png").exists()

    assert main(["retrieve", str(checkpoint), "--task", "babilong", *arguments, "--depths", "0,0.5"]) == 0
    (result,) = read_result(output / "retrieval.json", RetrievalComparison).models
    assert result.rows == ("qa1, 0 %", "qa1, 50 %", "qa2, 0 %", "qa2, 50 %")
    assert result.depths == (0, 0.5, 0, 0.5)
    assert [row[1].samples for row in result.cells] == [2] * 4
    assert not (output / "within.png").exists()


def test_needles_in_a_text(checkpoint: Path, text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "save_svg", lambda *_: None)
    output = tmp_path / "found"
    arguments = ["--data", str(text_file), "--split", "train", "--lengths", "700", "--depths", "0.5"]
    assert main(["retrieve", str(checkpoint), "--task", "niah", *arguments, "--output", str(output)]) == 0
    (result,) = read_result(output / "retrieval.json", RetrievalComparison).models
    assert (result.task, result.style, result.rows) == ("niah", "single-2", ("50 %",))
    assert result.data.description == f"{text_file.name}, split train"
    assert (output / "within.png").exists()


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--lengths", "100"], "length is 100, but a passkey prompt without filler has 2"),
        (["--depths", "0.5,2"], "--depths is '0.5,2'"),
        (["--depths", "2.5"], "--depths is '2.5'"),
        (["--depths", "0.5,0.5"], "the rows of passkey must be different"),
        (["--lengths", "400,600", "--within", "100,601"], "--within names 601, but must be at most the longest"),
        (["--task", "babilong", "--task-files", "nowhere"], "nowhere has 0 files qa1_*_test.txt"),
        (["--task", "niah", "--lengths", "1m"], "that does not repeat, but the data have"),
        (["--output", "TEXT_FILE"], "is a file, or inside one: give the name of a folder"),
        (["--device", "moon"], "Cannot use the device 'moon'"),
        (["--tokenizer", "MERGING"], "merges '\\nWhat is t' with the word before it"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    arguments: list[str],
    complaint: str,
    checkpoint: Path,
    text_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(retrieve, "load_documents", lambda *_: [text_file.read_text()])
    if "MERGING" in arguments:
        vocabulary = {character: place for place, character in enumerate([*map(chr, range(128)), "a\n"])}
        merging = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE(vocabulary, [("a", "\n")])))
        monkeypatch.setattr(retrieve, "shared_tokenizer", lambda _: merging)
    words = [str(text_file) if word == "TEXT_FILE" else word for word in arguments]
    output = [] if "--output" in words else ["--output", str(tmp_path / "out")]
    assert main(["retrieve", str(checkpoint), *words, *output]) == 1
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--data", "stdlib"], "unrecognized arguments: --data stdlib"),
        (["--task", "niah", "--task-style", "pass key"], "unrecognized arguments: --task-style"),
        (["--task=babilong", "--task-files", "f", "--within", "3"], "unrecognized arguments: --within"),
        (["--babi-tasks", "1"], "unrecognized arguments: --babi-tasks"),
        (["--task", "babilong"], "the following arguments are required: --task-files"),
        (["--task"], "argument --task: expected one argument"),
        (["--lengths", "1k,k"], "argument --lengths: must be whole numbers with commas between"),
        (["--lengths", "1k,1024"], "argument --lengths: must have each number once"),
        (["--within", "x"], "argument --within: must be whole numbers"),
    ],
)
def test_a_task_has_its_own_options_only_and_numbers_are_checked(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["retrieve", "checkpoint", *arguments])
    assert complaint in capsys.readouterr().err


def test_models_must_be_several_and_tasks_known(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["retrieve", str(checkpoint), str(checkpoint)]) == 1
    assert "Each model can be given once" in capsys.readouterr().err
    for arguments in (["--task", "copying"], ["--task-style", "key"], ["--samples", "0"]):
        with pytest.raises(SystemExit):
            main(["retrieve", str(checkpoint), *arguments])
    assert "invalid choice: 'copying'" in capsys.readouterr().err


def test_the_help_says_where_other_tasks_are(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["retrieve", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "`lengthgen accuracy` measures copying and the recall of many key-value pairs" in shown
    assert "babilong" in shown
