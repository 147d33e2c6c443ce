"""`Trainer` resumes without the state of a method and from damaged folders; these runs resume bit for bit, or refuse.

Checkpoints also hold the state of the source of initial states, the settings that a resumed run must share, and the
record of the training so far.
"""

import hashlib
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from torch import Tensor, nn
from transformers import TrainerState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, TrainOutput, has_length
from transformers.utils import logging

from hf_recurrent_lengthgen.checkpoints.adapters import adapter_folder, holds_adapter, write_adapter_base
from hf_recurrent_lengthgen.checkpoints.records import Lineage
from hf_recurrent_lengthgen.evaluation.json_schema import to_plain
from hf_recurrent_lengthgen.evaluation.results import DataSource
from hf_recurrent_lengthgen.evaluation.text_configs import attention_window
from hf_recurrent_lengthgen.trainers.checks import layout_of
from hf_recurrent_lengthgen.trainers.initial_state_config import InitialStateConfig
from hf_recurrent_lengthgen.trainers.initial_states import InitialStateSource
from hf_recurrent_lengthgen.trainers.run.callbacks import is_finished
from hf_recurrent_lengthgen.trainers.run.checkpoints import (
    TRAINER_STATE_FILE,
    begin_save,
    checkpoint_to_resume,
    initial_states_file,
    load_converted_weights,
    load_initial_states,
    newest_complete_checkpoint,
    save_initial_states,
    saved_run,
)
from hf_recurrent_lengthgen.trainers.run.data_place import DataPlace
from hf_recurrent_lengthgen.trainers.run.interrupts import InterruptCallback
from hf_recurrent_lengthgen.trainers.run.records import RunFacts, RunRecord, record_lineage
from hf_recurrent_lengthgen.trainers.run.resumed_settings import apply_rates, fixed_arguments, initial_rates
from hf_recurrent_lengthgen.trainers.run.same_rows import SameRowsTrainer

logger = logging.get_logger(__name__)


