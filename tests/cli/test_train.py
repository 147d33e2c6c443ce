"""Training from files and flags, of every kind of model, on every kind of data."""

import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, TrainerCallback, TrainingArguments

from hf_recurrent_lengthgen import load_state
from hf_recurrent_lengthgen.checkpoints.loading import load_model
from hf_recurrent_lengthgen.cli.main import main
from hf_recurrent_lengthgen.evaluation.files import read_result
from hf_recurrent_lengthgen.metrics.context_harm.result import Comparison
from hf_recurrent_lengthgen.models import StatefulMamba2ForCausalLM
from hf_recurrent_lengthgen.trainers import INTERVENTIONS, StatePassingTrainer
from tests.cli.training import TINY, Train, trained_config, write


def test_post_training_moves_every_weight_and_records_what_was_done(
    train: Train, checkpoint: Path, text_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(model=checkpoint, learning_rate="1e-2", max_steps=3, warmup_steps=0) == 0
    before, after = load_file(checkpoint / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert before.keys() == after.keys()
    assert [name for name in before if torch.equal(before[name], after[name])] == []
    config = trained_config(tmp_path / "out")
    assert config["interventions"] == ["state_passing, 3 steps"]
    assert config["training_length"] == 8
    shown = capsys.readouterr()
    out = tmp_path / "out"
    compare = f"lengthgen evaluate {checkpoint} {out} --roles base,intervention --training-length 8 --data {text_file}"
    assert f"Saved to {out}. Next: lengthgen verify {out}, then {compare}\n" in shown.out
    assert "\r" not in shown.err  # no bars in a log


def test_a_stock_mamba2_becomes_a_checkpoint_of_ours(train: Train, stock_checkpoint: Path, tmp_path: Path) -> None:
    assert train(model=stock_checkpoint, tokenizer="bytes", lr_scheduler_type="constant", learning_rate=0) == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert isinstance(model, StatefulMamba2ForCausalLM)
    before = load_file(stock_checkpoint / "model.safetensors")
    after = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_training_from_scratch_with_mimetic_initialization(train: Train, config_file: Path, tmp_path: Path) -> None:
    options = {"mimetic": True, "mimetic_c": 4, "mimetic_offset": 1, "intervention": "none"}
    assert train(model=config_file, lr_scheduler_type="constant", learning_rate=0, **options) == 0
    weights = load_file(tmp_path / "out" / "model.safetensors")
    decays = -4 * torch.tensor([2.0, 3.0]).log()
    torch.testing.assert_close(weights["backbone.layers.0.mixer.A_log"], decays, rtol=0, atol=1e-6)
    assert not trained_config(tmp_path / "out")["interventions"]


@pytest.mark.slow
def test_mimetic_switches_and_layers(
    train: Train, config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = {"model": config_file, "lr_scheduler_type": "constant", "learning_rate": 0, "intervention": "none"}
    assert train(**common) == 0
    plain = load_file(tmp_path / "out" / "model.safetensors")
    chosen = ("--mimetic-switches", "a", "conv", "--mimetic-layers", "0")
    assert train(*chosen, **common, mimetic=True, output_dir=tmp_path / "mimetic") == 0
    mimetic = load_file(tmp_path / "mimetic" / "model.safetensors")
    changed = {name for name in plain if not torch.equal(plain[name], mimetic[name])}
    assert changed - {"backbone.layers.0.mixer.conv1d.bias"} == {
        f"backbone.layers.0.mixer.{name}" for name in ("A_log", "conv1d.weight")
    }
    assert train("--mimetic-switches", "a", "b", **common, mimetic=True, output_dir=tmp_path / "other") == 1
    assert "mimetic_switches must be some of a delta bc conv, got b." in capsys.readouterr().err


@pytest.mark.parametrize("model_type", ["mamba2", "mamba"])
def test_a_stock_config_from_scratch_becomes_a_model_of_ours(train: Train, tmp_path: Path, model_type: str) -> None:
    sizes = {"vocab_size": 384, "hidden_size": 8, "state_size": 4, "num_hidden_layers": 2}
    own = {"num_heads": 2, "head_dim": 8, "n_groups": 1} if model_type == "mamba2" else {}
    stock = AutoConfig.for_model(model_type, **sizes, **own, architectures=["Stock"], dtype="bfloat16")
    stock.save_pretrained(tmp_path)
    assert train(model=tmp_path / "config.json") == 0
    assert trained_config(tmp_path / "out")["model_type"] == f"stateful_{model_type}"
    weights = load_file(tmp_path / "out" / "model.safetensors")
    assert {weight.dtype for weight in weights.values()} == {torch.float32}
    assert weights["backbone.embeddings.weight"].shape == (384, 8)


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({"model_type": "llama"}, {}, "has the model_type 'llama'.*mamba2,.*stateful_gla,.*FOLDER/models"),
        ({"vocab_size": 300}, {}, "The tokenizer has 384 tokens, the model's vocab_size is 300"),
        ({}, {"intervention": "learned"}, "random weights of a config.json would be lost"),
    ],
)
def test_a_config_that_cannot_be_trained_is_refused(
    changes: Any, options: Any, message: str, train: Train, config_file: Path, tmp_path: Path, capsys: Any
) -> None:
    config = json.loads(config_file.read_text()) | changes
    assert train(model=write(tmp_path / "config.json", json.dumps(config)), **options) == 1
    assert re.search(message, capsys.readouterr().err)


def test_epochs_are_recorded_as_such(train: Train, checkpoint: Path, tmp_path: Path) -> None:
    assert train(model=checkpoint, max_steps=None, num_train_epochs=0.01, training_length=200) == 0
    assert trained_config(tmp_path / "out")["interventions"] == ["state_passing, 0.01 epochs"]


class Interrupt(TrainerCallback):
    """Ctrl-C when a step begins."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_begin(self, args: TrainingArguments, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            raise KeyboardInterrupt


class InterruptedTrainer(StatePassingTrainer):
    """Interrupted before its fourth step."""

    def __init__(self, *positional: Any, **keyword: Any) -> None:
        super().__init__(*positional, **keyword)
        self.add_callback(Interrupt(3))


def test_an_interrupted_run_resumes_to_the_same_weights(
    train: Train, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {"model": checkpoint, "max_steps": 5, "save_strategy": "steps", "save_steps": 2, "learning_rate": 0.01}
    assert train(**options, output_dir=tmp_path / "whole") == 0
    with monkeypatch.context() as patch:
        patch.setitem(INTERVENTIONS, "state_passing", InterruptedTrainer)
        assert train(**options, output_dir=tmp_path / "broken") == 130
    shown = capsys.readouterr()
    assert "checkpoint-2" in shown.out
    assert "On the command line, add --resume" in shown.out
    assert "interrupted" in shown.err
    assert not (tmp_path / "broken" / "model.safetensors").exists()
    assert train("--resume", **options, output_dir=tmp_path / "broken") == 0
    found = tmp_path / "broken" / "checkpoint-2"
    assert f"Resuming from {found}, after step 2." in capsys.readouterr().out
    whole, resumed = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "broken"))
    assert [name for name in whole if not torch.equal(whole[name], resumed[name])] == []
    for folder, code in (("broken", 1), ("whole", 1), ("named", 0)):
        assert train("--resume-from-checkpoint", str(found), **options, output_dir=tmp_path / folder) == code
    shown = capsys.readouterr()
    assert "broken holds checkpoints of an earlier run (checkpoint-5, checkpoint-4), which a later" in shown.err
    assert "whole holds checkpoints of an earlier run (checkpoint-5, checkpoint-4, checkpoint-2)" in shown.err
    assert f"Resuming from {found}, after step 2." in shown.out
    named = load_file(tmp_path / "named" / "model.safetensors")
    assert [name for name in whole if not torch.equal(whole[name], named[name])] == []
    for later in ("checkpoint-5", "checkpoint-4"):
        shutil.rmtree(tmp_path / "broken" / later)
    with monkeypatch.context() as patch:
        patch.setitem(INTERVENTIONS, "state_passing", InterruptedTrainer)
        assert train("--resume-from-checkpoint", str(found), **options, output_dir=tmp_path / "broken") == 130
    assert "options in place of --resume-from-checkpoint to continue" in capsys.readouterr().out
    assert train("--resume-from-checkpoint", str(found), **options, output_dir=tmp_path / "broken") == 0


def test_a_new_run_does_not_mix_its_checkpoints_with_old_ones(
    train: Train, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(model=checkpoint, save_strategy="steps", save_steps=2) == 0
    before = (tmp_path / "out" / "model.safetensors").read_bytes()
    assert train(model=checkpoint, max_steps=1) == 1
    assert "holds checkpoints of an earlier run" in capsys.readouterr().err
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == before


def test_a_checkpoint_is_not_overwritten_by_its_own_training(
    train: Train, checkpoint: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(checkpoint.parent)
    before = (checkpoint / "model.safetensors").read_bytes()
    assert train(model=checkpoint.name, output_dir=checkpoint) == 1
    assert "would overwrite" in capsys.readouterr().err
    assert (checkpoint / "model.safetensors").read_bytes() == before


METHODS: dict[str, dict[str, Any]] = {
    "tbtt": {"chunks_before_reset": 3, "reset_at_document": True},
    "mixed": {"mixture": '{"zero": 0.5, "tbtt": 0.25, "fitted_noise": 0.25}'},
}


@pytest.mark.thinned(2)
@pytest.mark.parametrize("intervention", METHODS)
def test_every_intervention_trains_every_weight(
    train: Train, checkpoint: Path, tmp_path: Path, intervention: str
) -> None:
    options = {"intervention": intervention, "learning_rate": 0.01, "warmup_steps": 0} | METHODS[intervention]
    assert train(model=checkpoint, **options) == 0
    before, after = load_file(checkpoint / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert [name for name in before if torch.equal(before[name], after[name])] == []
    assert trained_config(tmp_path / "out")["training_length"] == TINY["training_length"]


def test_a_learned_state_is_saved_alone(
    train: Train, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(model=checkpoint, intervention="learned", learning_rate=0.1, warmup_steps=0) == 0
    assert not (tmp_path / "out" / "model.safetensors").exists()
    out = tmp_path / "out"
    state, _ = load_state(out / "learned_state.safetensors")
    assert all(bool(layer.recurrent.any()) for layer in state)
    saved = capsys.readouterr().out.partition("Saved ")[2]
    assert saved.startswith(f"to {out}. Next: lengthgen evaluate {checkpoint} {out} --roles base,intervention")
    prompt = {"input_ids": torch.tensor([[70, 71]]), "max_new_tokens": 4}
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    expected = model.generate(**prompt, initial_state=state)
    assert torch.equal(load_model(str(out)).generate(**prompt), expected)
    measured = [str(tmp_path / "cache"), str(tmp_path / "evaluation")]
    options = ["--length", "24", "--sequences", "2", "--cache", measured[0], "--output", measured[1]]
    command, remark = saved.partition("Next: lengthgen ")[2].split("\n", 1)
    assert remark.startswith("It was trained on this text. ")
    assert main([*shlex.split(command), *options]) == 0
    assert "split train, the same name as the training data of out\n" in capsys.readouterr().out
    base, learned = read_result(tmp_path / "evaluation" / "result.json", Comparison).models
    assert base.evaluation.weights != learned.evaluation.weights
    assert base.evaluation.in_window.loss != learned.evaluation.in_window.loss


@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    [
        {"data": "saved", "text_column": "body"},
        {"data": "train.txt", "eval_data": "val.jsonl", "text_column": "text", "eval_strategy": "steps"},
        {"data": "a name.txt", "tokenizer": "bytes"},
    ],
    ids=["validation split", "held-out text", "tokenizer"],
)
def test_the_lines_of_what_to_do_next_run_as_they_are(
    text: dict[str, str],
    train: Train,
    checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LENGTHGEN_CACHE", str(tmp_path / "cache"))
    rows = [" ".join(f"{number} times {row} is {number * row}." for number in range(90)) for row in range(3)]
    column = text.get("text_column", "text")
    Path("val.jsonl").write_text("".join(json.dumps({column: row}) + "\n" for row in rows))
    for name in ("train.txt", "a name.txt"):
        Path(name).write_text("\n".join(rows))
    splits = {name: datasets.Dataset.from_dict({column: rows}) for name in ("train", "validation")}
    datasets.DatasetDict(splits).save_to_disk("saved")
    assert train(model=checkpoint, output_dir="out", **text) == 0
    said = capsys.readouterr().out
    for line in said.partition("Next: ")[2].splitlines()[0].split(", then "):
        assert shlex.split(line)[0] == "lengthgen"
        if line == "lengthgen verify out" and "tokenizer" not in text:
            continue  # which is the same in all
        shorter = ["--length", "24", "--sequences", "2"] if " evaluate " in line else []
        assert main([*shlex.split(line)[1:], *shorter]) == 0, line
    [measured] = tmp_path.glob("evaluation/result.json")
    expected = "validation" if text["data"] == "saved" else "train"
    description = read_result(measured, Comparison).models[0].evaluation.data.description
    seen = ", the same name as the training data of out" if text["data"] == "a name.txt" else ""
    assert description == f"{text.get('eval_data', text['data'])}, split {expected}{seen}"


def test_a_state_is_not_learned_into_the_folder_of_a_checkpoint_unless_with_the_weights(
    train: Train, checkpoint: Path, config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(checkpoint, tmp_path / "out")
    assert train(model=checkpoint, intervention="learned", train_model=False) == 1
    assert "holds a checkpoint, which the learned state would be confused with" in capsys.readouterr().err
    whole = {"model": config_file, "train_model": True, "output_dir": tmp_path / "whole"}
    assert train(intervention="learned", **whole) == 0


EXTRA = {"alignment_min_context": 0, "alignment_min_extra": 4}


@pytest.mark.parametrize(
    ("intervention", "shift", "done"),
    [
        ("none", EXTRA, "output alignment 0.1"),  # T is 8: above the T/2 - 1 of the default
        ("state_passing", {}, "state_passing with output alignment 0.1"),
        ("tbtt", EXTRA, "tbtt with output alignment 0.1"),
        ("tbtt", {"alignment_max_extra": 2}, "tbtt with output alignment 0.1"),
    ],
)
def test_alignment_is_recorded_and_reads_ahead_as_far_as_the_least_context_allows(
    intervention: str, shift: dict[str, int], done: str, train: Train, checkpoint: Path, tmp_path: Path
) -> None:
    assert train(model=checkpoint, intervention=intervention, alignment_alpha=0.1, **shift) == 0
    assert trained_config(tmp_path / "out")["interventions"][-1] == f"{done}, 2 steps"
