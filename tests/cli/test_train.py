"""Training from files and flags, of every kind of model, on every kind of data."""

import argparse
import contextlib
import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, TrainerCallback, TrainingArguments

from hf_recurrent_lengthgen import load_state
from hf_recurrent_lengthgen.checkpoints.loading import load_model
from hf_recurrent_lengthgen.checkpoints.records import read_lineage
from hf_recurrent_lengthgen.cli import train as command
from hf_recurrent_lengthgen.cli import train_rows
from hf_recurrent_lengthgen.cli.main import main
from hf_recurrent_lengthgen.cli.options import _flags_of, command_parser, parse, read_options
from hf_recurrent_lengthgen.data import PackedBlocks
from hf_recurrent_lengthgen.evaluation.files import read_result
from hf_recurrent_lengthgen.metrics.context_harm.result import Comparison
from hf_recurrent_lengthgen.models import StatefulMamba2ForCausalLM
from hf_recurrent_lengthgen.trainers import INTERVENTIONS, StatePassingConfig, StatePassingTrainer, ZeroStateTrainer

TINY = {
    "use_cpu": True,
    "training_length": 8,
    "max_steps": 2,
    "per_device_train_batch_size": 2,
    "logging_steps": 1,
    "save_strategy": "no",
}
Train = Callable[..., int]


def flags(**options: Any) -> list[str]:
    return [part for name, value in options.items() for part in (f"--{name}", str(value))]


@pytest.fixture
def train(tmp_path: Path, text_file: Path) -> Train:
    """Run `lengthgen train` with tiny settings into `tmp_path / "out"`; an option given as None is left out."""

    def run(*first: str, **options: Any) -> int:
        given = {"data": text_file, "output_dir": tmp_path / "out"} | TINY | options
        return main(["train", *first, *flags(**{name: value for name, value in given.items() if value is not None})])

    return run


def parsed(*arguments: str, file: Path | None = None) -> dict[str, Any]:
    return parse([*([] if file is None else _flags_of(str(file))), "--model", "m", *arguments])


