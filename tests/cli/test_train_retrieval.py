"""`lengthgen train` keeps the checkpoint that retrieves best, by the numbers of `lengthgen retrieve`."""

import json
from pathlib import Path

import pytest

from hf_recurrent_lengthgen.cli.main import main
from hf_recurrent_lengthgen.data.tasks import grids
from hf_recurrent_lengthgen.evaluation.files import read_result
from hf_recurrent_lengthgen.metrics.retrieval.result import RetrievalComparison
from tests.cli.training import Train, write

LENGTHS = ["300", "400"]


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