class ResumableTrainer(SameRowsTrainer):
    """`Trainer` whose runs can be interrupted and resumed, and that records what was trained.

    Attributes:
        initial_states: Source of the initial states.
        run_record: Settings, tokens and time of the run.
        given_scheduler: Class name of the schedule that was given, or None.
        facts: Facts for the lineage that a command knows and the trainer does not, or None.
        data_description: Description of the training data for the lineage, or None.
    """

    initial_states: InitialStateSource
    facts: RunFacts | None = None
    data_description: DataSource | str | None = None
    args: InitialStateConfig

    def __init__(self, model: Any, args: InitialStateConfig, *positional: Any, **keyword: Any) -> None:
        super().__init__(model, args, *positional, **keyword)
        self.given_scheduler = None if self.lr_scheduler is None else type(self.lr_scheduler).__name__
        self.run_record = RunRecord()
        self._place = DataPlace(args.dataloader_num_workers)
        self._trained: TrainOutput | None = None
        self._interrupts = InterruptCallback(self.any_process)
        made: Any = self.model
        parameters = sum(parameter.numel() for parameter in made.parameters())
        self._model_description = f"{type(made).__name__} with {parameters:,} parameters"

    # --- running ---

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> TrainOutput:
        """Train; `resume_from_checkpoint=True` resumes from the newest checkpoint that is complete.

        For a run that has all its steps, only the weights are loaded.

        Raises:
            ValueError: if there is no such checkpoint, or the given folder is incomplete; and for data that
                make no step.
            KeyboardInterrupt: after SIGINT, when the current step is done and a checkpoint is written.
            SystemExit: after SIGTERM, likewise.
        """
        return self._train(self._checkpoint_to_resume(resume_from_checkpoint), *args, **kwargs)

    def _train(self, checkpoint: str | None, *args: Any, **kwargs: Any) -> TrainOutput:
        if checkpoint is None:
            self.run_record.begin(self)
        else:
            step = TrainerState.load_from_json(os.path.join(checkpoint, TRAINER_STATE_FILE)).global_step
            self.run_record.begin(self, saved_run(self._own_file(checkpoint))["record"], step)
            if self.is_world_process_zero():
                print(f"Resuming from {checkpoint}, after step {step}.", flush=True)
        self._place = DataPlace(self.args.dataloader_num_workers)
        self.initial_states.reset()
        try:
            with self._interrupts.listening():
                output: TrainOutput = super().train(checkpoint, *args, **kwargs)
        except KeyboardInterrupt:
            self._say_interrupted()
            raise
        finally:
            if (noise := getattr(self, "neftune_hook_handle", None)) is not None:
                noise.remove()  # Trainer leaves it on the embeddings after an error, and the next run adds another
        if self.any_process(self._interrupts.received is not None):
            self._say_interrupted()
            if self._interrupts.received == signal.SIGTERM:
                raise SystemExit(128 + signal.SIGTERM)
            raise KeyboardInterrupt
        self._trained = output
        return output

    def get_batch_samples(
        self, epoch_iterator: Iterator[dict[str, Any]], num_batches: int, device: torch.device
    ) -> tuple[list[dict[str, Any]], Tensor | int | None]:
        """Trainer's; none for a finished run that is resumed."""
        return (
            ([], None) if is_finished(self.state) else super().get_batch_samples(epoch_iterator, num_batches, device)
        )

    def any_process(self, condition: bool) -> bool:
        """Whether a condition holds in any process."""
        if self.args.world_size == 1:
            return condition
        flag = torch.tensor(float(condition), device=self.accelerator.device)
        return bool(self.accelerator.reduce(flag, "sum") > 0)

    def _say_interrupted(self) -> None:
        if self.is_world_process_zero():
            print(f"\nInterrupted after step {self.state.global_step}. {self.resume_hint()}", flush=True)

    def resume_hint(self) -> str:
        """How to continue a run that ends now, in a sentence."""
        newest = newest_complete_checkpoint(self.output_dir)
        if newest is None:
            return f"There is no complete checkpoint in {self.output_dir} yet."
        return f"The newest complete checkpoint is {newest}: train(resume_from_checkpoint=True) continues from it."

    # --- saving ---

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Trainer's; after `train`, also lineage.json, which tells from which checkpoint the model was made, and how.

        With an adapter, adapter_base.json names the weights that it belongs to.
        """
        super().save_model(output_dir, _internal_call)
        if _internal_call or not self.is_world_process_zero():
            return
        folder = Path(output_dir or self.output_dir)
        adapter = adapter_folder(folder, self.model)
        if hasattr(self.model, "peft_config") and holds_adapter(adapter):
            write_adapter_base(adapter, self.model)
        for each in {folder, adapter} if self._trained is not None else ():
            record_lineage(self, self._trained, each)  # type: ignore[arg-type]

    def _run_description(self) -> dict[str, Any]:
        """What a resumed run must share."""
        return {
            "model": self._model_description,
            "attention_window": attention_window(self.model),
            **({} if self.facts is None else {"start": _digest_of(self.facts.start)}),
            "source": type(self.initial_states).__name__,
            **self.initial_states.settings(),
            **layout_of(self.train_dataset),
            "num_processes": self.args.world_size,
            "arguments": fixed_arguments(self.args),
        }

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        folder = os.path.join(self._get_output_dir(trial=trial), f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}")
        self._check_weights()  # or a gradient with NaN would leave no good checkpoint
        if self.args.should_save:
            begin_save(folder)
        self.accelerator.wait_for_everyone()
        super()._save_checkpoint(model, trial)

    def _check_weights(self) -> None:
        """Raise a `ValueError` for trained weights that are NaN or infinite."""
        model: Any = self.model
        trained = [(name, weight) for name, weight in model.named_parameters() if weight.requires_grad]
        parts = ((name, getattr(weight.detach(), "to_local", weight.detach)()) for name, weight in trained)
        broken = next((name for name, part in parts if not bool(part.isfinite().all())), None)
        if self.any_process(broken is not None):
            raise ValueError(
                f"The weights after step {self.state.global_step} have NaN or infinite values, first in {broken}: no "
                f"checkpoint is written. {self.resume_hint()} Lower the learning rate, or look for what makes "
                "gradients NaN."
            )

    # The last file that Trainer writes for a process is its random state; the initial states follow. The folder is
    # marked as complete, and older ones are deleted, only after every process has written its files.
    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        run = self._run_description() | {"record": self.run_record.saved(self), "place": self._place.saved()}
        save_initial_states(self._own_file(output_dir), self.initial_states.state_dict(), run)
        self.accelerator.wait_for_everyone()

    def _own_file(self, checkpoint: str) -> Path:
        return initial_states_file(checkpoint, self.args.process_index)

    # --- resuming ---

    def _checkpoint_to_resume(self, asked: str | bool | None) -> str | None:
        """The folder to resume from, chosen by the main process for all processes; None for a new run."""
        if not asked:
            return None
        chosen: list[str | None] = [None, None]  # the folder, and why there is none
        if self.is_world_process_zero():
            try:
                chosen[0] = checkpoint_to_resume(asked, self.output_dir)
            except ValueError as error:
                chosen[1] = str(error)
        checkpoint, refused = broadcast_object_list(chosen)
        if refused is not None:
            raise ValueError(refused)
        # Checked before Trainer loads, so that the error names what changed and no weights reach another model.
        defaults = fixed_arguments(self.args, defaults=True)
        load_initial_states(self._own_file(checkpoint), self._run_description(), defaults)
        return str(checkpoint)

    def _init_training_state(
        self, max_steps: int, steps_per_epoch: int, epochs: int, checkpoint: str | None, trial: Any
    ) -> tuple[int, int]:
        """Trainer's passes over the data that are complete, and batches to skip in the next; those of a stream, which
        Trainer would count as one pass, are in the checkpoint."""
        passes, batches = super()._init_training_state(max_steps, steps_per_epoch, epochs, checkpoint, trial)
        if checkpoint is None:
            return passes, batches
        place = saved_run(self._own_file(checkpoint))["place"]
        if has_length(self.train_dataset):
            place |= {"passes": passes, "batches": batches}
        self._place.resume(place, place["batches"] > 0)
        return place["passes"], place["batches"]

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if not self._load_converted(resume_from_checkpoint):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        best = str(self.state.best_model_checkpoint)
        if self._load_converted(best):
            return
        adapter = adapter_folder(best, self.model)  # Trainer looks for one without a name of its own
        self.state.best_model_checkpoint = os.fspath(adapter) if holds_adapter(adapter) else best
        try:
            super()._load_best_model()
        finally:
            self.state.best_model_checkpoint = best

    def _load_converted(self, checkpoint: str) -> bool:
        sharded = self.is_fsdp_enabled or self.is_deepspeed_enabled
        return not sharded and load_converted_weights(self.model, checkpoint)  # type: ignore[arg-type]

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        assert checkpoint is not None  # Trainer calls it to resume
        self.run_record.note_settings(self)
        rates = initial_rates(self.optimizer)
        super()._load_optimizer_and_scheduler(checkpoint)
        apply_rates(self.optimizer, self.lr_scheduler, rates, "learning_rate" in self.run_record.changes)
        tensors = load_initial_states(self._own_file(checkpoint), self._run_description())
        self.initial_states.load_state_dict(tensors, self.args.device)


def _digest_of(start: Lineage) -> str | None:
    """Digest of the weights that training starts from, independent of their path; None for random weights."""
    if start.source is None:
        return None
    made = [start.source.files, [to_plain(step) for step in start.steps]]
    return hashlib.blake2b(json.dumps(made, sort_keys=True).encode(), digest_size=8).hexdigest()
