"""`lengthgen train`: train or post-train a model with any intervention that exists."""

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml
from transformers import AutoConfig, AutoModelForCausalLM, HfArgumentParser, Trainer, TrainingArguments, set_seed

from hf_recurrent_lengthgen.cli.inputs import DATA_HELP, load_model, load_stream, load_tokenizer
from hf_recurrent_lengthgen.data import PackedBlocks
from hf_recurrent_lengthgen.surgery import mimetic_initialization
from hf_recurrent_lengthgen.trainers import StatePassingConfig, StatePassingTrainer

INTERVENTIONS: dict[str, tuple[type[Trainer], type[TrainingArguments]]] = {
    "none": (Trainer, TrainingArguments),
    "state_passing": (StatePassingTrainer, StatePassingConfig),
}

# "Unexplored states" (arXiv:2507.02782), B.2: post-training of Mamba-2 in 500 steps (Figure 1)
PAPER_DEFAULTS: dict[str, Any] = {
    "max_steps": 500,
    "adam_beta2": 0.95,
    "lr_scheduler_type": "cosine_with_min_lr",
    "lr_scheduler_kwargs": {"min_lr": 1e-5},
    "warmup_steps": 0.1,
    "max_grad_norm": 1.0,
    "report_to": "none",
}


@dataclass
class RunArguments:
    """What to train, on what, with which intervention."""

    model: str = field(
        metadata={
            "help": "Checkpoint folder or Hub name; or a config.json to train from scratch (its model_type decides)."
        }
    )
    intervention: Literal["none", "state_passing"] = field(
        default="state_passing",
        metadata={"help": "Where initial states come from: none (zero, plain training) or state_passing."},
    )
    data: str = field(default="stdlib", metadata={"help": f"Training text: {DATA_HELP}"})
    data_split: str = field(default="train", metadata={"help": "Split of the data set to train on."})
    eval_data: str | None = field(
        default=None,
        metadata={
            "help": "Text for eval_loss, as for data. Default: the validation files with data=stdlib, else none."
        },
    )
    eval_data_split: str = field(default="validation", metadata={"help": "Split of eval_data."})
    text_column: str = field(default="text", metadata={"help": "Column that holds the text."})
    tokenizer: str | None = field(
        default=None, metadata={"help": 'Tokenizer folder or name, or "bytes". Default: the model\'s own.'}
    )
    block_length: int = field(default=2048, metadata={"help": "Training length T in tokens (2048 in the paper)."})
    mimetic: bool = field(
        default=False, metadata={"help": "Mimetic initialization before training from scratch (arXiv:2410.11135)."}
    )
    mimetic_c: float = field(default=8.0, metadata={"help": "Its c: A_n = -n^-c. The paper uses 2, 4 and 8."})
    mimetic_offset: int = field(default=0, metadata={"help": "Its n counts from 1 + offset; at n = 1 a head decays."})
    trust_remote_code: bool = field(default=False, metadata={"help": "Run the code that a checkpoint carries."})
    resume: bool = field(
        default=False, metadata={"help": "Continue from the newest complete checkpoint in output_dir."}
    )


class RunParser(HfArgumentParser):
    """Flags on top of a YAML file on top of the paper's defaults; unknown YAML keys are refused."""

    def __init__(self, arguments_class: type[TrainingArguments]) -> None:
        super().__init__(
            (RunArguments, arguments_class),  # type: ignore[arg-type]
            prog="lengthgen train",
            usage="lengthgen train [CONFIG.yaml] [--model MODEL] [--output_dir FOLDER] [--OPTION VALUE ...]",
            description="Train or post-train a model that takes initial states. Every option can stand in the YAML "
            "file (option: value) or on the command line, which wins. Besides the options of this command there are "
            "those of transformers.TrainingArguments; defaults follow arXiv:2507.02782, B.2 (500 steps, "
            "AdamW(0.9, 0.95), cosine to 1e-5 with 10 %% warm-up; set learning_rate to a tenth of pre-training's).",
        )
        self.set_defaults(**{key: value for key, value in PAPER_DEFAULTS.items() if key in self.names()})

    def names(self) -> set[str]:
        """All option names."""
        return {action.dest for action in self._actions} - {"help"}

    def use_file(self, path: str) -> None:
        """Take a YAML file's values as defaults.

        Raises:
            ValueError: for a missing file, text that is not a YAML mapping, or unknown keys (with the nearest known).
        """
        try:
            values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise ValueError(f"There is no config file {path}.") from error
        except yaml.YAMLError as error:
            raise ValueError(f"{path} is not valid YAML: {error}") from error
        if not isinstance(values, dict):
            raise ValueError(f"{path} must hold options as 'name: value' lines, got {type(values).__name__}.")
        for key in values:
            if key not in self.names():
                near = difflib.get_close_matches(str(key), self.names(), n=3)
                raise ValueError(f"{path}: unknown option {key!r}. Nearest: {', '.join(near) or 'none'}.")
        self.set_defaults(**{key: str(value) if isinstance(value, Path) else value for key, value in values.items()})
        for action in self._actions:
            action.required = action.required and action.dest not in values


