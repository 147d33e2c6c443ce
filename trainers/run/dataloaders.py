"""`Trainer` gives several processes other sequences than one; here they are the same on any number of processes.

Training leaves out the sequences that do not fill a batch over all processes; accelerate would complete it with those
of the first batch. A stream without a length is read again and again, as one endless pass, so that a count of batches
is a place in it. Evaluation deals each sequence once: Trainer would evaluate streams in batches of one length, or
count sequences twice.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from itertools import chain, count, islice
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.data_loader import DataLoaderStateMixin, prepare_data_loader
from accelerate.utils import broadcast_object_list, send_to_device
from torch.utils.data import DataLoader, IterableDataset
from transformers import DataCollatorWithFlattening
from transformers.trainer_pt_utils import LengthGroupedSampler
from transformers.trainer_utils import RemoveColumnsCollator, has_length, seed_worker
from transformers.utils import logging

from hf_recurrent_lengthgen.data.continued import ContinuedChunks, StreamRowSampler
from hf_recurrent_lengthgen.models.modeling_protocols import base_of
from hf_recurrent_lengthgen.trainers.run.attributes import replaced

logger = logging.get_logger(__name__)

COLUMNS = ("shift_labels", "state_resets", "position_ids", "seq_idx")
"""Columns of training data that no signature of a model names, and that reach it, or `lay_out`."""

_SETTINGS = ("num_workers", "pin_memory", "prefetch_factor", "multiprocessing_context", "in_order")


def more_columns(trainer: Any) -> AbstractContextManager[None]:
    """Within the `with` block, Trainer makes loaders that keep `COLUMNS`, by naming these as labels."""
    return replaced(trainer, label_names=[*trainer.label_names, *COLUMNS])


def _collator(trainer: Any) -> Callable[[Any], Any]:
    """The collator, without columns that the model does not take, as Trainer has it; SFTTrainer's takes its own."""
    if not trainer.args.remove_unused_columns or not trainer.drops_columns:
        return trainer.data_collator
    names = inspect.signature(base_of(trainer.model).forward).parameters
    columns = [*names, *trainer.label_names, "label", "label_ids", *COLUMNS]
    return RemoveColumnsCollator(trainer.data_collator, columns)


def _settings(trainer: Any, **settings: Any) -> dict[str, Any]:
    args = trainer.args
    seeding = partial(seed_worker, num_workers=args.dataloader_num_workers, rank=args.process_index)
    return {name: getattr(args, f"dataloader_{name}") for name in _SETTINGS} | {"worker_init_fn": seeding} | settings


def packs_all(trainer: Any) -> bool:
    """Whether the collator, of TRL, makes one row of all examples, each of which may hold several sequences."""
    return getattr(trainer.data_collator, "padding_free", False)


class GroupedByLength(LengthGroupedSampler):
    """Sequences of like lengths together, in an order that depends on seed and epoch only."""

    seed: int

    def set_epoch(self, epoch: int) -> None:
        self.generator = torch.Generator().manual_seed(self.seed + epoch)


def train_sampler(trainer: Any) -> Any:
    """The sampler of continued chunks, and of sequences grouped by length; None for data in Trainer's own order."""
    dataset, args = trainer.train_dataset, trainer.args
    seed = args.seed if args.data_seed is None else args.data_seed
    if isinstance(dataset, ContinuedChunks):
        stream_rows = args.row_processes * args.train_batch_size * args.gradient_accumulation_steps
        return StreamRowSampler(dataset, stream_rows, seed)
    if args.train_sampling_strategy != "group_by_length":
        return None
    lengths = getattr(dataset, "item_lengths", None)
    if args.length_column_name in getattr(dataset, "column_names", ()):
        lengths = list(dataset[args.length_column_name])
    sampler = GroupedByLength(args.train_batch_size * args.gradient_accumulation_steps, dataset, lengths)
    sampler.seed = seed
    return sampler


def train_loader(trainer: Any, stock: Callable[[], DataLoader]) -> DataLoader:
    """Trainer's, without the sequences at the end of an epoch that do not fill a batch over all processes.

    Raises:
        ValueError: for data that do not fill one batch.
    """
    dataset, args = trainer.train_dataset, trainer.args
    trainer.sampler = None
    if isinstance(dataset, IterableDataset):
        return _stream_loader(trainer, dataset)
    trainer.sampler = train_sampler(trainer)
    with trainer.shared.dealing(trainer.accelerator):
        if trainer.sampler is None:
            with replaced(args, dataloader_drop_last=True):
                loader = stock()
        else:
            settings = _settings(trainer, persistent_workers=args.dataloader_persistent_workers, drop_last=True)
            loader = DataLoader(
                dataset, args.train_batch_size, sampler=trainer.sampler, collate_fn=_collator(trainer), **settings
            )
            loader = trainer.accelerator.prepare(loader)
    _check_batches(trainer, len(loader))
    return loader


def _check_batches(trainer: Any, batches: int) -> None:
    """Raise a `ValueError` if an epoch has no batch, and warn about the sequences that it leaves out."""
    dataset, args = trainer.train_dataset, trainer.args
    rows = args.train_batch_size * args.row_processes
    if not batches:
        raise ValueError(
            f"The training data have {len(dataset)} sequences, fewer than one batch of {rows} "
            f"({args.train_batch_size} on each of {args.row_processes} processes): give a smaller "
            "per_device_train_batch_size or more data."
        )
    dropped = len(dataset) - batches * rows
    ends = not 0 < args.max_steps * args.gradient_accumulation_steps <= batches
    if dropped and ends and trainer.is_world_process_zero():
        logger.warning(
            f"Each epoch leaves out {dropped} of {len(dataset)} sequences, which do not fill a batch of {rows}."
        )


