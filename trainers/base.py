"""The one place that threads initial states through `transformers.Trainer`.

A method is a source of initial states (`initial_states.py`) and a config. The loss stays Trainer's: this class puts
`initial_state` into the inputs of the training batches and shows the outputs' `final_state` to the source.
Evaluation uses the zero state.
"""

import inspect
import os
from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import nn
from torch.utils.data import IterableDataset, RandomSampler
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, TrainOutput, has_length
from transformers.utils import logging

from hf_recurrent_lengthgen.models.recurrent_state import check_finite_state
from hf_recurrent_lengthgen.trainers.checkpoints import (
    TRAINER_STATE_FILE,
    begin_save,
    initial_states_file,
    load_initial_states,
    newest_complete_checkpoint,
    save_initial_states,
    what_is_missing,
)
from hf_recurrent_lengthgen.trainers.initial_states import BatchPlace, InitialStateSource

logger = logging.get_logger(__name__)


class _SlotCounter(TrainerCallback):
    """Counts the micro-batches of an optimizer step."""

    def __init__(self) -> None:
        self.slot = 0

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.slot = 0

    def on_substep_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.slot += 1


class InitialStateTrainer(Trainer, ABC):
    """`Trainer` for models that take `initial_state` and return `final_state`. Takes Trainer's arguments.

    Subclasses say where initial states come from (`initial_state_source`) and which config they need
    (`config_class`). Checkpoints also hold the source's state, so that a resumed run continues bit for bit.

    Raises:
        ValueError: at construction, if the model cannot take states, if the arguments are of another class, or for
            settings under which states would be lost or mixed up.
    """

    config_class: type[TrainingArguments] = TrainingArguments
    needs_shuffled_data = False

    def __init__(
        self, model: nn.Module | None = None, args: TrainingArguments | None = None, *positional: Any, **keyword: Any
    ) -> None:
        if args is None:
            args = self.config_class("tmp_trainer")
        if not isinstance(args, self.config_class):
            raise ValueError(
                f"{type(self).__name__} needs its arguments as {self.config_class.__name__}, which has all fields of "
                f"TrainingArguments; got {type(args).__name__}."
            )
        super().__init__(model, args, *positional, **keyword)
        _check_model(self.model)
        _check_arguments(args)
        self.output_dir = str(args.output_dir)
        if self.needs_shuffled_data:
            self._check_shuffled()
        self.initial_states = self.initial_state_source()
        self._slots = _SlotCounter()
        self.add_callback(self._slots)

    @abstractmethod
    def initial_state_source(self) -> InitialStateSource:
        """The source of initial states, made from `self.args`."""

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> Any:
        """Trainer's loss, from the source's initial states in training and from the zero state in evaluation.

        Raises:
            ValueError: if the training loss or a final state is not finite.
        """
        if not model.training:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch=num_items_in_batch)
        place = self._place(inputs)
        inputs = {**inputs, "initial_state": self.initial_states.initial_state(place), "output_final_state": True}
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch=num_items_in_batch)
        if not torch.isfinite(loss):
            raise ValueError(
                f"The loss of step {place.step}, micro-batch {place.slot} is {loss.item()}. "
                f"{self._resume_hint()} Lower the learning rate or clip gradients (max_grad_norm) and look for a "
                "batch without labels."
            )
        try:
            check_finite_state(outputs["final_state"], f"final_state of step {place.step}, micro-batch {place.slot}")
        except ValueError as error:
            raise ValueError(f"{error} {self._resume_hint()}") from error
        self.initial_states.observe(place, outputs["final_state"])
        return (loss, outputs) if return_outputs else loss

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        """Trainer's, without final states, which would count as predictions."""
        return super().prediction_step(model, {**inputs, "output_final_state": False}, *args, **kwargs)

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> TrainOutput:
        """Train; `resume_from_checkpoint=True` takes the newest checkpoint that is complete.

        Raises:
            ValueError: if there is none, or the given folder is not complete or already has all `max_steps`.
        """
        output_dir = self.output_dir
        if resume_from_checkpoint is True:
            newest = newest_complete_checkpoint(output_dir)
            if newest is None:
                raise ValueError(
                    f"There is no complete checkpoint in {output_dir}: train without resume_from_checkpoint."
                )
            logger.info(f"Resuming from {newest}.")
            resume_from_checkpoint = str(newest)
        elif resume_from_checkpoint:
            missing = what_is_missing(resume_from_checkpoint)
            if missing:
                raise ValueError(
                    f"Cannot resume from {resume_from_checkpoint}: {missing}. "
                    f"The newest complete checkpoint in {output_dir} is {newest_complete_checkpoint(output_dir)}."
                )
        if resume_from_checkpoint and self.args.max_steps > 0:
            state_file = os.path.join(resume_from_checkpoint, TRAINER_STATE_FILE)
            step = TrainerState.load_from_json(state_file).global_step
            if step >= self.args.max_steps:  # Trainer would take one more step in the middle of an epoch
                raise ValueError(
                    f"Nothing is left to train: {resume_from_checkpoint} is at step {step} of {self.args.max_steps}. "
                    "Load it with from_pretrained, or give more max_steps."
                )
        self.initial_states.reset()
        try:
            return super().train(resume_from_checkpoint, *args, **kwargs)
        except KeyboardInterrupt:
            if self.is_world_process_zero():
                print(f"\nInterrupted after step {self.state.global_step}. {self._resume_hint()}")
            raise

    def _place(self, inputs: dict[str, Any]) -> BatchPlace:
        rows = next(value for key, value in inputs.items() if key in ("input_ids", "inputs_embeds")).shape[0]
        first_row = self.args.process_index * self._train_batch_size
        return BatchPlace(self.args.seed, self.state.global_step, self._slots.slot, first_row, rows)

    def _resume_hint(self) -> str:
        newest = newest_complete_checkpoint(self.output_dir)
        if newest is None:
            return f"There is no complete checkpoint in {self.output_dir} yet."
        return f"The newest complete checkpoint is {newest}: train(resume_from_checkpoint=True) continues from it."

    def _run_description(self) -> dict[str, str | int]:
        return {
            "source": type(self.initial_states).__name__,
            **{name: value for name, value in vars(self.initial_states).items() if not name.startswith("_")},
            "seed": self.args.seed,
            "num_processes": self.args.world_size,
            "per_device_train_batch_size": self.args.per_device_train_batch_size,
            "gradient_accumulation_steps": self.args.gradient_accumulation_steps,
        }

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        folder = os.path.join(self._get_output_dir(trial=trial), f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}")
        if self.args.should_save:
            begin_save(folder)
        self.accelerator.wait_for_everyone()
        super()._save_checkpoint(model, trial)

    # Trainer writes the random state of a process last of its own files; the initial states follow it. Nothing marks
    # the folder complete, and no older one is deleted, before every process has written its files.
    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        path = initial_states_file(output_dir, self.args.process_index)
        save_initial_states(path, self.initial_states.state_dict(), self._run_description())
        self.accelerator.wait_for_everyone()

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            path = initial_states_file(checkpoint, self.args.process_index)
            tensors = load_initial_states(path, self._run_description())
            self.initial_states.load_state_dict(tensors, self.args.device)

    def _check_shuffled(self) -> None:
        if self.train_dataset is None or getattr(self.args, "assume_shuffled", False):
            return
        if isinstance(self.train_dataset, IterableDataset) or not has_length(self.train_dataset):
            raise ValueError(
                f"{type(self).__name__} passes states between different sequences, so the data must be shuffled; "
                "a stream cannot be checked. Shuffle it and set assume_shuffled=True."
            )
        if not isinstance(self._get_train_sampler(), RandomSampler):
            raise ValueError(
                f"{type(self).__name__} passes states between different sequences, so the data must be shuffled: use "
                "Trainer's default random sampler, or set assume_shuffled=True if the data are shuffled already."
            )


def _check_model(model: Any) -> None:
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    missing = {"initial_state", "output_final_state"} - set(inspect.signature(base.forward).parameters)
    if missing:
        raise ValueError(
            f"{type(base).__name__} takes no {sorted(missing)}, so it cannot be given states. Load it with "
            "hf_recurrent_lengthgen.load_model(...), or wrap it with stateful(model)."
        )


def _check_arguments(args: TrainingArguments) -> None:
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
