"""What the commands write of where a checkpoint comes from."""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import HfApi, ModelCard
from transformers import AutoModelForCausalLM

from hf_recurrent_lengthgen.checkpoints.methods import MIMETIC_INITIALIZATION, OUTPUT_ALIGNMENT, PLAIN
from hf_recurrent_lengthgen.checkpoints.records import (
    InitialWeights,
    Lineage,
    Source,
    Step,
    read_lineage,
    write_lineage,
)
from hf_recurrent_lengthgen.checkpoints.sources import lineage_of
from hf_recurrent_lengthgen.evaluation.results import DataSource
from hf_recurrent_lengthgen.trainers import StatePassingTrainer
from hf_recurrent_lengthgen.trainers.run.records import mean_loss
from tests.checkpoints.hub.conftest import hub as hub
from tests.checkpoints.hub.endpoint import Endpoint
from tests.cli.training import run
from tests.cli.training import train_briefly as train


def steps_of(folder: Path) -> tuple[Step, ...]:
    lineage: Any = read_lineage(folder)
    return lineage.steps


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_training_is_recorded_with_what_it_started_from(checkpoint: Path, tmp_path: Path, text_file: Path) -> None:
    assert train(checkpoint, tmp_path / "out", text_file, "--learning-rate", "1e-3", "--alignment-alpha", 0.1) == 0
    lineage: Any = read_lineage(tmp_path / "out")
    digest = sha256(checkpoint / "model.safetensors")
    assert lineage.source == Source("checkpoint", False, None, "lengthgen", None, {"model.safetensors": digest})
    [step] = lineage.steps
    assert (step.kind, step.description) == ("train", "")
    assert step.command.startswith("lengthgen train --model checkpoint --output out --data text.txt")
    assert step.versions["torch"]
    assert step.versions["python"]
    training: Any = step.training
    assert training.methods == (StatePassingTrainer.about, OUTPUT_ALIGNMENT)
    assert training.data == DataSource("text.txt", "train")
    assert (training.steps, training.tokens) == (3, 3 * 2 * 8)
    assert training.seconds > 0
    assert (training.hardware.device, training.hardware.number) == ("cpu", 1)
    assert (training.rows_per_step, training.training_length, training.row_tokens) == (2, 8, None)
    (settings,) = training.settings
    assert (settings.learning_rate, settings.seed) == (0.001, 42)
    assert (settings.method["state_drop_probability"], settings.method["alignment_alpha"]) == (0.1, 0.1)
    logged = json.loads((tmp_path / "out" / "trainer_state.json").read_text())["log_history"]
    losses = [entry["loss"] for entry in logged if "loss" in entry]
    assert len(losses) == 3
    assert training.loss == pytest.approx(sum(losses) / 3)
    text = (tmp_path / "out" / "lineage.json").read_text()
    assert not [path for path in (tmp_path, Path.home(), checkpoint.parent) if str(path) in text]


def test_each_command_goes_on_with_the_lineage_of_its_start(checkpoint: Path, tmp_path: Path, text_file: Path) -> None:
    start = tmp_path / "start"
    shutil.copytree(checkpoint, start)
    source = Source("state-spaces/mamba2-130m", True, "a" * 40, "mamba-ssm", "apache-2.0", {"pytorch_model.bin": "0"})
    converted = Step("convert", "from mamba-ssm", "lengthgen convert state-spaces/mamba2-130m start", {"torch": "2"})
    write_lineage(start, Lineage(source, (converted,)))
    assert run("expand", start, "--output", tmp_path / "larger", "--layers", "all", "--factor", 2) == 0
    assert train(tmp_path / "larger", tmp_path / "trained", text_file, "--intervention", "none") == 0
    assert run("forget", tmp_path / "trained", "--output", tmp_path / "forgets", "--window", 4) == 0
    lineage: Any = read_lineage(tmp_path / "forgets")
    assert lineage.source == source
    assert lineage.steps[0] == converted
    steps = [(step.kind, step.description, step.training is not None) for step in lineage.steps[1:]]
    config = json.loads((tmp_path / "forgets" / "config.json").read_text())
    assert steps == [
        ("expand", config["interventions"][0], False),
        ("train", "", True),
        ("forget", "forgetting at inference: window 4", False),
    ]
    assert lineage.steps[1].command == "lengthgen expand start --output larger --layers all --factor 2"
    assert lineage.steps[3].command == "lengthgen forget trained --output forgets --window 4"
    assert steps_of(tmp_path / "trained") == lineage.steps[:3]


