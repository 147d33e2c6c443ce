"""What a trainer refuses, with the reason, before anything is trained."""

import dataclasses
import inspect
import os
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.utils.data import IterableDataset, RandomSampler
from transformers import TrainingArguments
from transformers.trainer_utils import has_length

from hf_recurrent_lengthgen.data.continued import ContinuedChunks, ContinuedStream
from hf_recurrent_lengthgen.data.packing import IGNORED_LABEL, sampled_digest
from hf_recurrent_lengthgen.models.forgetting import Forgetting
from hf_recurrent_lengthgen.models.recurrent_state import RecurrentState
from hf_recurrent_lengthgen.models.token_inputs import check_token_ids
from hf_recurrent_lengthgen.trainers.alignment import AlignmentSettings
from hf_recurrent_lengthgen.trainers.chunked_backprop import check_chunkable, innermost_model
from hf_recurrent_lengthgen.trainers.nonfinite_states import recurrent_layers
from hf_recurrent_lengthgen.trainers.scored_targets import token_labels

STATE_ARGUMENTS = {"initial_state", "output_final_state"}


def base_of(model: Any) -> Any:
    """The model itself, without PEFT."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def takes_states(model: nn.Module) -> bool:
    """Whether a model takes `initial_state` and returns a `final_state` that holds all of its state."""
    base = base_of(model)
    return set(inspect.signature(base.forward).parameters) >= STATE_ARGUMENTS and not _stateless_layers(base)


def _stateless_layers(base: Any) -> list[int]:
    return getattr(base, "stateless_layers", [])


def check_model(model: nn.Module) -> None:
    """Raise a `ValueError` for a model that cannot be given states."""
    base = base_of(model)
    missing = STATE_ARGUMENTS - set(inspect.signature(base.forward).parameters)
    if missing:
        raise ValueError(
            f"{type(base).__name__} takes no {sorted(missing)}, so it cannot be given states. Load it with "
            "hf_recurrent_lengthgen.load_model(...), or wrap it with stateful(model)."
        )
    if _stateless_layers(base):
        base.check_has_states()


def check_trainer(trainer: Any) -> None:
    """Raise a `ValueError` for a model, settings or data under which a method would do something else than it says."""
    model, args = trainer.model, trainer.args
    if trainer.needs_states:
        check_model(model)
    check_trainable(model, trainer.learns_state)
    check_no_forgetting(model)
    check_arguments(args)
    check_state_limits(model, args)
    keep_states_in_full_precision(trainer.accelerator.state)
    if args.bptt_chunk_length is not None:
        check_chunkable(innermost_model(model))
    for name in ("train_dataset", "eval_dataset"):
        check_not_empty(name, getattr(trainer, name))
    check_evaluation_data(trainer.eval_dataset)


def check_train_data(trainer: Any, alignment: AlignmentSettings | None) -> None:
    """Raise a `ValueError` for training data whose rows do not suit the method."""
    dataset = trainer.train_dataset
    continued = isinstance(dataset, ContinuedChunks | ContinuedStream)
    if trainer.needs_continued_data or continued:
        check_continued_data(trainer, dataset, alignment)
    if trainer.needs_shuffled_data:
        sampler = None if continued else trainer._get_train_sampler
        check_shuffled(type(trainer).__name__, dataset, trainer.args, sampler)


def check_state_limits(model: nn.Module, args: Any) -> None:
    """Raise a `ValueError` for settings of broken states that a model has no states for."""
    given = (args.nonfinite_states, args.max_state_rms) != ("stop", None)
    if given and not takes_states(model):
        raise ValueError(
            f"{type(model).__name__} has no states that could break: leave nonfinite_states and max_state_rms out."
        )
    if args.max_state_rms is not None and not _has_recurrent_part(base_of(model)):
        raise ValueError(
            f"max_state_rms limits the recurrent parts of states, and {type(base_of(model)).__name__} has only "
            "short convolutions: leave it out."
        )


def _has_recurrent_part(base: Any) -> bool:
    """Whether some layer has one; a model that does not say (`zero_state`) has."""
    return not hasattr(base, "zero_state") or bool(recurrent_layers(base.zero_state(1)))


def check_config(trainer: type[Any], args: Any) -> None:
    """Raise a `ValueError` for arguments of another class than a trainer's own."""
    if not isinstance(args, trainer.config_class):
        raise ValueError(
            f"{trainer.__name__} needs its arguments as {trainer.config_class.__name__}, which has all fields of "
            f"TrainingArguments; got {type(args).__name__}."
        )


