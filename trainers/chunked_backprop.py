"""Training on a sequence longer than memory allows: in chunks, with exact gradients through the state.

The sequence is cut into chunks of C tokens and the state goes from one to the next. Only the states between chunks are
kept; the activations of a chunk are computed again when the backward pass reaches it (arXiv:1604.06174, with a whole
chunk as the segment). Loss, final state and gradients are those of one forward pass over all S tokens, at the memory
of about one chunk and the time of one more forward pass.

With a window of w chunks the gradient is stopped after every w of them: a loss reaches back to the beginning of its
window, between 1 and w chunks. A window of 1 is TBTT (arXiv:2507.02782, section 4.5) inside the sequence.

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

from hf_recurrent_lengthgen.models.causal_lm import StatefulCausalLMOutput
from hf_recurrent_lengthgen.models.recurrent_state import RecurrentState, detach_state

IGNORED = -100
TAKEN = (
    "input_ids",
    "attention_mask",
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
        forward: Forward of a causal language model with the state contract. Its loss must be a sum over targets
            divided by `num_items_in_batch`, as the one of Transformers is.
        inputs: `input_ids` (B, S), `labels` or `shift_labels` (B, S), and if wanted `attention_mask` (B, S),
            `initial_state`, `num_items_in_batch` and `output_final_state`, with the meaning that they have for the
            model. Padding may stand on the left or right, also as whole chunks.
        chunk_length: C. The last chunk may be shorter.
        window: Chunks after which the gradient through the state is stopped; None for never. The gradient into
            `initial_state` comes from the first window.

    Returns:
        `loss` and `final_state`. There are no logits, (B, S, V) being what does not fit into memory.

    Raises:
        ValueError: for a chunk length or window below 1, missing labels, other inputs, and padding inside a row
            that cannot be scored in chunks.
    """
    check_chunks(chunk_length, window)
    _check_inputs(inputs)
    input_ids, mask = inputs["input_ids"], inputs.get("attention_mask")
    targets = _targets(inputs) if mask is None else _scored(_targets(inputs), mask, chunk_length)
    counted = inputs.get("num_items_in_batch")
    num_items = (targets != IGNORED).sum() if counted is None else counted

    def run(start: int, state: RecurrentState | None) -> tuple[Tensor, RecurrentState]:
        chunk = slice(start, start + chunk_length)
        chunk_targets = targets[:, chunk].contiguous()  # the loss of Transformers makes a view of them
        output = forward(
            input_ids=input_ids[:, chunk],
            labels=chunk_targets,  # stock models compute no loss without them; shift_labels win
            shift_labels=chunk_targets,
            initial_state=state,
            output_final_state=True,
            num_items_in_batch=num_items,
            return_dict=True,
            **({} if mask is None else {"attention_mask": mask[:, chunk]}),
        )
        # Autocast keeps its copies of the weights while its outermost context lasts. One copy for all chunks would
        # sum their gradients in its low precision.
        torch.clear_autocast_cache()
        return output["loss"], output["final_state"]

    losses = []
    state: Any = inputs.get("initial_state")
    starts = range(0, input_ids.shape[1], chunk_length)
    for index, start in enumerate(starts):
        if window is not None and index and index % window == 0:
            state = detach_state(state)
        # The backward pass begins with the last chunk, at once: nothing is gained by computing it again.
        is_last = start == starts[-1]
        loss, state = run(start, state) if is_last else checkpoint(run, start, state, use_reentrant=False)
        losses.append(loss)
    final_state = None if inputs.get("output_final_state") is False else state
    return StatefulCausalLMOutput(loss=torch.stack(losses).sum(), final_state=final_state)


@contextmanager
def forward_in_chunks(model: nn.Module, chunk_length: int, window: int | None = None) -> Iterator[None]:
    """Within the `with` block, a call of the model is `chunked_forward` of its inputs.

    Made for `compute_loss` of a Trainer. What wraps the model (DDP, PEFT, FSDP2, autocast of accelerate) sees one
    call: the innermost model's own forward is what runs in chunks, also when the backward pass computes chunks again
    after the block has ended.

    Args:
        model: A causal language model with the state contract, alone or in PEFT and DistributedDataParallel.
        chunk_length: Tokens of a chunk.
        window: As in `chunked_forward`.

    Raises:
        ValueError: for a chunk length or window below 1, a model without the state contract or in another wrapper, one
            with attention layers, and one that is compiled as a whole (its layers may be compiled).
    """
    check_chunks(chunk_length, window)
    inner: Any = innermost_model(model)
    check_chunkable(inner)
    forward = inner.forward  # the class's own, or what stands on the object: autocast of accelerate, for one
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


