"""`lengthgen retrieve` on tiny checkpoints."""

import re
from pathlib import Path
from typing import Any

import pytest

from hf_recurrent_lengthgen.checkpoints.loading import load_model
from hf_recurrent_lengthgen.cli import report, retrieve
from hf_recurrent_lengthgen.cli.main import main
from hf_recurrent_lengthgen.data import byte_tokenizer
from hf_recurrent_lengthgen.evaluation.files import read_result
from hf_recurrent_lengthgen.evaluation.provenance import weights_digest
from hf_recurrent_lengthgen.metrics.retrieval import measure as retrieval
from hf_recurrent_lengthgen.metrics.retrieval.result import RetrievalComparison
from tests.llamas import tiny_llama

QA = "1 Mary moved to the bathroom.\n2 Where is Mary? \tbathroom\t1\n1 John went home.\n2 Where is John? \thome\t1\n"


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama") / "checkpoint"
    tiny_llama().save_pretrained(folder)
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
    assert main([*arguments, "--output", str(output)]) == 0
    shown = capsys.readouterr().out
    assert "model" in shown
    assert "0 (0 to 49)" in shown  # Wilson of 0 of 4
    assert "T_recall" in shown
    comparison = read_result(output / "retrieval.json", RetrievalComparison)
    one, other = comparison.models
    names = tuple(f"{folder.parent.name}/{folder.name}" for folder in (checkpoint, llama))
    assert (one.model, other.model) == names  # both folders have one name
    assert one.weights == weights_digest(load_model(str(checkpoint)))
    assert (one.lengths, one.depths, one.training_length, other.training_length) == ((400, 512), (0, 0.5), 8, None)
    assert [[cell.samples for cell in row] for row in one.cells] == [[2, 2], [2, 2]]
    assert one.command.startswith("lengthgen retrieve ")
    pictures = {"heat_map", "accuracy"}
    assert {path.name for path in output.iterdir()} == {
        "retrieval.json",
        *(f"{name}.{kind}" for name in pictures for kind in ("png", "svg")),
    }

    def refuse(*_: Any, **options: Any) -> None:
        raise AssertionError("read again")

    monkeypatch.setattr(retrieval, "greedy_hits", refuse)
    monkeypatch.setattr(retrieve, "_write", lambda *_: [tmp_path])
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


def test_keys_in_a_text_and_what_wrong_answers_say(
    checkpoint: Path, text_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "found"
    arguments = ["--data", str(text_file), "--split", "train", "--lengths", "400,500", "--depths", "0.5", "--csv"]
    arguments += ["--task-keys", "2", "--task-values", "3", "--samples", "3", "--output", str(output)]
    assert main(["retrieve", str(checkpoint), "--task", "keys", *arguments]) == 0
    (result,) = read_result(output / "retrieval.json", RetrievalComparison).models
    assert (result.task, result.style, result.rows) == ("keys", "2 keys of 3 values", ("50 %",))
    assert result.mistakes_by_length == {"earlier value": (0, 0), "another key": (0, 0), "other": (3, 3)}
    shown = capsys.readouterr().out
    assert "keys (2 keys of 3 values): right answers in percent" in shown
    assert re.search(r"checkpoint +3 +3 +other\n", shown)
    assert (output / "retrieval.csv").read_text().splitlines()[0].endswith(",high,earlier value,another key")
    assert (output / "mistakes.png").is_file()


def test_needles_in_a_text(checkpoint: Path, text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "save_svg", lambda *_: None)
    output = tmp_path / "found"
    arguments = ["--data", str(text_file), "--split", "train", "--lengths", "700", "--depths", "0.5"]
    assert main(["retrieve", str(checkpoint), "--task", "niah", *arguments, "--output", str(output)]) == 0
    (result,) = read_result(output / "retrieval.json", RetrievalComparison).models
    assert (result.task, result.style, result.rows) == ("niah", "single-2", ("50 %",))
    assert result.data.description == f"{text_file.name}, split train"
