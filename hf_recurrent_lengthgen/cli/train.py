"""`lengthgen train`: train or post-train a model with any intervention that exists."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM, Trainer, set_seed
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from hf_recurrent_lengthgen.cli.inputs import load_documents, load_stream, load_tokenizer
from hf_recurrent_lengthgen.cli.options import RunArguments, RunParser
from hf_recurrent_lengthgen.data import ContinuedChunks, PackedBlocks, keep_long_documents
from hf_recurrent_lengthgen.data.tasks import BabilongPrompts, PasskeyPrompts, babi_files, read_babi
from hf_recurrent_lengthgen.loading import load_model
from hf_recurrent_lengthgen.surgery import mimetic_initialization
from hf_recurrent_lengthgen.trainers import InitialStateConfig, InitialStateTrainer, MixedStatesConfig, TbttConfig
from hf_recurrent_lengthgen.trainers.alignment_loss import largest_extra

PASSKEY_SAMPLES, PASSKEY_EVALUATION_SAMPLES = 100_000, 256
"""Samples of an epoch where max_steps does not say how many there are, and of an evaluation."""


def run(arguments: Sequence[str]) -> int:
    """Run the command with its arguments."""
    arguments = list(arguments)
    config_file = arguments.pop(0) if arguments and not arguments[0].startswith("-") else None
    settings, training, trainer_class = RunParser(everything="--help-all" in arguments).read(arguments, config_file)
    train(settings, training, trainer_class)
    return 0


def train(settings: RunArguments, training: InitialStateConfig, trainer_class: type[InitialStateTrainer]) -> Trainer:
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
    _check_task(settings, training)
    if training.alignment_alpha and training.alignment_length is None:
        training.alignment_length = settings.block_length
    rows = _rows(settings, training, tokenizer)
    eval_data = settings.eval_data or ("stdlib" if evaluated and settings.data == "stdlib" else None)
    eval_rows = None if eval_data is None else _evaluation_rows(settings, eval_data, training, tokenizer)
    model.config.training_length = settings.block_length
    if settings.intervention != "none":
        steps = training.max_steps
        budget = f"{steps} steps" if steps > 0 else f"{training.num_train_epochs:g} epochs"
        done = f"{settings.intervention}, {budget}"
        model.config.interventions = [*(getattr(model.config, "interventions", None) or ()), done]
    trainer = trainer_class(model, training, train_dataset=rows, eval_dataset=eval_rows, processing_class=tokenizer)
    trainer.train(resume_from_checkpoint=settings.resume or None)
    trainer.save_model()
    trainer.save_state()
    print(f"Saved to {output}. Next: {shlex.join(['lengthgen', 'evaluate', output])}")
    return trainer


def _check_task(settings: RunArguments, training: InitialStateConfig) -> None:
    """Refuse options of other data than those that are asked for."""
    continued = _continues(training)
    wrong = {
        "chunks_before_reset": settings.chunks_before_reset != 12 and not continued,
        "reset_at_document": settings.reset_at_document and not continued,
        "task_files": (settings.task_files is None) == (settings.task == "babilong"),
        "task_style": settings.task_style is not None and settings.task != "passkey",
        "minimum_document_tokens": settings.minimum_document_tokens > 0 and settings.task != "text",
    }
    if any(wrong.values()):
        raise ValueError(
            f"{[name for name, found in wrong.items() if found]} do not fit task {settings.task} and intervention "
            f"{settings.intervention}: chunks_before_reset and reset_at_document go with tbtt, task_files with "
            "babilong (required there), task_style with passkey, minimum_document_tokens with text."
        )
    if settings.task != "text" and (continued or training.alignment_alpha):
        raise ValueError(f"task {settings.task} has rows of its own: it goes with neither tbtt nor alignment_alpha.")


def _continues(training: InitialStateConfig) -> bool:
    return isinstance(training, TbttConfig) or (
        isinstance(training, MixedStatesConfig) and "tbtt" in (training.mixture or {})
    )


def _lookahead(training: InitialStateConfig) -> int:
    """Tokens that the alignment loss reads beyond the training length."""
    if not training.alignment_alpha:
        return 0
    assert training.alignment_length is not None
    return training.alignment_max_extra or largest_extra(training.alignment_length)


def _rows(settings: RunArguments, training: InitialStateConfig, tokenizer: Any) -> Any:
    """Training data."""
    if settings.task != "text":
        return _task_rows(settings, settings.data, settings.data_split, training, tokenizer)
    stream = load_stream(settings.data, settings.data_split, tokenizer, settings.text_column).tokens
    if settings.minimum_document_tokens:
        stream = keep_long_documents(stream, tokenizer.eos_token_id, settings.minimum_document_tokens)
    lookahead = _lookahead(training)
    if _continues(training):
        return ContinuedChunks(
            stream,
            settings.block_length,
            settings.chunks_before_reset or None,
            settings.reset_at_document,
            tokenizer.eos_token_id if settings.reset_at_document else None,
            lookahead,
        )
    # A block of n predictions has n + 1 tokens.
    return PackedBlocks(stream, settings.block_length + max(lookahead - 1, 0))


def _evaluation_rows(settings: RunArguments, data: str, training: InitialStateConfig, tokenizer: Any) -> Any:
    if settings.task != "text":
        return _task_rows(settings, data, settings.eval_data_split, training, tokenizer)
    stream = load_stream(data, settings.eval_data_split, tokenizer, settings.text_column).tokens
    return PackedBlocks(stream, settings.block_length)


def _task_rows(settings: RunArguments, data: str, split: str, training: InitialStateConfig, tokenizer: Any) -> Any:
    """Rows of a task; the keys and places of other splits than the training split come from another seed."""
    seed = training.seed + (split != settings.data_split)
    if settings.task == "passkey":
        rows = training.per_device_train_batch_size * training.gradient_accumulation_steps * training.world_size
        samples = rows * training.max_steps if training.max_steps > 0 else PASSKEY_SAMPLES
        style = {} if settings.task_style is None else {"style": settings.task_style}
        if split != settings.data_split:
            samples = min(samples, PASSKEY_EVALUATION_SAMPLES)
        return PasskeyPrompts(tokenizer, settings.block_length, samples, seed, **style)
    assert settings.task_files is not None
    files = babi_files(settings.task_files, "train" if split == settings.data_split else "test")
    questions = [question for file in files for question in read_babi(file)]
    background = load_documents(data, split, settings.text_column)
    prompts = BabilongPrompts(tokenizer, questions, background, settings.block_length, seed)
    if prompts.left_out:
        print(f"Left out {prompts.left_out} of {len(questions)} questions, whose facts do not fit into a row.")
    return prompts