def trained_config(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


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
    text = f"--data {text_file} --split train --length 512 --sequences 8"
    compare = f"lengthgen evaluate {checkpoint} {out} --roles base,cured {text}"
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


def test_a_config_of_another_type_is_refused(train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(model=write(tmp_path / "config.json", json.dumps({"model_type": "llama"}))) == 1
    error = capsys.readouterr().err
    assert "has the model_type 'llama'" in error
    assert all(name in error for name in ("mamba2,", "stateful_gla,", "FOLDER/models"))


def test_only_the_first_process_says_what_was_saved(
    train: Train, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(StatePassingTrainer, "is_world_process_zero", lambda self: False)
    assert train(model=checkpoint, max_steps=1) == 0
    assert "Saved to" not in capsys.readouterr().out


@pytest.mark.parametrize(("intervention", "passes"), [("none", False), ("state_passing", True)])
def test_the_intervention_decides_the_trainer(
    intervention: str, passes: bool, train: Train, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = []
    monkeypatch.setattr(command, "train", lambda settings, training, trainer, line: used.append((trainer, training)))
    assert train(model=checkpoint, intervention=intervention) == 0
    [(trainer, training)] = used
    assert issubclass(trainer, StatePassingTrainer) == isinstance(training, StatePassingConfig) == passes


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_a_file_gives_options_and_flags_win(tmp_path: Path) -> None:
    text = """
        training_length: 16
        learning_rate: 1e-3
        weight_decay: 1.e-2
        max_steps: 7
        eval_strategy: no
        tokenizer: null
        mimetic: true
        carry_conv_state: false
        label_names: [labels, others]
        lr_scheduler_kwargs:
          min_lr: 2e-5
    """
    values = parsed("--max-steps", "9", file=write(tmp_path / "c.yaml", text))
    expected = {
        "training_length": 16,
        "learning_rate": 0.001,
        "weight_decay": 0.01,
        "max_steps": 9,
        "eval_strategy": "no",
        "tokenizer": None,
        "mimetic": True,
        "carry_conv_state": False,
        "label_names": ["labels", "others"],
    }
    assert {name: values[name] for name in expected} == expected
    settings, training, trainer = read_options(["--model", "m.json", "--use-cpu"], str(tmp_path / "c.yaml"))
    assert (settings.training_length, training.lr_scheduler_kwargs) == (16, {"min_lr": 2e-5})
    assert trainer is StatePassingTrainer
    assert not training.carry_conv_state


@pytest.mark.parametrize("output", ["output", "output_dir"])
def test_training_from_a_file(output: str, checkpoint: Path, text_file: Path, tmp_path: Path) -> None:
    lines = {"model": checkpoint, "data": text_file, output: tmp_path / "out", "learning_rate": "1e-3"} | TINY
    path = write(tmp_path / "config.yaml", "".join(f"{name}: {value}\n" for name, value in lines.items()))
    assert main(["train", str(path), "--max-steps", "1"]) == 0
    state = json.loads((tmp_path / "out" / "trainer_state.json").read_text())
    assert state["global_step"] == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("learnig_rate: 1", "unknown option 'learnig_rate'; did you mean learning_rate"),
        ("xyzzy: 1", "unknown option 'xyzzy'; lengthgen train --help-all"),
        ("- model", "must hold options as 'option: value' lines, got list"),
        ("just text", "got str"),
        ("", "got NoneType|got str"),
        ("a: [1", "is not valid YAML"),
    ],
)
def test_an_unusable_file_is_refused(
    text: str, message: str, train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "c.yaml", text)
    assert train(str(path)) == 1
    error = capsys.readouterr().err
    assert str(path) in error
    assert any(part in error for part in message.split("|"))


@pytest.mark.parametrize("arguments", [["--config", "c.yaml"], ["--use-cpu", "--config=c.yaml"]])
def test_a_file_is_not_an_option(arguments: list[str], train: Train, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(*arguments) == 1
    assert "lengthgen train CONFIG.yaml [options]" in capsys.readouterr().err


def test_a_file_that_is_not_there_is_refused(train: Train, capsys: pytest.CaptureFixture[str]) -> None:
    assert train("nowhere.yaml") == 1
    assert "There is no config file nowhere.yaml" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_steps: 5.5", "invalid int value: '5.5'"),
        ("max_steps: [1, 2]", "unrecognized arguments: 2"),
        ("learning_rate: fast", "invalid float value: 'fast'"),
        ("intervention: magic", "invalid choice: 'magic'"),
        ("mimetic: perhaps", "perhaps"),
    ],
)
def test_values_of_a_file_are_checked_like_flags(
    text: str, message: str, train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "c.yaml", text)
    with pytest.raises(SystemExit) as ended:
        main(["train", str(path), "--model", "m"])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_defaults_are_the_papers() -> None:
    values = parsed()
    assert values["max_steps"] == 500
    assert (values["adam_beta2"], values["warmup_steps"], values["max_grad_norm"]) == (0.95, 0.1, 1.0)
    assert values["lr_scheduler_type"] == "cosine_with_min_lr"
    assert values["lr_scheduler_kwargs"] == {"min_lr": 1e-5}
    _run, training, _ = read_options(["--model", "m", "--output", "o", "--use-cpu"])
    assert isinstance(training, StatePassingConfig)
    assert training.state_drop_probability == 0.1


def test_epochs_replace_the_default_number_of_steps_and_another_schedule_its_settings() -> None:
    values = parsed("--num-train-epochs", "2", "--lr-scheduler-type", "linear")
    assert (values["num_train_epochs"], values["max_steps"], values["lr_scheduler_kwargs"]) == (2, -1, None)
    assert "num_train_epochs" not in parsed()
    assert parsed("--max-steps", "-1", "--num-train-epochs", "2")["max_steps"] == -1


@pytest.mark.parametrize(
    "given", ["--num-train-epochs 2 --max-steps 3", "--max-steps 0", "--max-steps -1", "--max-steps -2"]
)
def test_steps_or_epochs_count(given: str) -> None:
    with pytest.raises(ValueError, match="give either max_steps of at least 1 or num_train_epochs"):
        parsed(*given.split())


def test_epochs_are_recorded_as_such(train: Train, checkpoint: Path, tmp_path: Path) -> None:
    assert train(model=checkpoint, max_steps=None, num_train_epochs=0.01, training_length=200) == 0
    assert trained_config(tmp_path / "out")["interventions"] == ["state_passing, 0.01 epochs"]


def test_the_help_shows_what_most_people_need_and_all_if_asked(capsys: pytest.CaptureFixture[str]) -> None:
    shown = {}
    for option in ("--help", "--help-all"):
        with contextlib.suppress(SystemExit):
            assert main(["train", option]) == 0
        shown[option] = capsys.readouterr().out
    positions = [
        shown["--help"].index(part)
        for part in (
            "model:",
            "--model MODEL",
            "data:",
            "--intervention",
            "training:",
            "--max-steps N",
            "--output",
            "examples:",
        )
    ]
    assert positions == sorted(positions)
    for text in shown.values():
        assert "--state-drop-probability" in text
        assert "%(" not in text
        assert "10 % warm-up" in text
        assert "default: None" not in text.split("other options")[0]
    assert "--torch-compile " not in shown["--help"]
    assert "--torch-compile " in shown["--help-all"]
    assert len(shown["--help"].splitlines()) < 266


def test_the_help_of_every_option_shown_says_what_holds_without_it() -> None:
    shown = [
        action for action in command_parser()._actions if action.default is None and action.help != argparse.SUPPRESS
    ]
    assert len(shown) > 20
    silent = [
        action.dest for action in shown if not re.search("[Dd]efault|[Rr]equired|the same as", action.help or "")
    ]
    assert silent == []
    helps = {action.dest: action.help or "" for action in command_parser()._actions}
    assert "(default: 12)" in helps["chunks_before_reset"]
    assert "(default: 8.0)" in helps["mimetic_c"]


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
    whole, resumed = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "broken"))
    assert [name for name in whole if not torch.equal(whole[name], resumed[name])] == []
    for name in ("moved", "other"):
        shutil.copytree(checkpoint, tmp_path / name)
    other = StatefulMamba2ForCausalLM.from_pretrained(checkpoint)
    other.backbone.norm_f.weight.data += 1
    other.save_pretrained(tmp_path / "other")
    capsys.readouterr()
    further = options | {"max_steps": int(options["max_steps"]) + 1, "output_dir": tmp_path / "broken"}
    assert train("--resume", **further | {"model": tmp_path / "other"}) == 1
    assert "Cannot resume exactly" in (refused := capsys.readouterr().err)
    assert "start was" in refused
    assert train("--resume", **further | {"model": tmp_path / "moved"}) == 0