def check_arguments(args: TrainingArguments) -> None:
    """Raise a `ValueError` for arguments under which states would be lost or mixed up."""
    if args.n_gpu > 1:
        raise ValueError(
            f"{args.n_gpu} GPUs in one process (DataParallel) would mix up carried states: start one process for each "
            "GPU with accelerate launch or torchrun, or set CUDA_VISIBLE_DEVICES."
        )
    if args.auto_find_batch_size:
        raise ValueError("auto_find_batch_size is not supported: carried states belong to one batch size. Give it.")
    if args.label_smoothing_factor:
        raise ValueError("label_smoothing_factor is not supported: Trainer would smooth against unshifted labels.")
    for name in ("activation_checkpointing_kwargs", "gradient_checkpointing_kwargs"):
        if (getattr(args, name, None) or {}).get("use_reentrant"):
            raise ValueError(
                "Reentrant activation checkpointing loses gradients through recurrent states: set use_reentrant=False."
            )
    if getattr(args.accelerator_config, "split_batches", False):
        raise ValueError(
            "accelerator_config split_batches is not supported: rows would change their process. Leave it out and "
            "give per_device_train_batch_size."
        )
    started = int(os.environ.get("WORLD_SIZE", 1))
    if started > args.world_size:
        raise ValueError(
            f"{started} processes were started, but each sees itself alone and would train all of the data: without "
            "GPUs, give use_cpu=True."
        )
    if args.world_size > 1:
        _check_same_on_processes(args)


def _check_same_on_processes(args: TrainingArguments) -> None:
    """Raise a `ValueError` for what would train other weights than one process with all rows."""
    if not getattr(args, "average_tokens_across_devices", True):
        raise ValueError(
            "average_tokens_across_devices=False would weigh a token by the others on its process: leave it out."
        )
    config = args.accelerator_config
    for name, other in (("even_batches", False), ("use_seedable_sampler", False), ("dispatch_batches", False)):
        if getattr(config, name, None) is other:
            raise ValueError(
                f"accelerator_config {name}=False would give {args.world_size} processes other rows than one: leave "
                "it out."
            )
    strategy = args.train_sampling_strategy
    if str(getattr(strategy, "value", strategy)) not in ("random", "sequential"):
        raise ValueError(
            f"train_sampling_strategy {strategy!r} orders rows by the batches of one process, so {args.world_size} "
            "processes would see other batches than one: leave it out, or train on one."
        )


def check_shuffled(trainer: str, dataset: Any, args: Any, make_sampler: Callable[[], Any] | None) -> None:
    """Raise a `ValueError` for data that are known to come in order; `make_sampler` is None if their rows continue."""
    if make_sampler is None:
        raise ValueError(
            f"{trainer} passes states between different sequences, but the rows of a {type(dataset).__name__} "
            "continue one another: train on it with TbttTrainer."
        )
    if getattr(args, "assume_shuffled", False):
        return
    if isinstance(dataset, IterableDataset) or not has_length(dataset):
        raise ValueError(
            f"{trainer} passes states between different sequences, so the data must be shuffled; "
            "a stream cannot be checked. Shuffle it and set assume_shuffled=True."
        )
    if not isinstance(make_sampler(), RandomSampler):
        raise ValueError(
            f"{trainer} passes states between different sequences, so the data must be shuffled: use "
            "Trainer's default random sampler, or set assume_shuffled=True if the data are shuffled already."
        )


