"""Options of `lengthgen train`: the paper's defaults, overridden by a YAML file, overridden by flags."""

import argparse
import json
import re
import sys
from collections.abc import Collection, Sequence
from dataclasses import fields
from typing import Any

import torch
from transformers import HfArgumentParser

from hf_recurrent_lengthgen.cli import parsing
from hf_recurrent_lengthgen.cli.run_arguments import RunArguments, goes_with
from hf_recurrent_lengthgen.trainers import (
    INTERVENTIONS,
    InitialStateConfig,
    InitialStateTrainer,
    LearnedStateConfig,
    MixedStatesConfig,
    StateXConfig,
    TbttConfig,
)
from hf_recurrent_lengthgen.trainers.mixed_states import mixable
from hf_recurrent_lengthgen.yaml_files import read_yaml

# Buitrago Ruiz & Gu, 2025 (arXiv:2507.02782), B.1 and B.2: post-training for 100 steps with the recipe of pre-training
PAPER_STEPS = 100
PAPER_SCHEDULE, PAPER_SCHEDULE_SETTINGS = "cosine_with_min_lr", {"min_lr": 1e-5}
DEFAULTS: dict[str, Any] = {
    "max_steps": PAPER_STEPS,
    "adam_beta2": 0.95,
    "lr_scheduler_type": PAPER_SCHEDULE,
    "warmup_steps": 0.1,
    "weight_decay": 0.01,  # the paper schedules it with this peak
    "max_grad_norm": 1.0,
    "report_to": "none",
    "logging_steps": 10,
}

TRAINING = (
    *("learning_rate", "max_steps", "num_train_epochs", "per_device_train_batch_size", "gradient_accumulation_steps"),
    *("lr_scheduler_type", "warmup_steps", "weight_decay", "bf16"),
)
RUN = (
    *("output_dir", "resume_from_checkpoint", "logging_steps", "eval_strategy", "eval_steps", "save_strategy"),
    *("save_steps", "save_total_limit", "seed", "use_cpu"),
)
"""Options of transformers.TrainingArguments that --help lists, by their headings."""
TYPES = {"attention_window": parsing.windows, "task_length": parsing.lengths}
HELPS = {
    "output_dir": "folder for checkpoints and the trained model",
    "resume_from_checkpoint": "continue from this checkpoint, a folder checkpoint-N in --output",
    "max_steps": "optimizer steps",
    "num_train_epochs": "passes over the data, in place of --max-steps",
    "learning_rate": "peak learning rate",
    "lr_scheduler_type": "schedule of the learning rate, a name of transformers.SchedulerType",
    "warmup_steps": "steps in which the learning rate rises from 0, or below 1 the share of all steps",
    "bf16": "train in bfloat16 mixed precision",
    "eval_strategy": "when to evaluate",
    "save_strategy": "when to write a checkpoint",
    "use_cpu": "train on the CPU, even with an accelerator",
}
"""In place of what Transformers says, which does not hold here."""
METAVARS = {"output_dir": "FOLDER", "resume_from_checkpoint": "FOLDER", "intervention": "NAME"}
HEADINGS = ("model", "data", "method", "training", "run")
_OF_TOKENS = re.compile(r"_(lengths?|extra|min_context|windows|tokens)$")
"""Names of options that are numbers of tokens, which may be written as 2k."""
DESCRIPTION = f"""\
Train or post-train a model that accepts initial states; plain training and output alignment take any causal language
model of Transformers. Each option can also stand in CONFIG.yaml, as a line "option: value"; the command line wins. The
defaults are those of Buitrago Ruiz & Gu, 2025 (B.2): {PAPER_STEPS} steps, AdamW(0.9, 0.95), weight decay 0.01, cosine
to 1e-5 after 10 % warm-up, gradients clipped at 1.

An option whose help ends with [task passkey] goes with this choice of --task only, and so on. All other options of
transformers.TrainingArguments are taken, too.
"""
EXAMPLES = """\
lengthgen train --model demo-output/base --training-length 128 --learning-rate 1e-3 --output state-passing
lengthgen train --model demo-output/base --data my-texts --intervention none --output control
lengthgen train config.yaml --max-steps 1000
"""


def continues(training: InitialStateConfig) -> bool:
    """Whether a sequence of the training data continues the sequence of the previous step."""
    return isinstance(training, TbttConfig) or any(method.needs_continued_data for method in _mixed(training))


