"""The one place that threads initial states and losses through `transformers.Trainer`.

A method is a source of initial states (`initial_states.py`) and a config. This class puts `initial_state` into the
inputs of the training batches and shows the `final_state` of the outputs to the source. The loss remains Trainer's, or
is the output alignment loss through Trainer's own `compute_loss_func`. Evaluation uses the zero state, unless a source
says otherwise. All other differences from Trainer are in `run/`.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, ClassVar, NoReturn

import torch
from accelerate.utils import gather_object
from torch import Tensor, nn
from transformers import DataCollatorWithFlattening
from transformers.trainer_utils import TrainOutput

from hf_recurrent_lengthgen.checkpoints.methods import PLAIN, Method
from hf_recurrent_lengthgen.data.continued import ContinuedChunks
from hf_recurrent_lengthgen.data.segments import unpacked
from hf_recurrent_lengthgen.models.modeling_protocols import base_of
from hf_recurrent_lengthgen.models.rows import read_rows
from hf_recurrent_lengthgen.models.state_value import keep_rows, states_checked_by_caller
from hf_recurrent_lengthgen.trainers.attention_windows import drawn_window
from hf_recurrent_lengthgen.trainers.checks import (
    UPDATE_IN_BACKWARD,
    check_batch,
    check_no_forgetting,
    check_train_data,
    check_trainer,
    check_windows,
)
from hf_recurrent_lengthgen.trainers.chunked_backprop import evaluation_chunk, forward_in_chunks
from hf_recurrent_lengthgen.trainers.initial_state_config import InitialStateConfig
from hf_recurrent_lengthgen.trainers.initial_states import MICRO_BATCH, BatchPlace, InitialStateSource, MicroBatch
from hf_recurrent_lengthgen.trainers.row_layout import lay_out, rows_of_all_lengths
from hf_recurrent_lengthgen.trainers.run.arguments import check_config
from hf_recurrent_lengthgen.trainers.run.callbacks import AttachedCallback, RunCallback
from hf_recurrent_lengthgen.trainers.run.resumable_runs import ResumableTrainer
from hf_recurrent_lengthgen.trainers.run.scored_targets import token_shape_of
from hf_recurrent_lengthgen.trainers.run.shared_rows import SharedRows
from hf_recurrent_lengthgen.trainers.run.step_checks import ModelCalls, StepChecks, StepLogs, say_lost, say_passed_by
from hf_recurrent_lengthgen.trainers.windows import plan_windows, train_in_windows

_NEVER_DECAYED = re.compile(r"(^|\.)(A_log$|learned_states\.|time_|x_[rwkvag]$|r_k$|bonus$|lora\.\d|x_proj\.\d)")

INTERVENTIONS: dict[str, type["InitialStateTrainer"]] = {}
"""The trainers by the name of their method. A class with an `about` of its own is registered when it is defined."""


class InitialStateTrainer(ResumableTrainer, ABC):
    """`Trainer` for models that take `initial_state` and return `final_state`. Takes Trainer's arguments; `model` may
    also be a checkpoint folder or Hub name, which `load_model` loads.

    Subclasses say where initial states come from (`initial_state_source`) and which config they need
    (`config_class`). A subclass with an `about` of its own is a method: `lengthgen train --intervention` and mixtures
    take it by its name, records and cards describe it. Checkpoints also hold the state of the source, so that a
    resumed run continues bit for bit. SIGINT and SIGTERM end the run after the current step, with a checkpoint.

    Raises:
        ValueError: at construction, if the model cannot take states, if the arguments are not a `config_class`, or for
            settings under which states would be lost or mixed up.
    """

    config_class: type[InitialStateConfig] = InitialStateConfig
    about: ClassVar[Method] = PLAIN  # what lineages and cards say about the method
    needs_states = True
    needs_shuffled_data = False
    needs_continued_data = False
    learns_state = False
    gives_states = True  # whether the method consists of nothing but nonzero initial states
    is_mixable = True  # whether mixtures may draw from its source
    _align: Any  # AlignmentSettings, or None

    def __init__(
        self,
        model: nn.Module | str | None = None,
        args: InitialStateConfig | None = None,
        *positional: Any,
        **keyword: Any,
    ) -> None:
        if args is None:
            args = self.config_class("tmp_trainer")
        check_config(type(self), args)
        if isinstance(model, str):
            from hf_recurrent_lengthgen.checkpoints.loading import load_model  # reaches all hybrids

            model = load_model(model, needs_states=self.needs_states)
        self._shared = SharedRows.of(args)
        super().__init__(self.prepared(model, args), args, *positional, **keyword)
        self.data_collator = rows_of_all_lengths(self.data_collator)
        check_trainer(self)
        self._own_loss = self.compute_loss_func
        self._set_up_alignment()
        if self.train_dataset is not None:
            self._check_train_data()
        self._make_source()
        self._evaluation_batches = 0
        self._calls, self._logs = ModelCalls(), StepLogs()
        self._checks = StepChecks(self.resume_hint)
        for callback in self.callback_handler.callbacks:
            if isinstance(callback, AttachedCallback):
                callback.attach(self)
        self.add_callback(RunCallback(self))
        self.add_callback(self._interrupts)

    def __init_subclass__(cls, **keyword: Any) -> None:
        super().__init_subclass__(**keyword)
        if "about" not in vars(cls):
            return
        other = INTERVENTIONS.get(cls.about.name, cls)
        if (other.__module__, other.__qualname__) != (cls.__module__, cls.__qualname__):
            raise ValueError(
                f"The method name {cls.about.name!r} of {cls.__name__} belongs to {other.__name__} already: choose "
                "another name."
            )
        INTERVENTIONS[cls.about.name] = cls  # a notebook cell may define it again

    def prepared(self, model: Any, args: Any) -> Any:
        """The model to train, made from the model given."""
        return model

    @staticmethod
    @abstractmethod
    def initial_state_source(args: Any, trainer: Any) -> InitialStateSource:
        """The source of initial states.

        Args:
            args: A `config_class`: of the trainer, or of the method's share in a mixture.
            trainer: The trainer whose model gets the states.
        """

    @property
    def continues(self) -> bool:
        """Whether rows continue those of the step before."""
        whole = self.args.bptt_chunk_length is not None  # each row is an example, which TBTT reads in windows
        return isinstance(self.train_dataset, ContinuedChunks) or (self.needs_continued_data and not whole)

    def _set_up_alignment(self) -> None:
        self._align = None
        if self.args.alignment_alpha:
            from hf_recurrent_lengthgen.trainers.alignment_loss import AlignmentSettings

            self._align = AlignmentSettings.of(self.args, self.model, self._own_loss, self.needs_states)
        self.compute_loss_func = self._own_loss if self._align is None else self._not_aligned

    def _not_aligned(self, *_: Any, **__: Any) -> NoReturn:
        """Called in place of the loss of a micro-batch, which `compute_loss` gives."""
        say_passed_by(self)

    def _make_source(self) -> None:
        self.initial_states = self.initial_state_source(self.args, self)
        self.initial_states.sum_over_processes = partial(self.accelerator.reduce, reduction="sum")

    def _check_train_data(self) -> None:
        check_train_data(self, self._align)

    def _hp_search_setup(self, trial: Any) -> None:
        super()._hp_search_setup(trial)
        if trial is not None:  # the trial may have changed settings of the method
            self._set_up_alignment()
            self._make_source()

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Trainer's, without parameters of one dimension, Mamba's A_log, all small ones of RWKV and a learned state.

        Nor do the authors decay them (RWKV-LM, `configure_optimizers`); Trainer exempts biases and norms only.
        """
        spared = {name for name, parameter in model.named_parameters() if parameter.ndim < 2}
        names: list[str] = super().get_decay_parameter_names(model)
        return [name for name in names if name not in spared and not _NEVER_DECAYED.search(name)]

    def train(self, *args: Any, **kwargs: Any) -> TrainOutput:
        """See `ResumableTrainer.train`.

        Raises:
            ValueError: as in `ResumableTrainer.train`, and for a model that is made to forget.
        """
        check_no_forgetting(self.model)
        self._checks = StepChecks(self.resume_hint)
        # Trainer's filter reads each loss, to leave those that are not finite out of the log; here they end the run.
        asked, self.args.logging_nan_inf_filter = self.args.logging_nan_inf_filter, False
        try:
            return super().train(*args, **kwargs)
        finally:
            self.args.logging_nan_inf_filter = asked
            self._calls.stop()

    # --- batches ---

    def get_batch_samples(
        self, epoch_iterator: Iterator[dict[str, Any]], num_batches: int, device: torch.device
    ) -> tuple[list[dict[str, Any]], Tensor | int | None]:
        """Trainer's micro-batches of a step, laid out before Trainer counts their labels."""
        laid_out = (lay_out(self, batch, index) for index, batch in enumerate(self._place.checked(epoch_iterator)))
        batches, num_items = super().get_batch_samples(laid_out, num_batches, device)
        if self.args.optim not in UPDATE_IN_BACKWARD:
            for batch in batches[:-1]:
                batch[MICRO_BATCH].is_last = False
        if self.args.bptt_window is not None and batches:
            plan_windows(self, batches)
        if self._align is None:  # whose rows have one length
            self.run_record.count_tokens(self, batches)
        if self._align is not None:
            losses = [batch[MICRO_BATCH].crop_loss for batch in batches]
            overlap = sum(loss.overlap for loss in losses)
            if self.args.world_size > 1:
                overlap = int(self.accelerator.reduce(torch.tensor(overlap, device=device), "sum"))
            for loss in losses:
                loss.step_overlap = overlap
        return batches, num_items

    # --- loss ---

    def training_step(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Tensor:
        """Trainer's, or one for each window of the rows that has targets.

        Raises:
            ValueError: if the loss comes from a `compute_loss` that does not call the method's.
        """
        step = partial(self._training_step, model)
        with nullcontext() if self.args.attention_windows is None else drawn_window(self):
            if self.args.bptt_window is None or MICRO_BATCH not in inputs:
                return step(inputs, *args, **kwargs)
            return train_in_windows(self, model, inputs, lambda window: step(window, *args, **kwargs))

    def _training_step(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Tensor:
        try:
            with states_checked_by_caller():
                loss: Tensor = super().training_step(model, inputs, *args, **kwargs)
        except (TypeError, ValueError) as error:  # from a model that got the method's own input
            if MICRO_BATCH not in str(error):
                raise
            say_passed_by(self, error)
        if MICRO_BATCH in inputs and not inputs[MICRO_BATCH].is_trained:
            say_passed_by(self)
        return loss

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """Trainer's loss; in training, from the initial states of the source.

        Raises:
            ValueError: for ids and labels outside the vocabulary, for a training loss that is not finite, and for a
                broken final state if `nonfinite_states` is "stop".
        """
        if not model.training:
            check_batch(self.model, inputs)
            if self.args.world_size > 1:
                num_items_in_batch = None  # the mean of this process; `prediction_step` averages over processes
            with self._loss_function(None if self._align else self.compute_loss_func):
                return super().compute_loss(model, inputs, return_outputs, num_items_in_batch=num_items_in_batch)
        if self.args.bptt_window is not None:
            check_windows(self, inputs, num_items_in_batch)
        if MICRO_BATCH not in inputs:  # called by hand, outside of `train`
            inputs = lay_out(self, inputs, 0)
        micro_batch, inputs = self.given(inputs)
        crop_loss = micro_batch.crop_loss
        length = None if self.args.bptt_window == 1 else self.args.bptt_chunk_length
        with (
            self._loss_function(crop_loss or self.compute_loss_func),
            nullcontext() if length is None else forward_in_chunks(model, length),
        ):
            result = self._loss(model, inputs, return_outputs, num_items_in_batch)
        self._checks.ask_loss(result[0] if return_outputs else result, micro_batch.where)
        if crop_loss is not None:
            if crop_loss.misalignment is None:
                say_lost(self, "the alignment loss was not computed", "compute_loss_func")
            self._logs.add(misalignment=crop_loss.misalignment)
        self.observe(micro_batch, inputs)
        micro_batch.is_trained = True
        if not self.is_in_train:
            self._calls.stop()
        return result

    def given(self, inputs: dict[str, Any]) -> tuple[MicroBatch, dict[str, Any]]:
        """The facts of a micro-batch or window, and what the model gets, which is watched from now on."""
        inputs = dict(inputs)
        micro_batch: MicroBatch = inputs.pop(MICRO_BATCH)
        place, state = micro_batch.place, micro_batch.carried
        if self._takes_states:
            if state is None:
                state = self.initial_states.initial_state(place)
                source = type(self.initial_states).__name__
                from_zero = self._checks.ask_initial_state(state, micro_batch.where, source)
                self.run_record.given = self.run_record.given + place.rows * (1 - from_zero.double())
                sequences = micro_batch.sequences
                share = from_zero if sequences is None else 1 - (1 - from_zero) * place.rows / sequences
                self._logs.add(zero_states=share)
                if state is None and self.args.torch_compile and not self.initial_states.always_zero:
                    state = base_of(self.model).zero_state(place.rows)  # or a second graph is compiled for None
            inputs |= {"initial_state": micro_batch.layout.scatter(state), "output_final_state": True}
        if micro_batch.keys is not None:
            inputs["attention_cache"] = micro_batch.keys
        if self._shared.group is not None:
            inputs["sequence_group"] = self._shared.group
        if micro_batch.crop_loss is not None:
            inputs.pop("shift_labels")  # Trainer counted them
        unwrap = partial(self.accelerator.unwrap_model, keep_torch_compile=False)
        self._calls.watch(self.model, lambda wrapped: base_of(unwrap(wrapped)))
        return micro_batch, inputs

    def observe(self, micro_batch: MicroBatch, inputs: dict[str, Any]) -> None:
        """Show the source the final states that the model returned, or keep them for the next window; zeros in broken
        rows if these are reset. Before weights change, answer the questions of the step."""
        if self._takes_states:
            if inputs["initial_state"] is not None and not self._calls.got_state:
                say_lost(self, "the model got no initial_state", "the initial_state of the inputs")
            final_state = self._calls.take_final_state()
            if final_state is None:
                say_lost(self, "the model returned no final_state", "the output_final_state of the inputs")
            state = micro_batch.layout.gather(final_state)
            resets = self.args.nonfinite_states == "reset"
            broken = self._checks.ask_final_state(state, micro_batch.where, resets, self._logs)
            state = keep_rows(state, ~broken) if resets else state
            if micro_batch.ends:
                self.initial_states.observe(micro_batch.place, state, broken if resets else None)
            else:
                micro_batch.carried = state
        if micro_batch.is_last:
            self._checks.read()

    def _loss(self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool, num_items: Any) -> Any:
        """The training loss of the trainer that the method is combined with."""
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch=num_items)

    @contextmanager
    def _loss_function(self, function: Any) -> Iterator[None]:
        kept, self.compute_loss_func = self.compute_loss_func, function
        try:
            yield
        finally:
            self.compute_loss_func = kept

    def describe_method(self) -> str:
        """The method and the class of the trainer, in words."""
        alignment = ["output alignment"] if self._align is not None else []
        methods = alignment if self.about is PLAIN else [self.about.name.replace("_", " "), *alignment]
        return f"{' with '.join(methods) or 'InitialStateTrainer'} ({type(self).__name__})"

    # --- evaluation ---

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        self._evaluation_batches = 0
        return super().evaluation_loop(*args, **kwargs)

    @property
    def _unpacks_evaluation(self) -> bool:
        """Whether packed sequences are evaluated as rows: those that start from a state, or that processes share."""
        from_zero = type(self.initial_states).evaluation_state is InitialStateSource.evaluation_state
        shared = self.args.world_size > 1 and isinstance(self.data_collator, DataCollatorWithFlattening)
        return not from_zero or shared

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, *args: Any, **kwargs: Any
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Trainer's, from the source's state for evaluation, without final states, which would count as predictions.
        In chunks where nothing but the loss is asked for (`evaluation_chunk`).

        Raises:
            ValueError: for rows with resets inside them, which are for training only.
        """
        inputs = dict(inputs)
        resets = inputs.pop("state_resets", None)
        if resets is not None and bool(resets[:, 1:].any()):
            raise ValueError(
                "The evaluation data reset states inside rows (reset_at_document), which only training supports: "
                "evaluate on PackedBlocks."
            )
        if self._takes_states:
            if self._unpacks_evaluation and (packed := read_rows(inputs)).starts is not None:
                inputs = unpacked(inputs, packed)
            rows = token_shape_of(inputs)[0]
            first_row = self.args.row_process_index * rows
            place = BatchPlace(self.args.seed, self.state.global_step, self._evaluation_batches, first_row, rows)
            state = self.initial_states.evaluation_state(place)
            plain = None if state is None else tuple(tuple(layer) for layer in state)  # Trainer moves no others
            inputs |= {"initial_state": plain, "output_final_state": False}
            self._evaluation_batches += 1
        length = evaluation_chunk(self, model, inputs) if prediction_loss_only else None
        with nullcontext() if length is None else forward_in_chunks(model, length):
            return super().prediction_step(model, inputs, prediction_loss_only, *args, **kwargs)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Trainer's, with the values of the method beside the training loss."""
        if "loss" in logs:
            logs |= self._logs.take(gather_object)
            if self.initial_states.always_zero:  # all sequences start from zero, and no state is passed on
                logs.pop("zero_states", None)
                if self.args.nonfinite_states == "stop":
                    logs.pop("reset_states", None)
            logs |= self.initial_states.logs()
        super().log(logs, *args, **kwargs)
