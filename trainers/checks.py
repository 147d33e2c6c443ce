"""What a trainer refuses before training starts, with the reason."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset
from transformers.trainer_utils import has_length
from transformers.training_args import OptimizerNames

from hf_recurrent_lengthgen.data.continued import ContinuedChunks
from hf_recurrent_lengthgen.data.packing import IGNORED_LABEL, sampled_digest
from hf_recurrent_lengthgen.models.modeling_protocols import base_of
from hf_recurrent_lengthgen.models.scan_forgetting import Forgetting
from hf_recurrent_lengthgen.models.state_value import RecurrentState
from hf_recurrent_lengthgen.trainers.chunked_backprop import check_chunkable, innermost_model
from hf_recurrent_lengthgen.trainers.run.arguments import check_arguments, keep_states_in_full_precision
from hf_recurrent_lengthgen.trainers.run.scored_targets import token_labels
from hf_recurrent_lengthgen.trainers.run.step_checks import recurrent_layers

if TYPE_CHECKING:
    from hf_recurrent_lengthgen.trainers.alignment_loss import AlignmentSettings

UPDATE_IN_BACKWARD = {OptimizerNames.LOMO, OptimizerNames.ADALOMO}
"""Optimizers that change the weights in the backward pass of each micro-batch."""
IDS = torch.int64, torch.int32  # what embeddings index with
STATE_ARGUMENTS = {"initial_state", "output_final_state"}


def takes_states(model: nn.Module) -> bool:
    """Whether a model takes `initial_state` and returns a `final_state` that holds all of its state."""
    base = base_of(model)
    stateless = getattr(base, "stateless_layers", [])
    return set(inspect.signature(base.forward).parameters) >= STATE_ARGUMENTS and not stateless


def check_model(model: nn.Module) -> None:
    """Raise a `ValueError` for a model that cannot be given states."""
    base = base_of(model)
    missing = STATE_ARGUMENTS - set(inspect.signature(base.forward).parameters)
    if missing:
        raise ValueError(
            f"{type(base).__name__} does not take {sorted(missing)}, so it cannot be given states. Load it with "
            "hf_recurrent_lengthgen.load_model(...), or wrap it with stateful(model)."
        )
    if getattr(base, "stateless_layers", []):
        base.check_has_states()


def check_trainer(trainer: Any) -> None:
    """Raise a `ValueError` for a model, settings or data with which a method would not do what it says."""
    model, args = trainer.model, trainer.args
    if trainer.needs_states:
        check_model(model)
    check_trainable(model, trainer.learns_state)
    check_adapters(model)
    check_no_forgetting(model)
    check_arguments(args)
    if args.attention_windows is not None:
        from hf_recurrent_lengthgen.hybrids.windows import check_window  # reaches all hybrids

        for window in args.attention_windows:
            check_window(base_of(model), window)
    if args.nonfinite_states != "stop" and not takes_states(model):
        raise ValueError(f"{type(model).__name__} has no states, so nonfinite_states does nothing: leave it out.")
    keep_states_in_full_precision(trainer.accelerator.state)
    if args.context_parallel_size > 1:
        if not hasattr(base := base_of(model), "check_shares_rows"):
            raise ValueError(
                f"{type(base).__name__} takes no sequence_group, so processes cannot share its rows: leave "
                "context_parallel_size out, or give a causal language model of this package or stateful(model)."
            )
        base.check_shares_rows()
        if trainer.compute_loss_func is not None:
            raise ValueError(
                "compute_loss_func gets labels of whole rows, which processes that share rows do not have: leave it "
                "or context_parallel_size out."
            )
    if args.bptt_chunk_length is not None:
        check_chunks(trainer)
    for name in ("train_dataset", "eval_dataset"):
        data = getattr(trainer, name)
        for each in data.values() if isinstance(data, dict) else [data]:
            if each is not None and has_length(each) and not len(each):
                raise ValueError(f"{name} has no rows: give more text, or cut it into shorter rows.")
    check_evaluation_data(trainer.eval_dataset)


def check_chunks(trainer: Any) -> None:
    """Raise a `ValueError` for a model or settings with which rows cannot be read in chunks or windows."""
    args = trainer.args
    if any(adapter.is_prompt_learning for adapter in getattr(trainer.model, "peft_config", {}).values()):
        raise ValueError(
            "The adapter puts virtual tokens before what the model is given, so before each piece of a row: choose "
            "another adapter, such as LoRA, or leave bptt_chunk_length out."
        )
    check_chunkable(innermost_model(trainer.model))
    if trainer.compute_loss_func is not None:
        raise ValueError(
            "compute_loss_func gets the logits and labels of whole rows, which chunks do not have: leave it or "
            "bptt_chunk_length out."
        )
    if trainer.bptt_window is None:
        return
    if trainer.learns_state:
        raise ValueError(
            "bptt_window stops the gradient between windows, so a learned state would learn from the first window of "
            "each row only: leave bptt_window out. With bptt_chunk_length alone the gradient is that of the whole row."
        )
    name = OptimizerNames(args.optim).value
    if args.optim in UPDATE_IN_BACKWARD or "layerwise" in name:
        raise ValueError(
            f"optim={name!r} changes the weights in each backward pass, and each window has one: choose "
            "another, or leave bptt_window out."
        )
    if trainer.is_deepspeed_enabled:
        raise ValueError(
            "DeepSpeed counts the backward passes of a step, and each window has one: leave bptt_window out, or use "
            "FSDP."
        )


def check_windows(trainer: Any, micro_batch: Any, num_items: Tensor | int | None) -> None:
    """Raise a `ValueError` for a loss computed by hand where windows would have to be trained on one by one, and for
    the loss of a window without the number of targets of the step, by which the losses of windows add up."""
    if micro_batch is None:
        raise ValueError(
            "With bptt_window each window has a backward pass of its own, in training_step of a run: call train(), or "
            "leave bptt_window out."
        )
    if num_items is None:
        raise ValueError(
            f"The compute_loss of {type(trainer).__name__} does not hand on num_items_in_batch, so each window would "
            "count as much as the whole step: take it as an argument, and give it to super().compute_loss(...)."
        )


def check_train_data(trainer: Any, alignment: "AlignmentSettings | None") -> None:
    """Raise a `ValueError` for training data whose rows do not suit the method."""
    dataset = trainer.train_dataset
    if trainer.continues:
        check_continued_data(trainer, dataset, alignment)
    elif trainer.needs_continued_data:
        check_examples(trainer)
    if trainer.needs_shuffled_data:
        check_shuffled(trainer, dataset)


def check_shuffled(trainer: Any, dataset: Any) -> None:
    """Raise a `ValueError` for training data that are not shuffled."""
    name = type(trainer).__name__
    if trainer.continues:
        raise ValueError(
            f"{name} passes states between different sequences, but the rows of {type(dataset).__name__} continue "
            "one another: use TbttTrainer."
        )
    if getattr(trainer.args, "assume_shuffled", False):
        return
    streamed = isinstance(dataset, IterableDataset) or not has_length(dataset)
    if streamed or trainer.args.train_sampling_strategy != "random":
        raise ValueError(
            f"{name} passes states between different sequences, so the data must be shuffled: use Trainer's "
            "default random sampler, or, for a stream or data that are shuffled already, set assume_shuffled=True."
        )


def check_token_ids(ids: Tensor, vocabulary: int, name: str = "input_ids", ignored: int | None = None) -> None:
    """Check ids (B, T) before an embedding or a loss indexes with them and fails without a position, or not at all."""
    if ids.dtype not in IDS:
        raise ValueError(
            f"{name} must be int64 or int32, got {ids.dtype} of shape {tuple(ids.shape)}. Of other integers, such as "
            "uint16, PaddingCollator (data_collator), PackedBlocks and ContinuedChunks make int64."
        )
    wrong = (ids < 0) | (ids >= vocabulary)
    if ignored is not None:
        wrong &= ids != ignored
    if wrong.any():
        row, *_, place = wrong.nonzero()[0].tolist()
        also = "" if ignored is None else f", or {ignored} for none"
        raise ValueError(
            f"{name} must be from 0 to {vocabulary - 1}{also}, got {int(ids[wrong][0])} in row {row}, position "
            f"{place}: tokenize with the model's own tokenizer."
        )


def check_batch(model: nn.Module | None, inputs: Mapping[str, Any]) -> None:
    """Raise a `ValueError` with row and position for input ids and labels outside the vocabulary."""
    for name, ids, vocabulary in _token_ids(model, inputs):
        check_token_ids(ids, vocabulary, name, None if name == "input_ids" else IGNORED_LABEL)


def _token_ids(model: nn.Module | None, inputs: Mapping[str, Any]) -> Iterator[tuple[str, Tensor, int]]:
    """Name and value of input ids and labels, and the vocabulary; none for a model that names no vocabulary."""
    vocabulary: Any = getattr(getattr(base_of(model), "config", None), "vocab_size", None)
    for name in () if vocabulary is None else ("input_ids", *token_labels(base_of(model), inputs)):
        if isinstance(ids := inputs.get(name), Tensor):
            yield name, ids, vocabulary


def usable_ids(
    model: nn.Module | None, inputs: Mapping[str, Any], ask: Callable[[Tensor, Callable[[bool], None]], None]
) -> dict[str, Any]:
    """The inputs without ids and labels outside the vocabulary; `ask` has `check_batch` refuse them before weights
    change, so that the device is not waited for."""
    usable, questions = dict(inputs), []
    for name, ids, vocabulary in _token_ids(model, inputs):
        if ids.dtype not in IDS:
            check_batch(model, inputs)
        wrong = (ids < 0) | (ids >= vocabulary)
        wrong &= ids != IGNORED_LABEL if name != "input_ids" else True
        usable[name] = ids.masked_fill(wrong, 0 if name == "input_ids" else IGNORED_LABEL)
        questions.append(wrong.any())
    if questions:
        ask(torch.stack(questions).any(), lambda is_wrong: check_batch(model, inputs) if is_wrong else None)
    return usable


def check_trainable(model: nn.Module, learns_state: bool) -> None:
    """Raise a `ValueError` for a model without trainable parameters, and for one with an active learned state."""
    states = getattr(base_of(model), "learned_states", None)
    if states is not None and states.active_adapter is not None and not learns_state:
        raise ValueError(
            f"The learned state {states.active_adapter!r} is active, which only LearnedStateTrainer trains with: call "
            "model.learned_states.set_adapter(None) to start from zero."
        )
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    if not [name for name in trained if learns_state or "learned_states." not in name]:
        raise ValueError(
            "The model has no trainable parameters: all of them are frozen. "
            + (
                "PEFT loads adapters frozen: give PeftModel.from_pretrained(model, FOLDER, is_trainable=True)."
                if hasattr(model, "peft_config")
                else "Perhaps LearnedStateTrainer did that. Call model.requires_grad_(True)."
            )
        )


def check_adapters(model: Any) -> None:
    """Raise a `ValueError` for trainable weights that a checkpoint of adapters would not have: PEFT saves adapters."""
    if not hasattr(model, "get_base_model"):
        return
    from peft import get_peft_model_state_dict

    weights = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    saved = {
        value.data_ptr()
        for name in model.peft_config
        for value in get_peft_model_state_dict(model, weights, name, save_embedding_layers=False).values()
    }
    lost = [
        name
        for name, weight in model.get_base_model().named_parameters()
        if weight.requires_grad and weight.data_ptr() not in saved and "learned_states." not in name
    ]
    if lost:
        raise ValueError(
            f"{len(lost)} trainable weights are in no adapter, so they would be trained and not saved, the first is "
            f"{lost[0]}: name their modules in modules_to_save of the LoraConfig, or freeze them "
            "(requires_grad_(False))."
        )


def check_no_forgetting(model: nn.Module | None) -> None:
    """Raise a `ValueError` for a model that is made to forget, by its config or by `forgetting`."""
    config: Any = getattr(base_of(model), "config", None)
    if Forgetting.of(config) != Forgetting():
        raise ValueError(
            f"The model is made to forget at inference ({config.forgetting}). Training would compensate for that, and "
            "random or learned states cannot fill a window. Train without it (model.config.forgetting = None, or "
            "the checkpoint before it) and set it afterwards."
        )


def check_evaluation_data(dataset: Any) -> None:
    """Raise a `ValueError` for rows that continue one another, because each row is evaluated by itself."""
    for each in dataset.values() if isinstance(dataset, dict) else [dataset]:
        if isinstance(each, ContinuedChunks):
            raise ValueError(
                f"Evaluation starts every row from a new state, but the rows of {type(each).__name__} continue one "
                "another: give PackedBlocks as eval_dataset."
            )


def check_examples(trainer: Any) -> None:
    """Raise a `ValueError` for settings of TBTT that do nothing for examples, each of which is read in one step."""
    args = trainer.args
    wrong = {"state_drop_probability": 0.0, "carry_conv_state": True}
    if given := [name for name, usual in wrong.items() if getattr(args, name, usual) != usual]:
        raise ValueError(
            f"{given[0]} does nothing here: each row of {type(trainer.train_dataset).__name__} is an example that "
            "begins from zero. Leave it out, or give ContinuedChunks and no bptt_chunk_length."
        )


def check_continued_data(trainer: Any, dataset: Any, alignment: "AlignmentSettings | None") -> None:
    """Raise a `ValueError` unless rows continue those of the previous step, stay in place and can be reset."""
    args = trainer.args
    if not isinstance(dataset, ContinuedChunks):
        raise ValueError(
            f"{type(trainer).__name__} needs rows that continue those of the previous step: give ContinuedChunks "
            f"from hf_recurrent_lengthgen.data as train_dataset, got {type(dataset).__name__}. For examples with "
            "labels, set bptt_chunk_length: each is read in pieces of that many tokens."
        )
    strategy = args.train_sampling_strategy
    if strategy != "random":
        raise ValueError(
            f"train_sampling_strategy {strategy!r} would separate rows that continue one another: leave it out."
        )
    if dataset.reset_at_document:
        if not trainer.needs_continued_data:
            raise ValueError(
                "reset_at_document sets states to zero inside rows, which TBTT supports and "
                f"{type(trainer).__name__} does not: leave it out."
            )
        if alignment is not None:
            raise ValueError(
                "The alignment loss cannot be computed across resets inside rows: leave reset_at_document out."
            )
        if args.context_parallel_size > 1 and hasattr(base_of(trainer.model), "attends"):
            raise ValueError(
                f"reset_at_document begins sequences inside rows, which processes cannot share with "
                f"{type(base_of(trainer.model)).__name__}, wrapped by stateful(): leave it or context_parallel_size "
                "out."
            )
    needed = 0 if alignment is None else alignment.max_extra
    if alignment is not None and alignment.length != dataset.length:
        raise ValueError(
            f"alignment_length must be the length of the chunks, {dataset.length}, so that the next chunk continues "
            f"the first crop; got {alignment.length}. The chunks also need lookahead=alignment_max_extra, by default "
            "T - T // 2 - 1."
        )
    if dataset.lookahead != needed:
        raise ValueError(
            f"The chunks have lookahead={dataset.lookahead}, but this run needs {needed}"
            f"{' (alignment_max_extra)' if needed else ': only the alignment loss reads ahead'}."
        )


def layout_of(dataset: Any) -> dict[str, Any]:
    """What the data of a resumed run must share: the number of rows, the `resume_record` if there is one, and for rows
    that continue one another their text and their layout."""
    if not isinstance(dataset, ContinuedChunks):
        rows = {"train_dataset.rows": len(dataset)} if has_length(dataset) else {}
        return {**rows, "train_dataset.record": getattr(dataset, "resume_record", None)}
    names = ("length", "chunks_before_reset", "reset_at_document", "lookahead")
    layout = {f"train_dataset.{name}": getattr(dataset, name) for name in names}
    layout["train_dataset.tokens"] = len(dataset.stream)
    layout["train_dataset.digest"] = sampled_digest(dataset.stream)
    return layout


def zero_state_of(trainer: Any) -> Callable[[int], RecurrentState]:
    """A function that makes the zero state of a trainer's model for a number of rows.

    Raises:
        ValueError: for a model that cannot start from noise.
    """
    base = base_of(trainer.model)
    reason = getattr(base, "no_noise", None)
    if not recurrent_layers(base.zero_state(1)):
        reason = "its only states are those of short convolutions, which get no noise"
    if reason is not None:
        raise ValueError(f"{type(base).__name__} cannot start from noise: {reason}. Use passed or learned states.")
    return lambda rows: base_of(trainer.model).zero_state(rows)
