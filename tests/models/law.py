"""What the core law compares: everything that comes out of a model or a scan run in chunks."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from hf_recurrent_lengthgen.models.state_value import LayerState, RecurrentState, map_state

Step = Callable[[Tensor, Tensor | None, RecurrentState], tuple[Tensor, RecurrentState]]


def checkpointed(model: Any) -> Any:
    """A model in training with activation checkpointing."""
    for layer in model.train().base_model.layers:
        layer.gradient_checkpointing = True
        layer._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)
    return model


def model_step(model: Any) -> Step:
    """A chunk of embeddings, its mask and a state to logits and the next state."""

    def step(embeds: Tensor, mask: Tensor | None, state: RecurrentState) -> tuple[Tensor, RecurrentState]:
        output = model(inputs_embeds=embeds, attention_mask=mask, initial_state=state)
        return output.logits, output.final_state

    return step


def weights_like(x: Tensor, seed: int) -> Tensor:
    return torch.randn(x.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(x)


def run_in_chunks(
    step: Step,
    parameters: dict[str, Tensor],
    embeds: Tensor,
    state: RecurrentState,
    cuts: Sequence[int] = (),
    mask: Tensor | None = None,
) -> dict[str, Tensor]:
    """Outputs, final state and all gradients of a random functional of both, cut before the positions `cuts`.

    `mask` (B, T) is 0 at padding, and goes to the step.
    """
    embeds = embeds.detach().clone().requires_grad_()
    state = map_state(lambda part: part.detach().clone().requires_grad_(), state)
    carried, outputs = state, []
    for start, stop in pairwise([0, *cuts, embeds.shape[1]]):
        chunk = slice(start, stop)
        output, carried = step(embeds[:, chunk], None if mask is None else mask[:, chunk], carried)
        outputs.append(output)
    logits = torch.cat(outputs, 1)
    if mask is not None:
        logits = logits * (mask != 0)[..., None]
    objective = (logits * weights_like(logits, 0)).sum()
    named = {"logits": logits}
    for index, layer in enumerate(carried):
        for name, part in zip(LayerState._fields, layer, strict=True):
            objective = objective + (part * weights_like(part, 10 + index)).sum()
            named[f"final {name} {index}"] = part
    leaves = {"inputs": embeds} | parameters
    for index, layer in enumerate(state):
        leaves |= {f"initial {name} {index}": part for name, part in zip(LayerState._fields, layer, strict=True)}
    gradients = torch.autograd.grad(objective, list(leaves.values()), allow_unused=True)
    pairs = zip(leaves.items(), gradients, strict=True)
    named |= {f"gradient of {n}": torch.zeros_like(x) if g is None else g for (n, x), g in pairs}
    return {name: value.detach() for name, value in named.items()}


def assert_equal_up_to(tolerance: float, actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Compare tensor by tensor, relative to the largest entry of the expected one."""
    assert actual.keys() == expected.keys()
    errors = {}
    for name, value in expected.items():
        assert actual[name].shape == value.shape, name
        assert bool(value.isfinite().all()), name
        if value.numel():
            scale = value.abs().max().clamp(min=1e-30)
            errors[name] = float((actual[name] - value).abs().max() / scale)
    wrong = {name: error for name, error in errors.items() if not error <= tolerance}
    assert not wrong, wrong
