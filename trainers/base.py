"""The one place that threads initial states and losses through `transformers.Trainer`.

A method is a source of initial states (`initial_states.py`) and a config. This class puts `initial_state` into the
inputs of the training batches and shows the outputs' `final_state` to the source. The loss stays Trainer's, or is the
output alignment loss through Trainer's own `compute_loss_func`. Evaluation uses the zero state, unless a source says
otherwise.
"""

import os
import re
import signal
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, NoReturn

import torch
from accelerate.utils import broadcast_object_list, gather_object
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset
from transformers import Trainer, TrainerState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, TrainOutput, has_length
from transformers.utils import logging

from hf_recurrent_lengthgen.adapters import holds_adapter, write_adapter_base
from hf_recurrent_lengthgen.data.continued import ContinuedChunks, ContinuedStream, StreamRowSampler
from hf_recurrent_lengthgen.data.segments import split_at_resets
from hf_recurrent_lengthgen.evaluation.results import DataSource
from hf_recurrent_lengthgen.methods import PLAIN, Method
from hf_recurrent_lengthgen.models.recurrent_state import RecurrentState, keep_rows
from hf_recurrent_lengthgen.trainers.alignment import AlignedBatch, AlignmentSettings
from hf_recurrent_lengthgen.trainers.checkpoints import (
    TRAINER_STATE_FILE,
    begin_save,
    checkpoint_to_resume,
    initial_states_file,
    load_converted_weights,
    load_initial_states,
    newest_complete_checkpoint,
    save_digests,
    save_initial_states,
    saved_run,
)
from hf_recurrent_lengthgen.trainers.checks import (
    base_of,
    check_arguments,
    check_batch,
    check_config,
    check_continued_data,
    check_evaluation_data,
    check_model,
    check_no_forgetting,
    check_not_empty,
    check_shuffled,
    check_state_limits,
    check_trainable,
    count_parameters,
    keep_states_in_full_precision,
    layout_of,
    takes_states,
)
from hf_recurrent_lengthgen.trainers.chunked_backprop import (
    check_chunkable,
    forward_in_chunks,
    innermost_model,
)
from hf_recurrent_lengthgen.trainers.evaluation_rows import (
    first_rows,
    is_filled_up,
    mean_over_processes,
    present_rows,
    without_repeated_rows,
)
from hf_recurrent_lengthgen.trainers.folder_lock import locked
from hf_recurrent_lengthgen.trainers.hub_pushes import (
    check_texts,
    copy_code,
    has_card_of_another,
    leave_out_pickles,
    write_own_card,
)
from hf_recurrent_lengthgen.trainers.initial_state_config import InitialStateConfig
from hf_recurrent_lengthgen.trainers.initial_states import BatchPlace, InitialStateSource
from hf_recurrent_lengthgen.trainers.interrupts import InterruptCallback
from hf_recurrent_lengthgen.trainers.metric_callbacks import MetricCallback
from hf_recurrent_lengthgen.trainers.model_calls import ModelCalls
from hf_recurrent_lengthgen.trainers.nonfinite_states import (
    describe_nonfinite,
    nonfinite_rows,
    part_norms,
    recurrent_rms,
)
from hf_recurrent_lengthgen.trainers.resumed_optimizers import (
    apply_changes,
    check_same_kind,
    made_before,
    remember_settings,
)
from hf_recurrent_lengthgen.trainers.row_layout import RowLayout, share_of_zero_rows, without_padding
from hf_recurrent_lengthgen.trainers.scored_targets import token_labels, token_shape_of, with_scored_labels
from hf_recurrent_lengthgen.trainers.step_callback import StepCallback, first_with, is_finished
from hf_recurrent_lengthgen.trainers.step_logs import StepLogs
from hf_recurrent_lengthgen.trainers.train_batches import check_batches, stream_loader
from hf_recurrent_lengthgen.trainers.training_runs import RATES, RunFacts, RunRecord, record_lineage

logger = logging.get_logger(__name__)

EXTRA_COLUMNS = ("shift_labels", "state_resets")
_NEVER_DECAYED = re.compile(r"(^|\.)(A_log$|learned_state\.)")


@dataclass(frozen=True)
class _MicroBatch:
    """Where a micro-batch stands, how its rows are laid out, and its part in the alignment loss."""

    place: BatchPlace
    layout: RowLayout
    alignment: AlignedBatch | None = None


