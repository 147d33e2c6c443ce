"""A method of this package combined with another trainer: the other's loss and data, our initial states.

    SFT, Config = combine(StatePassingTrainer, trl.SFTTrainer)
    SFT(model, Config("out", packing=True, state_drop_probability=0.1), train_dataset=chats).train()

The class of the method comes first among the bases, so that what it puts into a batch reaches the loss of the other
trainer, which is computed once. The config has the fields of both; where both have a default, the other trainer's
applies.
"""

import copyreg
import inspect
import sys
from dataclasses import dataclass, fields
from functools import cache
from typing import Any

import torch
import transformers
from torch import nn
from transformers import Trainer, TrainingArguments
from transformers.utils import logging

from hf_recurrent_lengthgen.models.modeling_protocols import base_of
from hf_recurrent_lengthgen.trainers.base import InitialStateTrainer
from hf_recurrent_lengthgen.trainers.initial_states import MicroBatch

logger = logging.get_logger(__name__)


def combine(
    first: type[Trainer], second: type[Trainer], config: type[TrainingArguments] | None = None
) -> tuple[type[Any], type[Any]]:
    """A trainer class that is both, and its config class; the same two classes always give the same result.

    Args:
        first: The trainer of a method, such as `StatePassingTrainer`, or another subclass of `Trainer`.
        second: The other of the two; the order does not matter.
        config: Config class of the other trainer; None for the one named as it is (`SFTConfig` for `SFTTrainer`).

    Raises:
        ValueError: unless exactly one is the trainer of a method, and for a TRL trainer that does not train on single
            texts.
    """
    methods = [cls for cls in (first, second) if issubclass(cls, InitialStateTrainer)]
    if len(methods) != 1:
        raise ValueError(
            "combine takes the trainer of one method of this package and one other trainer, got "
            f"{first.__name__} and {second.__name__}."
        )
    (method,) = methods
    other: Any = second if method is first else first
    chosen: Any = config or _config_of(other)
    return _combined(method, other, chosen)


@cache
def _combined(method: Any, other: Any, config: Any) -> tuple[type[Any], type[Any]]:
    from_trl = [base.__name__ for base in other.__mro__ if base.__module__.startswith("trl.")]
    if from_trl and "SFTTrainer" not in from_trl:
        raise ValueError(
            f"{other.__name__} does not train on single texts, so no sequence could start from a state: train with "
            "SFTTrainer and a method first, then train the saved model with this trainer alone."
        )
    made_config = _combined_config(method.config_class, config)
    bases = (_OnTexts, method, other) if from_trl else (method, other)
    name = method.__name__.removesuffix("Trainer") + other.__name__
    doc = f"{other.__name__} with the initial states of {method.__name__}."
    own = {} if other.compute_loss is Trainer.compute_loss else {"needs_logits": True}
    return type(name, bases, {"config_class": made_config, "__doc__": doc, "__module__": __name__, **own}), made_config


def _config_of(trainer: type[Trainer]) -> Any:
    """The config class of the first base class with one in its module, named as in Transformers and TRL."""
    for base in trainer.__mro__:
        for ending in ("Config", "TrainingArguments"):
            name = base.__name__.removesuffix("Trainer") + ending
            config = getattr(sys.modules[base.__module__], name, getattr(transformers, name, None))
            if inspect.isclass(config) and issubclass(config, TrainingArguments):
                return config
    raise AssertionError("Trainer has TrainingArguments")


@cache
def _combined_config(method: Any, other: Any) -> Any:
    if issubclass(method, other) or issubclass(other, method):
        return method if issubclass(method, other) else other
    stock = {item.name for item in fields(TrainingArguments)}
    both = {item.name for item in fields(method)} & {item.name for item in fields(other)} - stock
    if both:
        raise ValueError(
            f"{method.__name__} and {other.__name__} cannot be combined: both define the fields {sorted(both)}."
        )
    name = method.__name__.removesuffix("Config") + other.__name__
    # The other's defaults take precedence: the method's config has defaults for all of TrainingArguments.
    made: Any = dataclass(type(name, (other, method), {"__doc__": f"{method.__doc__}", "__module__": __name__}))
    copyreg.pickle(made, lambda args: (_restored, (method, other, vars(args))))  # Trainer pickles its arguments
    return made


