"""`lengthgen train`: train or post-train a model with any intervention."""

import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, Trainer, set_seed

from hf_recurrent_lengthgen.checkpoints.adapters import add_adapter, holds_adapter, merge_advice
from hf_recurrent_lengthgen.checkpoints.loading import NoInitialState, load_model, load_tokenizer
from hf_recurrent_lengthgen.checkpoints.records import InitialWeights, Lineage
from hf_recurrent_lengthgen.checkpoints.sources import lineage_of
from hf_recurrent_lengthgen.cli.inputs import chosen_split, data_source
from hf_recurrent_lengthgen.cli.options import RunParser, read_options
from hf_recurrent_lengthgen.cli.run_arguments import PROMPTS, USUAL_LENGTH, RunArguments
from hf_recurrent_lengthgen.cli.shared_options import HOW
from hf_recurrent_lengthgen.cli.train_data import evaluation_data, stream_of, training_data, with_training_length
from hf_recurrent_lengthgen.data import PaddingCollator, rest_of, splits_overlap
from hf_recurrent_lengthgen.data.tasks import DEPTHS, KeyGrid, PasskeyGrid, RetrievalGrid, TaskStrings
from hf_recurrent_lengthgen.evaluation.results import DataSource
from hf_recurrent_lengthgen.models import FAMILIES, STATEFUL_CLASSES
from hf_recurrent_lengthgen.surgery import mimetic_initialization
from hf_recurrent_lengthgen.surgery.mimetic import SWITCHES
from hf_recurrent_lengthgen.trainers import (
    InitialStateConfig,
    InitialStateTrainer,
    LearnedStateConfig,
    MetricCallback,
    retrieval,
)
from hf_recurrent_lengthgen.trainers.checks import takes_states
from hf_recurrent_lengthgen.trainers.run.records import RunFacts
from hf_recurrent_lengthgen.trainers.run.resume import checkpoints_of, newest_complete_checkpoint

RESUME = ("--resume", "--resume-from-checkpoint")

command_parser = RunParser


def run(arguments: Sequence[str]) -> int:
    arguments = list(arguments)
    command, grouped = ["lengthgen", "train", *_without_resume(arguments)], dist.is_initialized()
    config_file = arguments.pop(0) if arguments and not arguments[0].startswith("-") else None
    settings, training, trainer_class = read_options(arguments, config_file)
    try:
        train(settings, training, trainer_class, command)
    except KeyboardInterrupt:
        if training.process_index == 0 and newest_complete_checkpoint(str(training.output_dir)) is not None:
            place = " in place of --resume-from-checkpoint" if training.resume_from_checkpoint else ""
            print(f"On the command line, add --resume to the same options{place} to continue.", flush=True)
        raise
    if dist.is_initialized() and not grouped:
        dist.destroy_process_group()  # threads of one that outlives the interpreter abort the process
    return 0


def _without_resume(arguments: Sequence[str]) -> list[str]:
    """The options without those of a resume, so that a card has a command that can start the run."""
    kept, before = [], ""
    for word in arguments:
        name = word.partition("=")[0].replace("_", "-")
        dropped = name in RESUME or (before in RESUME and not word.startswith("-"))  # an option or its value
        kept += [] if dropped else [word]
        before = word.replace("_", "-")
    return kept


