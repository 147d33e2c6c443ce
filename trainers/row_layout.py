"""How the rows of a batch become the rows that the model sees, and back.

The alignment loss runs two crops of every row. A source of initial states still sees one state per row of the batch.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from torch.nn.functional import pad
from transformers import DataCollatorWithFlattening, DataCollatorWithPadding, default_data_collator

from hf_recurrent_lengthgen.data.chunks import sequence_shard
from hf_recurrent_lengthgen.data.collating import PaddingCollator
from hf_recurrent_lengthgen.data.continued import ContinuedChunks
from hf_recurrent_lengthgen.data.segments import unpacked
from hf_recurrent_lengthgen.models.rows import LAYOUT, read_rows
from hf_recurrent_lengthgen.trainers.initial_states import MICRO_BATCH, BatchPlace, MicroBatch, RowLayout
from hf_recurrent_lengthgen.trainers.run.distributed_sequences import different_sequences
from hf_recurrent_lengthgen.trainers.run.scored_targets import token_shape_of
from hf_recurrent_lengthgen.trainers.token_ids import usable_ids
from hf_recurrent_lengthgen.trainers.windows import ended_together


class DefaultCollator:
    """Trainer's default collator; `PaddingCollator` where the labels of tokens differ in length, which the default
    does not pad."""

    def __init__(self, default: Callable[[Any], Any]) -> None:
        self.default = default
        self.tokenizer = getattr(default, "tokenizer", None)  # which Trainer saves

    def __call__(self, items: Sequence[Any]) -> Any:
        rows = [item for item in items if isinstance(item, Mapping)]
        shapes = {np.shape(row[name]) for row in rows for name in ("labels", "shift_labels") if name in row}
        return PaddingCollator()(items) if len(shapes) > 1 else self.default(items)


def default_collator(collator: Any) -> Any:
    """The collator; in place of Trainer's defaults `DefaultCollator`, also for a tokenizer without a pad token."""
    if collator is default_data_collator:
        return DefaultCollator(collator)
    if type(collator) is not DataCollatorWithPadding:
        return collator
    return DefaultCollator(default_data_collator if collator.tokenizer.pad_token is None else collator)


def with_resets(trainer: Any, batch: dict[str, Any]) -> dict[str, Any]:
    """The batch; a `ValueError` for continued chunks without `state_resets`."""
    if isinstance(trainer.train_dataset, ContinuedChunks) and "state_resets" not in batch:
        raise ValueError(
            f"A batch of ContinuedChunks has no state_resets, which say where sequences begin, got {sorted(batch)}: "
            "let data_collator keep state_resets and shift_labels, or leave it out."
        )
    return batch


def lay_out(trainer: Any, batch: dict[str, Any], micro_batch: int) -> dict[str, Any]:
    """The inputs of the model for a micro-batch of a trainer: labels that are not scored are -100, resets inside rows
    are sequences that begin there, or rows are cropped in pairs; a `MicroBatch` describes the layout."""
    args, shared, align = trainer.args, trainer.shared, trainer.alignment
    inputs = usable_ids(trainer.model, batch, trainer.checks.ask)
    resets, sequences = inputs.pop("state_resets", None), None
    inputs = inputs if trainer.bptt_window is None else ended_together(inputs)
    batch_rows = read_rows(inputs) if trainer.takes_states else None
    packed = batch_rows is not None and batch_rows.starts is not None
    if packed and (trainer.continues or resets is not None):
        raise ValueError(
            f"{type(trainer).__name__} gets sequences that continue those of the last step, but the batch is packed: "
            "leave data_collator out. reset_at_document of the data begins documents inside sequences."
        )
    if resets is not None and getattr(trainer.train_dataset, "reset_at_document", True):
        numbers = pad(resets[:, 1:].long(), (1, 0)).cumsum(1)
        batch_rows = read_rows({**inputs, "seq_idx": numbers})
        if batch_rows.starts is not None:
            inputs["seq_idx"], sequences = numbers, len(resets) + batch_rows.starts.sum()
    inputs = dict(trainer.scored(inputs, batch_rows))
    first_row = args.row_process_index * args.train_batch_size
    from_zero = trainer.initial_states.always_zero and align is None
    if batch_rows is not None and packed and not (from_zero and not args.bptt_chunk_length):
        inputs = unpacked(inputs, batch_rows)  # a model takes one state per row; from zero it runs rows packed
        if trainer.bptt_window is not None:
            inputs = dict(trainer.scored(ended_together(inputs)))
        if not isinstance(trainer.data_collator, DataCollatorWithFlattening):  # whose examples are one sequence each
            first_row = args.row_process_index << 20  # the rows of the processes before this one are unknown
    rows, length = token_shape_of(inputs)
    mask = inputs.get("attention_mask")
    tokens = rows * length if mask is None else (mask != 0).sum()
    place = BatchPlace(args.seed, trainer.state.global_step, micro_batch, first_row, rows)
    place = place if resets is None else replace(place, continues=~resets[:, 0])
    layout, loss = RowLayout(), None
    if shared.group is not None:
        trainer.checks.ask(shared.differ(inputs), different_sequences)
        inputs = sequence_shard(inputs, shared.rank, shared.size)
    elif resets is not None or align is not None:
        if "attention_mask" in inputs and bool((inputs["attention_mask"] == 1).all()):
            inputs.pop("attention_mask")
        if align is not None:
            if batch_rows is not None:  # rows are one sequence each by now, and forms that say so are not cropped
                inputs = {name: value for name, value in inputs.items() if name not in LAYOUT[1:]}
            inputs, loss = align.crop(inputs, place)
            layout = RowLayout(crops=2, later_from_zero=align.second_from_zero)
    if "shift_labels" in inputs:
        inputs.setdefault("labels", inputs["shift_labels"])  # where Trainer looks before it counts targets
    return {**inputs, MICRO_BATCH: MicroBatch(place, length, tokens, layout, loss, sequences=sequences)}
