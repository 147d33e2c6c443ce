"""`Trainer` gives several processes other rows than one; here rows are the same on any number of processes.

Training leaves out the rows that do not fill a batch over all processes; accelerate would complete it with rows of the
first batch. Evaluation counts each row once, although accelerate repeats rows in its last batch to give all processes
the same number.
"""

from collections.abc import Iterator, Sequence
from functools import cached_property, partial
from typing import Any

import torch
from accelerate.data_loader import prepare_data_loader
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset
from transformers import DataCollatorWithFlattening
from transformers.trainer_utils import has_length
from transformers.utils import logging

from hf_recurrent_lengthgen.data.continued import ContinuedChunks, StreamRowSampler
from hf_recurrent_lengthgen.data.packing import IGNORED_LABEL
from hf_recurrent_lengthgen.data.pieces import piece_of_rows
from hf_recurrent_lengthgen.models.modeling_protocols import base_of
from hf_recurrent_lengthgen.models.rows import Rows
from hf_recurrent_lengthgen.trainers.checks import takes_states
from hf_recurrent_lengthgen.trainers.initial_state_config import InitialStateConfig
from hf_recurrent_lengthgen.trainers.run.data_place import DataPlace
from hf_recurrent_lengthgen.trainers.run.dealt_rows import DealtBatches
from hf_recurrent_lengthgen.trainers.run.hub_pushes import PushingTrainer
from hf_recurrent_lengthgen.trainers.run.scored_targets import token_labels, token_shape_of, with_scored_labels
from hf_recurrent_lengthgen.trainers.run.shared_rows import SharedRows, refuse_other_rows

logger = logging.get_logger(__name__)

EXTRA_COLUMNS = ("shift_labels", "state_resets")
PACKING_COLUMNS = ("position_ids", "seq_idx")

# workers that persist would not hear of a new epoch
_SETTINGS = ("num_workers", "pin_memory", "prefetch_factor", "multiprocessing_context", "in_order")