def train(
    settings: RunArguments,
    training: InitialStateConfig,
    trainer_class: type[InitialStateTrainer],
    command: Sequence[str] = (),
) -> Trainer:
    """Train as the settings say, and save model, tokenizer and lineage to `training.output_dir`.

    Args:
        settings: The model, the data and the intervention.
        training: Arguments of the trainer.
        trainer_class: The trainer of the intervention.
        command: The command line, for the lineage; empty from Python.

    Raises:
        ValueError: for settings that contradict each other, and as the data, model and trainer raise.
    """
    _check_folders(settings, training)
    set_seed(training.seed)
    model = _model(settings, trainer_class.needs_states)
    if settings.attention_window is not None and (hasattr(model, "peft_config") or _state_alone(training)):
        raise ValueError(
            "An adapter or a learned state does not store attention_window: put it into a checkpoint first, "
            "load_model(MODEL, attention_window=W).save_pretrained(FOLDER), and train on FOLDER."
        )
    requested, length_before = settings.training_length, getattr(model.config, "training_length", None)
    settings = replace(settings, training_length=requested or length_before or USUAL_LENGTH)
    tokenizer = None if settings.of_symbols else _tokenizer(settings, model.config.vocab_size)
    if training.alignment_alpha and training.alignment_length is None:
        training.alignment_length = settings.length
    eval_dataset = evaluation_data(settings, training, tokenizer) if training.eval_strategy != "no" else None
    dataset = training_data(settings, training, tokenizer)
    if settings.task in PROMPTS:
        settings = with_training_length(settings, training, dataset.longest, requested)
    if not settings.of_symbols:
        guessed = not (requested or length_before or settings.task in PROMPTS)
        why = ", as its config names no training length (--training-length sets another)" * guessed
        print(f"Training at {settings.length:,} tokens{why}.")
    model.config.training_length = settings.length
    if settings.of_symbols:
        task = dataset.strings if settings.task_row_length else dataset
        _record_task(model.config, task, dataset.row_length)
    trainer = trainer_class(
        model,
        training,
        data_collator=None if settings.task == "text" else PaddingCollator(),
        train_dataset=dataset,
        eval_dataset=eval_dataset,
        processing_class=tokenizer,
        callbacks=_metrics(settings, training, tokenizer),
    )
    _record_method(trainer, _method(settings, training), training)
    trainer.facts = RunFacts(
        lineage_of(settings.model) if trainer.is_world_process_zero() else Lineage(),
        _data(settings),
        dataset.row_length if settings.of_symbols else settings.length,
        tuple(command),
        InitialWeights(settings.mimetic_start if settings.mimetic else None) if settings.from_scratch else None,
    )
    trainer.card_writer = _write_card
    trainer.train(resume_from_checkpoint=training.resume_from_checkpoint or settings.resume)
    trainer.save_model()
    trainer.save_state()
    if training.push_to_hub:
        trainer.push_to_hub()  # once more, now with the lineage
    if trainer.is_world_process_zero():
        text = [] if settings.of_symbols or settings.task == "examples" else _held_out(settings)
        print(_next_step(settings, training, text, takes_states(model)))
    return trainer


def _metrics(settings: RunArguments, training: InitialStateConfig, tokenizer: Any) -> list[MetricCallback]:
    """What is measured in each evaluation in addition to the loss."""
    if not settings.retrieval_lengths:
        return []
    sizes = DEPTHS, settings.retrieval_samples, training.seed
    grid: RetrievalGrid
    if settings.task == "keys":
        stream = stream_of(settings, settings.chosen_eval_data, settings.chosen_eval_split, tokenizer)
        grid = KeyGrid(tokenizer, stream, *sizes, settings.task_keys, settings.task_values)
    else:
        grid = PasskeyGrid(tokenizer, *sizes, settings.retrieval_style)
    return [MetricCallback([retrieval(grid, settings.retrieval_lengths)])]


def _write_card(*arguments: Any) -> bool:
    """See `write_card_of_run`, which needs matplotlib; only a push calls it."""
    from hf_recurrent_lengthgen.checkpoints.cards import write_card_of_run

    return write_card_of_run(*arguments)


def _check_folders(settings: RunArguments, training: InitialStateConfig) -> None:
    """Raise a `ValueError` if the output folder holds something that would be lost."""
    resumed, output = training.resume_from_checkpoint, str(training.output_dir)
    if Path(settings.model).resolve() == Path(output).resolve():
        raise ValueError(f"The trained model would overwrite {settings.model}: give another --output.")
    checkpoints = checkpoints_of(output)
    same = (step for step, path in checkpoints.items() if resumed and path.resolve() == Path(resumed).resolve())
    start = next(same, -1)
    later = [path.name for step, path in checkpoints.items() if step > start]
    if later and not settings.resume:
        raise ValueError(
            f"{output} holds checkpoints of an earlier run ({', '.join(later)}), which a later --resume would mix up "
            "with those of this one: continue it with --resume, give another --output, or remove them."
        )