def _restored(method: Any, other: Any, values: dict[str, Any]) -> Any:
    cls = _combined_config(method, other)
    args = cls.__new__(cls)
    vars(args).update(values)
    return args


class _OnTexts(InitialStateTrainer):
    """What a method needs with TRL's SFTTrainer."""

    drops_columns = False  # its collator chooses them
    _total_train_tokens: int

    def __init__(self, model: Any = None, args: Any = None, *positional: Any, **keyword: Any) -> None:
        if getattr(args, "context_parallel_size", 1) > 1:
            raise ValueError(
                "SFTTrainer computes its loss and metrics from the labels of whole sequences, so processes cannot "
                "split them: leave context_parallel_size out."
            )
        windows = (1, None) if type(self).needs_continued_data is True else (1,)  # a mixture reads its arguments
        if getattr(args, "bptt_chunk_length", None) is not None and args.bptt_window not in windows:
            raise ValueError(
                "SFTTrainer needs the losses of single tokens, which chunks do not have: set bptt_window=1, so that "
                "the gradient stops at each chunk, or leave bptt_chunk_length out."
            )
        if getattr(args, "alignment_alpha", 0) and args.loss_type == "dft":
            raise ValueError(
                "alignment_alpha works with cross-entropy only, not with loss_type='dft': leave one of them out."
            )
        if self.learns_state and keyword.get("peft_config") is not None:
            raise ValueError(
                "peft_config would freeze the learned state: give a model with adapters (get_peft_model) instead."
            )
        super().__init__(model, args, *positional, **keyword)
        _name_experts(base_of(self.model).config)
        sft: Any = self.args
        default = next(field.default for field in fields(sft) if field.name == "max_length")
        is_default = default is not None and sft.max_length == default
        if sft.bptt_chunk_length is not None and is_default and not sft.packing and self.is_world_process_zero():
            logger.warning(
                f"SFTTrainer cuts texts to its default max_length, {default} tokens, and leaves out those whose "
                "answer begins later. Sequences read in chunks may have any length: set max_length=None, or a limit."
            )
        packs = getattr(self, "padding_free", False) and not self.initial_states.always_zero
        if packs and sft.pad_to_multiple_of:
            raise ValueError(
                "pad_to_multiple_of fills packed sequences with some of one token, which would get states: leave it "
                "out."
            )
        if self.alignment is not None and sft.packing and sft.packing_strategy == "wrapped":
            blocks: Any = self.train_dataset  # the last block of each thousand texts may be shorter
            self.train_dataset = blocks.filter(lambda block: len(block["input_ids"]) == sft.max_length)

    def with_states(self, micro_batch: MicroBatch, inputs: dict[str, Any]) -> dict[str, Any]:
        inputs = super().with_states(micro_batch, inputs)
        if micro_batch.windows is not None:
            inputs.setdefault("attention_mask", torch.ones_like(inputs["input_ids"]))  # SFTTrainer counts tokens in it
            if not torch.is_grad_enabled():  # a window without targets, which SFTTrainer does not see
                tokens = self.accelerator.gather_for_metrics(inputs["attention_mask"].sum()).sum()
                self._total_train_tokens += int(tokens)
        return inputs

    def _loss(self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool, num_items: Any) -> Any:
        if self.alignment is None:
            return super()._loss(model, inputs, return_outputs, num_items)
        # SFTTrainer would run the model again for its metrics, on labels that are shifted already.
        return Trainer.compute_loss(self, model, inputs, return_outputs, num_items_in_batch=num_items)


def _name_experts(config: Any) -> None:
    """Give the number of experts of some types, such as Granite 4, the name under which SFTTrainer reads it."""
    kind = type(config.get_text_config())
    if hasattr(config.get_text_config(), "num_local_experts") and "num_experts" not in kind.attribute_map:
        kind.attribute_map = {**kind.attribute_map, "num_experts": "num_local_experts"}  # as in Mixtral's config