class StreamSequences(IterableDataset[Any]):
    """The sequences of a stream in the order in which a loader, with its workers, reads them, also in short
    batches."""

    def __init__(self, loader: DataLoader) -> None:
        self.loader = loader

    def set_epoch(self, epoch: int) -> None:
        if hasattr(self.loader.dataset, "set_epoch"):
            self.loader.dataset.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        yield from chain.from_iterable(self.loader)


class CountedSequences(StreamSequences):
    """Sequences of a stream with a length."""

    def __len__(self) -> int:
        return len(self.loader.dataset)  # type: ignore[arg-type]


class EndlessSequences(StreamSequences):
    """A stream read again and again; it gets the number of each pass. It ends if a pass has no sequences."""

    def set_epoch(self, epoch: int) -> None:
        pass  # Trainer's count of epochs

    def __iter__(self) -> Iterator[Any]:
        for number in count():
            super().set_epoch(number)
            is_empty = True
            for row in super().__iter__():
                is_empty = False
                yield row
            if is_empty:
                return


def _stream_loader(trainer: Any, stream: IterableDataset[Any]) -> DataLoader:
    """Batches of a stream: one process reads the batch of all processes and distributes it."""
    args, sized = trainer.args, has_length(stream)
    processes = args.row_processes
    if processes < args.world_size:
        raise ValueError(
            "Processes that split sequences (context_parallel_size) read them from data with a length, got "
            f"{type(stream).__name__}: give such data."
        )  # of a stream, accelerate would deal other sequences to each
    if processes > 1 and (packs_all(trainer) or isinstance(trainer.data_collator, DataCollatorWithFlattening)):
        raise ValueError(
            f"{type(trainer.data_collator).__name__} packs all examples of a batch into one row, but the "
            f"sequences of a stream are dealt to {processes} processes: give data with a length, or a collator that "
            "pads (TRL's does with padding_free=False and packing=False)."
        )
    size = args.train_batch_size * processes
    settings = _settings(trainer, persistent_workers=args.dataloader_persistent_workers, pin_memory=False)
    sequences = CountedSequences if sized else EndlessSequences if trainer.is_in_train else StreamSequences
    loader = DataLoader(
        sequences(DataLoader(stream, size, collate_fn=list, **settings)),
        size,
        collate_fn=_collator(trainer),
        drop_last=True,
        pin_memory=args.dataloader_pin_memory,
    )
    if sized:
        _check_batches(trainer, len(loader))
    return prepare_data_loader(
        loader,
        trainer.accelerator.device,
        num_processes=processes,
        process_index=args.process_index if processes > 1 else 0,
        split_batches=processes > 1,
        put_on_device=True,
        dispatch_batches=processes > 1,
        non_blocking=trainer.accelerator.non_blocking,
        use_stateful_dataloader=trainer.accelerator.use_stateful_dataloader,
    )


def evaluation_loader(trainer: Any, dataset: Any, stock: Callable[[], DataLoader]) -> Any:
    """Trainer's, or `DealtBatches` of a stream, and of sequences that a collator packs on several processes."""
    args = trainer.args
    packs = packs_all(trainer) and args.row_processes > 1
    if not packs and not isinstance(dataset, IterableDataset):
        with trainer.shared.dealing(trainer.accelerator), more_columns(trainer):
            return stock()
    place = args.row_process_index, args.row_processes
    loader = DataLoader(dataset, args.eval_batch_size * place[1], collate_fn=list, **_settings(trainer))
    return DealtBatches(loader, _collator(trainer), trainer.accelerator, *place, packs=packs)


@dataclass(eq=False)
class DealtBatches(DataLoaderStateMixin):
    """The batches of one process in an evaluation: the main process reads and deals sequences, each collates its own.

    All processes get the same number of sequences, some of them twice at the end: accelerate and `present_rows` leave
    out what is behind `remainder`. If the collator `packs` them into one row, it gets each once; where none is left,
    its row is behind `remainder`. `process` and `processes` count groups that split sequences once; `dealt` are the
    sequences of the last pass.
    """

    loader: DataLoader
    collate: Callable[[Any], Any]
    accelerator: Accelerator
    process: int
    processes: int
    packs: bool
    dealt: int = 0

    @property
    def dataset(self) -> Any:
        return self.loader.dataset

    def __iter__(self) -> Iterator[Any]:
        self.gradient_state, self.dealt = self.accelerator.gradient_state, 0
        self.begin()
        self.reset()  # `begin` would have batches of data with a length be full, up to the last
        for rows, is_last in self._read():
            self.dealt += len(rows)
            share = -(-len(rows) // self.processes)
            own = rows[self.process * share : (self.process + 1) * share]
            own += rows[:1] * (not own if self.packs else share - len(own))
            if is_last:
                self.end_of_dataloader = True
                self.remainder = -(-len(rows) // share) if self.packs else len(rows)
            yield send_to_device(self.collate(own), self.accelerator.device)
        self.end()

    def _read(self) -> Iterator[tuple[list[Any], bool]]:
        """The sequences of a batch of all processes, and whether it is the last."""
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(0)  # as accelerate does: each evaluation reads the same sequences
        read = chain.from_iterable(self.loader if self.accelerator.is_main_process else ())
        batches = iter(lambda: list(islice(read, self.loader.batch_size)), [])  # workers give short ones in between
        ahead, is_last = next(batches, []), False
        while not is_last:
            rows, ahead = ahead, next(batches, [])
            rows, is_last = broadcast_object_list([rows, not ahead])
            if rows:
                yield rows, is_last
