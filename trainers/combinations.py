"""What does not combine: settings, models and data with which a method would have another effect, in tables.

A row is a question about a trainer, whose answer is false where all is well, and a message, in which `{0}` is the
answer, `{1}` the name of a class.
"""

import inspect
import os
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any, NamedTuple

from torch.utils.data import IterableDataset
from transformers.trainer_utils import has_length
from transformers.training_args import OptimizerNames

from hf_recurrent_lengthgen.data.continued import ContinuedChunks
from hf_recurrent_lengthgen.models.modeling_protocols import base_of

UPDATE_IN_BACKWARD = {OptimizerNames.LOMO, OptimizerNames.ADALOMO}
"""Optimizers that change the weights in the backward pass of each micro-batch."""


class Refusal(NamedTuple):
    """A combination that is refused.

    Attributes:
        question: Returns what is wrong in a trainer, or something false.
        message: What is wrong and what to do.
        about: Returns the object whose class the message names.
    """

    question: Callable[[Any], Any]
    message: str
    about: Callable[[Any], Any] = lambda trainer: base_of(trainer.model)


def refuse(trainer: Any, tables: Iterable[tuple[Refusal, ...]]) -> None:
    """Raise a `ValueError` for the first combination of tables that a trainer has."""
    for question, message, about in chain.from_iterable(tables):
        if answer := question(trainer):
            raise ValueError(message.format(answer, type(about(trainer)).__name__))


def _argument(name: str, allowed: Any = None) -> Callable[[Any], Any]:
    """The value of an argument, if it is not the `allowed` one."""

    def question(trainer: Any) -> Any:
        value = getattr(trainer.args, name, None)
        return None if value is None or value == allowed else str(value) or "nothing"

    return question


def _of_accelerator(name: str, value: bool) -> Callable[[Any], bool]:
    return lambda trainer: getattr(trainer.args.accelerator_config, name, None) is value


def _reentrant(trainer: Any) -> bool:
    names = ("activation_checkpointing_kwargs", "gradient_checkpointing_kwargs")
    return any((getattr(trainer.args, name, None) or {}).get("use_reentrant") for name in names)


def _started_alone(trainer: Any) -> int:
    started = int(os.environ.get("WORLD_SIZE", 1))
    return started if started > trainer.args.world_size else 0


def _old_fsdp(trainer: Any) -> bool:
    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    return plugin is not None and getattr(plugin, "fsdp_version", 1) != 2


def _datasets(trainer: Any, names: tuple[str, ...] = ("train_dataset", "eval_dataset")) -> Iterator[tuple[str, Any]]:
    for name in names:
        data = getattr(trainer, name)
        yield from ((name, each) for each in (data.values() if isinstance(data, dict) else [data]) if each is not None)


def _empty(trainer: Any) -> str | None:
    return next((name for name, data in _datasets(trainer) if has_length(data) and not len(data)), None)


def _continued_evaluation(trainer: Any) -> bool:
    return any(isinstance(data, ContinuedChunks) for _, data in _datasets(trainer, ("eval_dataset",)))


_SPLIT_NO_SEQUENCES = (
    Refusal(
        lambda trainer: "sequence_group" not in inspect.signature(base_of(trainer.model).forward).parameters,
        "{1} takes no sequence_group, so processes cannot split its sequences: leave context_parallel_size out, or "
        "give a causal language model of a family of this package.",
    ),
)
_READ_NO_CHUNKS = (
    Refusal(
        lambda trainer: any(each.is_prompt_learning for each in getattr(trainer.model, "peft_config", {}).values()),
        "The adapter puts virtual tokens before each input of the model, so before each chunk of a sequence: choose "
        "another adapter, such as LoRA, or leave bptt_chunk_length out.",
    ),
    Refusal(
        lambda trainer: trainer.compute_loss_func,
        "compute_loss_func gets the logits and labels of whole sequences, which chunks do not have: leave it or "
        "bptt_chunk_length out.",
    ),
)
_READ_NO_WINDOWS = (
    Refusal(
        lambda trainer: trainer.learns_state,
        "bptt_window stops the gradient between windows, so a learned state would learn from the first window of each "
        "sequence only: leave bptt_window out. With bptt_chunk_length alone the gradient is that of whole sequences.",
    ),
    Refusal(
        lambda trainer: (
            (trainer.args.optim in UPDATE_IN_BACKWARD or "layerwise" in OptimizerNames(trainer.args.optim).value)
            and OptimizerNames(trainer.args.optim).value
        ),
        "optim={0!r} changes the weights in each backward pass, and each window has one: choose another, or leave "
        "bptt_window out.",
    ),
    Refusal(
        lambda trainer: trainer.is_deepspeed_enabled,
        "DeepSpeed counts the backward passes of a step, and each window has one: leave bptt_window out, or use FSDP.",
    ),
)
_ARGUMENTS = (
    Refusal(
        lambda trainer: trainer.args.n_gpu > 1 and trainer.args.n_gpu,
        "{0} GPUs in one process (DataParallel) would mix up carried states: start one process per GPU with "
        "accelerate launch or torchrun, or set CUDA_VISIBLE_DEVICES to one GPU.",
    ),
    Refusal(
        _argument("auto_find_batch_size", False),
        "auto_find_batch_size is not supported, because carried states belong to one batch size: leave it out.",
    ),
    Refusal(
        _argument("label_smoothing_factor", 0.0),
        "label_smoothing_factor is not supported, because Trainer would smooth against unshifted labels: leave it "
        "out.",
    ),
    Refusal(
        _argument("ignore_data_skip", False),
        "ignore_data_skip is not supported, because a resumed run would read its epoch from the first sequence again: "
        "leave it out.",
    ),
    Refusal(
        _reentrant,
        "Reentrant activation checkpointing loses gradients through recurrent states: set use_reentrant=False.",
    ),
    Refusal(
        _of_accelerator("split_batches", True),
        "split_batches in accelerator_config makes batches smaller than per_device_train_batch_size: leave it out.",
    ),
    Refusal(
        lambda trainer: (
            _of_accelerator("dispatch_batches", True)(trainer)
            and not isinstance(trainer.train_dataset, IterableDataset | None)
        ),
        "dispatch_batches in accelerator_config gives a resumed run other sequences, if the data have a length: leave "
        "it out.",
    ),
    Refusal(
        _of_accelerator("use_seedable_sampler", False),
        "use_seedable_sampler=False in accelerator_config draws an order of sequences that neither a resumed run nor "
        "other processes would draw: leave it out.",
    ),
    Refusal(
        _started_alone,
        "{0} processes were started, but each one runs by itself and would train on all of the data: without GPUs, "
        "set use_cpu=True.",
    ),
    Refusal(_old_fsdp, "FSDP version 1 is not supported: set fsdp_version: 2 in the accelerate config."),
)
_SEVERAL_PROCESSES = (
    Refusal(
        lambda trainer: not trainer.args.average_tokens_across_devices,
        "average_tokens_across_devices=False would make the weight of a token depend on the other tokens of its "
        "process: leave it out.",
    ),
    Refusal(
        _of_accelerator("even_batches", False),
        "even_batches=False in accelerator_config gives several processes other sequences than one: leave it out.",
    ),
    Refusal(
        lambda trainer: (
            trainer.args.train_sampling_strategy not in ("random", "sequential")
            and trainer.args.train_sampling_strategy
        ),
        "train_sampling_strategy {0!r} orders sequences by the batches of one process, so several processes see "
        "other batches than a single process: leave it out, or train with one process.",
    ),
)
_DATA = (
    Refusal(_empty, "{0} has no sequences: give more text, or cut it into shorter sequences."),
    Refusal(
        _continued_evaluation,
        "Evaluation starts every sequence from a new state, but those of ContinuedChunks continue one another: give "
        "PackedBlocks as eval_dataset.",
    ),
)


