"""What `lengthgen train` takes from files and flags, what it assumes, and what it refuses."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from hf_recurrent_lengthgen.checkpoints.records import read_lineage
from hf_recurrent_lengthgen.cli import train as command
from hf_recurrent_lengthgen.cli.main import main
from hf_recurrent_lengthgen.cli.options import RunParser, read_options
from hf_recurrent_lengthgen.trainers import INTERVENTIONS
from tests.cli.training import TINY, Train, parsed, write


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
    assert values["lr_scheduler_kwargs"] == {"min_lr": 2e-5}


@pytest.mark.parametrize("output", ["output", "output_dir"])
def test_training_from_a_file(output: str, checkpoint: Path, text_file: Path, tmp_path: Path) -> None:
    lines = {"model": checkpoint, "data": text_file, output: tmp_path / "out", "learning_rate": "1e-3"} | TINY
    path = write(tmp_path / "config.yaml", "".join(f"{name}: {value}\n" for name, value in lines.items()))
    assert main(["train", str(path), "--max-steps", "1"]) == 0
    state = json.loads((tmp_path / "out" / "trainer_state.json").read_text())
    assert state["global_step"] == 1


@pytest.mark.parametrize(
    ("text", "status", "message"),
    [
        ("- model", 1, "c.yaml must hold options as 'option: value' lines, got list"),
        ("a: [1", 1, "c.yaml is not valid YAML"),
        ("max_steps: 1\nmodel: m\nmax_steps: 2", 1, "max_steps stands twice, in line 1 and line 3: leave one out."),
        ("lr_scheduler_kwargs:\n  min_lr: 1\n  min_lr: 2", 1, "min_lr stands twice, in line 2 and line 3"),
        ("learnig_rate: 1", 2, "unrecognized arguments: --learnig_rate=1"),
        ("max_steps: 5.5", 2, "invalid int value: '5.5'"),
        ("mimetic: perhaps", 2, "perhaps"),
        (None, 1, "There is no config file"),
    ],
)
def test_an_unusable_file_is_refused_and_its_values_are_checked_like_flags(
    text: str | None, status: int, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if text is not None:
        write(tmp_path / "c.yaml", text)
    try:
        ended: Any = main(["train", str(tmp_path / "c.yaml"), "--model", "m"])
    except SystemExit as error:
        ended = error.code
    assert ended == status
    assert message in capsys.readouterr().err


def test_defaults_are_the_papers() -> None:
    values = parsed()
    assert values["max_steps"] == 100
    assert (values["adam_beta2"], values["warmup_steps"], values["max_grad_norm"]) == (0.95, 0.1, 1.0)
    assert values["weight_decay"] == 0.01
    assert values["lr_scheduler_type"] == "cosine_with_min_lr"
    assert values["lr_scheduler_kwargs"] == {"min_lr": 1e-5}
    assert values["state_drop_probability"] == 0.1
    assert parsed("--intervention", "tbtt")["state_drop_probability"] == 0.0


def test_epochs_replace_the_default_number_of_steps_and_another_schedule_its_settings() -> None:
    values = parsed("--num-train-epochs", "2", "--lr-scheduler-type", "linear")
    assert (values["num_train_epochs"], values["max_steps"], values["lr_scheduler_kwargs"] or {}) == (2, -1, {})
    assert parsed("--max-steps", "-1", "--num-train-epochs", "2")["max_steps"] == -1


@pytest.mark.parametrize(
    "words", ["--num-train-epochs 2 --max-steps 3", "--max-steps 0", "--max-steps -1", "--max-steps -2"]
)
def test_steps_or_epochs_count(words: str) -> None:
    with pytest.raises(ValueError, match="give either max_steps of at least 1 or num_train_epochs"):
        parsed(*words.split())


def test_the_help_shows_what_most_people_need_and_what_holds_without_it() -> None:
    shown = RunParser().format_help()
    assert all(part in shown for part in ("--model MODEL", "--intervention", "--max-steps N", "--output"))
    assert "%(" not in shown
    assert "default: None" not in shown
    assert "--torch-compile" not in shown


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
        ({"mimetic": True}, "mimetic overwrites trained weights"),
        ({"resume": True}, "no complete checkpoint"),
        ({"resume_from_checkpoint": "x"}, "Cannot resume from x: there is no such folder. The newest complete"),
        ({"task": "babilong"}, "task babilong needs task_files"),
        ({"task": "passkey", "data": None, "alignment_alpha": 0.1}, "own sequences: leave out alignment_alpha"),
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


@pytest.mark.parametrize(
    ("arguments", "following"),
    [
        ("--model m --intervention none", "evaluate m out --roles base,control --training-length 8"),
        (
            "--model m --alignment-alpha 1 --intervention none --tokenizer bytes --trust-remote-code",
            "evaluate m out --roles base,intervention --training-length 8 --tokenizer bytes --trust-remote-code",
        ),
        ("--model m/config.json", "evaluate out"),
        ("--model m --task copying", "accuracy out"),
    ],
)
def test_what_to_measure_next(arguments: str, following: str) -> None:
    settings, training, _ = read_options([*arguments.split(), "--output", "out"])
    settings.training_length = 8
    message = command._next_step(settings, training)
    assert message == f"Saved to out. Next: lengthgen verify out, then lengthgen {following}"


PASSKEY = "--task passkey"
EXAMPLES = "--task examples --data x.jsonl"
BABILONG = "--task babilong --task-files f"
SCRATCH = "--mimetic --model m.json"


@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    ("option", "elsewhere", "fitting", "what"),
    [
        ("data x.txt", PASSKEY, BABILONG, "task text or keys or babilong"),
        ("text_column a", f"{EXAMPLES}", BABILONG, "task text or keys or babilong"),
        ("eval_data stdlib", "", "--eval-strategy epoch", "eval_strategy steps or epoch and task text or keys"),
        ("chunks_before_reset 12", "", "--intervention tbtt", "intervention tbtt or mixed or statex and task text"),
        ("task_files f", PASSKEY, "--task babilong", "task babilong"),
        ("task_keys 2", PASSKEY, "--task keys", "task keys"),
        ("task_length 5", "", "--task recall", "task copying or"),
        ("task_row_length 220", PASSKEY, "--task recall", "task copying or"),
        ("mimetic_c 8", "", SCRATCH, "mimetic"),
        ("lora_alpha 4", "", "--lora-r 2", "lora_r"),
        ("retrieval_lengths 300", "", f"{PASSKEY} --eval-strategy steps", "eval_strategy steps or epoch and task"),
        (
            "retrieval_style passkey",
            "--task keys --eval-strategy steps --retrieval-lengths 300",
            "--eval-strategy steps --retrieval-lengths 300",
            "retrieval_lengths and task text or passkey or babilong or examples",
        ),
    ],
)
def test_an_option_that_would_do_nothing_is_refused(
    option: str, elsewhere: str, fitting: str, what: str, tmp_path: Path
) -> None:
    name, _, value = option.partition(" ")
    common = "--model m --output o --use-cpu"
    file = write(tmp_path / "c.yaml", f"{name}: {value or 'true'}\n")
    for words, config in ((f"{common} --{option} {elsewhere}", None), (f"{common} {elsewhere}", str(file))):
        with pytest.raises(ValueError, match=f"{name} has no effect here: it requires {what}"):
            read_options(words.split(), config)
    read_options(f"{common} --{option} {fitting}".split())


@pytest.mark.parametrize(("option", "what"), [("noise_sigma", "random_noise"), ("mixture", "mixed or statex")])
def test_an_option_of_another_intervention_is_named(option: str, what: str) -> None:
    with pytest.raises(ValueError, match=f"{option} has no effect here: it requires intervention {what}"):
        read_options(["--model", "m", "--use-cpu", f"--{option}", "1"])


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
    options: dict[str, Any] = {"intervention": "own", "own_size": 2.5, "metric_for_best_model": "of_its_own"}
    known = dict(INTERVENTIONS)
    try:
        if in_file:
            config = write(tmp_path / "run.yaml", json.dumps({"import": str(own), **options}))
            assert train(str(config), model=checkpoint) == 0
        else:
            assert train(model=checkpoint, **{"import": own}, **options) == 0
        lineage: Any = read_lineage(tmp_path / "out")
        assert lineage.steps[0].training.settings[0].method["own_size"] == 2.5
        assert train(model=checkpoint, **{"import": write(tmp_path / "json.py", OWN)}) == 1
        assert "is not called as another module" in capsys.readouterr().err
    finally:
        sys.modules.pop(name)
        INTERVENTIONS.clear()
        INTERVENTIONS.update(known)