def _mixed(training: InitialStateConfig) -> list[type[InitialStateTrainer]]:
    """The methods of a mixture; none for other interventions."""
    return [mixable()[name] for name in training.shares()] if isinstance(training, MixedStatesConfig) else []


def read_options(
    arguments: Sequence[str], config_file: str | None = None
) -> tuple[RunArguments, InitialStateConfig, type[InitialStateTrainer]]:
    """Read what to train, the arguments of the trainer, and its class; flags win over the file.

    Raises:
        SystemExit: for unknown options, after a message.
        ValueError: for a file that cannot be used, for options without effect or in contradiction, and as the config
            raises.
    """
    arguments = [*([] if config_file is None else _flags_of(config_file)), *arguments]
    own = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    own.add_argument("--import", "--import_file", "--import-file", action=parsing.ImportUserCode)
    own.parse_known_args(arguments)  # what is imported defines options
    parsed = vars(RunParser().parse_args(arguments))
    run = RunArguments(**{name: parsed[name] for name in _names(RunArguments) & parsed.keys()})
    trainer = INTERVENTIONS[run.intervention]
    values = _defaults(parsed) | parsed
    training = trainer.config_class(**{name: values[name] for name in _names(trainer.config_class) & values.keys()})
    _check(run, training, parsed.keys())
    if run.lengths_differ and "train_sampling_strategy" not in parsed and training.world_size == 1:
        methods = _mixed(training) or [trainer]
        if not any(method.needs_shuffled_data for method in methods):
            training.train_sampling_strategy = "group_by_length"
    return run, training, trainer


def _defaults(parsed: dict[str, Any]) -> dict[str, Any]:
    """The paper's settings, as far as the parsed options leave them open."""
    steps, epochs = parsed.get("max_steps"), parsed.get("num_train_epochs")
    if steps is not None and (steps < 1 if epochs is None else steps != -1):
        raise ValueError(
            f"max_steps is {steps}, num_train_epochs {'not given' if epochs is None else epochs}: give either "
            "max_steps of at least 1 or num_train_epochs (max_steps -1 overrides that of a file)."
        )
    values = DEFAULTS | ({} if epochs is None else {"max_steps": -1})
    if parsed.get("lr_scheduler_type", PAPER_SCHEDULE) == PAPER_SCHEDULE:
        values["lr_scheduler_kwargs"] = dict(PAPER_SCHEDULE_SETTINGS)
    if not torch.accelerator.is_available():  # torch warns of pinned memory, the default of Transformers
        values["dataloader_pin_memory"] = False
    if not sys.stderr.isatty():
        values["disable_tqdm"] = True
    return values


class RunParser(parsing.NearestOptions, HfArgumentParser):
    """Parser of `RunArguments` and the configs of all trainers, without defaults."""

    def __init__(self) -> None:
        self._groups: dict[str, Any] = {}
        configs = [trainer.config_class for _, trainer in sorted(INTERVENTIONS.items())]
        super().__init__(
            (RunArguments, *configs),  # type: ignore[arg-type]
            prog="lengthgen train",
            usage="lengthgen train [CONFIG.yaml] [options]",
            description=DESCRIPTION,
            epilog=parsing.examples_text(EXAMPLES),
            formatter_class=parsing.HelpFormatter,
            argument_default=argparse.SUPPRESS,
            allow_abbrev=False,
            add_help=False,
        )

    def add_argument(self, *flags: str, **options: Any) -> Any:
        """As in argparse, once and under the heading of the option; of TrainingArguments, the most used are listed."""
        name = options.setdefault("dest", flags[0].lstrip("-"))
        if not self._groups:
            self._groups = dict(zip(HEADINGS, parsing.add_headings(self, *HEADINGS), strict=True))
            self._groups["other"] = self.add_argument_group("other options of transformers.TrainingArguments")
        if flags[0] in self._option_string_actions:
            return None
        if options.get("type") is int and _OF_TOKENS.search(name):
            options["type"] = parsing.tokens
        if name in TYPES:
            options["type"] = TYPES[name]
        if name == "intervention":
            options["choices"] = sorted(INTERVENTIONS)
        heading = _heading(name)
        options["help"] = argparse.SUPPRESS if heading == "other" else _help(name, flags[0], options)
        if name in METAVARS:
            options["metavar"] = METAVARS[name]
        if "type" in options and len(options.get("choices", ())) not in range(1, 5):
            words = {int: "N", parsing.tokens: "N", float: "X", str: "TEXT"}
            options.setdefault("metavar", "BOOL" if "const" in options else words.get(options["type"], "NAME"))
        flags = {"import_file": ("--import",), "output_dir": ("--output",)}.get(name, ()) + flags
        options = {key: options[key] for key in options.keys() - {"heading", "goes_with"}}
        action = self._groups[heading].add_argument(*flags, **options | {"default": argparse.SUPPRESS})
        action.option_strings = [flags[0].replace("_", "-")]  # other spellings are accepted, but not listed
        return action


