"""`lengthgen train`: train or post-train a model with any intervention that exists."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments, set_seed
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from hf_recurrent_lengthgen.cli.inputs import load_stream, load_tokenizer
from hf_recurrent_lengthgen.cli.options import RunArguments, RunParser
from hf_recurrent_lengthgen.data import PackedBlocks
from hf_recurrent_lengthgen.loading import load_model
from hf_recurrent_lengthgen.surgery import mimetic_initialization
from hf_recurrent_lengthgen.trainers import StatePassingConfig, StatePassingTrainer, ZeroStateTrainer

INTERVENTIONS: dict[str, tuple[type[Trainer], type[TrainingArguments]]] = {
    "none": (ZeroStateTrainer, TrainingArguments),
    "state_passing": (StatePassingTrainer, StatePassingConfig),
}


def run(arguments: Sequence[str]) -> int:
    """Run the command with its arguments."""
    arguments = list(arguments)
    config_file = arguments.pop(0) if arguments and not arguments[0].startswith("-") else None
    parser = RunParser(StatePassingConfig, everything="--help-all" in arguments)
    values = parser.parse(arguments, config_file)
    trainer_class, arguments_class = INTERVENTIONS[values["intervention"]]
    if arguments_class is not StatePassingConfig:
        parser = RunParser(arguments_class)
        values = parser.parse(arguments, config_file)
    settings, training = parser.parse_dict(values)
    train(settings, training, trainer_class)
    return 0


def train(settings: RunArguments, training: TrainingArguments, trainer_class: type[Trainer]) -> Trainer:
    """Train as the settings say, and save model and tokenizer to `training.output_dir`.

    Raises:
        ValueError: for settings that contradict each other, and as the data, model and trainer raise.
    """
    output = str(training.output_dir)
    if Path(settings.model).resolve() == Path(output).resolve():
        raise ValueError(f"The trained model would overwrite {settings.model}: give another output_dir.")
    if any(Path(output).glob(f"{PREFIX_CHECKPOINT_DIR}-*")) and not settings.resume:
        raise ValueError(
            f"{output} holds checkpoints of an earlier run, which a later --resume would mix up with those of this "
            "one: continue it with --resume, give another output_dir, or remove them."
        )
    if training.max_steps == 0:
        raise ValueError("max_steps must be at least 1, or left out for num_train_epochs; got 0.")
    evaluated = str(getattr(training.eval_strategy, "value", training.eval_strategy)) != "no"
    if settings.eval_data and not evaluated:
        raise ValueError("eval_data needs eval_strategy: steps or epoch.")
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
            f"The tokenizer has {len(tokenizer)} tokens, the model's vocab_size is {model.config.vocab_size}: give "
            "the model's own tokenizer, or a config.json with a larger vocab_size."
        )
    blocks = _blocks(settings, settings.data, settings.data_split, tokenizer)
    eval_data = settings.eval_data or ("stdlib" if evaluated and settings.data == "stdlib" else None)
    eval_blocks = None if eval_data is None else _blocks(settings, eval_data, settings.eval_data_split, tokenizer)
    model.config.training_length = settings.block_length
    if settings.intervention != "none":
        steps = training.max_steps
        budget = f"{steps} steps" if steps > 0 else f"{training.num_train_epochs:g} epochs"
        done = f"{settings.intervention}, {budget}"
        model.config.interventions = [*(getattr(model.config, "interventions", None) or ()), done]
    trainer = trainer_class(
        model, training, train_dataset=blocks, eval_dataset=eval_blocks, processing_class=tokenizer
    )
    trainer.train(resume_from_checkpoint=settings.resume or None)
    trainer.save_model()
    trainer.save_state()
    print(f"Saved to {output}. Next: {shlex.join(['lengthgen', 'evaluate', output])}")
    return trainer


def _blocks(settings: RunArguments, data: str, split: str, tokenizer: Any) -> PackedBlocks:
    return PackedBlocks(load_stream(data, split, tokenizer, settings.text_column).tokens, settings.block_length)