@pytest.mark.slow
def test_a_resumed_training_is_one_step_over_all_of_it(checkpoint: Path, tmp_path: Path, text_file: Path) -> None:
    saving = ("--save-strategy", "steps", "--save-steps", 1)
    assert train(checkpoint, tmp_path / "out", text_file, *saving) == 0
    shutil.rmtree(tmp_path / "out" / "checkpoint-3")
    whole: Any = steps_of(tmp_path / "out")[0].training
    assert train(checkpoint, tmp_path / "out", text_file, *saving, "--resume") == 0
    [step] = steps_of(tmp_path / "out")
    assert "--save-steps 1" in step.command
    assert "--resume" not in step.command  # it repeats the whole
    assert (step.training.steps, step.training.tokens) == (3, 3 * 2 * 8)
    assert step.training.loss == pytest.approx(whole.loss)


def test_the_mean_loss_is_over_the_steps_that_each_entry_is_of() -> None:
    log = [
        {"step": 10, "loss": 3.0},
        {"step": 10, "eval_loss": 9.0},
        {"step": 20, "loss": 2.0},
        {"step": 30, "loss": 1},
    ]
    assert mean_loss(log, 7.0) == pytest.approx(2.0)
    assert mean_loss(log, 7.0, starts=[0, 18]) == pytest.approx((10 * 3 + 2 * 2 + 10 * 1) / 22)
    assert mean_loss(log, 7.0, starts=[0, 20]) == pytest.approx(2.0)
    assert mean_loss([], 7.0, starts=[0]) == 7.0


def test_a_run_resumed_after_its_last_step_records_no_loss_that_it_did_not_log(
    checkpoint: Path, tmp_path: Path, text_file: Path
) -> None:
    options = ("--max-steps", "2", "--logging-strategy", "no", "--save-strategy", "steps", "--save-steps", "2")
    assert train(checkpoint, tmp_path / "out", text_file, *options) == 0
    [whole] = steps_of(tmp_path / "out")
    assert train(checkpoint, tmp_path / "out", text_file, *options, "--resume") == 0
    [again] = steps_of(tmp_path / "out")
    assert whole.training is not None
    assert again.training is not None
    assert whole.training.loss
    assert again.training.loss is None


def test_training_from_scratch_has_no_source(config_file: Path, tmp_path: Path, text_file: Path) -> None:
    assert train(config_file, tmp_path / "out", text_file, "--intervention", "none", "--mimetic") == 0
    lineage: Any = read_lineage(tmp_path / "out")
    assert lineage.source is None
    assert lineage.steps[0].training.methods == (PLAIN, MIMETIC_INITIALIZATION)
    assert lineage.steps[0].training.initial_weights == InitialWeights({"c": 8.0, "offset": 0})


def test_the_source_is_determined_by_its_config_and_card(stock_checkpoint: Path, tmp_path: Path) -> None:
    folder = tmp_path / "stock"
    shutil.copytree(stock_checkpoint, folder)
    assert lineage_of(str(folder)).source == Source(
        "stock", False, None, "transformers", None, {"model.safetensors": sha256(folder / "model.safetensors")}
    )
    ModelCard("---\nlicense: mit\n---\n# Stock").save(folder / "README.md")
    source: Any = lineage_of(str(folder)).source
    assert source.license == "mit"
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "gla"}))
    source = lineage_of(str(folder)).source
    assert source.format == "fla"


def test_a_start_on_the_hub_is_known_by_its_commit_and_licence(hub: Endpoint, stock_checkpoint: Path) -> None:
    api = HfApi()
    api.create_repo("user/stock")
    api.upload_folder(repo_id="user/stock", folder_path=stock_checkpoint)
    AutoModelForCausalLM.from_pretrained("user/stock")  # as the commands, before they ask where it is from
    commit = api.model_info("user/stock").sha
    digest = sha256(stock_checkpoint / "model.safetensors")
    bare = Source("user/stock", True, commit, "transformers", None, {"model.safetensors": digest})
    assert lineage_of("user/stock") == Lineage(bare)
    card = b"---\nlicense: mit\n---\n# Stock"
    api.upload_file(repo_id="user/stock", path_in_repo="README.md", path_or_fileobj=card)
    AutoModelForCausalLM.from_pretrained("user/stock")
    source: Any = lineage_of("user/stock").source
    assert (source.license, source.revision) == ("mit", api.model_info("user/stock").sha)
    assert source.revision != commit
