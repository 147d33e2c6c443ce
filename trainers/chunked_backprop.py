"""Training on a sequence longer than memory allows: in chunks, with exact gradients through the state.

The sequence is cut into chunks of C tokens and the state is carried from each chunk to the next. Only the states
between chunks are kept; the activations of a chunk are recomputed in the backward pass (Chen et al., 2016,
arXiv:1604.06174, with a whole chunk as the segment). Loss, final state and gradients are those of one forward pass
over all S tokens. The cost is the memory of about one chunk and the time of one more forward pass.

With a window of w chunks the gradient is stopped after every w chunks: the gradient of a loss reaches back to the
beginning of its window, between 1 and w chunks. A window of 1 is TBTT (Buitrago Ruiz and Gu, 2025, section 4.5) inside
the sequence.

Shape legend: B batch, S tokens of the sequence, C tokens of a chunk.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.utils import is_compiled_module
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from hf_recurrent_lengthgen.data.packing import IGNORED_LABEL
from hf_recurrent_lengthgen.models.modeling_heads import StatefulCausalLMOutput, scored_labels
from hf_recurrent_lengthgen.models.rows import Rows, read_rows
from hf_recurrent_lengthgen.models.state_value import RecurrentState, detach_state, keep_rows

TAKEN = (
    "input_ids",
    "attention_mask",
    "seq_idx",
    "labels",
    "shift_labels",
    "initial_state",
    "output_final_state",
    "num_items_in_batch",
    "return_dict",
)


def chunked_forward(
    forward: Callable[..., Any], inputs: Mapping[str, Any], chunk_length: int, window: int | None = None
) -> StatefulCausalLMOutput:
    """The loss and final state of one long sequence, with the memory of about one chunk.

    Args:
        forward: Forward method of a causal language model with the state contract. Its loss must be a sum over
            targets divided by `num_items_in_batch`, as in Transformers.
        inputs: `input_ids` (B, S), `labels` or `shift_labels` (B, S), and optionally `attention_mask` (B, S),
            `initial_state`, `num_items_in_batch` and `output_final_state`, with the meaning that they have for the
            model. Padding may be on the left or right and may fill whole chunks. `seq_idx` (B, S) says where
            sequences begin inside rows, from the zero state.
        chunk_length: C. The last chunk may be shorter.
        window: Chunks after which the gradient through the state is stopped; None for never. The gradient into
            `initial_state` comes from the first window.

    Returns:
        `loss` and `final_state`. There are no logits, because (B, S, V) would not fit into memory.

    Raises:
        ValueError: for other inputs, and padding inside a row that cannot be scored in chunks.
    """
    _check_inputs(inputs)
    input_ids, mask, numbers = inputs["input_ids"], inputs.get("attention_mask"), inputs.get("seq_idx")
    rows = read_rows({"input_ids": input_ids, "attention_mask": mask, "seq_idx": numbers})
    targets = _targets(inputs, rows)
    if rows.real is not None:
        _check_padding(targets, rows.real, chunk_length)
    counted = inputs.get("num_items_in_batch")
    num_items = (targets != IGNORED_LABEL).sum() if counted is None else counted

    def run(start: int, state: RecurrentState | None) -> tuple[Tensor, RecurrentState]:
        chunk = slice(start, start + chunk_length)
        if rows.starts is not None and state is not None and start:
            state = keep_rows(state, ~_begins_anew(rows.starts, rows.real, chunk))
        chunk_targets = targets[:, chunk].contiguous()  # the loss of Transformers makes a view of them
        output = forward(
            input_ids=input_ids[:, chunk],
            labels=chunk_targets,  # stock models compute no loss without labels; shift_labels take precedence
            shift_labels=chunk_targets,
            initial_state=state,
            output_final_state=True,
            num_items_in_batch=num_items,
            return_dict=True,
            **({} if mask is None else {"attention_mask": mask[:, chunk]}),
            **({} if numbers is None else {"seq_idx": numbers[:, chunk]}),
        )
        # Autocast keeps its low-precision copies of the weights until its outermost context ends. A copy shared by
        # all chunks would sum their gradients in that precision.
        torch.clear_autocast_cache()
        return output["loss"], output["final_state"]

    losses = []
    state: Any = inputs.get("initial_state")
    starts = range(0, input_ids.shape[1], chunk_length)
    for index, start in enumerate(starts):
        if window is not None and index and index % window == 0:
            state = detach_state(state)
        # The backward pass begins with the last chunk, so checkpointing it would save no memory.
        is_last = start == starts[-1]
        loss, state = run(start, state) if is_last else checkpoint(run, start, state, use_reentrant=False)
        losses.append(loss)
    final_state = None if inputs.get("output_final_state") is False else state
    return StatefulCausalLMOutput(loss=torch.stack(losses).sum(), final_state=final_state)


@contextmanager
def forward_in_chunks(model: nn.Module, chunk_length: int, window: int | None = None) -> Iterator[None]:
    """Within the `with` block, a call of the model is `chunked_forward` of its inputs.

    For use in `compute_loss` of a Trainer. Wrappers of the model (DDP, PEFT, FSDP2, autocast of accelerate) see a
    single call: only the forward method of the innermost model runs in chunks, also when the backward pass recomputes
    chunks after the block has ended.

    Args:
        model: A causal language model with the state contract, alone or in PEFT and DistributedDataParallel.
        chunk_length: Tokens per chunk.
        window: As in `chunked_forward`.

    Raises:
        ValueError: for a model without the state contract or in another wrapper, a model with attention layers, and
            one that is compiled as a whole (its layers may be compiled).
    """
    inner: Any = innermost_model(model)
    check_chunkable(inner)
    forward = inner.forward  # the method of the class, or one set on the object, such as accelerate's autocast
    on_object = "forward" in vars(inner)

    def in_chunks(input_ids: Tensor | None = None, **inputs: Any) -> StatefulCausalLMOutput:
        return chunked_forward(forward, {"input_ids": input_ids, **inputs}, chunk_length, window)

    inner.forward = in_chunks
    try:
        yield
    finally:
        if on_object:
            inner.forward = forward
        else:
            del inner.forward


def innermost_model(model: nn.Module) -> nn.Module:
    """The model itself, without DistributedDataParallel and PEFT.

    Raises:
        ValueError: if the model or one of its wrappers is compiled.
    """
    outer: Any = model
    while True:
        if is_compiled_module(outer) or outer._compiled_call_impl is not None:
            raise ValueError(
                "A model that is compiled as a whole cannot read a sequence in chunks, because its compiled code "
                "would not see the chunks. Compile its layers instead (for layer in model.backbone.layers: "
                "layer.compile()), or set torch_compile=False."
            )
        if isinstance(outer, DistributedDataParallel):
            outer = outer.module
        elif hasattr(outer, "get_base_model"):
            outer = outer.get_base_model()
        else:
            return outer


def check_chunkable(model: nn.Module) -> None:
    """Raise a `ValueError` with the reason if a model, without wrappers, cannot read a sequence in chunks exactly."""
    parameters = inspect.signature(model.forward).parameters
    missing = {"input_ids", "initial_state", "output_final_state"} - set(parameters)
    takes_others = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    if not takes_others:  # stock models hand these to their loss
        missing |= {"shift_labels", "num_items_in_batch"} - set(parameters)
    if missing:
        raise ValueError(
            f"{type(model).__name__} does not take {sorted(missing)}, so it cannot read a sequence in chunks. Give a "
            "causal language model of this package or stateful(model), alone or in PEFT, DistributedDataParallel or "
            "FSDP2 (fully_shard); other wrappers are not supported."
        )
    if getattr(model, "attends", False):
        raise ValueError(
            f"{type(model).__name__} has attention layers, which would see only their own chunk, so the loss would "
            "not be that of the whole sequence. Train on sequences that fit into memory, or with TBTT."
        )


def _check_inputs(inputs: Mapping[str, Any]) -> None:
    given = {name for name, value in inputs.items() if isinstance(value, Tensor) or value not in (None, False, 0)}
    if other := sorted(given - set(TAKEN)):
        raise ValueError(
            f"A forward pass in chunks does not take {other}: leave it out. Allowed inputs are {', '.join(TAKEN)}."
        )
    if inputs.get("labels") is None and inputs.get("shift_labels") is None:
        raise ValueError(
            "A forward pass in chunks returns a loss and no logits, so it needs labels: give labels or shift_labels."
        )


def _targets(inputs: Mapping[str, Any], rows: Rows) -> Tensor:
    """The target of output t at position t, (B, S), as scored on the whole row."""
    shifted = inputs.get("shift_labels")
    if shifted is not None:
        return scored_labels(shifted, rows, shifted=True)
    return F.pad(scored_labels(inputs["labels"], rows)[:, 1:], (0, 1), value=IGNORED_LABEL)


def _begins_anew(starts: Tensor, real: Tensor | None, chunk: slice) -> Tensor:
    """Whether the first real token of a chunk begins a sequence, (B,): the chunk alone does not show it."""
    if real is None:
        return starts[:, chunk.start]
    return (starts[:, chunk] & (real[:, chunk].cumsum(1) == 1)).any(1)


def _check_padding(targets: Tensor, real: Tensor, chunk_length: int) -> None:
    """Raise a `ValueError` if padding at the beginning of a later chunk has targets: its output is that of the last
    real token, which is not in the chunk."""
    nothing_in_chunk = torch.cat([part.cumsum(1) == 0 for part in real.split(chunk_length, dim=1)], dim=1)
    lost = nothing_in_chunk & (targets != IGNORED_LABEL)
    if bool(lost.any()):
        row, position = lost.nonzero()[0].tolist()
        raise ValueError(
            f"Row {row} has padding with a target at position {position}, at the beginning of a chunk and after real "
            "tokens. Label padding with -100, and move padding inside a row to its end."
        )
