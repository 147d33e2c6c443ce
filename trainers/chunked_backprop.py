"""Training on a sequence longer than memory allows: in chunks, with exact gradients through the state.

The sequence is cut into chunks of about C tokens and the state is carried from each chunk to the next, in a hybrid
also the keys and values. Only these stay in memory; the activations of a chunk are recomputed in the backward pass
(Chen et al., 2016, arXiv:1604.06174, with a whole chunk as the segment). Loss, final state and gradients are those of
one forward pass over all S tokens. The cost is the memory of about one chunk and the time of one more forward pass.
Keys and values grow with S, unless the model has an `attention_window`.

Shape legend: B batch, S tokens of the sequence, C tokens of a chunk.
"""

import copy
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.utils import is_compiled_module
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from hf_recurrent_lengthgen.data.chunks import Chunk, chunk_borders, cut_rows
from hf_recurrent_lengthgen.data.packing import IGNORED_LABEL
from hf_recurrent_lengthgen.models.modeling_heads import StatefulCausalLMOutput
from hf_recurrent_lengthgen.models.rows import LAYOUT
from hf_recurrent_lengthgen.models.state_value import RecurrentState, keep_rows, layer_state, learned_row

ROWS = ("input_ids", *LAYOUT, "labels", "shift_labels")
TAKEN = (*ROWS, "initial_state", "attention_cache", "output_final_state", "num_items_in_batch", "return_dict")


