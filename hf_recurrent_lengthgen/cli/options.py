"""Options of `lengthgen train`: flags on top of a YAML file on top of the paper's defaults."""

import argparse
import difflib
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import yaml
from transformers import HfArgumentParser, TrainingArguments

from hf_recurrent_lengthgen.cli.inputs import DATA_HELP
from hf_recurrent_lengthgen.trainers import (
    FittedNoiseConfig,
    FittedNoiseTrainer,
    InitialStateConfig,
    InitialStateTrainer,
    LearnedStateConfig,
    LearnedStateTrainer,
    MixedStatesConfig,
    MixedStatesTrainer,
    RandomNoiseConfig,
    RandomNoiseTrainer,
    StatePassingConfig,
    StatePassingTrainer,
    TbttConfig,
    TbttTrainer,
    ZeroStateTrainer,
)

Intervention = Literal["none", "random_noise", "fitted_noise", "state_passing", "tbtt", "mixed", "learned"]
INTERVENTIONS: dict[str, tuple[type[InitialStateTrainer], type[InitialStateConfig]]] = {
    "none": (ZeroStateTrainer, InitialStateConfig),
    "random_noise": (RandomNoiseTrainer, RandomNoiseConfig),
    "fitted_noise": (FittedNoiseTrainer, FittedNoiseConfig),
    "state_passing": (StatePassingTrainer, StatePassingConfig),
    "tbtt": (TbttTrainer, TbttConfig),
    "mixed": (MixedStatesTrainer, MixedStatesConfig),
    "learned": (LearnedStateTrainer, LearnedStateConfig),
}

# "Unexplored states" (arXiv:2507.02782), B.2 and Figure 1: post-training of Mamba-2
PAPER_STEPS = 500
PAPER_SCHEDULE, PAPER_SCHEDULE_SETTINGS = "cosine_with_min_lr", {"min_lr": 1e-5}
DEFAULTS: dict[str, Any] = {
    "adam_beta2": 0.95,
    "lr_scheduler_type": PAPER_SCHEDULE,
    "warmup_steps": 0.1,
    "max_grad_norm": 1.0,
    "report_to": "none",
    "logging_steps": 10,
}

MOST_USED = {
    "output_dir": "Folder for the model and the checkpoints on the way.",
    "learning_rate": "Peak learning rate; in post-training a tenth of that of pre-training.",
    "max_steps": f"Optimizer steps (default: {PAPER_STEPS}, unless num_train_epochs is given).",
    "num_train_epochs": "Passes over the data, instead of max_steps (default: none).",
    "per_device_train_batch_size": "Sequences per forward pass.",
    "gradient_accumulation_steps": "Forward passes per optimizer step.",
    "lr_scheduler_type": "Learning-rate schedule; cosine_with_min_lr falls to 1e-5.",
    "warmup_steps": "Steps of warm-up, or a fraction of all steps if below 1.",
    "weight_decay": "Weight decay of AdamW.",
    "logging_steps": "Steps between two printed losses.",
    "eval_strategy": "When to measure eval_loss: no, steps or epoch.",
    "eval_steps": "Steps between two measurements.",
    "save_strategy": "When to save a checkpoint to --resume from: no, steps or epoch.",
    "save_steps": "Steps between two checkpoints.",
    "save_total_limit": "How many checkpoints to keep (default: all).",
    "bf16": "Compute in bfloat16 where it is safe; states stay float32.",
    "seed": "Seed of initialization, data order and state passing.",
    "use_cpu": "Do not use an accelerator.",
}
DESCRIPTION = """\
Train or post-train a model that takes initial states. Every option can stand in CONFIG.yaml, as a line
"option: value", or on the command line, which wins. Defaults follow arXiv:2507.02782, B.2: 500 steps,
AdamW(0.9, 0.95), cosine to 1e-5 after 10 % warm-up.

  lengthgen train --model demo-output/base --block_length 128 --learning_rate 1e-3 --output_dir cured
"""