def test_resuming_without_a_checkpoint_is_refused(
    train: Train, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("--resume", model=checkpoint) == 1
    assert "no complete checkpoint" in capsys.readouterr().err


def test_a_new_run_does_not_mix_its_checkpoints_with_old_ones(
    train: Train, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(model=checkpoint, save_strategy="steps", save_steps=2) == 0
    before = (tmp_path / "out" / "model.safetensors").read_bytes()
    assert train(model=checkpoint, max_steps=1) == 1
    assert "holds checkpoints of an earlier run" in capsys.readouterr().err
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == before


def test_an_evaluation_on_the_training_text_and_a_length_that_nobody_named_are_told(
    train: Train, checkpoint: Path, text_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {"data": text_file, "eval_data": text_file, "eval_strategy": "steps", "eval_steps": 2}
    assert train(model=checkpoint, **options, per_device_eval_batch_size=64) == 0
    told = capsys.readouterr().out
    assert f"eval_loss is that of the training text, split train of {text_file}" in told
    assert "The command below evaluates on the training text." in told
    assert "No training length in the config" not in told
    assert "Training at" not in told
    assert train(model=checkpoint, training_length=16, output_dir=tmp_path / "longer") == 0
    assert f"Training at 16 tokens: the config of {checkpoint} had 8." in capsys.readouterr().out
    halves = {"split": "train[:50%]", "eval_split": "train[50%:]"}
    silent = tmp_path / "silent"
    shutil.copytree(checkpoint, silent)
    (silent / "config.json").write_text(json.dumps(trained_config(silent) | {"training_length": None}))
    short = {"model": silent, "training_length": None, "output_dir": tmp_path / "other"}
    with contextlib.suppress(ValueError):
        train(**options, **halves, **short)
    told = capsys.readouterr().out
    assert f"No training length in the config of {silent}: training at 2048 tokens." in told
    assert "eval_loss is that of the training text" not in told


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
    told = capsys.readouterr().out
    assert "eval_loss" in told
    assert "training text" not in told
    assert f"--data {folder} --split validation" in told


def spy(seen: list[Any]) -> Callable[..., None]:
    """A constructor of `PackedBlocks` that also keeps the streams."""
    original = PackedBlocks.__init__

    def made(self: PackedBlocks, stream: torch.Tensor, length: int) -> None:
        seen.append(stream)
        original(self, stream, length)

    return made


OWN = """
from dataclasses import dataclass, field
from hf_recurrent_lengthgen.checkpoints.methods import Method
from hf_recurrent_lengthgen.trainers import InitialStateConfig, InitialStateTrainer, RandomNoise
from hf_recurrent_lengthgen.trainers.checks import zero_state_of

@dataclass
class OwnConfig(InitialStateConfig):
    own_size: float = field(default=0.5, metadata={"help": "The size of it."})

class OwnTrainer(InitialStateTrainer):
    config_class = OwnConfig
    about = Method("own", "own noise")

    @staticmethod
    def initial_state_source(args, trainer):
        return RandomNoise(args.own_size, zero_state_of(trainer))
"""


@pytest.mark.parametrize("in_file", [False, True])
def test_an_intervention_from_a_file(
    in_file: bool, train: Train, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = f"own_method_{in_file}".lower()
    own = write(tmp_path / f"{name}.py", OWN)
    given: dict[str, Any] = {"intervention": "own", "own_size": 2.5}
    known = dict(INTERVENTIONS)
    try:
        if in_file:
            config = write(tmp_path / "run.yaml", json.dumps({"import": str(own), **given}))
            assert train(str(config), model=checkpoint) == 0
        else:
            assert train(model=checkpoint, **{"import": own}, **given) == 0
            with pytest.raises(SystemExit):
                main(["train", "--import", str(own), "--help"])
            assert "The size of it." in capsys.readouterr().out
        lineage = read_lineage(tmp_path / "out")
        assert lineage is not None
        assert lineage.steps[0].training is not None
        assert lineage.steps[0].training.settings[0].method["own_size"] == 2.5
        broken = write(tmp_path / f"broken_{name}.py", "x = undefined\n")
        assert train(model=checkpoint, **{"import": broken}) == 1
        assert "fails: NameError: name 'undefined' is not defined" in capsys.readouterr().err
    finally:
        sys.modules.pop(name)
        INTERVENTIONS.clear()
        INTERVENTIONS.update(known)


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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"training_length": 5000}, "give more data or a smaller length"),
        ({"training_length": 0}, "training_length must be at least 1, got 0"),
        ({"text_column": "body"}, "no column 'body'"),
        ({"split": "validation"}, "validation"),
        ({"data": "nowhere.txt"}, "no file or folder nowhere.txt"),
        ({"data": "../nowhere"}, "no file or folder ../nowhere"),
        ({"eval_strategy": "steps"}, "has no validation split: give eval_data, or a part of the training text"),
        (
            {"report_to": "wandb"},
            "report_to names wandb, which is not installed here, or unknown to Transformers",
        ),
        ({"report_to": "nothing"}, "report_to names nothing, which is not installed here, or unknown"),
        ({"import": "nowhere.py"}, "--import nowhere.py: there is no such Python file"),
        ({"mimetic": True}, "mimetic overwrites trained weights"),
        ({"resume_from_checkpoint": "x"}, "--resume takes the newest complete checkpoint"),
        ({"task": "babilong"}, "task babilong needs task_files"),
        ({"task": "passkey", "data": None, "alignment_alpha": 0.1}, "own rows: leave out tbtt and alignment_alpha"),
        ({"alignment_max_extra": 2}, "have no effect without alignment_alpha"),
        ({"alignment_alpha": 0.1, "alignment_length": 4}, "alignment_length is 4, training_length 8"),
        ({"minimum_document_tokens": -1}, "minimum_document_tokens must be at least 0, got -1"),
        ({"intervention": "random_noise"}, "noise_sigma is missing"),
    ],
)
def test_bad_settings_are_refused_in_one_line(
    options: dict[str, Any], message: str, train: Train, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(model=checkpoint, **options) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("lengthgen train: ")
    assert message in error


def test_a_tokenizer_larger_than_the_vocabulary_is_refused(
    train: Train, config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = json.loads(config_file.read_text()) | {"vocab_size": 300}
    assert train(model=write(tmp_path / "small.json", json.dumps(config))) == 1
    assert "The tokenizer has 384 tokens, the model's vocab_size is 300" in capsys.readouterr().err


def test_a_checkpoint_is_not_overwritten_by_its_own_training(
    train: Train, checkpoint: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(checkpoint.parent)
    before = (checkpoint / "model.safetensors").read_bytes()
    assert train(model=checkpoint.name, output_dir=checkpoint) == 1
    assert "would overwrite" in capsys.readouterr().err
    assert (checkpoint / "model.safetensors").read_bytes() == before


def test_an_args_file_beside_the_program_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "lengthgen.args", "--max-steps 3")
    monkeypatch.setattr("sys.argv", [os.fspath(tmp_path / "lengthgen")])
    assert parsed()["max_steps"] == 500


@pytest.mark.slow
def test_a_run_starts_with_its_seed(
    train: Train, config_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names: Sequence[str] = ("a", "b", "c")
    for name, seed in zip(names, (0, 0, 1), strict=True):
        assert train(model=config_file, seed=seed, output_dir=tmp_path / name) == 0
    a, b, c = (load_file(tmp_path / name / "model.safetensors")["backbone.embeddings.weight"] for name in names)
    assert torch.equal(a, b)
    assert not torch.equal(a, c)


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
    saved, python = capsys.readouterr().out.partition("Saved ")[2].splitlines()
    assert saved.startswith(
        f"the learned state to {out}. Next: lengthgen evaluate {checkpoint} {out} --roles base,cured"
    )
    assert python == f"In Python, load_model({str(out)!r}) loads it with its base, {checkpoint}."
    prompt = {"input_ids": torch.tensor([[70, 71]]), "max_new_tokens": 4}
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    expected = model.generate(**prompt, initial_state=state)
    assert torch.equal(load_model(str(out)).generate(**prompt), expected)
    measured = [str(tmp_path / "cache"), str(tmp_path / "evaluation")]
    options = ["--length", "24", "--sequences", "2", "--cache", measured[0], "--output", measured[1]]
    assert main([*shlex.split(saved.partition("Next: lengthgen ")[2]), *options]) == 0
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
        assert main(shlex.split(line)[1:]) == 0, line
    [measured] = tmp_path.glob("evaluation/result.json")
    expected = "validation" if text["data"] == "saved" else "train"
    description = read_result(measured, Comparison).models[0].evaluation.data.description
    assert description == f"{text.get('eval_data', text['data'])}, split {expected}"


def test_a_state_is_not_learned_into_the_folder_of_a_checkpoint(
    train: Train, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(checkpoint, tmp_path / "out")
    assert train(model=checkpoint, intervention="learned", train_model=False) == 1
    assert "holds a checkpoint, which the learned state would be confused with" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "length_before", "following"),
    [
        ("--model m --intervention none --training-length 8", 8, "evaluate m out --roles base,control"),
        ("--model m --alignment-alpha 1 --intervention none", None, "evaluate m out --roles base,cured"),
        ("--model m --training-length 8", 4, "evaluate m out --roles base,cured --training-length 8"),
        ("--model m --tokenizer bytes", None, "evaluate m out --roles base,cured --tokenizer bytes"),
        ("--model m --trust-remote-code", None, "evaluate m out --roles base,cured --trust-remote-code"),
        ("--model m/config.json", None, "evaluate out"),
        ("--model m --task copying", None, "accuracy out"),
    ],
)
def test_what_to_measure_next(arguments: str, length_before: int | None, following: str) -> None:
    settings, training, _ = read_options([*arguments.split(), "--output", "out"])
    settings.training_length = settings.training_length or 8
    told = command._next_step(settings, training, length_before)
    assert told == f"Saved to out. Next: lengthgen verify out, then lengthgen {following}"


@pytest.mark.parametrize(
    ("accelerator", "given", "pinned"),
    [(False, [], False), (True, [], True), (False, ["--dataloader-pin-memory"], True)],
)
def test_memory_is_pinned_for_an_accelerator_or_if_asked_for(
    accelerator: bool, given: list[str], pinned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: accelerator)
    monkeypatch.setattr(command, "train", lambda *values: seen.append(values))
    assert command.run(["--model", "m", "--output", "out", *given]) == 0
    assert seen[0][1].dataloader_pin_memory is pinned


def test_random_weights_are_not_lost_beside_a_learned_state(
    train: Train, config_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(model=config_file, intervention="learned") == 1
    assert "random weights of a config.json would be lost" in capsys.readouterr().err
    assert train(model=config_file, intervention="learned", train_model=True) == 0


@pytest.mark.parametrize(
    ("intervention", "done"),
    [("none", "output alignment 0.1, 2 steps"), ("state_passing", "state_passing with output alignment 0.1, 2 steps")],
)
def test_the_config_records_the_alignment_loss(
    train: Train, checkpoint: Path, tmp_path: Path, intervention: str, done: str
) -> None:
    assert train(model=checkpoint, intervention=intervention, alignment_alpha=0.1) == 0
    assert trained_config(tmp_path / "out")["interventions"][-1] == done


def test_alignment_of_tbtt_reads_ahead(train: Train, checkpoint: Path) -> None:
    assert train(model=checkpoint, intervention="tbtt", alignment_alpha=0.1, alignment_max_extra=2) == 0


PASSKEY = "--task passkey"
BABILONG = "--task babilong --task-files f"
SCRATCH = "--mimetic --model m.json"


@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    ("option", "elsewhere", "fitting", "what"),
    [
        ("noise_sigma 0.1", "", "--intervention random_noise", "intervention random_noise"),
        ("mixture {}", "", """--intervention mixed --mixture {"zero":1.0}""", "intervention mixed or statex"),
        ("data x.txt", PASSKEY, BABILONG, "task text or babilong"),
        ("split train", PASSKEY, BABILONG, "task text or babilong"),
        ("eval_data stdlib", "", "--eval-strategy epoch", "eval_strategy steps or epoch and task text or babilong"),
        ("eval_data stdlib", f"{PASSKEY} --eval-strategy steps", f"{BABILONG} --eval-strategy steps", "eval_strategy"),
        ("eval_split validation", "", "--eval-strategy steps", "eval_strategy steps or epoch"),
        ("chunks_before_reset 12", "", "--intervention tbtt", "intervention mixed or statex or tbtt"),
        ("reset_at_document", "--intervention none", "--intervention tbtt", "intervention mixed or statex or tbtt"),
        ("minimum_document_tokens 0", BABILONG, "", "task text"),
        ("task_files f", PASSKEY, "--task babilong", "task babilong"),
        ("task_style passkey", "", PASSKEY, "task passkey"),
        ("task_length 5", "", "--task recall", "task copying or"),
        ("training_length 5", "--task recall", PASSKEY, "task text or passkey or babilong"),
        ("mimetic_c 8", "", SCRATCH, "mimetic"),
        ("mimetic_offset 0", "--mimetic false", SCRATCH, "mimetic"),
        ("mimetic_layers 0", "", SCRATCH, "mimetic"),
        ("mimetic_switches a", "", SCRATCH, "mimetic"),
        ("lora_alpha 4", "", "--lora-r 2", "lora_r"),
    ],
)
def test_an_option_that_would_do_nothing_is_unknown(
    option: str, elsewhere: str, fitting: str, what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name, _, value = option.partition(" ")
    common = "--model m --output o --use-cpu"
    file = write(tmp_path / "c.yaml", f"{name}: {value or 'true'}\n")
    for first in ([*f"{common} --{option} {elsewhere}".split()], [*f"{common} {elsewhere}".split(), str(file)]):
        given = first if first[-1] != str(file) else first[:-1]
        with pytest.raises(SystemExit):
            read_options(given, None if given is first else str(file))
        assert f"; {name} goes with {what}" in capsys.readouterr().err
    read_options(f"{common} --{option} {fitting}".split())


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("--text-column x --data stdlib", "text_column does nothing here: stdlib has no columns"),
        (
            """--chunks-before-reset 12 --intervention mixed --mixture {"zero":1.0}""",
            "chunks_before_reset does nothing here: it belongs to tbtt, which has no share",
        ),
    ],
)
def test_options_that_do_nothing_here_are_refused(given: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        read_options(f"--model m --output o --use-cpu {given}".split())


def rows_of(monkeypatch: pytest.MonkeyPatch, train: Train, **options: Any) -> dict[str, Any]:
    """Training and evaluation rows of `lengthgen train`, which trains nothing."""
    seen: dict[str, Any] = {}

    class Seen(ZeroStateTrainer):
        def __init__(self, model: Any, training: Any, **given: Any) -> None:
            seen.update(given)
            raise ValueError("enough seen")

    with monkeypatch.context() as patch:
        patch.setitem(INTERVENTIONS, "none", Seen)
        assert train(intervention="none", **options) == 1
    return seen


@pytest.mark.slow
def test_passkeys_are_trained_on_the_key_alone(
    train: Train, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {"task": "passkey", "data": None, "training_length": 400, "intervention": "fitted_noise"}
    assert train(model=checkpoint, **options, eval_strategy="steps", eval_steps=2, per_device_eval_batch_size=64) == 0
    history = json.loads((tmp_path / "out" / "trainer_state.json").read_text())["log_history"]
    assert [entry["step"] for entry in history if "eval_loss" in entry] == [2]
    command = capsys.readouterr().out.rpartition(" for losses on text, and for passkeys ")[2].strip()
    few = ["--samples", "1", "--depths", "0.1,0.9", "--no-cache", "--output", str(tmp_path / "retrieval")]
    assert main([*shlex.split(command)[1:], *few]) == 0
    assert "passkey (pass key)" in capsys.readouterr().out


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
    asked = [{question.question for question in rows[name].questions} for name in ("train_dataset", "eval_dataset")]
    assert asked == [{"Where is Mary?"}, {"Where is Daniel?"}]
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


@pytest.mark.parametrize(("data", "column"), [("stdlib", "text"), ("pages.jsonl", "body")])
def test_the_standard_library_beside_other_data_needs_no_column(data: str, column: str) -> None:
    settings: Any = SimpleNamespace(text_column="body")
    assert train_rows._text_column(settings, data) == column
