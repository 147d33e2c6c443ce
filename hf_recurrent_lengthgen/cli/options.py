"""Options of `lengthgen train`: flags on top of a YAML file on top of the paper's defaults."""

import argparse
import difflib
import json
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import yaml
from transformers import HfArgumentParser, TrainingArguments

from hf_recurrent_lengthgen.cli.inputs import DATA_HELP, STANDARD_LIBRARY, USUAL_SPLIT, chosen_split
from hf_recurrent_lengthgen.data.tasks import STRING_TASKS
from hf_recurrent_lengthgen.surgery.mimetic import SWITCHES
from hf_recurrent_lengthgen.trainers import (
    INTERVENTIONS,
    InitialStateConfig,
    InitialStateTrainer,
    LearnedStateConfig,
    MixedStatesConfig,
    StateXConfig,
    TbttConfig,
)
from hf_recurrent_lengthgen.trainers.settings import check_settings

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
    "output_dir": "Folder for the model and the checkpoints on the way (default: trainer_output).",
    "learning_rate": "Peak learning rate; in post-training a tenth of that of pre-training.",
    "max_steps": f"Optimizer steps (default: {PAPER_STEPS}, unless num_train_epochs is given).",
    "num_train_epochs": "Passes over the data, instead of max_steps (default: none).",
    "per_device_train_batch_size": "Sequences per forward pass.",
    "gradient_accumulation_steps": "Forward passes per optimizer step.",
    "lr_scheduler_type": "Learning-rate schedule; cosine_with_min_lr falls to 1e-5.",
    "warmup_steps": "Steps of warm-up, or a fraction of all steps if below 1.",
    "weight_decay": "Weight decay of AdamW.",
    "logging_steps": "Steps between two printed losses.",
    "eval_strategy": "When to measure eval_loss.",
    "eval_steps": "Steps between two measurements (default: logging_steps).",
    "save_strategy": "When to save a checkpoint to --resume from.",
    "save_steps": "Steps between two checkpoints.",
    "save_total_limit": "How many checkpoints to keep (default: all).",
    "bf16": "Compute in bfloat16 where it is safe; states stay float32.",
    "seed": "Seed of initialization, data order and state passing.",
    "use_cpu": "Do not use an accelerator.",
}
OUR_HELP = MOST_USED | {
    "alignment_length": "Length T in tokens of the two crops that are aligned. Default: block_length; here no other.",
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
    intervention: str = field(
        default="state_passing",
        metadata={"help": "What is done beside plain training: "},  # and the names, which the parser knows
    )
    data: str = field(default="stdlib", metadata={"help": f"Training text: {DATA_HELP}"})
    data_split: str | None = field(
        default=None,
        metadata={"help": "Split of the data to train on. Default: train, or the only one that there is."},
    )
    eval_data: str | None = field(
        default=None,
        metadata={
            "help": "Text for eval_loss, as for data; needs eval_strategy. Default: stdlib where that is the training "
            "text. Passkeys and symbols need none, evaluation has others."
        },
    )
    eval_data_split: str | None = field(
        default=None, metadata={"help": f"Split of eval_data. Default: {USUAL_SPLIT}."}
    )
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
    task: Literal["text", "passkey", "babilong", "copying", "stack_copying", "recall", "sorting"] = field(
        default="text",
        metadata={
            "help": "What a row is: text; passkey, a prompt; babilong, a question of bAbI hidden in the text of data; "
            "or random symbols (arXiv:2410.11135): copying, stack_copying (from the last to the first), recall (of "
            "values by their keys) or sorting. In all but the first only the answer is scored."
        },
    )
    task_length: str = field(
        default="50",
        metadata={
            "help": 'With tasks on symbols: how many there are (with recall, pairs), or a range such as "50-100".'
        },
    )
    task_vocabulary: int | None = field(
        default=None,
        metadata={
            "help": "With tasks on symbols: how many there are to choose from. The model's vocab_size must be 3 more. "
            "Default: 26 for copying, 512 for recall (keys and values) and sorting."
        },
    )
    task_files: str | None = field(
        default=None,
        metadata={
            "help": "Required with babilong: the folder of bAbI's files qa1_..._train.txt to qa10, and ..._test.txt "
            "for evaluation."
        },
    )
    task_style: str | None = field(
        default=None,
        metadata={
            "help": 'With passkey: "pass key" (prompt of arXiv:2507.02782, default), "passkey" (2410.07145) or '
            '"infinity-bench" (2509.22630).'
        },
    )
    mimetic: bool = field(
        default=False,
        metadata={"help": "Mimetic initialization (arXiv:2410.11135) before training Mamba or GLA from scratch."},
    )
    mimetic_switches: list[str] | None = field(
        default=None,
        metadata={
            "help": "Its parts: a (decays near 1), delta (steps near 1), bc (correlated B and C), conv (identity). "
            "Default: the paper's, all but conv in Mamba-1 and all in Mamba-2; in GLA all, which has no delta."
        },
    )
    mimetic_layers: list[int] | None = field(
        default=None, metadata={"help": "Its layers, counted from 0 (default: all)."}
    )
    mimetic_c: float = field(default=8.0, metadata={"help": "Its c: A_n = -n^-c. The paper uses 2, 4 and 8."})
    mimetic_offset: int = field(
        default=0, metadata={"help": "Its n counts from 1 + offset; a head, state or key at n = 1 decays."}
    )
    lora_r: int | None = field(
        default=None,
        metadata={
            "help": "Train an adapter (LoRA of PEFT) of this rank and leave the weights of the model alone; lengthgen "
            "merge makes a checkpoint of both. Default: all weights are trained, or the adapter that the model is."
        },
    )
    lora_alpha: int | None = field(
        default=None, metadata={"help": "Its scale: the adapter counts alpha / rank. Default: twice the rank."}
    )
    lora_target_modules: list[str] | None = field(
        default=None,
        metadata={
            "help": "Names of the linear layers that it changes. Default: those of the family's mixers; in hybrids "
            "those of all layers, where PEFT takes them."
        },
    )
    trust_remote_code: bool = field(default=False, metadata={"help": "Run the code that a checkpoint carries."})
    resume: bool = field(
        default=False, metadata={"help": "Continue from the newest complete checkpoint in output_dir."}
    )

    def __post_init__(self) -> None:
        check_settings(self)
        if self.intervention not in INTERVENTIONS:
            raise ValueError(f"intervention must be one of {', '.join(INTERVENTIONS)}, got {self.intervention!r}.")
        if empty := [item.name for item in fields(self) if getattr(self, item.name) == ""]:
            raise ValueError(f"{empty[0]} is empty: give a value, or leave it out.")

    @property
    def from_scratch(self) -> bool:
        """Whether the model is made of a config.json, with random weights."""
        return self.model.endswith(".json")

    @property
    def chosen_split(self) -> str:
        return chosen_split(self.data, self.data_split, "train")

    @property
    def chosen_eval_split(self) -> str:
        return chosen_split(self.eval_data or STANDARD_LIBRARY, self.eval_data_split, "validation")

    @property
    def mimetic_choice(self) -> dict[str, bool]:
        """The switches of `mimetic_initialization` that are given; empty for its defaults.

        Raises:
            ValueError: for a switch that there is not.
        """
        given = self.mimetic_switches
        if unknown := sorted(set(given or ()) - set(SWITCHES)):
            raise ValueError(f"mimetic_switches must be some of {' '.join(SWITCHES)}, got {' '.join(unknown)}.")
        return {} if given is None else {name: name in given for name in SWITCHES}

    @property
    def of_symbols(self) -> bool:
        """Whether the task is one on random symbols, which needs neither text nor a tokenizer."""
        return self.task in STRING_TASKS


def _every_config() -> type[InitialStateConfig]:
    """A class with the options of all interventions, for the help and the parser; never made."""
    configs = {trainer.config_class for trainer in INTERVENTIONS.values()}
    most_special = [one for one in configs if not any(issubclass(other, one) for other in configs - {one})]
    bases = sorted(most_special, key=lambda one: one.__name__)
    return dataclass(type("EveryConfig", tuple(bases), {}))


def continues(training: InitialStateConfig) -> bool:
    """Whether a row of the training data goes on where that of the step before ended."""
    return isinstance(training, TbttConfig) or (
        isinstance(training, MixedStatesConfig) and "tbtt" in (training.mixture or {})
    )


def evaluates(training: InitialStateConfig) -> bool:
    """Whether eval_loss is measured."""
    return training.eval_strategy != "no"


_WITH_DATA = ("text", "babilong")
_Fits = Callable[[RunArguments, InitialStateConfig], bool]
# What an option that is given goes with, in words and as a check; elsewhere it would do nothing.
GOES_WITH: dict[str, tuple[str, _Fits]] = {
    **dict.fromkeys(("data", "data_split"), ("task text or babilong", lambda run, _: run.task in _WITH_DATA)),
    **dict.fromkeys(
        ("eval_data", "eval_data_split"),
        (
            "eval_strategy steps or epoch, and task text or babilong",
            lambda run, training: evaluates(training) and run.task in _WITH_DATA,
        ),
    ),
    "text_column": (
        f"data or eval_data other than {STANDARD_LIBRARY}",
        lambda run, _: bool({run.data, run.eval_data} - {STANDARD_LIBRARY, None}),
    ),
    **dict.fromkeys(
        ("chunks_before_reset", "reset_at_document"),
        ("intervention tbtt, or mixed with tbtt in its mixture", lambda _, training: continues(training)),
    ),
    "minimum_document_tokens": ("task text", lambda run, _: run.task == "text"),
    **dict.fromkeys(
        ("block_length", "tokenizer"), ("task text, passkey or babilong", lambda run, _: not run.of_symbols)
    ),
    **dict.fromkeys(
        ("task_length", "task_vocabulary"), (f"task {', '.join(STRING_TASKS)}", lambda run, _: run.of_symbols)
    ),
    "task_files": ("task babilong", lambda run, _: run.task == "babilong"),
    "task_style": ("task passkey", lambda run, _: run.task == "passkey"),
    **dict.fromkeys(
        ("mimetic_switches", "mimetic_layers", "mimetic_c", "mimetic_offset"), ("mimetic", lambda run, _: run.mimetic)
    ),
    **dict.fromkeys(("lora_alpha", "lora_target_modules"), ("lora_r", lambda run, _: run.lora_r is not None)),
}
# Defaults of these are in their dataclasses; in the parser, None is "not given".
_NOT_GIVEN = GOES_WITH.keys() | {"max_steps", "num_train_epochs"}


class RunParser(HfArgumentParser):
    """Parser of `RunArguments` and the arguments of the trainers.

    Args:
        everything: Whether the help lists all of TrainingArguments, over a hundred, or those in `MOST_USED`.
    """

    def __init__(self, everything: bool = False) -> None:
        self._everything = everything
        self._sections: dict[str, Any] = {}
        every_config = _every_config()
        self._method_options = every_config.method_fields()
        self._not_given = _NOT_GIVEN | self._method_options
        self._titles = {
            **dict.fromkeys(_names(TrainingArguments), "other options of transformers.TrainingArguments"),
            **dict.fromkeys(MOST_USED, "training (most used options of transformers.TrainingArguments)"),
            **dict.fromkeys(self._method_options, "options of interventions"),
            **dict.fromkeys(_names(InitialStateConfig) - _names(TrainingArguments), "options of all interventions"),
            **dict.fromkeys(_names(RunArguments), "what to train"),
        }
        super().__init__(
            (RunArguments, every_config),  # type: ignore[arg-type]
            prog="lengthgen train",
            usage="lengthgen train [CONFIG.yaml] [--model MODEL] [--output_dir FOLDER] [--OPTION VALUE ...]",
            description=DESCRIPTION,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        self.add_argument(
            "--help-all", action="help", help="show the other options of transformers.TrainingArguments, too"
        )
        quiet = {"disable_tqdm": None if sys.stderr.isatty() else True}
        self.set_defaults(**DEFAULTS, **quiet, **dict.fromkeys(self._not_given))

    def add_argument(self, *flags: str, **options: Any) -> argparse.Action:
        """As in argparse, in the section of the help that the option belongs to."""
        name = options.get("dest", flags[0].lstrip("-"))
        title = self._titles.get(name)
        if title is None:
            return super().add_argument(*flags, **options)
        if name == "intervention":
            options["choices"] = sorted(INTERVENTIONS)
            options["help"] += "; ".join(f"{name} ({INTERVENTIONS[name].about.title})" for name in options["choices"])
        options["help"] = _help(name, flags[0], options, name in self._not_given)
        if title == "options of interventions":
            owners = [key for key, trainer in INTERVENTIONS.items() if name in _names(trainer.config_class)]
            options["help"] = f"{options['help']} [{', '.join(owners)}]"
        if title.startswith("other") and not self._everything:
            options["help"] = argparse.SUPPRESS
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
            ValueError: for a file that cannot be used, options that would do nothing or contradict each other, and as
                the config raises.
        """
        values = self.parse(arguments, config_file)
        trainer = INTERVENTIONS[values["intervention"]]
        config = trainer.config_class
        for name in sorted(self._method_options - _names(config)):
            if values[name] is not None:
                owners = [key for key, one in INTERVENTIONS.items() if name in _names(one.config_class)]
                *others, last = owners
                which = f"interventions {', '.join(others)} and {last}" if others else f"intervention {last}"
                raise ValueError(f"{name} is an option of the {which}, not of {values['intervention']}.")
        given = {name: value for name, value in values.items() if not (name in self._not_given and value is None)}
        run = RunArguments(**{name: given[name] for name in _names(RunArguments) & given.keys()})
        training = config(**{name: given[name] for name in _names(config) & given.keys()})
        _check(run, training, set(given))
        return run, training, trainer

    def parse(self, arguments: Sequence[str], config_file: str | None = None) -> dict[str, Any]:
        """All options as a dictionary, None for those of `_NOT_GIVEN`; flags win over the file.

        Raises:
            ValueError: for a file that cannot be used, and unless one of max_steps and num_train_epochs counts.
        """
        from_file = [] if config_file is None else self._arguments_of(config_file)
        values = vars(self.parse_args([*from_file, *arguments]))
        steps, epochs = values["max_steps"], values["num_train_epochs"]
        if steps is None:
            values["max_steps"] = PAPER_STEPS if epochs is None else -1
        elif not (steps >= 1 if epochs is None else steps == -1):
            raise ValueError(
                f"max_steps is {steps}, num_train_epochs {'not given' if epochs is None else epochs}: give either "
                "max_steps of at least 1 or num_train_epochs (max_steps -1 takes back that of a file)."
            )
        if epochs is None:
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


def _help(name: str, flag: str, options: dict[str, Any], may_lack: bool) -> str:
    """The help of an option with its default."""
    if flag == f"--no_{name}":
        return f"The same as --{name} false."
    text, default = str(OUR_HELP.get(name, options.get("help"))), options.get("default")
    if re.search("[Dd]efault|Required", text) or default is None or (default is False and not may_lack):
        return text
    return f"{text} (default: {default if may_lack else '%(default)s'})"


def _check(run: RunArguments, training: InitialStateConfig, given: set[str]) -> None:
    """Refuse what would do nothing, and what does not go together."""
    for name, (what, fits) in GOES_WITH.items():
        if name in given and not fits(run, training):
            raise ValueError(f"{name} does nothing here: it goes with {what}. Leave it out, or give that.")
    if run.task == "babilong" and run.task_files is None:
        raise ValueError("task babilong needs task_files, the folder of bAbI's files.")
    if run.task != "text" and (continues(training) or training.alignment_alpha):
        raise ValueError(f"task {run.task} has rows of its own: it goes with neither tbtt nor alignment_alpha.")
    if training.alignment_length not in (None, run.block_length):
        raise ValueError(
            f"alignment_length is {training.alignment_length}, block_length {run.block_length}: both are the training "
            "length T. Give block_length alone; rows are lengthened for the shift."
        )
    for name in ("lora_r", "lora_alpha"):
        if (value := getattr(run, name)) is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}.")
    if run.lora_r is not None and run.from_scratch:
        raise ValueError("lora_r trains an adapter beside weights that are kept: give a checkpoint as model.")
    if run.lora_r is not None and isinstance(training, StateXConfig):
        raise ValueError("statex changes the weights that an adapter belongs to: lengthgen expand first, then lora_r.")
    if isinstance(training, LearnedStateConfig) and not training.train_model and run.lora_r is not None:
        raise ValueError("The intervention learned trains the state alone: give train_model, or leave lora_r out.")
    if isinstance(training, LearnedStateConfig) and not training.train_model and run.from_scratch:
        raise ValueError(
            "The intervention learned saves the state alone, so the random weights of a config.json would be lost: "
            "give a checkpoint as model, or train_model."
        )


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