def check_not_empty(name: str, dataset: Any) -> None:
    """Raise a `ValueError` for data without a row; of a stream that is not known."""
    for each in dataset.values() if isinstance(dataset, dict) else [dataset]:
        if each is not None and has_length(each) and not len(each):
            raise ValueError(f"{name} holds no row: give data, or shorter rows if they were cut from a text.")


def check_batch(model: nn.Module | None, inputs: Mapping[str, Any]) -> None:
    """Raise a `ValueError` that names row and position for ids and labels of tokens that are not in the vocabulary."""
    vocabulary = getattr(getattr(base_of(model), "config", None), "vocab_size", None)
    if vocabulary is None:
        return
    if isinstance(ids := inputs.get("input_ids"), Tensor):
        check_token_ids(ids, vocabulary)
    for name in token_labels(base_of(model), inputs):
        check_token_ids(inputs[name], vocabulary, name, IGNORED_LABEL)


def check_trainable(model: nn.Module, learns_state: bool) -> None:
    """Raise a `ValueError` for a model without anything to train, and for what LearnedStateTrainer left in it."""
    if hasattr(model, "learned_state") and not learns_state:
        raise ValueError(
            "The model still has the learned state of a LearnedStateTrainer, which this trainer would not use: keep "
            "it with save_state(path, trainer.learned_state()), then del model.learned_state."
        )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(
            "Nothing in the model is to be trained: all parameters are frozen, maybe by LearnedStateTrainer. "
            "model.requires_grad_(True) undoes it."
        )


def check_no_forgetting(model: nn.Module | None) -> None:
    """Raise a `ValueError` for a model that is made to forget, in its config or by `forgetting`."""
    config: Any = getattr(base_of(model), "config", None)
    if Forgetting.of(config) != Forgetting():
        raise ValueError(
            f"The model is made to forget at inference ({config.forgetting}). Training would make up for that, and "
            "random or learned states cannot fill a window. Train without it (model.config.forgetting = None, or the "
            "checkpoint that it was made from) and set it afterwards."
        )


def check_evaluation_data(dataset: Any) -> None:
    """Raise a `ValueError` for rows that continue one another, since each row is evaluated on its own."""
    for each in dataset.values() if isinstance(dataset, dict) else [dataset]:
        if isinstance(each, ContinuedChunks | ContinuedStream):
            raise ValueError(
                f"Evaluation starts every row anew, but the rows of a {type(each).__name__} continue one another: "
                "give PackedBlocks as eval_dataset."
            )


def check_continued_data(trainer: Any, dataset: Any, alignment: AlignmentSettings | None) -> None:
    """Raise a `ValueError` unless rows continue those of the step before, stay in their places and can be reset."""
    args = trainer.args
    if not isinstance(dataset, ContinuedChunks | ContinuedStream):
        raise ValueError(
            f"{type(trainer).__name__} needs rows that continue those of the step before: give a ContinuedChunks or "
            f"ContinuedStream of hf_recurrent_lengthgen.data as train_dataset, got {type(dataset).__name__}."
        )
    if args.ignore_data_skip:
        raise ValueError(
            "ignore_data_skip would continue carried states with other texts after a resume: leave it out."
        )
    strategy = args.train_sampling_strategy
    if str(getattr(strategy, "value", strategy)) != "random":
        raise ValueError(
            f"train_sampling_strategy {strategy!r} would part rows that continue one another: leave it out."
        )
    if isinstance(dataset, ContinuedStream):
        rows = args.per_device_train_batch_size * args.gradient_accumulation_steps
        wanted = {"rows": rows, "process_index": args.process_index, "num_processes": args.world_size}
        wrong = {name: value for name, value in wanted.items() if getattr(dataset, name) != value}
        if wrong:
            given = {name: getattr(dataset, name) for name in wrong}
            raise ValueError(f"The ContinuedStream was made with {given}, but this run needs {wrong}.")
    if isinstance(dataset, ContinuedStream) and args.dataloader_num_workers > 1:
        raise ValueError(
            "A ContinuedStream is read in order, by one data worker at most: dataloader_num_workers is "
            f"{args.dataloader_num_workers}."
        )
    if dataset.reset_at_document:
        if not trainer.needs_continued_data:
            raise ValueError(
                "reset_at_document sets states to zero inside rows, which goes with TBTT, not with "
                f"{type(trainer).__name__}: leave it out."
            )
        if alignment is not None:
            raise ValueError("The alignment loss compares texts that go on: use it without reset_at_document.")
        if hasattr(base_of(trainer.model), "attends"):
            raise ValueError(
                f"{type(base_of(trainer.model)).__name__} is wrapped by stateful(), which takes no padding; "
                "reset_at_document needs it to cut rows where documents begin: leave it out."
            )
    needed = 0 if alignment is None else alignment.max_extra
    if alignment is not None and alignment.length != dataset.length:
        raise ValueError(
            f"alignment_length must be the length of the chunks, {dataset.length}, so that the next chunk continues "
            f"the first crop; got {alignment.length}. The chunks need lookahead=alignment_max_extra, by default "
            f"T - T // 2 - 1."
        )
    if dataset.lookahead != needed:
        raise ValueError(
            f"The chunks have lookahead={dataset.lookahead}, this run needs {needed}"
            f"{' (alignment_max_extra)' if needed else ': only the alignment loss reads ahead'}."
        )


