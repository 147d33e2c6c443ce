"""Tasks on random symbols from the command line: training, measuring, and what is refused."""

import hashlib
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig

from hf_recurrent_lengthgen import load_model
from hf_recurrent_lengthgen.cli import train_data
from hf_recurrent_lengthgen.cli.main import main
from hf_recurrent_lengthgen.data.tasks import EVALUATION_SEED, string_task
from hf_recurrent_lengthgen.evaluation.files import read_result
from hf_recurrent_lengthgen.metrics.accuracy import figure
from hf_recurrent_lengthgen.metrics.accuracy.measure import measure_accuracy
from hf_recurrent_lengthgen.metrics.accuracy.result import AccuracyComparison
from hf_recurrent_lengthgen.metrics.tables import read_rows
from hf_recurrent_lengthgen.models import StatefulMamba2Config, StatefulMamba2ForCausalLM

SIZES = {"hidden_size": 8, "num_heads": 2, "head_dim": 8, "state_size": 4, "n_groups": 1, "num_hidden_layers": 1}
Run = Callable[..., int]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("config")
    StatefulMamba2Config(vocab_size=12, **SIZES).save_pretrained(folder)
    return folder / "config.json"


@pytest.fixture
def train(train: Run, config: Path) -> Run:
    """Run `lengthgen train --task copying` with tiny settings; an option of None is left out."""
    copying = {"model": config, "task": "copying", "task_length": 4, "task_vocabulary": 8}
    copying |= {"data": None, "training_length": None, "per_device_train_batch_size": 3}
    return lambda *first, **options: train(*first, **copying | options)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Callable[..., Path]:
    """A checkpoint with random weights and a record of its task."""

    def make(folder: str = "model", **record: Any) -> Path:
        torch.manual_seed(0)
        config = StatefulMamba2Config(vocab_size=12, **SIZES)
        if record:
            config.task = record
        StatefulMamba2ForCausalLM(config).save_pretrained(tmp_path / folder)
        return tmp_path / folder

    return make