@dataclass
class RunArguments:
    """What to train, on what, with which intervention."""

    model: str = field(
        metadata={"help": "Checkpoint folder or Hub name; or a config.json, to train from scratch. Required."}
    )
    intervention: Intervention = field(
        default="state_passing",
        metadata={
            "help": "Where initial states come from: none is the zero state, so plain training; random_noise and "
            "fitted_noise draw them; state_passing takes final states of other texts, tbtt (truncated backpropagation "
            "through time) those of the same text; mixed draws one of these for each sequence; learned trains one."
        },
    )
    data: str = field(default="stdlib", metadata={"help": f"Training text: {DATA_HELP}"})
    data_split: str = field(default="train", metadata={"help": "Split of the data to train on."})
    eval_data: str | None = field(
        default=None,
        metadata={
            "help": "Text for eval_loss, as for data; needs eval_strategy. Default: the validation files of stdlib "
            "where that is the training text."
        },
    )
    eval_data_split: str = field(default="validation", metadata={"help": "Split of eval_data."})
    text_column: str = field(default="text", metadata={"help": "Column that holds the text."})
    tokenizer: str | None = field(
        default=None,
        metadata={"help": 'Tokenizer folder or name, or "bytes". Default: the model\'s own; bytes from scratch.'},
    )
    block_length: int = field(default=2048, metadata={"help": "Training length T in tokens."})
    chunks_before_reset: int = field(
        default=12,
        metadata={"help": "With tbtt: chunks of block_length after which a state is reset to zero; 0 for never."},
    )
    reset_at_document: bool = field(
        default=False, metadata={"help": "With tbtt: reset states where a document begins, wherever that is in a row."}
    )
    minimum_document_tokens: int = field(
        default=0, metadata={"help": "Leave out documents with fewer tokens (arXiv:2410.07145 uses 4096)."}
    )
    task: Literal["text", "passkey", "babilong"] = field(
        default="text",
        metadata={
            "help": "What a row is: text; a passkey prompt; or a question of bAbI hidden in the text of data. In the "
            "last two only the answer is scored."
        },
    )
    task_files: str | None = field(
        default=None, metadata={"help": "With babilong: the folder of bAbI's files (qa1_..._train.txt to qa10)."}
    )
    task_style: str | None = field(
        default=None,
        metadata={"help": 'With passkey: the prompt, "pass key" (arXiv:2507.02782) or "passkey" (arXiv:2410.07145).'},
    )
    mimetic: bool = field(
        default=False, metadata={"help": "Mimetic initialization before training from scratch (arXiv:2410.11135)."}
    )
    mimetic_c: float = field(default=8.0, metadata={"help": "Its c: A_n = -n^-c. The paper uses 2, 4 and 8."})
    mimetic_offset: int = field(default=0, metadata={"help": "Its n counts from 1 + offset; a head at n = 1 decays."})
    trust_remote_code: bool = field(default=False, metadata={"help": "Run the code that a checkpoint carries."})
    resume: bool = field(
        default=False, metadata={"help": "Continue from the newest complete checkpoint in output_dir."}
    )


@dataclass
class _EveryConfig(StatePassingConfig, MixedStatesConfig, LearnedStateConfig):
    """The options of all interventions, for the help and the parser; never made."""


_METHOD_OPTIONS = {item.name for item in fields(_EveryConfig)} - {item.name for item in fields(TrainingArguments)}