def run(arguments: Sequence[str]) -> int:
    """Run the command with its arguments."""
    arguments = list(arguments)
    config_file = arguments.pop(0) if arguments and not arguments[0].startswith("-") else None
    first = RunParser(StatePassingConfig)
    if config_file:
        first.use_file(config_file)
    (settings, training) = first.parse_args_into_dataclasses(arguments, look_for_args_file=False)
    trainer_class, arguments_class = INTERVENTIONS[settings.intervention]
    if arguments_class is not StatePassingConfig:
        parser = RunParser(arguments_class)
        if config_file:
            parser.use_file(config_file)
        (settings, training) = parser.parse_args_into_dataclasses(arguments, look_for_args_file=False)
    train(settings, training, trainer_class)
    return 0


def train(settings: RunArguments, training: TrainingArguments, trainer_class: type[Trainer]) -> Trainer:
    """Train as the settings say, and save model and tokenizer to `training.output_dir`.

    Raises:
        ValueError: for settings that contradict each other, and as the data, model and trainer raise.
    """
    set_seed(training.seed)
    from_scratch = settings.model.endswith(".json")
    if from_scratch:
        config = AutoConfig.from_pretrained(settings.model, trust_remote_code=settings.trust_remote_code)
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=settings.trust_remote_code)
        if settings.mimetic:
            mimetic_initialization(model, c=settings.mimetic_c, offset=settings.mimetic_offset)
    elif settings.mimetic:
        raise ValueError("mimetic overwrites trained weights: it goes with a config.json as model, not a checkpoint.")
    else:
        model = load_model(settings.model, settings.trust_remote_code)
    tokenizer = load_tokenizer(
        settings.tokenizer or ("bytes" if from_scratch else settings.model), settings.trust_remote_code
    )
    if len(tokenizer) > model.config.vocab_size:
        raise ValueError(
            f"The tokenizer has {len(tokenizer)} tokens, the model's vocab_size is {model.config.vocab_size}."
        )
    blocks = _blocks(settings, settings.data, settings.data_split, tokenizer)
    eval_data = settings.eval_data or ("stdlib" if settings.data == "stdlib" else None)
    eval_blocks = None if eval_data is None else _blocks(settings, eval_data, settings.eval_data_split, tokenizer)
    model.config.training_length = settings.block_length
    if settings.intervention != "none":
        done = f"{settings.intervention}, {training.max_steps} steps"
        model.config.interventions = [*(getattr(model.config, "interventions", None) or ()), done]
    other_schedule = training.lr_scheduler_type != PAPER_DEFAULTS["lr_scheduler_type"]
    if other_schedule and training.lr_scheduler_kwargs == PAPER_DEFAULTS["lr_scheduler_kwargs"]:
        training.lr_scheduler_kwargs = None
    trainer = trainer_class(
        model, training, train_dataset=blocks, eval_dataset=eval_blocks, processing_class=tokenizer
    )
    trainer.train(resume_from_checkpoint=settings.resume or None)
    trainer.save_model()
    trainer.save_state()
    print(f"Saved to {training.output_dir}. Next: lengthgen evaluate {training.output_dir}")
    return trainer


def _blocks(settings: RunArguments, data: str, split: str, tokenizer: Any) -> PackedBlocks:
    return PackedBlocks(load_stream(data, split, tokenizer, settings.text_column).tokens, settings.block_length)