class _OnlyLengths(Dataset[dict[str, range]]):
    """Rows of which only the lengths are known; a sampler that groups by length would make every row to measure it."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self.lengths = lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, range]:
        return {"input_ids": range(self.lengths[index])}


class SameRowsTrainer(PushingTrainer):
    """`Trainer` that trains and evaluates the same rows on any number of processes, and rows that continue."""

    args: InitialStateConfig
    _shared = SharedRows()
    _sampler: Any = None
    _place: DataPlace
    _means: list[tuple[Tensor, Tensor]] | None = None  # of the batches of an evaluation, with numbers of targets

    @cached_property
    def _takes_states(self) -> bool:
        assert self.model is not None
        return takes_states(self.model)

    def _check_train_data(self) -> None:
        """Raise a `ValueError` for data whose rows do not suit the method."""

    @property
    def _packs(self) -> bool:
        """Whether the collator, of TRL, makes one row of all examples, which may hold several sequences each."""
        return getattr(self.data_collator, "padding_free", False)

    def _scored(self, batch: dict[str, Any], rows: Rows | None = None) -> dict[str, Any]:
        """A batch with only the labels that the model scores; unchanged for a model without states."""
        return with_scored_labels(base_of(self.model), batch, rows) if self._takes_states else batch

    # --- training ---

    def get_train_dataloader(self) -> DataLoader:
        """Trainer's, without the rows at the end of an epoch that do not fill a batch over all processes.

        Raises:
            ValueError: for data that do not fill one batch.
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

    def _get_dataloader(self, dataset: Any, description: str, batch_size: int, *args: Any, **kwargs: Any) -> Any:
        packs = self._packs and self.args.row_processes > 1 and not kwargs.get("is_training")
        if packs or isinstance(dataset, IterableDataset):  # to evaluate: `stream_loader` is for training
            place = self.args.row_process_index, self.args.row_processes
            settings = {name: getattr(self.args, f"dataloader_{name}") for name in _SETTINGS}
            collate = self._get_collator_with_removed_columns(self.data_collator, description=description)
            loader = DataLoader(dataset, batch_size * place[1], collate_fn=list, **settings)
            return DealtBatches(loader, collate, self.accelerator, *place, packs=packs)
        with self._shared.dealing(self.accelerator):
            return super()._get_dataloader(dataset, description, batch_size, *args, **kwargs)

    def get_total_train_batch_size(self, args: Any) -> int:
        """Trainer's, counting the rows of a group of processes once."""
        return int(super().get_total_train_batch_size(args)) // args.context_parallel_size

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        dataset = self.train_dataset if train_dataset is None else train_dataset
        if not isinstance(dataset, ContinuedChunks):
            known = getattr(dataset, "item_lengths", None)
            self._sampler = super()._get_train_sampler(train_dataset if known is None else _OnlyLengths(known))
            return self._sampler
        stream_rows = self.args.row_processes * self._train_batch_size * self.args.gradient_accumulation_steps
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        self._sampler = StreamRowSampler(dataset, stream_rows, seed)
        return self._sampler

    def begin_epoch(self, epoch: int) -> None:
        """Give the sampler the order of the epoch, also when a run is resumed inside it."""
        if isinstance(self._sampler, StreamRowSampler):
            self._sampler.set_epoch(epoch)
        self._place.begin_epoch(self._sampler)

    def end_epoch(self) -> None:
        self._place.end_epoch()

    def get_batch_samples(
        self, epoch_iterator: Iterator[dict[str, Any]], num_batches: int, device: torch.device
    ) -> tuple[list[dict[str, Any]], Tensor | int | None]:
        """Trainer's micro-batches of a step; those at the end of a stream that do not fill a step are left out.

        Raises:
            ValueError: for a stream that does not fill one step.
        """
        batches, num_items = super().get_batch_samples(epoch_iterator, num_batches, device)
        if len(batches) == num_batches or has_length(self.train_dataset):
            self._place.batches += len(batches)
            return batches, num_items
        if self.state.global_step == 0:
            rows = self._train_batch_size * self.args.row_processes
            raise ValueError(
                f"The training data ended after {len(batches)} batches of {rows} rows, but one step needs "
                f"{num_batches}: give more data, or a smaller per_device_train_batch_size or "
                "gradient_accumulation_steps."
            )
        return [], None

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Tensor | int | None:
        """Trainer's, also counting `shift_labels` that come without `labels`."""
        counted = [{**b, "labels": b["shift_labels"]} if "shift_labels" in b else b for b in batch_samples]
        return super()._get_num_items_in_batch(counted, device)

    def _set_signature_columns_if_needed(self) -> None:
        super()._set_signature_columns_if_needed()
        known: list[str] = self._signature_columns or []
        more = EXTRA_COLUMNS + (PACKING_COLUMNS if self._takes_states else ())
        self._signature_columns = list(dict.fromkeys([*known, *more]))  # type: ignore[assignment]

    # --- evaluation ---

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader:
        """Trainer's, in the order of the data, which is how predictions are told apart, also if rows are grouped."""
        asked, self.args.train_sampling_strategy = self.args.train_sampling_strategy, "random"
        try:
            return super().get_test_dataloader(test_dataset)
        finally:
            self.args.train_sampling_strategy = asked

    def evaluation_loop(self, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        # Trainer sets it after each loop; before the first it may gather objects, of which accelerate loses rows
        self.gather_function = self.accelerator.gather_for_metrics
        if self._shared.group is not None:
            self.gather_function = partial(self._shared.gather_once, self.accelerator)
        self._means = []
        output = super().evaluation_loop(dataloader, *args, **kwargs)
        batches, self._means = self._means, None
        if isinstance(dataloader, DealtBatches):
            output = output._replace(num_samples=dataloader.dealt)
        if batches and output.metrics is not None:  # Trainer gives all batches one weight, whatever their targets
            means, counts = (torch.stack(values).double() for values in zip(*batches, strict=True))
            prefix = [*args[3:], kwargs.get("metric_key_prefix", "eval")][0]
            total = means.mul(counts).where(counts > 0, 0).sum()
            output.metrics[f"{prefix}_loss"] = float(total / counts.sum())
        return output

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Trainer's; on several processes, with the mean loss over the tokens that are targets on all of them."""
        inputs = self._scored(dict(inputs))
        if not (names := token_labels(base_of(self.model), inputs)):
            return super().prediction_step(model, inputs, *args, **kwargs)
        present = token_shape_of(inputs)[0]
        if self.args.world_size > 1:
            unit = present if self._packs else 1  # a packed row is repeated as a whole
            present = unit * present_rows(self.accelerator, present // unit, self.args.row_process_index)
        inputs, scored = without_repeated_rows(inputs, names, present)
        loss_only = args[0] if args else kwargs.get("prediction_loss_only")
        if self._shared.group is None or not loss_only:  # predictions are of whole rows
            loss, logits, labels = super().prediction_step(model, inputs, *args, **kwargs)
            return None if loss is None else self._mean(loss, scored), logits, labels
        refuse_other_rows(bool(self._shared.differ(inputs)))
        inputs = piece_of_rows(inputs, self._shared.rank, self._shared.size)
        scored = inputs["shift_labels"].ne(IGNORED_LABEL).sum()
        inputs["sequence_group"] = self._shared.group
        given, self.label_names = self.label_names, ["shift_labels"]
        try:
            loss, _, _ = super().prediction_step(model, inputs, *args, **kwargs)
        finally:
            self.label_names = given
        assert loss is not None  # there are labels
        return self._mean(loss, scored), None, None

    def _mean(self, loss: Tensor, scored: Tensor) -> Tensor:
        """The mean over the targets of a batch on all processes, from that over `scored` targets of this one."""
        mean, count = loss, scored.to(loss.device)
        if self.args.world_size > 1:
            mean, count = mean_over_processes(self.accelerator, loss, scored)
        if self._means is not None:
            self._means.append((mean, count))
        return mean


def check_batches(trainer: Any, batches: int) -> None:
    """Raise a `ValueError` if an epoch has no batch, and warn about the rows that it leaves out."""
    dataset: Any = trainer.train_dataset
    rows = trainer._train_batch_size * trainer.args.row_processes
    if not batches:
        raise ValueError(
            f"The training data have {len(dataset)} rows, fewer than one batch of {rows} rows "
            f"({trainer._train_batch_size} on each of {trainer.args.row_processes} processes): give a smaller "
            "per_device_train_batch_size or more data."
        )
    dropped = len(dataset) - batches * rows
    ends = not 0 < trainer.args.max_steps * trainer.args.gradient_accumulation_steps <= batches
    if dropped and ends and trainer.is_world_process_zero():
        logger.warning(f"Each epoch leaves out {dropped} of {len(dataset)} rows, which do not fill a batch of {rows}.")


def stream_loader(trainer: Any, stream: IterableDataset[Any]) -> DataLoader:
    """Batches of a stream: one process reads the batch of all processes and distributes it."""
    processes = trainer.args.row_processes
    if processes < trainer.args.world_size:
        raise ValueError(
            "Processes that share rows (context_parallel_size) read them from data with a length, got "
            f"{type(stream).__name__}: give such data."
        )  # of a stream, accelerate would deal other rows to each
    if processes > 1 and (trainer._packs or isinstance(trainer.data_collator, DataCollatorWithFlattening)):
        raise ValueError(
            f"{type(trainer.data_collator).__name__} makes one row of all examples of a batch, but the rows of a "
            f"stream are dealt to {processes} processes: give data with a length, or a collator that pads (TRL's does "
            "with padding_free=False and packing=False)."
        )
    collate = trainer._get_collator_with_removed_columns(trainer.data_collator, description="Training")
    loader = DataLoader(
        stream,
        batch_size=trainer._train_batch_size * processes,
        collate_fn=trainer._place.marked(collate) if trainer.is_in_train else collate,
        drop_last=True,
        **{name: getattr(trainer.args, f"dataloader_{name}") for name in _SETTINGS},
    )
    if has_length(stream):
        check_batches(trainer, len(loader))
    return prepare_data_loader(
        loader,
        trainer.accelerator.device,
        num_processes=processes,
        process_index=trainer.args.process_index if processes > 1 else 0,
        split_batches=processes > 1,
        put_on_device=True,
        dispatch_batches=processes > 1,
        non_blocking=trainer.accelerator.non_blocking,
        use_stateful_dataloader=trainer.accelerator.use_stateful_dataloader,
    )


def present_rows(accelerator: Any, rows: int, index: int) -> int:
    """How many of the `rows` of this process, the `index`-th that reads rows, are not repeated; these come first."""
    state = accelerator.gradient_state
    if not state.end_of_dataloader or state.remainder <= 0:
        return rows
    left = state.remainder - index * rows  # counted over all processes
    return min(max(left, 0), rows)


def without_repeated_rows(inputs: dict[str, Any], names: list[str], present: int) -> tuple[dict[str, Any], Tensor]:
    """A batch without targets (labels of these names) in rows after the first `present`, and how many are left."""
    kept = {
        name: torch.cat([inputs[name][:present], torch.full_like(inputs[name][present:], IGNORED_LABEL)])
        for name in names
    }
    targets = kept["shift_labels"] if "shift_labels" in kept else kept["labels"][..., 1:]
    return {**inputs, **kept}, targets.ne(IGNORED_LABEL).sum()


def mean_over_processes(accelerator: Any, loss: Tensor, scored: Tensor) -> tuple[Tensor, Tensor]:
    """The mean over the targets of all processes, from the mean over `scored` targets of this one; their number."""
    scored = scored.to(accelerator.device)
    total = torch.where(scored > 0, loss.double() * scored, 0.0)
    summed, count = accelerator.reduce(torch.stack([total, scored.double()]), "sum")
    return (summed / count).to(loss), count
