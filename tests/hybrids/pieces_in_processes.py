"""What wrapped models give whose rows several processes (gloo) share, as in tests/models/pieces_in_processes.py."""

from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from hf_recurrent_lengthgen.hybrids import stateful
from hf_recurrent_lengthgen.models.state_value import LayerState, map_state
from tests.hybrids.measures import random_state
from tests.hybrids.tiny_models import VOCABULARY, tiny_model
from tests.models.law import weights_like
from tests.models.pieces_in_processes import main

ROWS, LENGTH = 2, 37
CUTS: dict[int, list[int]] = {1: [], 2: [30], 3: [2, 20], 4: [8, 10, 35]}
"""Where pieces begin; some are shorter than the convolution."""


def run_job(
    model_type: str, checkpointed: bool = False, window: int | None = None, group: Any = None
) -> dict[str, Tensor]:
    """Logits, loss, final state and all gradients of a random functional of them, of one piece or of the whole."""
    size, rank = (1, 0) if group is None else (dist.get_world_size(group), dist.get_rank(group))
    start, stop = list(pairwise([0, *CUTS[size], LENGTH]))[rank]
    piece = slice(start, stop)
    model = stateful(tiny_model(model_type), attention_window=window).train(checkpointed)
    for layer in model.modules() if checkpointed else ():
        if hasattr(layer, "gradient_checkpointing"):
            layer.gradient_checkpointing = True
            layer._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(3, VOCABULARY, (ROWS, LENGTH + 1), generator=generator)
    embeds = model.get_input_embeddings()(tokens[:, :-1]).detach()
    inputs = embeds[:, piece].clone().requires_grad_()
    state = map_state(lambda part: part.detach().clone().requires_grad_(), random_state(model, ROWS))
    given: dict[str, Any] = {"shift_labels": tokens[:, 1:][:, piece].contiguous(), "num_items_in_batch": ROWS * LENGTH}
    given |= {"labels": given["shift_labels"]} if group is None else {"sequence_group": group}
    output = model(inputs_embeds=inputs, initial_state=state, output_final_state=True, **given)
    weights = weights_like(embeds.new_zeros(ROWS, LENGTH, output.logits.shape[2]), 0)
    objective = output.loss + (output.logits * weights[:, piece]).sum()
    found = {"logits": output.logits, "loss": output.loss[None]}
    for index, layer in enumerate(output.final_state):
        for name, part in zip(LayerState._fields, layer, strict=True):
            found[f"final {name} {index}"] = part
            if rank == size - 1:
                objective = objective + (part * weights_like(part, 10 + index)).sum()
    leaves = {"inputs": inputs} | {name: one for name, one in model.named_parameters() if one.requires_grad}
    for index, layer in enumerate(state):
        leaves |= {f"initial {name} {index}": x for name, x in zip(LayerState._fields, layer, strict=True)}
    objective.backward()
    found |= {f"gradient of {key}": leaf.grad for key, leaf in leaves.items() if leaf.grad is not None}
    return {key: value.detach().clone() for key, value in found.items()}


if __name__ == "__main__":
    main(run_job)
