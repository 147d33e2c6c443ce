"""Gradients of a sequence in two processes (gloo) with one row each: `python chunks_in_processes.py FILE KIND ...`.

A KIND says what wraps the model (`wrap`). Process 0 writes to FILE, for each of them, the gradients summed over rows.
"""

import os
import sys
from contextlib import nullcontext
from functools import partial
from itertools import pairwise
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from transformers import Lfm2Config, Lfm2ForCausalLM

from hf_recurrent_lengthgen.hybrids import stateful
from hf_recurrent_lengthgen.models import StatefulMamba2Config, StatefulMamba2ForCausalLM, modeling_loss
from hf_recurrent_lengthgen.models.state_value import LayerState, map_state
from hf_recurrent_lengthgen.trainers.chunked_backprop import forward_in_chunks

CHUNK_LENGTH, LENGTH = 5, 13


def model_and_inputs(dtype: torch.dtype = torch.float64, hybrid: bool = False) -> tuple[Any, dict[str, Any]]:
    """A model and two rows, with a state before them."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 17, "hidden_size": 8, "num_hidden_layers": 2}
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    if hybrid:
        sizes |= {"layer_types": ["conv", "full_attention"], "conv_L_cache": 3, "intermediate_size": 16}
        heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
        model: Any = stateful(Lfm2ForCausalLM(Lfm2Config(**sizes, **heads, **special)))
    else:
        config = StatefulMamba2Config(num_heads=2, head_dim=8, n_groups=1, state_size=4, **sizes, **special)
        model = StatefulMamba2ForCausalLM(config)
    model = model.to(dtype).train()
    ids = torch.randint(3, 17, (2, LENGTH))
    state = tuple(LayerState(*(torch.randn(part.shape).to(part) for part in layer)) for layer in model.zero_state(2))
    inputs = {"input_ids": ids, "labels": ids, "initial_state": state, "num_items_in_batch": 2 * (LENGTH - 1)}
    return model, inputs


def gradients(model: nn.Module, loss: Tensor, state: Any, initial_state: Any) -> dict[str, Tensor]:
    """Gradients of a loss and a function of a final state, by the parameters and the initial state; then forgotten."""
    (loss + sum(part.sin().sum() for layer in state for part in layer)).backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    for index, part in enumerate(part for layer in initial_state for part in layer):
        found[f"state {index}"], part.grad = part.grad if part.numel() else None, None
    model.zero_grad()
    return {name: gradient for name, gradient in found.items() if gradient is not None}


def keys_of(model: Any) -> dict[str, Any]:
    """The argument of a hybrid that holds keys and values."""
    return {"attention_cache": model.new_attention_cache()} if getattr(model, "attends", False) else {}


def loop(model: Any, inputs: dict[str, Any], chunk_length: int) -> tuple[Tensor, Any]:
    """Loss and final state of chunks by plain calls of the model."""
    ids, labels, state = inputs["input_ids"], inputs["labels"], inputs["initial_state"]
    loss, keys = cast(Any, 0), keys_of(model)
    count = -(-ids.shape[1] // chunk_length)
    for start, end in pairwise(ids.shape[1] * index // count for index in range(count + 1)):
        output = model(input_ids=ids[:, start:end], initial_state=state, **keys)
        targets = labels[:, start + 1 : end + 1]  # one less in the last chunk
        logits = output.logits[:, : targets.shape[1]].float()  # as in the loss of Transformers
        loss = loss + cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        state = output.final_state
    return loss / inputs["num_items_in_batch"], state


def in_windows(model: Any, inputs: dict[str, Any]) -> dict[str, Tensor]:
    """Gradients of two windows with a backward pass each, after a chunk that is only read."""
    ids, state = inputs["input_ids"], map_state(Tensor.detach, inputs["initial_state"])
    targets = torch.nn.functional.pad(inputs["labels"][:, 1:], (0, 1), value=-100)
    also = {"num_items_in_batch": inputs["num_items_in_batch"], "output_final_state": True} | (keys := keys_of(model))
    with torch.no_grad():
        read = {"initial_state": state, "logits_to_keep": 1, "output_final_state": True}
        state = model(input_ids=ids[:, :3], **read, **keys).final_state
    for window in (slice(3, 8), slice(8, None)):
        labels = targets[:, window].contiguous()
        output = model(input_ids=ids[:, window], labels=labels, shift_labels=labels, initial_state=state, **also)
        state = map_state(Tensor.detach, output.final_state)
        if keys:
            also["attention_cache"] = also["attention_cache"].detached()
        output.loss.backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    return {name: gradient for name, gradient in found.items() if gradient is not None}


def checkpoint_layers(model: Any) -> None:
    """Activation checkpointing inside the model, without its switch, whose name depends on the version."""
    for layer in model.base_model.layers:
        layer.gradient_checkpointing = True
        layer._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)


def wrap(model: Any, kind: str) -> Any:
    """The model in DDP, or its layers and itself sharded."""
    kind = kind.removesuffix("_hybrid")
    if kind == "ddp":
        return DistributedDataParallel(model)
    if kind == "fsdp_checkpointed":
        checkpoint_layers(model)
    param_dtype = torch.bfloat16 if kind == "fsdp_bfloat16" else None
    # with cast_forward_inputs, states would be rounded at every layer
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, cast_forward_inputs=False)
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.base_model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def over_processes(name: str, gradient: Tensor) -> Tensor:
    """The sum of a parameter's gradient, of which the wrappers made a mean; both rows of a state's."""
    if name.startswith("state"):
        rows = [torch.empty_like(gradient) for _ in range(2)]
        dist.all_gather(rows, gradient)
        return torch.cat(rows)
    return 2 * (gradient.full_tensor() if isinstance(gradient, DTensor) else gradient)


def operations(loss: Tensor) -> set[str]:
    """The names of the last ones that made a loss."""
    nodes, found = [loss.grad_fn], set[str]()
    for _ in range(5):
        nodes = [above for node in nodes if node is not None for above, _ in node.next_functions]
        found |= {type(node).__name__ for node in nodes}
    return found


def run(kind: str) -> dict[str, dict[str, Tensor]]:
    """Gradients of one pass over the sequence, of chunks, of one pass without logits, and of windows."""
    dtype = torch.float32 if kind == "fsdp_bfloat16" else torch.float64
    model, inputs = model_and_inputs(dtype, kind.endswith("hybrid"))
    mine = slice(dist.get_rank(), dist.get_rank() + 1)
    inputs |= {key: inputs[key][mine] for key in ("input_ids", "labels")}
    inputs["initial_state"] = map_state(lambda part: part[mine].clone().requires_grad_(), inputs["initial_state"])
    wrapped, result = wrap(model, kind), {}
    modeling_loss.LOGITS_PER_CHUNK = CHUNK_LENGTH * 17
    for name in ("whole", "chunks", "without logits"):
        with forward_in_chunks(wrapped, CHUNK_LENGTH) if name == "chunks" else nullcontext():
            output = wrapped(**inputs, **({"skip_logits": True} if name == "without logits" else {}))
        assert ("logits" in output) == (name == "whole")
        assert ("_ChunkedLossBackward" in operations(output["loss"])) == (name == "without logits")
        found = gradients(wrapped, output["loss"], output["final_state"], inputs["initial_state"])
        result[name] = {key.removeprefix("module."): over_processes(key, value) for key, value in found.items()}
    if not kind.startswith("ddp"):  # where other windows than the last do not synchronize
        found = in_windows(wrapped, inputs)
        result["windows"] = {key: over_processes(key, value) for key, value in found.items()}
    return result


def main() -> None:
    file, *kinds = sys.argv[1:]
    children = []
    for rank in range(2):  # forked after the imports, which take most of the time
        if (child := os.fork()) == 0:
            torch.set_num_threads(1)
            dist.init_process_group("gloo", f"file://{file}.store", rank=rank, world_size=2)
            result = {kind: run(kind) for kind in kinds}
            if rank == 0:
                torch.save(result, file)
            dist.destroy_process_group()
            sys.exit()
        children.append(child)
    sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children))


if __name__ == "__main__":
    main()