class InitialStateTrainer(Trainer, ABC):
    """`Trainer` for models that take `initial_state` and return `final_state`. Takes Trainer's arguments.

    Subclasses say where initial states come from (`initial_state_source`) and which config they need
    (`config_class`). Checkpoints also hold the source's state, so that a resumed run continues bit for bit. SIGINT
    and SIGTERM end the run after the current step, with a checkpoint.

    Raises:
        ValueError: at construction, if the model cannot take states, if the arguments are of another class, or for
            settings under which states would be lost or mixed up.
    """

    config_class: type[InitialStateConfig] = InitialStateConfig
    about: ClassVar[Method] = PLAIN  # what lineages and cards tell of it
    facts: RunFacts | None = None  # what save_model writes into the lineage, where a command knows more
    data_description: DataSource | str | None = None  # what it is trained on, in the lineage
    needs_states = True
    needs_shuffled_data = False
    needs_continued_data = False
    learns_state = False
    gives_states = True  # whether initial states other than zero are all there is to the method
    args: InitialStateConfig

    def __init__(
        self, model: nn.Module | None = None, args: InitialStateConfig | None = None, *positional: Any, **keyword: Any
    ) -> None:
        if args is None:
            args = self.config_class("tmp_trainer")
        check_config(type(self), args)
        self._made_output_dir = not os.path.isdir(str(args.output_dir))
        super().__init__(model, args, *positional, **keyword)
        self.data_collator = without_padding(self.data_collator)
        assert isinstance(self.model, nn.Module)
        self.given_scheduler = None if self.lr_scheduler is None else type(self.lr_scheduler).__name__
        self.run_record = RunRecord()
        self._takes_states = takes_states(self.model)
        if self.needs_states:
            check_model(self.model)
        check_trainable(self.model, self.learns_state)
        check_no_forgetting(self.model)
        check_arguments(args)
        check_state_limits(self.model, args)
        keep_states_in_full_precision(self.accelerator.state)
        self.output_dir = str(args.output_dir)
        self._trained: TrainOutput | None = None
        self._own_loss = self.compute_loss_func
        self._set_up_alignment()
        if args.bptt_chunk_length is not None:
            check_chunkable(innermost_model(self.model))
        if self.train_dataset is not None:
            self._check_train_data()
        check_not_empty("train_dataset", self.train_dataset)
        check_not_empty("eval_dataset", self.eval_dataset)
        check_evaluation_data(self.eval_dataset)
        self._model_description = f"{type(self.model).__name__} with {count_parameters(self.model):,} parameters"
        self._make_source()
        self._micro_batches: list[_MicroBatch] = []
        self._aligned: AlignedBatch | None = None
        self._overlap_items = 0
        self._evaluation_batches = 0
        self._calls = ModelCalls()
        self._logs = StepLogs()
        self._stream_rows: StreamRowSampler | None = None
        self._steps = StepCallback(self)
        self._interrupts = InterruptCallback(self._any_process)
        for callback in self.callback_handler.callbacks:
            if isinstance(callback, MetricCallback):
                callback.attach(self)
        self.add_callback(self._steps)
        self.add_callback(self._interrupts)

    @abstractmethod
    def initial_state_source(self) -> InitialStateSource:
        """The source of initial states, made from `self.args`."""

    def _set_up_alignment(self) -> None:
        self._align: AlignmentSettings | None = None
        self.compute_loss_func = self._own_loss
        if self.args.alignment_alpha:
            self._align = AlignmentSettings.of(self.args, self.model, self._own_loss)
            self.compute_loss_func = self._aligned_loss

    def _make_source(self) -> None:
        self.initial_states = self.initial_state_source()
        self.initial_states.sum_over_processes = partial(self.accelerator.reduce, reduction="sum")

    def _hp_search_setup(self, trial: Any) -> None:
        super()._hp_search_setup(trial)
        if trial is not None:  # the trial may have changed settings of the method
            self._set_up_alignment()
            self._make_source()

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Trainer's, without parameters of one dimension, Mamba's A_log and a learned state.

        The authors of Mamba decay neither A_log nor D nor biases; Trainer knows biases and norms only.
        """
        spared = {name for name, parameter in model.named_parameters() if parameter.ndim < 2}
        names: list[str] = super().get_decay_parameter_names(model)
        return [name for name in names if name not in spared and not _NEVER_DECAYED.search(name)]

    # --- batches ---

    def get_batch_samples(
        self, epoch_iterator: Iterator[dict[str, Any]], num_batches: int, device: torch.device
    ) -> tuple[list[dict[str, Any]], Tensor | int | None]:
        """Trainer's micro-batches of a step; before labels are counted, those that are not scored become -100 and rows
        are cut at resets or cropped in pairs."""
        if is_finished(self.state):  # a finished run is resumed
            return [], None
        batches, num_items = super().get_batch_samples(map(self._scored, epoch_iterator), num_batches, device)
        if len(batches) < num_batches and not has_length(self.train_dataset):
            # A stream ends; its last micro-batches would never become a step.
            if self.state.global_step == 0:
                rows = self._train_batch_size * self.args.world_size
                raise ValueError(
                    f"The training data ended after {len(batches)} batches of {rows} rows, before the first step of "
                    f"{num_batches} of them: give more data, or a smaller per_device_train_batch_size or "
                    "gradient_accumulation_steps."
                )
            batches, num_items = [], None
        prepared = [self._lay_out(batch, micro_batch) for micro_batch, batch in enumerate(batches)]
        self._micro_batches = [micro_batch for _, micro_batch in prepared]
        self._overlap_items = sum(m.alignment.overlap for m in self._micro_batches if m.alignment is not None)
        if self._align is not None and self.args.world_size > 1:
            everywhere = self.accelerator.reduce(torch.tensor(self._overlap_items, device=device), "sum")
            self._overlap_items = int(everywhere)
        if any(new is not old for (new, _), old in zip(prepared, batches, strict=True)):
            batches = [batch for batch, _ in prepared]
            num_items = self._get_num_items_in_batch(batches, device)
        return batches, num_items

    def _scored(self, batch: dict[str, Any]) -> dict[str, Any]:
        """A batch whose labels are those that the model scores; one without states is left to Trainer."""
        return with_scored_labels(base_of(self.model), batch) if self._takes_states else batch

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Tensor | int | None:
        """Trainer's, counting `shift_labels` where they are; before 5.23 it would count the `labels` beside them."""
        counted = [{**b, "labels": b["shift_labels"]} if "shift_labels" in b else b for b in batch_samples]
        num_items: Tensor | int | None = super()._get_num_items_in_batch(counted, device)
        return num_items

    def _lay_out(self, batch: dict[str, Any], micro_batch: int) -> tuple[dict[str, Any], _MicroBatch]:
        """The inputs of the model for a micro-batch, and how its rows went into them."""
        rows = _rows(batch)
        first_row = self.args.process_index * self._train_batch_size
        place = BatchPlace(self.args.seed, self.state.global_step, micro_batch, first_row, rows)
        if self._align is None and "state_resets" not in batch:
            return batch, _MicroBatch(place, RowLayout(rows))
        inputs = dict(batch)
        resets = inputs.pop("state_resets", None)
        if bool((inputs.get("attention_mask", torch.ones(1)) == 1).all()):
            inputs.pop("attention_mask", None)
        if self._align is None:
            cut = split_at_resets(inputs, resets)
            place = replace(place, continues=cut.continues)
            return cut.inputs, _MicroBatch(place, RowLayout(_rows(cut.inputs), cut.first, cut.last))
        if resets is not None and bool(resets[:, 1:].any()):
            raise ValueError("The alignment loss compares texts that go on: use it without reset_at_document.")
        alignment = self._align.crop(inputs, place)
        if resets is not None:
            place = replace(place, continues=~resets[:, 0])
        return alignment.inputs, _MicroBatch(place, RowLayout(2 * rows, crops=2), alignment)

    # --- loss ---

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """Trainer's loss, from the source's initial states in training.

        Raises:
            ValueError: for ids and labels outside the vocabulary, if the training loss is not finite, or a final state
                is broken and `nonfinite_states` is "stop".
        """
        check_batch(self.model, inputs)
        if not model.training:
            if self.args.world_size > 1:
                num_items_in_batch = None  # the mean of this process: `prediction_step` makes that of all
            with self._without_alignment():
                return super().compute_loss(model, inputs, return_outputs, num_items_in_batch=num_items_in_batch)
        if self._micro_batches:
            micro_batch = self._micro_batches[self._steps.micro_batch]
        else:  # called by hand, outside of `train`
            inputs, micro_batch = self._lay_out(inputs, 0)
            self._overlap_items = 0 if micro_batch.alignment is None else micro_batch.alignment.overlap
        place, layout = micro_batch.place, micro_batch.layout
        if self._takes_states:
            state = self.initial_states.initial_state(place)
            from_zero = share_of_zero_rows(state)
            self.run_record.given = self.run_record.given + place.rows * (1 - from_zero.double())
            self._logs.add(zero_states=from_zero)
            inputs = {**inputs, "initial_state": layout.scatter(state), "output_final_state": True}
        if self._align is not None:
            self._aligned = micro_batch.alignment
            inputs = {name: value for name, value in inputs.items() if name != "shift_labels"}  # Trainer counted them
        self._calls.watch(self._innermost())
        with self._in_chunks(model):
            found = self._loss(model, inputs, return_outputs, num_items_in_batch)
        loss = found[0] if return_outputs else found
        if not torch.isfinite(loss):
            raise ValueError(
                f"The loss of step {place.step}, micro-batch {place.micro_batch} is {loss.item()}. "
                f"{self._resume_hint()} Lower the learning rate or clip gradients (max_grad_norm) and look for a "
                "batch without labels."
            )
        if self._align is not None and self._aligned is not None:
            self._say_lost("the alignment loss was not computed", "compute_loss_func")
        if self._takes_states:
            if inputs["initial_state"] is not None and not self._calls.got_state:
                self._say_lost("the model got no initial_state", "the initial_state of the inputs")
            if self._calls.final_state is None:
                self._say_lost("the model returned no final_state", "the output_final_state of the inputs")
            final_state, broken = self._checked(layout.gather(self._calls.final_state), place)
            self.initial_states.observe(place, final_state, broken)
        self._steps.observed += 1
        if not self.is_in_train:
            self._calls.stop()
        return found

    def _loss(self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool, num_items: Any) -> Any:
        """The training loss of the class that the method is put on."""
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch=num_items)

    def _innermost(self) -> nn.Module:
        model: nn.Module = base_of(self.accelerator.unwrap_model(self.model, keep_torch_compile=False))
        return model

    def _say_lost(self, what: str, needed: str) -> NoReturn:
        raise ValueError(
            f"{self.describe_method()} took no part in step {self.state.global_step}: {what}. "
            f"{first_with(type(self), 'compute_loss')}, or another one that it calls, must use {needed}."
        )

    def describe_method(self) -> str:
        """The trainer and what it does, for people."""
        alignment = ["output alignment"] if self._align is not None else []
        methods = alignment if self.about is PLAIN else [self.about.name.replace("_", " "), *alignment]
        return f"{' with '.join(methods) or 'InitialStateTrainer'} ({type(self).__name__})"

    def _checked(self, state: RecurrentState, place: BatchPlace) -> tuple[RecurrentState, Tensor | None]:
        """The final states of a micro-batch, broken ones replaced by zero, and which these are, None for none."""
        norms, limit = part_norms(state), self.args.max_state_rms
        broken = nonfinite_rows(state, norms, limit)
        self._logs.add(reset_states=broken.double().mean())
        found = bool(broken.any())
        if found:
            what = f"final_state of step {place.step}, micro-batch {place.micro_batch}: "
            what += describe_nonfinite(state, norms, limit)
            if self.args.nonfinite_states == "stop":
                raise ValueError(f"{what}. {self._resume_hint()} nonfinite_states='reset' would go on from zero.")
            logger.warning(f"{what}. The states of these rows are replaced by zero.")
            state = keep_rows(state, ~broken)
        rms = recurrent_rms(state, norms)
        if found:
            rms = rms[:, ~broken]
        if rms.numel():
            self._logs.add(state_rms=rms.mean(), state_rms_max=rms.max())
        return state, broken if found else None

    def _in_chunks(self, model: nn.Module) -> AbstractContextManager[None]:
        if self.args.bptt_chunk_length is None:
            return nullcontext()
        return forward_in_chunks(model, self.args.bptt_chunk_length, self.args.bptt_window)

    def _aligned_loss(self, outputs: Any, labels: Tensor, num_items_in_batch: Tensor | int | None = None) -> Tensor:
        assert self._align is not None
        batch, self._aligned = self._aligned, None
        assert batch is not None
        loss, misalignment = self._align.loss(
            outputs["logits"], labels, num_items_in_batch, batch, self._overlap_items
        )
        self._logs.add(misalignment=misalignment)
        return loss

    @contextmanager
    def _without_alignment(self) -> Iterator[None]:
        function = self.compute_loss_func
        if self._align is not None:
            self.compute_loss_func = None
        try:
            yield
        finally:
            self.compute_loss_func = function

    # --- evaluation ---

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        self._evaluation_batches = 0
        return super().evaluation_loop(*args, **kwargs)

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Trainer's, from the source's state for evaluation, without final states, which would count as predictions.

        Raises:
            ValueError: for rows with resets inside, which belong to training.
        """
        inputs = self._scored(dict(inputs))
        rows = _rows(inputs)
        present, scored = present_rows(self.accelerator, rows), None
        if self.args.world_size > 1:
            inputs, scored = without_repeated_rows(base_of(self.model), inputs, present, self.accelerator.device)
        resets = inputs.pop("state_resets", None)
        if resets is not None and bool(resets[:, 1:].any()):
            raise ValueError(
                "The evaluation data reset states inside rows (reset_at_document), which only training does: evaluate "
                "on PackedBlocks."
            )
        if self._takes_states:
            first_row = self.args.process_index * rows
            place = BatchPlace(self.args.seed, self.state.global_step, self._evaluation_batches, first_row, rows)
            state = self.initial_states.evaluation_state(place)
            # Trainer moves plain tuples only.
            plain = None if state is None else tuple(tuple(layer) for layer in state)
            inputs |= {"initial_state": plain, "output_final_state": False}
            self._evaluation_batches += 1
        loss, logits, labels = super().prediction_step(model, inputs, *args, **kwargs)
        if loss is not None and scored is not None:
            if is_filled_up(self.accelerator) and not token_labels(base_of(self.model), inputs):
                # every process runs the model, which may be sharded
                loss = super().prediction_step(model, first_rows(inputs, max(present, 1)), True)[0]
                assert loss is not None
            loss = mean_over_processes(self.accelerator, loss, scored)
        return loss, logits, labels

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Trainer's, with what the method does beside the training loss."""
        if "loss" in logs:
            logs |= self._logs.take(gather_object)
            logs |= self.initial_states.logs()
        super().log(logs, *args, **kwargs)

    # --- data ---

    def _check_train_data(self) -> None:
        """Raise a `ValueError` for data whose rows do not suit the source."""
        dataset = self.train_dataset
        continued = isinstance(dataset, ContinuedChunks | ContinuedStream)
        if self.needs_continued_data or continued:
            check_continued_data(self, dataset, self._align)
        if self.needs_shuffled_data:
            check_shuffled(type(self).__name__, dataset, self.args, None if continued else self._get_train_sampler)

    def begin_epoch(self, epoch: int) -> None:
        """Tell the sampler of continued rows, which Trainer forgets when it resumes on several processes."""
        if self._stream_rows is not None:
            self._stream_rows.set_epoch(epoch)

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        dataset = self.train_dataset if train_dataset is None else train_dataset
        if isinstance(dataset, ContinuedChunks):
            stream_rows = self.args.world_size * self._train_batch_size * self.args.gradient_accumulation_steps
            self._stream_rows = StreamRowSampler(
                dataset, stream_rows, self.args.seed if self.args.data_seed is None else self.args.data_seed
            )
            return self._stream_rows
        return super()._get_train_sampler(train_dataset)

    def get_train_dataloader(self) -> DataLoader:
        """Trainer's, without the rows at the end of an epoch that fill no batch of all processes.

        So every number of processes sees the same rows: accelerate would fill the batch up with rows of the first.

        Raises:
            ValueError: for data that make no batch.
        """
        if self.train_dataset is not None:  # it may have been replaced
            self._check_train_data()
        if isinstance(self.train_dataset, IterableDataset):
            return stream_loader(self, self.train_dataset)
        asked, self.args.dataloader_drop_last = self.args.dataloader_drop_last, True
        try:
            loader: DataLoader = super().get_train_dataloader()
        finally:
            self.args.dataloader_drop_last = asked
        check_batches(self, len(loader))
        return loader

    def _set_signature_columns_if_needed(self) -> None:
        super()._set_signature_columns_if_needed()
        known: list[str] = self._signature_columns or []
        self._signature_columns = list(dict.fromkeys([*known, *EXTRA_COLUMNS]))  # type: ignore[assignment]

    # --- running, saving and resuming ---

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> TrainOutput:
        """Train; `resume_from_checkpoint=True` takes the newest checkpoint that is complete and unchanged.

        A run that has all its steps is not trained further: its weights are loaded, and that is all.

        Raises:
            ValueError: if there is none, or the given folder is not complete and unchanged; while another run trains
                in the output folder; for data that make no step; and for a model that is made to forget.
            KeyboardInterrupt: after SIGINT, when the current step is done and a checkpoint is written.
            SystemExit: likewise after SIGTERM.
        """
        check_no_forgetting(self.model)
        # trials may run at the same time, in folders of their own
        is_trial = (args[0] if args else kwargs.get("trial")) is not None
        with nullcontext() if is_trial else self._only_run_here():
            try:
                return self._train(self._checkpoint_to_resume(resume_from_checkpoint), *args, **kwargs)
            except BaseException:
                if self._made_output_dir:
                    with suppress(OSError):  # it holds something
                        os.rmdir(self.output_dir)
                raise

    @contextmanager
    def _only_run_here(self) -> Iterator[None]:
        """Hold the output folder; the main process does so for all of the run."""
        with locked(self.output_dir) if self.is_world_process_zero() else nullcontext(True) as free:
            if self._any_process(not free):
                raise ValueError(
                    f"Another run trains in {self.output_dir}: give this one another output_dir, or wait for its end."
                )
            yield

    def _checkpoint_to_resume(self, asked: str | bool | None) -> str | None:
        """The folder to resume from, looked for by the main process for all of the run; None for a new run."""
        if not asked:
            return None
        found: list[str | None] = [None, None]
        if self.is_world_process_zero():
            try:
                found[0] = checkpoint_to_resume(asked, self.output_dir)
            except ValueError as error:
                found[1] = str(error)
        checkpoint, refused = broadcast_object_list(found)
        if refused is not None:
            raise ValueError(refused)
        # Before Trainer, so that what changed is named and no weights are loaded into another model.
        load_initial_states(initial_states_file(checkpoint, self.args.process_index), self._run_description())
        return str(checkpoint)

    def _train(self, checkpoint: str | None, *args: Any, **kwargs: Any) -> TrainOutput:
        if checkpoint is None:
            self.run_record.begin(self)
        else:
            step = TrainerState.load_from_json(os.path.join(checkpoint, TRAINER_STATE_FILE)).global_step
            path = initial_states_file(checkpoint, self.args.process_index)
            self.run_record.begin(self, saved_run(path).get("record"), step)
        self.initial_states.reset()
        try:
            with self._interrupts.listening():
                output: TrainOutput = super().train(checkpoint, *args, **kwargs)
        except KeyboardInterrupt:
            self._say_interrupted()
            raise
        finally:
            self._micro_batches = []
            self._calls.stop()
        if self._any_process(self._interrupts.received is not None):
            self._say_interrupted()
            if self._interrupts.received == signal.SIGTERM:
                raise SystemExit(128 + signal.SIGTERM)
            raise KeyboardInterrupt
        self._trained = output
        return output

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Trainer's; after `train`, lineage.json also tells of which checkpoint the model was made, and how.

        Beside an adapter, adapter_base.json says to which weights it belongs.
        """
        super().save_model(output_dir, _internal_call)
        if _internal_call or not self.is_world_process_zero():
            return
        folder = output_dir or self.output_dir
        if hasattr(self.model, "peft_config") and holds_adapter(folder):
            write_adapter_base(folder, self.model)
        if self._trained is not None:
            record_lineage(self, self._trained, folder)

    def _say_interrupted(self) -> None:
        if self.is_world_process_zero():
            print(f"\nInterrupted after step {self.state.global_step}. {self._resume_hint()}", flush=True)

    def _any_process(self, condition: bool) -> bool:
        if self.args.world_size == 1:
            return condition
        flag = torch.tensor(float(condition), device=self.accelerator.device)
        return bool(self.accelerator.reduce(flag, "sum") > 0)

    def _resume_hint(self) -> str:
        newest = newest_complete_checkpoint(self.output_dir)
        if newest is None:
            return f"There is no complete checkpoint in {self.output_dir} yet."
        return f"The newest complete checkpoint is {newest}: train(resume_from_checkpoint=True) continues from it."

    def _run_description(self) -> dict[str, Any]:
        return {
            "model": self._model_description,
            "source": type(self.initial_states).__name__,
            **self.args.method_settings(),
            **self.initial_states.settings(),
            **layout_of(self.train_dataset),
            **self._rows_left_out(),
            "seed": self.args.seed,
            "data_seed": self.args.data_seed,
            "num_processes": self.args.world_size,
            "per_device_train_batch_size": self.args.per_device_train_batch_size,
            "gradient_accumulation_steps": self.args.gradient_accumulation_steps,
        }

    def _rows_left_out(self) -> dict[str, int]:
        """How many, where there are any: checkpoints of before such rows were left out say nothing of them."""
        data: Any = self.train_dataset
        if isinstance(data, ContinuedChunks) or not has_length(data):
            return {}
        rows = len(data) % (self.args.per_device_train_batch_size * self.args.world_size)
        return {"rows_left_out": rows} if rows else {}

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        folder = os.path.join(self._get_output_dir(trial=trial), f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}")
        if self.args.should_save:
            begin_save(folder)
        self.accelerator.wait_for_everyone()
        super()._save_checkpoint(model, trial)
        if self.args.should_save and not self.args.save_only_model:
            save_digests(folder)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        if self.is_world_process_zero():
            copy_code(checkpoint_folder, self.output_dir)
            leave_out_pickles(self.output_dir)
            for folder in (self.output_dir, checkpoint_folder):
                check_texts(folder, self.args.hub_token)
        super()._push_from_checkpoint(checkpoint_folder)

    def push_to_hub(self, *args: Any, **kwargs: Any) -> Any:
        """Trainer's, without the pickle of its arguments, in which a token may be."""
        if self.is_world_process_zero():
            leave_out_pickles(self.output_dir)
        return super().push_to_hub(*args, **kwargs)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """The card of `lengthgen card` where a lineage tells of the run and nothing is asked for; else Trainer's.

        A card from elsewhere stays.
        """
        if not self.is_world_process_zero():
            return
        asked = args or any(value for name, value in kwargs.items() if name != "model_name")
        kept = has_card_of_another(self.output_dir) if asked else write_own_card(self.output_dir, self.hub_model_id)
        if not kept:
            super().create_model_card(*args, **kwargs)
        repository: str | None = self.hub_model_id
        if repository is not None:  # it is uploaded next
            check_texts(self.output_dir, self.args.hub_token)

    # Trainer writes the random state of a process last of its own files; the initial states follow it. Nothing marks
    # the folder complete, and no older one is deleted, before every process has written its files.
    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        path = initial_states_file(output_dir, self.args.process_index)
        run = self._run_description() | {"record": self.run_record.saved(self)}
        save_initial_states(path, self.initial_states.state_dict(), run)
        self.accelerator.wait_for_everyone()

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if not self._load_converted(resume_from_checkpoint):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        if not self._load_converted(str(self.state.best_model_checkpoint)):
            super()._load_best_model()

    def _load_converted(self, checkpoint: str) -> bool:
        sharded = self.is_fsdp_enabled or self.is_deepspeed_enabled
        return not sharded and load_converted_weights(self.model, checkpoint)  # type: ignore[arg-type]

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            super()._load_optimizer_and_scheduler(checkpoint)
        else:
            remember_settings(self.optimizer, new_run=False)
            check_same_kind(checkpoint, self.optimizer, self.lr_scheduler, self.args)
            super()._load_optimizer_and_scheduler(checkpoint)
            before = made_before(self.optimizer, self.lr_scheduler, self.run_record.groups)
            self.run_record.found_unrecorded(self, before)
            changed = self.run_record.changes(self).keys()
            apply_changes(self.optimizer, self.lr_scheduler, before, not changed.isdisjoint(RATES))
            path = initial_states_file(checkpoint, self.args.process_index)
            tensors = load_initial_states(path, self._run_description())
            self.initial_states.load_state_dict(tensors, self.args.device)


def _rows(batch: dict[str, Any]) -> int:
    return token_shape_of(batch)[0]
