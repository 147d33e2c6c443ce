"""Sequences read in windows: the state is carried from window to window without gradient, as in TBTT.

A sequence is an example, however long. Its windows have w chunks of C tokens (`bptt_window`, `bptt_chunk_length`),
counted from its end, so that an answer there has a whole window before it; the first window may be shorter. Each
window is a call of the model and a backward pass of its own, so memory is that of one window, whatever the length. A
window without a target has no gradient: it is read without a backward pass and without logits.

    h_{-1} of window k  =  h_T of window k - 1, without gradient;      loss  =  the sum over windows

In a hybrid, keys and values are carried, too: attention sees the whole sequence, or its `attention_window`.

Buitrago Ruiz and Gu, 2025 (arXiv:2507.02782), section 4.5, with whole examples in a step in place of sequences
that continue over steps: a step is the mean over all targets of its examples, and nothing is carried between steps.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from accelerate.utils import send_to_device
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.parallel import DistributedDataParallel
from transformers.utils import logging

from hf_recurrent_lengthgen.data.chunks import cut_rows, shifted_targets
from hf_recurrent_lengthgen.data.collating import FILL
from hf_recurrent_lengthgen.data.packing import IGNORED_LABEL
from hf_recurrent_lengthgen.models.modeling_protocols import base_of
from hf_recurrent_lengthgen.models.rows import BORDERS, LONGEST, read_rows
from hf_recurrent_lengthgen.models.state_value import keep_rows, states_checked_by_caller
from hf_recurrent_lengthgen.trainers.initial_states import MICRO_BATCH, MicroBatch
from hf_recurrent_lengthgen.trainers.run.scored_targets import token_shape_of
from hf_recurrent_lengthgen.trainers.states_of_batches import observe

logger = logging.get_logger(__name__)

Inputs = dict[str, Any]


def ended_together(inputs: Inputs) -> Inputs:
    """The inputs with padding at the end of rows moved to their beginning."""
    mask = inputs.get("attention_mask")
    if not isinstance(mask, Tensor) or mask.ndim != 2:  # a model refuses other masks by name
        return inputs
    behind = mask.flip(1).long().argmax(1)
    places = (torch.arange(mask.shape[1], device=mask.device) - behind[:, None]) % mask.shape[1]
    rows = torch.arange(len(mask), device=mask.device)[:, None]
    return {name: value[rows, places] if _has_tokens(value, mask.shape) else value for name, value in inputs.items()}


def plan_windows(trainer: Any, batches: list[Inputs]) -> None:
    """Note in each `MicroBatch` of a step which windows have targets, the same on all processes, and pad rows to the
    same length on all of them."""
    length = _length(trainer)
    targets = [_targets(batch) for batch in batches]
    if trainer.args.world_size > 1:
        own = torch.tensor([each.shape[1] for each in targets], device=trainer.args.device)
        longest = trainer.accelerator.gather(own[None]).amax(0).tolist()
        for index, (batch, columns) in enumerate(zip(batches, longest, strict=True)):
            extra = columns - targets[index].shape[1]
            if extra:
                batch.update(_padded(batch, extra))
                for name in (*BORDERS, *LONGEST):  # of rows that are one sequence each, without the padding
                    batch.pop(name, None)
                targets[index] = pad(targets[index], (extra, 0), value=IGNORED_LABEL)
    scored = torch.cat([_by_window((each != IGNORED_LABEL).any(0), length) for each in targets])
    masks = [
        batch.get("attention_mask", each.new_ones(each.shape)) for batch, each in zip(batches, targets, strict=True)
    ]
    padded = torch.cat([_by_window((mask == 0).any(0), length) for mask in masks])
    if trainer.args.world_size > 1:
        scored = trainer.accelerator.gather(scored[None].int().to(trainer.args.device)).amax(0).to(padded)
        if bool(scored.any()):
            scored[-1] = True  # in the last window of a step all processes add up their gradients
    facts: list[list[bool]] = torch.stack([scored, padded], 1).tolist()
    if not any(has_target for has_target, _ in facts) and trainer.is_world_process_zero():
        logger.warning_once(
            "A step has no token that is a target, so it changes no weight, and its loss is 0. Examples whose answers "
            "are cut off teach nothing. Further steps like this are not reported."
        )
    remaining = iter(facts)
    for batch, each in zip(batches, targets, strict=True):
        batch[MICRO_BATCH].windows = list(islice(remaining, -(-each.shape[1] // length)))


def _length(trainer: Any) -> int:
    """Tokens of a window."""
    return int(trainer.bptt_window * trainer.args.bptt_chunk_length)


def _by_window(columns: Tensor, length: int) -> Tensor:
    """Whether any of the columns (S,) of a window is true, (windows,)."""
    return pad(columns, (-len(columns) % length, 0)).view(-1, length).any(1)


def train_in_windows(
    trainer: Any, model: Any, inputs: Inputs, micro_batch: MicroBatch, train: Callable[[Inputs, MicroBatch], Tensor]
) -> Tensor:
    """The loss of a micro-batch, whose gradients were added to those of the weights.

    Args:
        train: Trains on the inputs of a window, and returns its part of the loss.
    """
    length = _length(trainer)
    model.train()
    if callable(of_optimizer := getattr(trainer.optimizer, "train", None)):  # it averages weights for evaluation
        of_optimizer()
    inputs = send_to_device(inputs, trainer.args.device)
    assert micro_batch.windows is not None
    (rows, columns), windows = token_shape_of(inputs), micro_batch.windows
    mask = inputs.get("attention_mask", torch.ones(rows, columns, device=trainer.args.device))
    trainer.logs.add(idle_tokens=1 - mask.float().mean())
    borders = [0, *range(columns - (len(windows) - 1) * length, columns + 1, length)]
    chunks = cut_rows(inputs, borders)
    synchronized = max((index for index, (scored, _) in enumerate(windows) if scored), default=None)
    loss, carried, base = torch.zeros((), device=trainer.args.device), None, base_of(trainer.model)
    keys = base.new_attention_cache() if getattr(base, "attends", False) else None
    for index, ((chunk, begins), (scored, padded)) in enumerate(zip(chunks, windows, strict=True)):
        if index and trainer.needs_continued_data:
            begun = mask[:, : borders[index]].any(1).sum()  # sequences with a chunk that TBTT continues
            trainer.run_record.nonzero_starts = trainer.run_record.nonzero_starts + begun
        if carried is not None and begins is not None:
            carried, keys = keep_rows(carried, ~begins), None if keys is None else keys.kept(~begins)
        ends = index == len(windows) - 1
        window = replace(micro_batch, carried=carried, keys=keys, ends=ends, is_last=micro_batch.is_last and ends)
        batch = {**chunk, "labels": chunk["shift_labels"]}  # stock models need both
        if not padded:
            batch.pop("attention_mask", None)  # to read it is to wait for the device
        waits = micro_batch.is_last and index != synchronized and isinstance(model, DistributedDataParallel)
        if not scored:
            _read(trainer, model, batch, window)
        else:
            with model.no_sync() if waits else nullcontext():
                loss += train(batch, window)
        carried, keys = window.carried, None if keys is None else keys.detached()
    return loss


@torch.no_grad()
def _read(trainer: Any, model: Any, inputs: Inputs, window: MicroBatch) -> None:
    """Run the model on a window without targets."""
    inputs = trainer.with_states(window, inputs)
    tokens = {name: value for name, value in inputs.items() if name not in ("labels", "shift_labels")}
    with trainer.compute_loss_context_manager(), states_checked_by_caller():
        model(**tokens, logits_to_keep=1)
    observe(trainer, window, inputs)


def _targets(batch: Inputs) -> Tensor:
    """(B, S), as in `cut_rows`."""
    targets = shifted_targets(batch.get("labels"), batch.get("shift_labels"), read_rows(batch))
    if targets is None:
        raise ValueError("Sequences that are read in windows (bptt_window) need labels: give labels or shift_labels.")
    return targets


def _has_tokens(value: Any, shape: Any) -> bool:
    return isinstance(value, Tensor) and value.shape[:2] == shape


def _padded(batch: Inputs, extra: int) -> Inputs:
    """The batch with `extra` columns of padding before its rows."""
    shape = token_shape_of(batch)
    first = next(value for value in batch.values() if _has_tokens(value, shape))
    whole = {"attention_mask": torch.ones(shape, dtype=torch.long, device=first.device)} | batch
    return {
        name: pad(value, (*[0] * (2 * value.ndim - 4), extra, 0), value=FILL.get(name, 0))
        for name, value in whole.items()
        if _has_tokens(value, shape)
    }
