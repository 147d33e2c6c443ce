"""What rows a training gets from files, tasks and splits, and the checkpoint that it keeps by what it retrieves."""

import json
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch

from hf_recurrent_lengthgen.cli import train as command
from hf_recurrent_lengthgen.cli.main import main
from hf_recurrent_lengthgen.data import PackedBlocks
from hf_recurrent_lengthgen.data.tasks import DEPTHS, KeyGrid, grids
from hf_recurrent_lengthgen.evaluation.files import read_result
from hf_recurrent_lengthgen.metrics.retrieval.result import RetrievalComparison
from hf_recurrent_lengthgen.trainers import INTERVENTIONS, Metric, ZeroStateTrainer
from tests.cli.training import Train, spy, write


def test_the_validation_split_of_the_training_data_is_what_is_evaluated(
    train: Train, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "texts"
    for split, letter in (("train", "a"), ("validation", "b")):
        (folder / split).mkdir(parents=True)
        (folder / split / "one.txt").write_text(letter * 3000)
    options = {"data": folder, "eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 64}
    seen: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PackedBlocks, "__init__", spy(seen))
        assert train(model=checkpoint, **options) == 0
    assert {chr(stream[0] - 3) for stream in seen} == {"a", "b"}
    shown = capsys.readouterr().out
    assert "eval_loss" in shown
    assert f"--data {folder}\n" in shown


@pytest.mark.thinned(2)
@pytest.mark.parametrize("kind", ["txt", "jsonl", "parquet"])
def test_data_from_files(kind: str, train: Train, checkpoint: Path, text_file: Path, tmp_path: Path) -> None:
    path = tmp_path / f"data.{kind}"
    rows = datasets.Dataset.from_dict({"body": [text_file.read_text()]})
    if kind == "txt":
        path.write_bytes(text_file.read_bytes())
    else:
        (rows.to_json if kind == "jsonl" else rows.to_parquet)(path)
    column = "text" if kind == "txt" else "body"
    options = {"eval_data": path, "eval_split": "train[:1]", "eval_strategy": "steps", "eval_steps": 2}
    assert train(model=checkpoint, data=path, text_column=column, **options, per_device_eval_batch_size=64) == 0
    history = json.loads((tmp_path / "out" / "trainer_state.json").read_text())["log_history"]
    [eval_loss] = [entry["eval_loss"] for entry in history if "eval_loss" in entry]
    assert 4 < eval_loss < 8  # log(384) = 5.95


def rows_of(monkeypatch: pytest.MonkeyPatch, train: Train, **options: Any) -> dict[str, Any]:
    """Training and evaluation rows of `lengthgen train`, which trains nothing."""
    seen: dict[str, Any] = {}

    class Seen(ZeroStateTrainer):
        def __init__(self, model: Any, training: Any, **fields: Any) -> None:
            seen.update(fields)
            raise ValueError("enough seen")

    with monkeypatch.context() as patch:
        patch.setitem(INTERVENTIONS, "none", Seen)
        assert train(intervention="none", **options) == 1
    return seen


def test_evaluation_has_other_passkeys(
    monkeypatch: pytest.MonkeyPatch, train: Train, checkpoint: Path, tmp_path: Path
) -> None:
    options = {"task": "passkey", "data": None, "training_length": 400, "eval_strategy": "steps"}
    rows = rows_of(monkeypatch, train, model=checkpoint, **options)
    keys = [
        {tuple(row["labels"][row["labels"] != -100].tolist()) for row in (rows[name][i] for i in range(4))}
        for name in ("train_dataset", "eval_dataset")
    ]
    assert [len(some) for some in keys] == [4, 4]
    assert not keys[0] & keys[1]


KEYS = {"task": "keys", "task_keys": 2, "task_values": 2, "training_length": 300}


def test_evaluation_has_keys_in_other_text(
    monkeypatch: pytest.MonkeyPatch, train: Train, checkpoint: Path, tmp_path: Path
) -> None:
    data, held_out = (write(tmp_path / f"{letter}.txt", f"{letter * 9}. " * 99) for letter in "pq")
    text = {"data": data, "eval_data": held_out, "eval_split": "train", "eval_strategy": "steps"}
    grids: list[KeyGrid] = []
    monkeypatch.setattr(command, "retrieval", lambda grid, _: grids.append(grid) or Metric("r", len, True))
    rows = rows_of(monkeypatch, train, model=checkpoint, **KEYS, **text, retrieval_lengths=310)
    task = grids[0].tasks(9, 300)[0]
    assert (grids[0].style, grids[0].samples, grids[0].depths) == ("2 keys of 2 values", 2, DEPTHS)
    prompts = {"evaluation": torch.cat([task.prompt, task.answer])}
    for name in ("train_dataset", "eval_dataset"):
        prompts[name] = rows[name][0]["input_ids"]
        assert int((rows[name][0]["labels"] != -100).sum()) == 7
    for name, ids in prompts.items():
        prompt = bytes((ids - 3).clamp(min=0).tolist()).decode()
        own, other = ("ppppp", "qqqqq") if name == "train_dataset" else ("qqqqq", "ppppp")
        assert own in prompt
        assert other not in prompt
        assert (prompt.count("The code of "), len(prompt)) == (5, 300)


@pytest.fixture
def babi(tmp_path: Path) -> Path:
    """Training files of bAbI with one question each."""
    folder = tmp_path / "babi"
    folder.mkdir()
    for task in range(1, 11):
        story = "1 Mary moved to the bathroom.\n2 John went to the hall.\n3 Where is Mary? \tbathroom\t1\n"
        (folder / f"qa{task}_made-up_train.txt").write_text(story)
    return folder


def test_questions_of_babi_are_hidden_in_text(train: Train, checkpoint: Path, babi: Path) -> None:
    options = {"task": "babilong", "task_files": babi, "training_length": 200, "intervention": "none"}
    assert train(model=checkpoint, **options) == 0


def test_evaluation_has_the_test_questions_of_babi_also_in_the_training_text(
    monkeypatch: pytest.MonkeyPatch,
    train: Train,
    checkpoint: Path,
    babi: Path,
    text_file: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = {"data": text_file, "eval_data": text_file, "eval_split": "train", "eval_strategy": "steps"}
    options = {"model": checkpoint, "task": "babilong", "task_files": babi, "training_length": 200} | text
    assert train(**options, intervention="none") == 1
    assert f"{babi} has 0 files qa1_*_test.txt" in capsys.readouterr().err
    for task in range(1, 11):
        story = "1 Daniel left for the garden.\n2 Where is Daniel? \tgarden\t1\n"
        (babi / f"qa{task}_made-up_test.txt").write_text(story)
    rows = rows_of(monkeypatch, train, **options)
    names = [{question.question for question in rows[name].questions} for name in ("train_dataset", "eval_dataset")]
    assert names == [{"Where is Mary?"}, {"Where is Daniel?"}]
    assert rows["train_dataset"].seed != rows["eval_dataset"].seed


def test_short_documents_are_left_out_of_the_evaluation_too(
    monkeypatch: pytest.MonkeyPatch, train: Train, checkpoint: Path, tmp_path: Path
) -> None:
    lines = (json.dumps({"text": letter * length}) for letter, length in (("a", 30), ("b", 8), ("c", 40)))
    data = write(tmp_path / "texts.jsonl", "\n".join(lines))
    text = {"data": data, "eval_data": data, "eval_split": "train", "eval_strategy": "steps"}
    for least, letters in ((0, set("abc")), (9, set("ac"))):
        rows = rows_of(monkeypatch, train, model=checkpoint, minimum_document_tokens=least, **text)
        for dataset in rows["train_dataset"], rows["eval_dataset"]:
            bytes_seen = {token for row in dataset for token in row["input_ids"].tolist()}
            assert {chr(token - 3) for token in bytes_seen if token > 2} == letters


LENGTHS = ["300", "400"]


def measured(folder: Path) -> dict[int, list[float]]:
    history = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    names = [f"eval_retrieval_{length}" for length in LENGTHS]
    return {entry["step"]: [entry[name] for name in names] for entry in history if names[0] in entry}


@pytest.mark.slow
def test_the_best_checkpoint_is_that_of_lengthgen_retrieve(
    train: Train, config_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # the words before a key and sevens: a model that has learned these pairs of letters predicts keys of sevens
    text = write(tmp_path / "text.txt", "is 7777777777777" * 400)
    monkeypatch.setattr(grids, "random_key", lambda generator: "77777" if generator.random() < 0.6 else "88888")
    each = {"eval_strategy": "steps", "eval_steps": 10, "save_strategy": "steps", "save_steps": 10}
    data = {"data": text, "eval_data": text, "eval_split": "train", "training_length": 16}
    schedule = {"learning_rate": 0.02, "lr_scheduler_type": "constant", "warmup_steps": 0}
    best = {"metric_for_best_model": "retrieval_400", "load_best_model_at_end": True, "retrieval_samples": 1}
    options = {"model": config_file, "seed": 5, "intervention": "none"} | each | data | schedule | best
    lengths = ["--retrieval-lengths", *LENGTHS]
    assert train(*lengths, **options, max_steps=40) == 0
    out = tmp_path / "out"
    checkpoints = [str(out / f"checkpoint-{step}") for step in (10, 20, 30, 40)]
    few = ["--lengths", ",".join(LENGTHS), "--samples", "1", "--seed", "5", "--no-cache"]
    assert main(["retrieve", *checkpoints, str(out), *few, "--output", str(tmp_path / "found")]) == 0
    results = read_result(tmp_path / "found" / "retrieval.json", RetrievalComparison).models
    found = [[share.right / share.samples for share in result.by_length] for result in results]
    during = measured(out)
    assert list(during) == [0, 10, 20, 30, 40]
    assert during[0] == [0, 0]
    assert [during[step] for step in (10, 20, 30, 40)] == found[:4]
    assert 0 < max(share for _, share in found[:4]) < 1
    state = json.loads((out / "trainer_state.json").read_text())
    first_best = max(range(4), key=lambda index: found[index][1])
    assert (state["best_global_step"], state["best_metric"]) == (10 * (first_best + 1), found[first_best][1])
    assert results[4].weights == results[first_best].weights  # which are those that are saved

    parts = {**options, "output_dir": tmp_path / "parts"}
    assert train(*lengths, **parts, max_steps=20) == 0
    assert train(*lengths, "--resume", **parts, max_steps=40) == 0
    assert measured(tmp_path / "parts") == during