def check_chunks(chunk_length: int, window: int | None) -> None:
    """Raise a `ValueError` for a chunk length or window that is no whole number from 1."""
    for name, value in (("chunk_length", chunk_length), ("window", window)):
        if not (isinstance(value, int) and value >= 1) and not (name == "window" and value is None):
            allowed = "a number of tokens" if name == "chunk_length" else "None for no limit, or a number of chunks"
            raise ValueError(f"{name} must be {allowed} from 1, got {value!r}.")


def innermost_model(model: nn.Module) -> nn.Module:
    """The model itself, without DistributedDataParallel and PEFT.

    Raises:
        ValueError: if it or what wraps it is compiled.
    """
    outer: Any = model
    while True:
        if is_compiled_module(outer) or outer._compiled_call_impl is not None:
            raise ValueError(
                "A sequence cannot go in chunks through a model that is compiled as a whole: the compiled code would "
                "not see the chunks. Compile its layers instead (for layer in model.backbone.layers: "
                "layer.compile()), or leave torch_compile off."
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
            f"{type(model).__name__} takes no {sorted(missing)}, so a sequence cannot go through it in chunks. Give a "
            "causal language model of this package or stateful(model), alone or in PEFT and DistributedDataParallel; "
            "other wrappers than these and FSDP2 (fully_shard) are not supported."
        )
    if getattr(model, "attends", False):
        raise ValueError(
            f"{type(model).__name__} has attention layers, which would see their own chunk only: the loss would not "
            "be that of the whole sequence. Train with sequences that fit into memory, or with TBTT."
        )


def _check_inputs(inputs: Mapping[str, Any]) -> None:
    given = [name for name, value in inputs.items() if isinstance(value, Tensor) or value not in (None, False, 0)]
    if inputs.get("input_ids") is None or inputs.get("inputs_embeds") is not None:
        raise ValueError(
            "Chunks are cut from input_ids: give them and no inputs_embeds, which take memory for the whole sequence."
        )
    if inputs.get("labels") is None and inputs.get("shift_labels") is None:
        raise ValueError("A sequence in chunks returns no logits, only its loss: give labels or shift_labels.")
    other = sorted(set(given) - set(TAKEN))
    if other or inputs.get("return_dict") is False:
        raise ValueError(
            f"A sequence in chunks takes no {other or 'return_dict=False'}: leave it out. Allowed are "
            f"{', '.join(TAKEN)}."
        )
    shape = tuple(inputs["input_ids"].shape)
    if len(shape) != 2 or 0 in shape:
        raise ValueError(f"input_ids must be (B, S) with at least one row and token, got shape {shape}.")
    for name in ("labels", "shift_labels", "attention_mask"):
        value = inputs.get(name)
        if value is not None and tuple(value.shape) != shape:
            raise ValueError(f"{name} must have the shape of input_ids, {shape}, got {tuple(value.shape)}.")


def _targets(inputs: Mapping[str, Any]) -> Tensor:
    """Position t holds the target of output t, (B, S): over a border, the first token of the next chunk."""
    shifted = inputs.get("shift_labels")
    return F.pad(inputs["labels"][:, 1:], (0, 1), value=IGNORED) if shifted is None else shifted


def _scored(targets: Tensor, mask: Tensor, chunk_length: int) -> Tensor:
    """The targets without those of outputs before the first real token of a row, as the model does on a whole row.

    Raises:
        ValueError: if padding at the beginning of a later chunk has targets. Its output is that of the last real
            token, which the chunk does not know.
    """
    nothing_seen = mask.cumsum(1) == 0
    targets = targets.masked_fill(nothing_seen, IGNORED)
    nothing_in_chunk = torch.cat([part.cumsum(1) == 0 for part in mask.split(chunk_length, dim=1)], dim=1)
    lost = nothing_in_chunk & ~nothing_seen & (targets != IGNORED)
    if bool(lost.any()):
        row, position = lost.nonzero()[0].tolist()
        raise ValueError(
            f"Row {row} has padding with a target at position {position}, at the beginning of a chunk and after real "
            "tokens. Label padding with -100, and move padding inside a row to its end."
        )
    return targets