def chunked_forward(
    forward: Callable[..., Any], inputs: Mapping[str, Any], chunk_length: int, model: Any = None
) -> StatefulCausalLMOutput:
    """The loss and final state of one long sequence, with the memory of about one chunk.

    Args:
        forward: Forward method of a causal language model with the state contract. Its loss must be a sum over
            targets divided by `num_items_in_batch`, as in Transformers.
        inputs: `input_ids` (B, S), `labels` or `shift_labels` (B, S), and optionally `attention_mask` (B, S),
            `initial_state`, `num_items_in_batch` and `output_final_state`, with the meaning that they have for the
            model. Padding may be on the left or right and may fill whole chunks. Any form of `LAYOUT` says where
            sequences begin inside rows, from the active learned state, or zero. A hybrid takes an `attention_cache`
            with what comes before, which then holds all keys and values.
        chunk_length: C, at most; chunks differ by one token.
        model: Whose forward method it is; None for the owner of a bound method.

    Returns:
        `loss` and `final_state`. There are no logits, because (B, S, V) would not fit into memory.

    Raises:
        ValueError: for other inputs, and padding inside a sequence that cannot be scored in chunks.
    """
    _check_inputs(inputs)
    length = inputs["input_ids"].shape[1]
    chunks = cut_rows({name: inputs.get(name) for name in ROWS}, chunk_borders(length, -(-length // chunk_length)))
    model = getattr(forward, "__self__", None) if model is None else model
    counted = inputs.get("num_items_in_batch")
    scored = torch.stack([(chunk.inputs["shift_labels"] != IGNORED_LABEL).sum() for chunk in chunks])
    num_items = scored.sum() if counted is None else counted

    def run(chunk: Chunk, state: RecurrentState | None, keys: Any) -> tuple[Tensor, RecurrentState, Any]:
        keys = copy.copy(keys)  # the backward pass runs this again, from the same keys
        output = forward(
            **({} if keys is None else {"attention_cache": keys}),
            **chunk.inputs,
            labels=chunk.inputs["shift_labels"],  # stock models compute no loss without labels
            initial_state=state,
            output_final_state=True,
            num_items_in_batch=num_items,
            return_dict=True,
        )
        # Autocast keeps its low-precision copies of the weights until its outermost context ends. A copy shared by
        # all chunks would sum their gradients in that precision.
        torch.clear_autocast_cache()
        return output["loss"], output["final_state"], keys

    losses = []
    state: Any = inputs.get("initial_state")
    cache: Any = inputs.get("attention_cache")
    # a copy, as `cache` will hold what comes after the chunks, which are computed again from what came before
    keys = model.new_attention_cache() if cache is None and getattr(model, "attends", False) else copy.copy(cache)
    for index, chunk in enumerate(chunks):
        if index and chunk.begins is not None:
            state, keys = restarted(model, state, keys, chunk.begins)
        # The backward pass begins with the last chunk, so checkpointing it would save no memory.
        is_last = chunk is chunks[-1]
        carried = state, keys
        loss, state, keys = run(chunk, *carried) if is_last else checkpoint(run, chunk, *carried, use_reentrant=False)
        losses.append(loss)
    if cache is not None:
        cache.become(keys)
    final_state = None if inputs.get("output_final_state") is False else state
    return StatefulCausalLMOutput(loss=torch.stack(losses).sum(), final_state=final_state)


def restarted(model: Any, state: RecurrentState, keys: Any, begins: Tensor) -> tuple[RecurrentState, Any]:
    """The carried state and keys: where a sequence `begins` (B,), its first state and no keys."""
    first = learned_row(model) if hasattr(model, "first_state") else None
    state = keep_rows(state, ~begins)
    if first is not None:
        state = tuple(
            layer_state(
                torch.where(begins.view(-1, *[1] * (old.ndim - 1)), new, old) for old, new in zip(*layers, strict=True)
            )
            for layers in zip(state, first, strict=True)
        )
    return state, None if keys is None else keys.kept(~begins)


@contextmanager
def forward_in_chunks(model: nn.Module, chunk_length: int) -> Iterator[None]:
    """Within the `with` block, a call of the model is `chunked_forward` of its inputs.

    For use in `compute_loss` of a Trainer. Wrappers of the model (DDP, PEFT, FSDP2, autocast of accelerate) see a
    single call: only the forward method of the innermost model runs in chunks, also when the backward pass recomputes
    chunks after the block has ended.

    Args:
        model: A causal language model with the state contract, alone or in PEFT and DistributedDataParallel.
        chunk_length: Tokens per chunk.

    Raises:
        ValueError: for a model without the state contract or in another wrapper, a hybrid that is not exact in chunks,
            and one that is compiled as a whole (its layers may be compiled).
    """
    inner: Any = innermost_model(model)
    check_chunkable(inner)
    forward = inner.forward  # the method of the class, or one set on the object, such as accelerate's autocast
    on_object = "forward" in vars(inner)

    @functools.wraps(forward)  # hybrids ask the signature of their forward method, which runs in it
    def in_chunks(input_ids: Tensor | None = None, **inputs: Any) -> StatefulCausalLMOutput:
        return chunked_forward(forward, {"input_ids": input_ids, **inputs}, chunk_length, inner)

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


def check_chunkable(model: Any) -> None:
    """Raise a `ValueError` with the reason if a model, without wrappers, cannot read a sequence in chunks exactly."""
    parameters = inspect.signature(model.forward).parameters
    missing = {"input_ids", "initial_state", "output_final_state"} - set(parameters)
    if not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):  # as in stock models
        missing |= {"shift_labels", "num_items_in_batch"} - set(parameters)
    if missing:
        raise ValueError(
            f"{type(model).__name__} does not take {sorted(missing)}, so it cannot read a sequence in chunks. Give a "
            "causal language model of this package or stateful(model), alone or in PEFT, DistributedDataParallel or "
            "FSDP2 (fully_shard); other wrappers are not supported."
        )
    if hasattr(model, "check_reads_chunks"):
        model.check_reads_chunks()
    config = getattr(model, "config", None)
    if config is not None and getattr(config.get_text_config(decoder=True), "output_router_logits", False):
        raise ValueError(
            "output_router_logits=True in the config adds a loss of the experts, which is one of all tokens, to each "
            "chunk: set it to False (model.config.output_router_logits), or leave bptt_chunk_length out."
        )


def evaluation_chunk(trainer: Any, model: nn.Module, inputs: Mapping[str, Any]) -> int | None:
    """C, where the loss of an evaluation is that of chunks, and nobody asks for logits; None otherwise.

    With padding inside a sequence, the output for the first target of a chunk may be in the one before.
    """
    chunk = trainer.args.bptt_chunk_length
    if chunk is None or trainer.needs_logits or not set(inputs) <= set(TAKEN):
        return None
    try:
        check_chunkable(innermost_model(model))
    except ValueError:  # compiled, or not exact in chunks
        return None
    mask = inputs.get("attention_mask")
    if mask is not None and mask.ndim == 2:
        real = pad(mask != 0, (1, 0))
        if bool(((real[:, 1:] & ~real[:, :-1]).sum(1) > 1).any()):
            return None
    return int(trainer.args.bptt_chunk_length)


def _check_inputs(inputs: Mapping[str, Any]) -> None:
    names = {name for name, value in inputs.items() if isinstance(value, Tensor) or value not in (None, False, 0)}
    if other := sorted(names - set(TAKEN)):
        raise ValueError(
            f"A forward pass in chunks does not take {other}: leave it out. Allowed inputs are {', '.join(TAKEN)}."
        )
    if inputs.get("labels") is None and inputs.get("shift_labels") is None:
        raise ValueError(
            "A forward pass in chunks returns a loss and no logits, so it needs labels: give labels or shift_labels."
        )