def layout_of(dataset: Any) -> dict[str, Any]:
    """What a resumed run must share of its data: their number of rows, what their `resume_record` says if they have
    one, and how and in which text rows continue."""
    if not isinstance(dataset, ContinuedChunks | ContinuedStream):
        rows = {"train_dataset.rows": len(dataset)} if has_length(dataset) else {}
        return {**rows, "train_dataset.record": getattr(dataset, "resume_record", None)}
    names = ("length", "chunks_before_reset", "reset_at_document", "lookahead")
    layout = {f"train_dataset.{name}": getattr(dataset, name) for name in names}
    if isinstance(dataset, ContinuedStream) and dataset.num_processes > 1:
        layout["train_dataset.documents"] = "dealt to rows"  # once to processes
    if isinstance(dataset, ContinuedChunks):
        layout["train_dataset.tokens"] = len(dataset.stream)
        layout["train_dataset.digest"] = sampled_digest(dataset.stream)
    return layout


def zero_state_of(trainer: Any) -> Callable[[int], RecurrentState]:
    """Makes the zero state of a trainer's model for a number of rows.

    Raises:
        ValueError: for a model that cannot, and one that noise means nothing to.
    """
    if not hasattr(base_of(trainer.model), "zero_state"):
        raise ValueError(
            f"{type(base_of(trainer.model)).__name__} has no method zero_state(rows), which says what shape noise "
            "must have. Load the model with hf_recurrent_lengthgen.load_model(...), or wrap it with stateful(model)."
        )
    base = base_of(trainer.model)
    reason = getattr(base, "no_noise", None)
    if not _has_recurrent_part(base):
        reason = "it has short convolutions only, whose states noise leaves alone, so nothing would change"
    if reason is not None:
        raise ValueError(f"{type(base).__name__} cannot start from noise: {reason}. Take passed or learned states.")
    return lambda rows: base_of(trainer.model).zero_state(rows)


def keep_states_in_full_precision(accelerator_state: Any) -> None:
    """Let FSDP cast weights but not states, which its default policy would cast at every module.

    Raises:
        ValueError: for the first version of FSDP, which was never tried with states.
    """
    plugin = getattr(accelerator_state, "fsdp_plugin", None)
    if plugin is None:
        return
    if getattr(plugin, "fsdp_version", 1) != 2:
        raise ValueError("FSDP version 1 is not supported: set fsdp_version: 2 in the accelerate config.")
    policy = plugin.mixed_precision_policy
    if policy is not None and getattr(policy, "cast_forward_inputs", False):
        plugin.mixed_precision_policy = dataclasses.replace(policy, cast_forward_inputs=False)