def _needed_lookahead(trainer: Any) -> int:
    return 0 if trainer.alignment is None else int(trainer.alignment.max_extra)


CONTINUED_DATA = (
    Refusal(
        lambda trainer: (
            not isinstance(trainer.train_dataset, ContinuedChunks) and type(trainer.train_dataset).__name__
        ),
        "{1} needs sequences that continue those of the previous step: give ContinuedChunks from "
        "hf_recurrent_lengthgen.data as train_dataset, got {0}. For examples with labels, set bptt_chunk_length: each "
        "is read in chunks of that many tokens.",
        lambda trainer: trainer,
    ),
    Refusal(
        _argument("train_sampling_strategy", "random"),
        "train_sampling_strategy {0!r} would separate sequences that continue one another: leave it out.",
    ),
    Refusal(
        lambda trainer: trainer.train_dataset.reset_at_document and not trainer.needs_continued_data,
        "reset_at_document sets states to zero inside sequences, which TBTT supports and {1} does not: leave it out.",
        lambda trainer: trainer,
    ),
    Refusal(
        lambda trainer: trainer.train_dataset.reset_at_document and trainer.alignment is not None,
        "The alignment loss cannot be computed across resets inside sequences: leave reset_at_document out.",
    ),
    Refusal(
        lambda trainer: (
            trainer.alignment is not None
            and trainer.alignment.length != trainer.train_dataset.length
            and f"{trainer.train_dataset.length}, so that the next chunk continues the first crop; got "
            f"{trainer.alignment.length}"
        ),
        "alignment_length must be the length of the chunks, {0}. The chunks also need lookahead=alignment_max_extra, "
        "by default T - T // 2 - 1.",
    ),
    Refusal(
        lambda trainer: (
            trainer.train_dataset.lookahead != _needed_lookahead(trainer)
            and f"lookahead={trainer.train_dataset.lookahead}, but this run needs {_needed_lookahead(trainer)}"
        ),
        "The chunks have {0} (alignment_max_extra): only the alignment loss reads ahead.",
    ),
)
SHUFFLED_DATA = (
    Refusal(
        lambda trainer: trainer.continues,
        "{1} passes states between different sequences, but its data continue one another: use TbttTrainer.",
        lambda trainer: trainer,
    ),
    Refusal(
        lambda trainer: (
            not getattr(trainer.args, "assume_shuffled", False)
            and (
                isinstance(trainer.train_dataset, IterableDataset)
                or not has_length(trainer.train_dataset)
                or trainer.args.train_sampling_strategy != "random"
            )
        ),
        "{1} passes states between different sequences, so the data must be shuffled: use Trainer's default random "
        "sampler, or, for a stream or shuffled data, set assume_shuffled=True.",
        lambda trainer: trainer,
    ),
)


def tables_of(trainer: Any) -> Iterator[tuple[Refusal, ...]]:
    yield _ARGUMENTS
    if trainer.args.world_size > 1:
        yield _SEVERAL_PROCESSES
    if trainer.args.context_parallel_size > 1:
        yield _SPLIT_NO_SEQUENCES
    if trainer.args.bptt_chunk_length is not None:
        yield _READ_NO_CHUNKS
    if trainer.bptt_window is not None:
        yield _READ_NO_WINDOWS
    yield _DATA


def data_tables_of(trainer: Any) -> Iterator[tuple[Refusal, ...]]:
    if trainer.train_dataset is not None and trainer.continues:
        yield CONTINUED_DATA
    if trainer.train_dataset is not None and trainer.needs_shuffled_data:
        yield SHUFFLED_DATA