def _model(settings: RunArguments, needs_states: bool) -> Any:
    """The model to train, new or loaded, with a new adapter if `lora_r` is set."""
    if not settings.from_scratch:
        how: dict[str, Any] = {"needs_states": needs_states, "attention_window": settings.attention_window}
        try:
            model = load_model(settings.model, settings.trust_remote_code, **how)
        except NoInitialState as error:
            advice = "Plain training and output alignment (--intervention none) take any type."
            raise ValueError(f"{error} {advice}") from error
        return model if settings.lora_r is None else _with_adapter(model, settings)
    model = _new_model(settings.model, settings.trust_remote_code)
    if settings.mimetic:
        switches = settings.mimetic_switches
        options: dict[str, Any] = {} if switches is None else {name: name in switches for name in SWITCHES}
        options |= {"c": settings.mimetic_c, "offset": settings.mimetic_offset, "layers": settings.mimetic_layers}
        mimetic_initialization(model, **options)
    return model


def _with_adapter(model: PreTrainedModel, settings: RunArguments) -> Any:
    """The model with a new adapter, whose config has the absolute path of the model."""
    name = settings.model
    if holds_adapter(name):
        raise ValueError(f"{name} is an adapter already: leave lora_r out to train it on. {merge_advice(name)}.")
    values, _ = PreTrainedConfig.get_config_dict(name)
    if values.get("model_type") in STATEFUL_CLASSES:
        convert = shlex.join(["lengthgen", "convert", name, "--output", "BASE"])
        raise ValueError(
            f"{name} is of type {values['model_type']!r}, so PEFT would load the adapter onto that class, not onto "
            f"{type(model).__name__}: run `{convert}`, and train on BASE."
        )
    if Path(name).is_dir():
        model.name_or_path = model.config.name_or_path = str(Path(name).resolve())
    alpha = 2 * settings.lora_r if settings.lora_alpha is None else settings.lora_alpha  # type: ignore[operator]
    return add_adapter(model, settings.lora_r, alpha)  # type: ignore[arg-type]


def _method(settings: RunArguments, training: InitialStateConfig) -> str:
    """The intervention and the loss in words; "" for plain training."""
    methods: list[str] = [settings.intervention] if settings.intervention != "none" else []
    if training.alignment_alpha:
        methods.append(f"output alignment {training.alignment_alpha:g}")
    if training.attention_windows is not None:
        methods.append(f"attention windows {' '.join(map(str, training.attention_windows))}")
    return " with ".join(methods)


def _record_method(trainer: Trainer, method: str, training: InitialStateConfig) -> None:
    """Record the method in the config of the trained model, which may be another object than `train` loaded."""
    if method:
        steps = training.max_steps
        budget = f"{steps} steps" if steps > 0 else f"{training.num_train_epochs:g} epochs"
        config: Any = trainer.model.config  # type: ignore[union-attr]
        config.interventions = [*(getattr(config, "interventions", None) or ()), f"{method}, {budget}"]


def _data(settings: RunArguments) -> DataSource:
    if settings.of_symbols:
        packed = f"sequences of {settings.task_row_length} tokens" if settings.task_row_length else ""
        return DataSource(f"{settings.task} of {settings.task_length} random symbols", selection=packed)
    if settings.task == "passkey":
        tokens = f", of {settings.task_length} tokens" if settings.task_length else ""
        return DataSource("passkey prompts", selection=f"style {settings.task_style}{tokens}")
    source = data_source(settings.data, settings.chosen_split)
    if settings.task == "examples":
        return replace(source, selection="examples, with the loss on the answers")
    if settings.task == "babilong":
        return replace(source, name=f"questions of bAbI in {source.name}")
    if settings.task == "keys":
        keys = f"{settings.task_keys} keys of {settings.task_values} values"
        tokens = f", {settings.task_length} tokens," if settings.task_length else ""
        source = replace(source, name=f"{keys}{tokens} in {source.name}")
    least = settings.minimum_document_tokens
    return replace(source, selection=f"documents of at least {least:,} tokens") if least else source


def _state_alone(training: InitialStateConfig) -> bool:
    """Whether only a learned state is saved, and no model."""
    return isinstance(training, LearnedStateConfig) and not training.train_model