def _heading(name: str) -> str:
    if own := RunArguments.__dataclass_fields__.get(name):
        return str(own.metadata["heading"])
    if name in InitialStateConfig.method_fields() or goes_with(name):
        return "method"
    return "training" if name in TRAINING else "run" if name in RUN else "other"


def _help(name: str, flag: str, options: dict[str, Any]) -> str:
    """The help of an option, with its default and the choices that it requires."""
    if flag == f"--no_{name}":
        return f"the same as --{name.replace('_', '-')} false"
    text, default = HELPS.get(name, str(options.get("help"))), DEFAULTS.get(name, options.get("default"))
    text = text.replace("%(default)s", str(default))
    if name == "intervention":
        text += ", ".join(f"{key} ({INTERVENTIONS[key].about.title})" for key in options["choices"])
    if name == "num_train_epochs":  # its default does not hold here
        default = None
    if not (re.search("[Dd]efault|Required", text) or default is None or default is False):
        text = f"{text} (default: {default})"
    return f"{text} [{goes_with(name)}]" if goes_with(name) else text


def _flags_of(path: str) -> list[str]:
    """A YAML file as flags, so that both pass the same checks; scalars stay as written ("no", "1e-3")."""
    values = read_yaml(path)
    if not isinstance(values, dict):
        raise ValueError(f"{path} must hold options as 'option: value' lines, got {type(values).__name__}.")
    flags = []
    for name, value in values.items():
        if isinstance(value, list):
            flags += [f"--{name}", *map(str, value)]
        elif value not in ("", "~", "null"):
            flags.append(f"--{name}={value if isinstance(value, str) else json.dumps(_typed(value))}")
    return flags


def _check(run: RunArguments, training: InitialStateConfig, names: Collection[str]) -> None:
    """Raise a `ValueError` for contradictions, and for options of these names without effect."""
    for name in names:
        own = RunArguments.__dataclass_fields__.get(name)
        required = own.metadata["goes_with"] if own else {}
        values = {key: getattr(run, key, getattr(training, key, None)) for key in required}
        fits = [values[key] in fitting if fitting else values[key] for key, fitting in required.items()]
        if not all(fits) or (own is None and name not in _names(type(training))):
            raise ValueError(f"{name} has no effect here: it requires {goes_with(name)}.")
    state_alone = isinstance(training, LearnedStateConfig) and not training.train_model
    if run.task != "text" and training.alignment_alpha:
        raise ValueError(f"task {run.task} makes its own sequences: leave out alignment_alpha.")
    if run.of_symbols and continues(training) and training.bptt_chunk_length is None:
        raise ValueError(
            f"tbtt reads the sequences of task {run.task} in chunks: give bptt_chunk_length, tokens of a chunk."
        )
    if training.alignment_length not in (None, run.training_length):
        raise ValueError(
            f"alignment_length is {training.alignment_length}, training_length {run.training_length}, but both are T: "
            "give training_length alone. Sequences are lengthened for the shift."
        )
    if run.lora_r is not None and isinstance(training, StateXConfig):
        raise ValueError(
            "statex changes the weights that lora_r freezes: run lengthgen expand first, then train with lora_r."
        )
    if run.lora_r is not None and state_alone:
        raise ValueError("The intervention learned trains only the state: give train_model, or leave lora_r out.")
    if run.from_scratch and state_alone:
        raise ValueError(
            "The intervention learned saves only the state, so the random weights of a config.json would be lost: "
            "give a checkpoint as model, or train_model."
        )


def _names(arguments_class: type[Any]) -> set[str]:
    return {item.name for item in fields(arguments_class) if item.init}


def _typed(value: Any) -> Any:
    """Scalars inside a mapping, read as JSON: "1e-5" is a number, "cosine" is text."""
    if isinstance(value, dict):
        return {key: _typed(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_typed(item) for item in value]
    try:
        return json.loads(value)
    except ValueError:
        return value
