"""The batches of an epoch, the same rows on any number of processes.

Rows that fill no batch of all processes are left out: accelerate would fill it up with rows of the first one.
"""

from typing import Any

from accelerate.data_loader import prepare_data_loader
from torch.utils.data import DataLoader, IterableDataset
from transformers.trainer_utils import has_length
from transformers.utils import logging

from hf_recurrent_lengthgen.data.continued import ContinuedStream

logger = logging.get_logger(__name__)

_SETTINGS = {
    name: f"dataloader_{name}"
    for name in (
        *("num_workers", "pin_memory", "persistent_workers", "prefetch_factor"),
        *("multiprocessing_context", "in_order"),  # not in every version of Trainer
    )
}


def check_batches(trainer: Any, batches: int) -> None:
    """Raise a `ValueError` if an epoch has no batch, and tell of the rows that it leaves out."""
    dataset: Any = trainer.train_dataset
    rows = trainer._train_batch_size * trainer.args.world_size
    if not batches:
        raise ValueError(
            f"The training data have {len(dataset)} rows, which make no batch of {rows} "
            f"({trainer._train_batch_size} on each of {trainer.args.world_size} processes): nothing would be trained. "
            "Give a smaller per_device_train_batch_size or more data."
        )
    dropped = len(dataset) - batches * rows
    ends = not 0 < trainer.args.max_steps * trainer.args.gradient_accumulation_steps <= batches
    if dropped and ends and trainer.is_world_process_zero():
        logger.warning(f"Each epoch leaves out {dropped} of {len(dataset)} rows, which fill no batch of {rows}.")


def stream_loader(trainer: Any, stream: IterableDataset[Any]) -> DataLoader:
    """Batches of a stream, read by one process as the batch of all and dealt out; a `ContinuedStream`
    already gives the rows of this process only."""
    processes = trainer.args.world_size
    if isinstance(stream, ContinuedStream):
        stream, processes = stream.in_micro_batches(trainer.args.gradient_accumulation_steps), 1
    loader = DataLoader(
        stream,
        batch_size=trainer._train_batch_size * processes,
        collate_fn=trainer._get_collator_with_removed_columns(trainer.data_collator, description="Training"),
        drop_last=True,
        **{name: vars(trainer.args)[key] for name, key in _SETTINGS.items() if key in vars(trainer.args)},
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
