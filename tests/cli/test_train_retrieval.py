"""`lengthgen train` keeps the checkpoint that retrieves best, by the numbers of `lengthgen retrieve`."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from hf_recurrent_lengthgen.cli.main import main
from hf_recurrent_lengthgen.data.tasks import grids
from hf_recurrent_lengthgen.evaluation.files import read_result
from hf_recurrent_lengthgen.metrics.retrieval.result import RetrievalComparison
from tests.cli.training import Train, write

LENGTHS = ["300", "400"]


def seven_or_eight(generator: np.random.Generator) -> str:
    return "77777" if generator.random() < 0.6 else "88888"


def measured(folder: Path) -> dict[int, list[float]]:
    history = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    names = [f"eval_retrieval_{length}" for length in LENGTHS]
    return {entry["step"]: [entry[name] for name in names] for entry in history if names[0] in entry}


@pytest.mark.slow
def test_the_best_checkpoint_is_that_of_lengthgen_retrieve(
    train: Train, config_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # the words before a key and sevens: a model that has learned these pairs of letters knows keys of sevens
    text = write(tmp_path / "text.txt", "is 7777777777777" * 400)
    monkeypatch.setattr(grids, "random_key", seven_or_eight)
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

    monkeypatch.setattr("sys.argv", ["lengthgen"])
    parts = {**options, "output_dir": tmp_path / "parts"}
    assert train(*lengths, **parts, max_steps=20) == 0
    assert train(*lengths, "--resume", **parts, max_steps=40) == 0
    assert measured(tmp_path / "parts") == during
    other = json.loads((tmp_path / "parts" / "trainer_state.json").read_text())
    assert other["best_global_step"] == state["best_global_step"]


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        (["--retrieval-lengths", "300"], "retrieval_lengths does nothing here: it goes with eval_strategy steps or"),
        (["--retrieval-samples", "3"], "retrieval_samples does nothing here: it goes with retrieval_lengths"),
        (
            ["--task", "copying", "--eval-strategy", "steps", "--retrieval-lengths", "300"],
            "retrieval_lengths does nothing here: it goes with .* and task text or passkey or babilong",
        ),
        (
            ["--eval-strategy", "steps", "--task", "passkey", "--retrieval-lengths", "30"],
            "'retrieval' failed at step 0: ValueError: length is 30, but a passkey prompt without filler has",
        ),
        (
            [
                "--eval-strategy",
                "steps",
                "--task",
                "passkey",
                "--retrieval-lengths",
                "300",
                "--retrieval-style",
                "key",
            ],
            "style is 'key', but must be one of",
        ),
    ],
)
def test_what_cannot_be_measured_is_refused(
    train: Train, checkpoint: Path, given: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    length = {} if "copying" not in given else {"training_length": None}
    assert train(*given, model=checkpoint, **({"data": None, "training_length": 400} | length)) == 1
    assert re.search(complaint, capsys.readouterr().err)
