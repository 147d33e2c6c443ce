"""The one place that threads initial states and losses through `transformers.Trainer`.

A method is a source of initial states (`initial_states.py`) and a config. This class puts `initial_state` into the
inputs of the training batches and shows the `final_state` of the outputs to the source. The loss remains Trainer's, or
is the output alignment loss through Trainer's own `compute_loss_func`. Evaluation uses the zero state, unless a source
says otherwise. All other differences from Trainer are in `run/`.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from accelerate.utils import gather_object
from torch import Tensor, nn
from transformers.trainer_utils import TrainOutput

from hf_recurrent_lengthgen.checkpoints.methods import PLAIN, Method
from hf_recurrent_lengthgen.data.continued import ContinuedChunks
from hf_recurrent_lengthgen.evaluation.results import DataSource
from hf_recurrent_lengthgen.models.state_value import states_checked_by_caller
from hf_recurrent_lengthgen.trainers.alignment_loss import AlignmentSettings
from hf_recurrent_lengthgen.trainers.attention_windows import drawn_window
from hf_recurrent_lengthgen.trainers.checks import check_no_forgetting, check_trainer, check_windows
from hf_recurrent_lengthgen.trainers.chunked_backprop import forward_in_chunks
from hf_recurrent_lengthgen.trainers.combinations import UPDATE_IN_BACKWARD, data_tables_of, refuse
from hf_recurrent_lengthgen.trainers.initial_state_config import InitialStateConfig
from hf_recurrent_lengthgen.trainers.initial_states import MICRO_BATCH, InitialStateSource, MicroBatch
from hf_recurrent_lengthgen.trainers.row_layout import default_collator, lay_out, with_resets
from hf_recurrent_lengthgen.trainers.run import resume
from hf_recurrent_lengthgen.trainers.run.attributes import replaced
from hf_recurrent_lengthgen.trainers.run.callback import AttachedCallback, RunCallback, is_finished
from hf_recurrent_lengthgen.trainers.run.dataloaders import more_columns, train_loader
from hf_recurrent_lengthgen.trainers.run.distributed_sequences import DistributedSequences
from hf_recurrent_lengthgen.trainers.run.evaluation import EvaluationTrainer
from hf_recurrent_lengthgen.trainers.run.pushes import prepare_push, write_card
from hf_recurrent_lengthgen.trainers.run.records import RunFacts, RunRecord, record_model
from hf_recurrent_lengthgen.trainers.run.step_checks import (
    ModelCalls,
    StepChecks,
    StepLogs,
    raise_bypassed,
    raise_ignored,
)
from hf_recurrent_lengthgen.trainers.states_of_batches import observe, with_training_states
from hf_recurrent_lengthgen.trainers.token_ids import usable_ids
from hf_recurrent_lengthgen.trainers.windows import plan_windows, train_in_windows

_NEVER_DECAYED = re.compile(r"(^|\.)(A_log$|learned_states\.|time_|x_[rwkvag]$|r_k$|bonus$|lora\.\d|x_proj\.\d)")

INTERVENTIONS: dict[str, type["InitialStateTrainer"]] = {}
"""The trainers by the name of their method. A class that defines `about` is registered."""


class InitialStateTrainer(EvaluationTrainer, ABC):
    """`Trainer` for models that take `initial_state` and return `final_state`. Takes Trainer's arguments; `model` may
    also be a checkpoint folder or Hub name, which `load_model` loads.

    Subclasses say where initial states come from (`initial_state_source`) and which config they need
    (`config_class`). A subclass that defines the class attribute `about` is a method: `lengthgen train
    --intervention` and mixtures take it by its name, records and cards describe it. Checkpoints also hold the state of
    the source, so that a resumed run continues bit for bit. SIGINT and SIGTERM end the run after the current step,
    with a checkpoint.

    Attributes:
        initial_states: Source of the initial states.
        run_record: Settings, tokens and time of the run.
        facts: Facts for the lineage that a command knows and the trainer does not, or None.
        data_description: Description of the training data for the lineage, or None.
        card_writer: Writes the card of a folder with a lineage (`checkpoints.cards.write_card_of_run`), and
            returns whether it did; `lengthgen train` sets it. None for the card of Trainer.

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
    drops_columns = True  # whether the columns of a stream that the model does not take are left out
    needs_logits = False  # whether its loss reads logits; else models with states return none
    args: InitialStateConfig
    initial_states: InitialStateSource
    facts: RunFacts | None = None
    data_description: DataSource | str | None = None
    card_writer: Callable[[str, str | None, bool], bool] | None = None
    hub_model_id: Any
    sampler: Any = None
    alignment: AlignmentSettings | None
    _begins = False  # between `train` and its loader
    _current: MicroBatch | None = None  # between `training_step` and `compute_loss`
    resumed: str | None = None  # the checkpoint from which a run goes on
    _trained: TrainOutput | None = None

    def __init__(
        self, model: nn.Module | str | None = None, args: InitialStateConfig | None = None, *rest: Any, **keyword: Any
    ) -> None:
        if not isinstance(args, self.config_class):
            raise ValueError(
                f"{type(self).__name__} needs args of class {self.config_class.__name__}, which has all fields of "
                f"TrainingArguments; got {type(args).__name__}."
            )
        if isinstance(model, str):
            from hf_recurrent_lengthgen.checkpoints.loading import load_model  # reaches all hybrids

            model = load_model(model, needs_states=self.needs_states)
        self.shared = DistributedSequences.of(args)
        super().__init__(self.prepared(model, args), args, *rest, **keyword)
        self.model_description = resume.description_of(self.model)  # before FSDP wraps it
        self.data_collator = default_collator(self.data_collator)
        check_trainer(self)
        self.user_scheduler = None if self.lr_scheduler is None else type(self.lr_scheduler).__name__
        self._set_up_method()
        refuse(self, data_tables_of(self))
        self.run_record = RunRecord(self)
        self.calls, self.logs = ModelCalls(), StepLogs()
        self.means, self.evaluation_batches = [], 0
        self.checks = StepChecks(partial(resume.hint, self.args.output_dir))
        for callback in self.callback_handler.callbacks:
            if isinstance(callback, AttachedCallback):
                callback.attach(self)
        self._run = RunCallback(self)
        self.callback_handler.callbacks.insert(1, self._run)  # after Trainer's own, before what measures the model

    def __init_subclass__(cls, **keyword: Any) -> None:
        super().__init_subclass__(**keyword)
        if "needs_logits" not in vars(cls) and cls.compute_loss is not InitialStateTrainer.compute_loss:
            cls.needs_logits = True  # its own loss, or that of a mixin, may read them
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
        """The model to train, made from the argument `model`."""
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
        """Whether sequences continue those of the step before."""
        whole = self.args.bptt_chunk_length is not None  # each sequence is an example, which TBTT reads in windows
        return isinstance(self.train_dataset, ContinuedChunks) or (self.needs_continued_data and not whole)

    def _set_up_method(self) -> None:
        align = bool(self.args.alignment_alpha)
        self.alignment = AlignmentSettings(self.args, self.model, self.compute_loss_func) if align else None
        self.initial_states = self.initial_state_source(self.args, self)
        self.initial_states.sum_over_processes = partial(self.accelerator.reduce, reduction="sum")

    @property
    def bptt_window(self) -> int | None:
        """Chunks between which the gradient is stopped; 1 by default for TBTT on examples."""
        by_chunk = self.args.bptt_chunk_length is not None and self.needs_continued_data and not self.continues
        return 1 if by_chunk and self.args.bptt_window is None else self.args.bptt_window

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Trainer's, without parameters of one dimension, Mamba's A_log, all small ones of RWKV and a learned state.

        Nor do the authors decay them (RWKV-LM, `configure_optimizers`); Trainer exempts biases and norms only.
        """
        names: list[str] = super().get_decay_parameter_names(model)
        return [name for name in names if model.get_parameter(name).ndim > 1 and not _NEVER_DECAYED.search(name)]

    # --- runs ---

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> TrainOutput:
        """Train; `resume_from_checkpoint=True` resumes from the newest checkpoint that is complete.

        For a run that has all its steps, only the weights are loaded.

        Raises:
            ValueError: if there is no such checkpoint, or it is incomplete; for data that make no step;
                and for a model that is made to forget.
            KeyboardInterrupt: after SIGINT, when the current step is done and a checkpoint is written.
            SystemExit: after SIGTERM, likewise.
        """
        check_no_forgetting(self.model)
        self.resumed = resume.chosen_checkpoint(self, resume_from_checkpoint)
        self.run_record = RunRecord(self, self.resumed)
        self.initial_states.reset()
        self._begins = True
        self.checks = StepChecks(partial(resume.hint, self.args.output_dir))
        with self._run.listening():
            try:
                output: TrainOutput = super().train(self.resumed, *args, **kwargs)
            finally:
                self.calls.stop()
                if (noise := getattr(self, "neftune_hook_handle", None)) is not None:
                    noise.remove()  # Trainer leaves it on the embeddings after an error, and the next run adds another
        self._trained = output
        return output

    def any_process(self, condition: bool) -> bool:
        """Whether a condition holds in any process."""
        if self.args.world_size == 1:
            return condition
        flag = torch.tensor(float(condition), device=self.accelerator.device)
        return bool(self.accelerator.reduce(flag, "sum") > 0)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Trainer's; after `train`, also lineage.json, which tells from which checkpoint the model was made, and how.

        With an adapter, adapter_base.json names the weights that it belongs to. A checkpoint also holds the initial
        states of each process.
        """
        if _internal_call and output_dir is not None:
            resume.save_states(self, output_dir)
        super().save_model(output_dir, _internal_call)
        if not _internal_call and self.is_world_process_zero():
            record_model(self, Path(output_dir or str(self.args.output_dir)), self._trained)

    def load_weights(self, checkpoint: str) -> bool:
        """Load weights of a checkpoint in the layout in which they were published, and return whether it has such."""
        sharded = self.is_fsdp_enabled or self.is_deepspeed_enabled
        return not sharded and resume.load_converted_weights(self.model, checkpoint)  # type: ignore[arg-type]

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if not self.load_weights(resume_from_checkpoint):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        best = str(self.state.best_model_checkpoint)
        if self.load_weights(best):
            return
        with replaced(self.state, best_model_checkpoint=resume.best_folder(self.model, best)):
            super()._load_best_model()

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """The card of `card_writer` if a lineage records the run and there are no arguments; else Trainer's.

        A card from elsewhere stays. A folder that is uploaded next is prepared for it (`prepare_push`).
        """
        if not self.is_world_process_zero():
            return
        has_arguments = bool(args) or any(value for name, value in kwargs.items() if name != "model_name")
        if not write_card(self, has_arguments):
            super().create_model_card(*args, **kwargs)
        if self.hub_model_id:
            prepare_push(str(self.args.output_dir), self.args.hub_token)

    # --- data ---

    def get_train_dataloader(self) -> Any:
        """Trainer's, with the same sequences on any number of processes; see `train_loader`."""
        if self._begins:  # settings or data may have been replaced, in a search by a trial
            self._begins = False
            self._set_up_method()
        refuse(self, data_tables_of(self))
        with more_columns(self):
            return train_loader(self, super().get_train_dataloader)

    def get_total_train_batch_size(self, args: Any) -> int:
        """Trainer's, counting the sequences of a group of processes once."""
        return int(super().get_total_train_batch_size(args)) // args.context_parallel_size

    def get_batch_samples(
        self, epoch_iterator: Iterator[dict[str, Any]], num_batches: int, device: torch.device
    ) -> tuple[list[dict[str, Any]], Tensor | int | None]:
        """Trainer's micro-batches of a step, laid out before Trainer counts their labels; none of a finished run.

        Raises:
            ValueError: for a stream without sequences.
        """
        if is_finished(self.state):
            return [], None
        checked = (with_resets(self, batch) for batch in epoch_iterator)
        laid_out = (lay_out(self, batch, index) for index, batch in enumerate(checked))
        batches, num_items = super().get_batch_samples(laid_out, num_batches, device)
        # later, Trainer ends a pass of a loader without a length
        if not batches and self.state.global_step == self.run_record.start:
            raise ValueError("The training data have no sequences for a step: give more data.")
        if not batches:
            return batches, num_items
        if self.args.optim not in UPDATE_IN_BACKWARD:
            for batch in batches[:-1]:
                batch[MICRO_BATCH].is_last = False
        if self.bptt_window is not None:
            plan_windows(self, batches)
        self.run_record.count(self, batches)
        if self.alignment is not None:
            self.alignment.share_overlap(self, [batch[MICRO_BATCH].crop_loss for batch in batches])
        return batches, num_items

    # --- loss ---

    def training_step(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Tensor:
        """Trainer's, or one for each window with targets.

        Raises:
            ValueError: if the loss comes from a `compute_loss` that does not call the method's.
        """
        inputs, stock = dict(inputs), super().training_step
        micro_batch: MicroBatch | None = inputs.pop(MICRO_BATCH, None)

        def step(inputs: dict[str, Any], micro_batch: MicroBatch | None) -> Tensor:
            with replaced(self, _current=micro_batch), states_checked_by_caller():
                loss: Tensor = stock(model, inputs, *args, **kwargs)
            if micro_batch is not None and not micro_batch.is_trained:
                raise_bypassed(self)
            return loss

        with nullcontext() if self.args.attention_windows is None else drawn_window(self):
            if self.bptt_window is None or micro_batch is None:
                return step(inputs, micro_batch)
            return train_in_windows(self, model, inputs, micro_batch, step)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """Trainer's loss; in training, from the initial states of the source.

        Raises:
            ValueError: for ids and labels outside the vocabulary, and for a training loss or a final state that is not
                finite.
        """
        if not model.training:
            inputs = usable_ids(self.model, inputs, self.checks.ask)
            self.checks.read()
            if self.args.world_size > 1:  # the mean of this process; `prediction_step` averages over processes
                own = None if self.compute_loss_func is None else inputs.get("labels", inputs.get("shift_labels"))
                num_items_in_batch = None if own is None else (own != -100).sum()
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch=num_items_in_batch)
        if self.bptt_window is not None:
            check_windows(self, self._current, num_items_in_batch)
        micro_batch = self._current or inputs.get(MICRO_BATCH)  # of a `training_step` that does not call Trainer's
        by_hand = micro_batch is None
        inputs = lay_out(self, inputs, 0) if micro_batch is None else dict(inputs)
        micro_batch = inputs.pop(MICRO_BATCH, micro_batch)
        inputs = self.with_states(micro_batch, inputs)
        crop_loss = micro_batch.crop_loss
        length = None if self.bptt_window == 1 else self.args.bptt_chunk_length
        if length is None and crop_loss is None and not return_outputs:
            inputs = self.without_logits(inputs)
        loss_func = replaced(self, compute_loss_func=crop_loss or self.compute_loss_func)
        with loss_func, nullcontext() if length is None else forward_in_chunks(model, length):
            result = self._loss(model, inputs, return_outputs, num_items_in_batch)
        self.checks.ask_loss(result[0] if return_outputs else result, micro_batch.where)
        if crop_loss is not None:
            if crop_loss.misalignment is None:
                raise_ignored(self, "the alignment loss was not computed", "compute_loss_func")
            self.logs.add(misalignment=crop_loss.misalignment)
        if not (by_hand and self.is_in_train):  # the loss of other sequences between steps
            observe(self, micro_batch, inputs)
        micro_batch.is_trained = True
        if not self.is_in_train:
            self.calls.stop()
        return result

    def with_states(self, micro_batch: MicroBatch, inputs: dict[str, Any]) -> dict[str, Any]:
        """What the model gets for a micro-batch or window; see `with_training_states`."""
        return with_training_states(self, micro_batch, inputs)

    def _loss(self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool, num_items: Any) -> Any:
        """The training loss of the trainer that the method is combined with."""
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch=num_items)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Trainer's, with the values of the method."""
        if "loss" in logs:
            logs |= self.logs.take(gather_object)
            if self.initial_states.always_zero:  # all sequences start from zero, and no state is passed on
                logs.pop("zero_states", None)
            logs |= self.initial_states.logs()
        super().log(logs, *args, **kwargs)