class RunParser(HfArgumentParser):
    """Parser of `RunArguments` and the arguments of the trainers.

    Args:
        everything: Whether the help lists all of TrainingArguments, over a hundred, or those in `MOST_USED`.
    """

    def __init__(self, everything: bool = False) -> None:
        self._everything = everything
        self._sections: dict[str, Any] = {}
        self._titles = {
            **dict.fromkeys(_names(TrainingArguments), "other options of transformers.TrainingArguments"),
            **dict.fromkeys(MOST_USED, "training (most used options of transformers.TrainingArguments)"),
            **dict.fromkeys(_METHOD_OPTIONS, "options of interventions"),
            **dict.fromkeys(_names(InitialStateConfig) - _names(TrainingArguments), "options of all interventions"),
            **dict.fromkeys(_names(RunArguments), "what to train"),
        }
        super().__init__(
            (RunArguments, _EveryConfig),  # type: ignore[arg-type]
            prog="lengthgen train",
            usage="lengthgen train [CONFIG.yaml] [--model MODEL] [--output_dir FOLDER] [--OPTION VALUE ...]",
            description=DESCRIPTION,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        self.add_argument(
            "--help-all", action="help", help="show the other options of transformers.TrainingArguments, too"
        )
        quiet = {"disable_tqdm": None if sys.stderr.isatty() else True}
        # Options of methods have defaults in the config of the method; None is "not given".
        not_given = dict.fromkeys([*_METHOD_OPTIONS, "max_steps", "num_train_epochs"])
        self.set_defaults(**DEFAULTS, **quiet, **not_given)

    def add_argument(self, *flags: str, **options: Any) -> argparse.Action:
        """As in argparse, in the section of the help that the option belongs to."""
        name = options.get("dest", flags[0].lstrip("-"))
        title = self._titles.get(name)
        if title is None:
            return super().add_argument(*flags, **options)
        options["help"] = MOST_USED.get(name, options.get("help"))
        if title == "options of interventions":
            owners = [key for key, (_, config) in INTERVENTIONS.items() if name in _names(config)]
            options["help"] = f"{options['help']} [{', '.join(owners)}]"
        if title.startswith("other") and not self._everything:
            options["help"] = argparse.SUPPRESS
        elif name in _METHOD_OPTIONS:
            pass  # the config of the method has the default, and its help says so
        elif "efault" not in str(options["help"]) and not any(options.get("default") is no for no in (None, False)):
            options["help"] = f"{options['help']} (default: %(default)s)"
        if "type" in options and len(options.get("choices", ())) not in range(1, 5):
            known = {int: "N", float: "X", str: "TEXT"}
            options["metavar"] = "BOOL" if "const" in options else known.get(options["type"], "NAME")
        if title not in self._sections:
            self._sections[title] = self.add_argument_group(title)
        action = self._sections[title].add_argument(*flags, **options)
        action.option_strings = list(flags[:1])  # spellings with "-" are understood, too, but not listed
        return action

    def error(self, message: str) -> Any:
        """As in argparse, with the option that was probably meant."""
        wrong = message.removeprefix("unrecognized arguments: ")
        hint = f"; {self._nearest(wrong.split()[0])}" if wrong != message and wrong.startswith("--") else ""
        super().error(message + hint)

    def read(
        self, arguments: Sequence[str], config_file: str | None = None
    ) -> tuple[RunArguments, InitialStateConfig, type[InitialStateTrainer]]:
        """What to train, the arguments of the trainer, and its class; flags win over the file.

        Raises:
            ValueError: for a file that cannot be used, options of other interventions, and as the config raises.
        """
        values = self.parse(arguments, config_file)
        trainer, config = INTERVENTIONS[values["intervention"]]
        for name in sorted(_METHOD_OPTIONS - _names(config)):
            if values[name] is not None:
                owners = [key for key, (_, other) in INTERVENTIONS.items() if name in _names(other)]
                raise ValueError(
                    f"{name} is an option of the intervention {' and '.join(owners)}, not of {values['intervention']}."
                )
        run = RunArguments(**{name: values[name] for name in _names(RunArguments)})
        given = {name: value for name, value in values.items() if not (name in _METHOD_OPTIONS and value is None)}
        return run, config(**{name: given[name] for name in _names(config) & given.keys()}), trainer

    def parse(self, arguments: Sequence[str], config_file: str | None = None) -> dict[str, Any]:
        """All options as a dictionary, None for those of methods that are not given; flags win over the file.

        Raises:
            ValueError: for a file that cannot be used.
        """
        from_file = [] if config_file is None else self._arguments_of(config_file)
        values = vars(self.parse_args([*from_file, *arguments]))
        if values["max_steps"] is None:
            values["max_steps"] = PAPER_STEPS if values["num_train_epochs"] is None else -1
        if values["num_train_epochs"] is None:
            del values["num_train_epochs"]
        if values["lr_scheduler_kwargs"] is None and values["lr_scheduler_type"] == PAPER_SCHEDULE:
            values["lr_scheduler_kwargs"] = dict(PAPER_SCHEDULE_SETTINGS)
        return values

    def _arguments_of(self, path: str) -> list[str]:
        """A YAML file as flags, so that both are checked alike; scalars stay as they are written ("no", "1e-3")."""
        try:
            values = yaml.load(Path(path).read_text(encoding="utf-8"), Loader=yaml.BaseLoader)
        except FileNotFoundError as error:
            raise ValueError(f"There is no config file {path}.") from error
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise ValueError(f"{path} is not valid YAML: {error}") from error
        if not isinstance(values, dict):
            raise ValueError(f"{path} must hold options as 'option: value' lines, got {type(values).__name__}.")
        flags = []
        for key, value in values.items():
            if key not in self._titles:
                raise ValueError(f"{path}: unknown option {key!r}; {self._nearest(key)}.")
            if isinstance(value, list):
                flags += [f"--{key}", *map(str, value)]
            elif value not in ("", "~", "null"):
                flags.append(f"--{key}={value if isinstance(value, str) else json.dumps(_typed(value))}")
        return flags

    def _nearest(self, name: str) -> str:
        wanted = name.partition("=")[0].lstrip("-").replace("-", "_")
        near = difflib.get_close_matches(wanted, self._titles, n=3)
        return f"did you mean {' or '.join(near)}?" if near else "lengthgen train --help-all lists all options"


def _names(arguments_class: type[Any]) -> set[str]:
    return {item.name for item in fields(arguments_class) if item.init}


def _typed(value: Any) -> Any:
    """Scalars inside a mapping by JSON's rules: "1e-5" is a number, "cosine" is text."""
    if isinstance(value, dict):
        return {key: _typed(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_typed(item) for item in value]
    try:
        return json.loads(value)
    except ValueError:
        return value