@pytest.mark.thinned(5)
@pytest.mark.parametrize(
    ("task", "length"), [("copying", "4"), ("stack_copying", "2-4"), ("recall", "2-4"), ("sorting", "4")]
)
def test_every_task_trains_and_is_measured(
    task: str, length: str, train: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(task=task, task_length=length, eval_strategy="steps", eval_steps=1, logging_steps=1) == 0
    config = AutoConfig.from_pretrained(tmp_path / "out")
    assert config.task == {"name": task, "length": [int(length[0]), 4], "vocabulary": 8, "begin": True}
    assert config.training_length == (19 if task == "recall" else 11)
    assert config.interventions == ["state_passing, 2 steps"]
    shown = capsys.readouterr().out
    assert "'eval_loss'" in shown
    assert f"Next: lengthgen verify {tmp_path / 'out'}, then lengthgen accuracy {tmp_path / 'out'}\n" in shown
    assert not (tmp_path / "out" / "tokenizer_config.json").exists()

    output = tmp_path / "found"
    arguments = [str(tmp_path / "out"), "--output", str(output), "--samples", "6", "--lengths", "4,2"]
    assert main(["accuracy", *arguments]) == 0
    (found,) = read_result(output / "accuracy.json", AccuracyComparison).models
    assert (found.task, found.training_length, found.vocabulary) == (task, 4, 8)
    assert found.command == shlex.join(["lengthgen", "accuracy", *arguments])
    data = string_task(task, 4, 8, begin=True)
    assert found.lengths == measure_accuracy(load_model(str(tmp_path / "out")), data, [2, 4], samples=6).lengths
    assert (output / "accuracy.png").stat().st_size > 5000
    assert ("pairs" if task == "recall" else "symbols") in (output / "accuracy.svg").read_text()


@pytest.mark.slow
def test_training_reads_the_strings_of_its_seed_and_evaluates_on_others(
    train: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[Any] = []
    original = train_data.string_task

    def spy(*arguments: Any, **named: Any) -> Any:
        used.append(original(*arguments, **named))
        return used[-1]

    monkeypatch.setattr(train_data, "string_task", spy)
    assert train(seed=7, eval_strategy="steps", gradient_accumulation_steps=2) == 0
    training, evaluation = sorted(used, key=len)
    assert (len(training), training.seed) == (12, 7)  # 2 steps of 2 x 3
    assert (len(evaluation), evaluation.seed) == (256, EVALUATION_SEED + 7)
    monkeypatch.setattr(train_data, "TASK_SAMPLES", 9)
    assert train(num_train_epochs=1, max_steps=None, save_strategy="no", output_dir=tmp_path / "epoch") == 0
    assert len(used[2]) == 9


@pytest.mark.thinned(2)
@pytest.mark.parametrize("options", [{}, {"intervention": "tbtt", "bptt_chunk_length": 7}], ids=["passing", "tbtt"])
def test_rows_of_several_strings_train_and_strings_are_measured_alone(
    options: dict[str, Any], train: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[Any] = []
    original = train_data.PackedStrings.__getitems__
    monkeypatch.setattr(
        train_data.PackedStrings,
        "__getitems__",
        lambda rows, indices: read.append((rows.seed, original(rows, indices))) or read[-1][1],
    )
    assert train(task_length="2-4", task_row_length=30, eval_strategy="steps", eval_steps=2, **options) == 0
    assert {seed for seed, _ in read} == {42, EVALUATION_SEED + 42}
    assert all(item["input_ids"].shape == (30,) for _, items in read for item in items)
    config = AutoConfig.from_pretrained(tmp_path / "out")
    assert config.task == {"name": "copying", "length": [2, 4], "vocabulary": 8, "begin": True}  # a string alone
    assert config.training_length == 30
    assert "sequences of 30 tokens" in (tmp_path / "out" / "lineage.json").read_text()
    arguments = ["accuracy", str(tmp_path / "out"), "--output", str(tmp_path), "--samples", "3", "--lengths", "4"]
    assert main(arguments) == 0
    (found,) = read_result(tmp_path / "accuracy.json", AccuracyComparison).models
    strings = string_task("copying", 4, 8, 3, EVALUATION_SEED, begin=True)
    digest = hashlib.sha256(b"".join(row["input_ids"].numpy().astype("<i8").tobytes() for row in strings))
    assert found.data.digest == digest.hexdigest()


def test_a_checkpoint_is_trained_on(train: Run, checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    assert train(model=checkpoint(), intervention="none", task_length="1 - 3") == 0
    assert AutoConfig.from_pretrained(tmp_path / "out").task["length"] == [1, 3]


@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"task_length": "5-3"}, "copying: the length must be a number, or a minimum and a maximum, from 1,"),
        (
            {"task_row_length": 10},
            "copying: sequences of 10 tokens do not hold the longest string with its answer, which has 11",
        ),
        ({"task_vocabulary": 10}, "copying with 10 symbols has 13 tokens, the model's vocab_size is 12"),
        ({"intervention": "tbtt"}, "tbtt reads the sequences of task copying in chunks: give bptt_chunk_length"),
        ({"alignment_alpha": 0.1}, "task copying makes its own sequences"),
    ],
)
def test_what_would_not_work_is_refused(
    options: dict[str, Any], complaint: str, train: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(**options) == 1
    assert complaint in capsys.readouterr().err


def test_several_checkpoints_are_compared(
    checkpoint: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = {"name": "copying", "length": [1, 2], "vocabulary": 5}
    names = [str(checkpoint(name, **record)) for name in ("one", "two")]
    assert main(["accuracy", *names, "--output", str(tmp_path), "--samples", "3"]) == 0
    head, first, second, note = capsys.readouterr().out.splitlines()[:4]
    assert head.split() == ["model", "2", "4", "8"]  # 1, 2 and 4 times the longest
    assert [first.split()[0], second.split()[0]] == ["one", "two"]
    assert first.split()[1:] == second.split()[1:]  # the same weights
    assert len(first.split()) == 7
    assert note.startswith("copying, 5 symbols: share of right symbols, and of whole answers")


def copier(copied: int = 3) -> Any:
    """A model that copies the first three symbols, or so many, and says the first letter of the alphabet then."""

    class Copier(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.nn.Parameter(torch.ones(()))
            self.config = StatefulMamba2Config(vocab_size=12, **SIZES)
            self.config.task = {"name": "copying", "length": [3, 3], "vocabulary": 6}

        def forward(self, input_ids: Tensor) -> Any:
            length = (input_ids.shape[1] - 1) // 2
            known = torch.full_like(input_ids, 3)
            known[:, length : length + copied] = input_ids[:, :copied]

            class Output:
                logits = torch.nn.functional.one_hot(known, 12) * self.scale

            return Output

    return Copier()


@pytest.mark.thinned(7)
@pytest.mark.parametrize(
    ("checkpoints", "expected"),
    [
        (["a/checkpoint-10", "a/checkpoint-9"], {"a": [9, 10]}),
        (["b/checkpoint-10", "a/checkpoint-9", "b/checkpoint-9"], {"b": [9, 10], "a": [9]}),
        (["b/checkpoint-10", "a/checkpoint-10"], {}),  # one of each run
        (["a/checkpoint-10", "a/checkpoint-9", "a"], {}),  # the step of the last is not in its name
    ],
)
def test_checkpoints_of_a_run_are_drawn_over_its_steps(
    checkpoints: list[str], expected: dict[str, list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Any] = []
    draw = figure.accuracy_over_steps_figure
    monkeypatch.setattr(figure, "accuracy_over_steps_figure", lambda *runs: drawn.append(runs[0]) or draw(*runs))
    # all three symbols are right after 10 steps, after 9 the first two, and the third by chance, one in six
    monkeypatch.setattr(
        "hf_recurrent_lengthgen.checkpoints.loading.load_model",
        lambda name, *_, **__: copier(2 if name.endswith("-9") else 3),
    )
    names = [str(tmp_path / name) for name in checkpoints]
    assert main(["accuracy", *names, "--output", str(tmp_path / "out"), "--lengths", "2,3", "--samples", "50"]) == 0
    shares = {9: {2: 1.0, 3: (2 + 1 / 6) / 3}, 10: {2: 1.0, 3: 1.0}}
    assert len(drawn) == bool(expected)
    for run, steps in expected.items():
        assert [*drawn[0][run]] == steps
        assert all(drawn[0][run][step] == pytest.approx(shares[step], abs=0.06) for step in steps)
    found = read_result(tmp_path / "out" / "accuracy.json", AccuracyComparison).models
    in_order = [f"{run}/checkpoint-{step}" for run, steps in expected.items() for step in steps] or checkpoints
    assert all(name.endswith(result.model) for name, result in zip(in_order, found, strict=True))


def test_the_document_names_weights_data_and_seed(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    folder = checkpoint(name="copying", length=[2, 3], vocabulary=8)
    arguments = ["accuracy", str(folder), "--output", str(tmp_path), "--samples", "5", "--lengths", "2,3"]
    assert main([*arguments, "--seed", "7", "--csv"]) == 0
    path = tmp_path / "accuracy.json"
    (found,) = read_result(path, AccuracyComparison).models
    weights, strings = hashlib.sha256(), hashlib.sha256()
    for name, value in load_model(str(folder)).state_dict().items():
        weights.update(f"{name} torch.float32 {tuple(value.shape)}".encode() + value.numpy().tobytes())
    for length in (2, 3):
        for row in string_task("copying", length, 8, 5, 2**40 + 7).__getitems__(range(5)):
            strings.update(row["input_ids"].numpy().astype("<i8").tobytes())
    assert (found.weights, found.data.digest, found.seed) == (weights.hexdigest(), strings.hexdigest(), 7)
    assert (found.device, found.versions["torch"]) == ("cpu", torch.__version__)
    assert found.wall_seconds > 0
    assert [row["length"] for row in read_rows(path)] == [2, 3]
    assert (tmp_path / "accuracy.csv").read_text().startswith("model,training_length,task,length,symbol_accuracy,")

    twice = replace(found, model="other", seed=8)
    assert AccuracyComparison((found, twice)).models[1].model == "other"
    for other in (found, replace(twice, vocabulary=9)):
        with pytest.raises(ValueError, match=r"different labels|same vocabulary"):
            AccuracyComparison((found, other))


@pytest.mark.parametrize(
    ("record", "arguments", "complaint"),
    [
        ({}, [], "names no task: give checkpoints of lengthgen train --task"),
        ({"name": "copying", "length": [2, 3], "vocabulary": 30}, [], "vocab_size 12 is too small: copying"),
        ({"name": "recall", "length": [2, 2], "vocabulary": 8}, ["--lengths", "8"], "from 1 to 4 (as the vocab"),
        ({"name": "sort", "length": [2, 2], "vocabulary": 8}, [], "The task is 'sort', but must be one of"),
        ({"name": "copying", "length": [2, 2], "more": 8}, [], "is damaged"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    record: dict[str, Any],
    arguments: list[str],
    complaint: str,
    checkpoint: Callable[..., Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["accuracy", str(checkpoint(**record)), "--output", str(tmp_path), *arguments]) == 1
    assert complaint in capsys.readouterr().err


def test_models_of_different_tasks_are_not_compared(
    checkpoint: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = str(checkpoint("one", name="copying", length=[2, 2], vocabulary=8))
    other = str(checkpoint("other", name="sorting", length=[2, 2], vocabulary=8))
    arguments = ["accuracy", one, other, "--output", str(tmp_path), "--samples", "2"]
    assert main(arguments) == 1
    assert "was trained on the task {" in capsys.readouterr().err
    assert main(["accuracy", one, one]) == 1
    assert "can be given once" in capsys.readouterr().err