def _new_model(file: str, trust_remote_code: bool) -> Any:
    """A model from a config.json with random weights; of our class also for the config of an upstream model."""
    values, _ = PreTrainedConfig.get_config_dict(file)
    model_type = values.get("model_type")
    if model_type in STATEFUL_CLASSES:
        config = STATEFUL_CLASSES[model_type].config_class.from_dict(values)
    elif str(model_type).startswith("stateful_"):
        config = AutoConfig.from_pretrained(file, trust_remote_code=trust_remote_code)
    else:
        possible = sorted(STATEFUL_CLASSES) + sorted(FAMILIES)
        raise ValueError(
            f"{file} has the model_type {model_type!r}; to train from scratch, give one of {', '.join(possible)}. "
            "`lengthgen recipe copy FOLDER` writes examples to FOLDER/models."
        )
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=trust_remote_code)


def _tokenizer(settings: RunArguments, vocab_size: int) -> Any:
    """That of --tokenizer, else of the checkpoint, else bytes for a model from scratch."""
    tokenizer = load_tokenizer(
        settings.tokenizer or ("bytes" if settings.from_scratch else settings.model), settings.trust_remote_code
    )
    if len(tokenizer) > vocab_size:
        raise ValueError(
            f"The tokenizer has {len(tokenizer)} tokens, the model's vocab_size is {vocab_size}: give "
            "the model's own tokenizer, or a config.json with a larger vocab_size."
        )
    return tokenizer


def _record_task(config: Any, task: TaskStrings, row_length: int) -> None:
    """Record the task in the config, for `lengthgen accuracy`."""
    if task.vocab_size > config.vocab_size:
        raise ValueError(
            f"task {task.name} with {task.vocabulary} symbols has {task.vocab_size} tokens, the model's vocab_size is "
            f"{config.vocab_size}: give a smaller task_vocabulary, or a config.json with a larger vocab_size."
        )
    config.training_length, config.task = row_length, task.record


def _held_out(settings: RunArguments) -> list[str]:
    """Options of `lengthgen evaluate` that name held-out text."""
    data = settings.eval_data or settings.data
    options = {"--data": data, "--split": _held_out_split(settings), "--text-column": settings.text_column}
    changed = {name: value for name, value in options.items() if value not in (None, HOW[name].get("default"))}
    return [word for option in changed.items() for word in option]


def _held_out_split(settings: RunArguments) -> str | None:
    """The split for evaluations, else what a slice in training left of its split; None leaves the choice open."""
    return settings.eval_split or (rest_of(settings.chosen_split) if settings.eval_data is None else None)


def _trained_on(settings: RunArguments) -> str:
    """A line if the text that `lengthgen evaluate` would read is that of the training."""
    other = settings.eval_data not in (None, settings.data)
    if settings.of_symbols or settings.task in ("passkey", "examples") or other:
        return ""
    evaluated = chosen_split(settings.data, _held_out_split(settings), "validation")
    if not splits_overlap(settings.chosen_split, evaluated):
        return ""
    part = f"{settings.chosen_split.partition('[')[0]}[:90%]"
    return (
        "\nIt was trained on this text. For the loss on unseen text, give other text with --data, or train with "
        f'--split "{part}", or on a folder with train.txt and validation.txt.'
    )


def _next_step(
    settings: RunArguments, training: InitialStateConfig, text: Sequence[str] = (), has_states: bool = True
) -> str:
    """The message after a training: what was saved, and how to check and measure it.

    `text` are options of `lengthgen evaluate`. A model without states is one of Transformers, which `lengthgen verify`
    does not take.
    """
    output = str(training.output_dir)
    command = ["lengthgen", "accuracy" if settings.of_symbols else "evaluate"]
    if settings.of_symbols or settings.from_scratch:
        command.append(output)
    else:
        role = "intervention" if _method(settings, training) else "control"
        command += [settings.model, output, "--roles", f"base,{role}", "--training-length", str(settings.length)]
        command += ["--tokenizer", settings.tokenizer] if settings.tokenizer else []
    command += [*text, *(["--trust-remote-code"] if settings.trust_remote_code else [])]
    check = [["lengthgen", "verify", output]] if has_states and not _state_alone(training) else []
    if holds_adapter(output):
        check = [["lengthgen", "merge", output, "--output", f"{output}-merged"]]
    return f"Saved to {output}. Next: {', then '.join(map(shlex.join, [*check, command]))}{_trained_on(settings)}"
