"""Models, texts, and the numbers that compare outputs, states and gradients of wrapped models."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hf_recurrent_lengthgen.hybrids.mixers import StateMixer
from hf_recurrent_lengthgen.hybrids.wrapping import stateful
from hf_recurrent_lengthgen.models.state_value import RecurrentState, map_state
from tests.hybrids.tiny_models import VOCABULARY, tiny_model


def pair(model_type: str, **changes: Any) -> tuple[Any, Any]:
    """A stock model and a wrapped one of the same weights."""
    stock = tiny_model(model_type, **changes)
    return stock, stateful(copy.deepcopy(stock))


WINDOW = 5


def windowed(model_type: str, window: int = WINDOW, **changes: Any) -> tuple[Any, Any]:
    stock, model = pair(model_type, **changes)
    return stock, stateful(model, attention_window=window)


def masked(stock: Any, x: Tensor, window: int = WINDOW, **options: Any) -> Any:
    """The stock model with a mask by hand, in which the query in row t sees the keys t - W + 1 to t."""
    ages = torch.arange(x.shape[1])[:, None] - torch.arange(x.shape[1])

    def within(size: int) -> Tensor:
        return ((ages >= 0) & (ages < size)).expand(len(x), 1, *ages.shape)

    own = getattr(stock.config, "sliding_window", None) or window
    masks = dict.fromkeys(("full_attention", "hybrid"), within(window)) | {"linear_attention": None, "conv": None}
    masks |= dict.fromkeys(("sliding_attention", "hybrid_sliding"), within(min(own, window)))
    name = "inputs_embeds" if x.is_floating_point() else "input_ids"
    return stock(**{name: x}, attention_mask=masks, **options)


def kept(cache: Any) -> list[Tensor]:
    return [layer.keys for layer in cache.layers if getattr(layer, "keys", None) is not None]


def random_tokens(rows: int, length: int, seed: int = 1) -> Tensor:
    return torch.randint(3, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))


def with_checkpointing(model: Any, reentrant: bool = False, **options: Any) -> Any:
    """The model in training with activation checkpointing, which Transformers 5.23 renamed."""
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    enable({"use_reentrant": reentrant} | options)
    return model.train()


def without_checkpointing(model: Any) -> Any:
    """The model in evaluation without activation checkpointing."""
    getattr(model, "activation_checkpointing_disable", model.gradient_checkpointing_disable)()
    return model.eval()


@torch.no_grad()
def by_calls(model: Any, prompt: Tensor, new: int, **arguments: Any) -> Tensor:
    """Greedy tokens after a prompt (1, T), each from a call with the whole text."""
    text = prompt
    for _ in range(new):
        text = torch.cat([text, model(input_ids=text, **arguments).logits[:, -1].argmax(-1, keepdim=True)], dim=1)
    return text[:, prompt.shape[1] :]


def read_in_chunks(
    model: Any, tokens: Tensor, lengths: Sequence[int], state: RecurrentState | None = None
) -> tuple[Tensor, RecurrentState]:
    """Outputs and final state of one text, of ids or embeddings, read in chunks with the state carried."""
    name = "inputs_embeds" if tokens.is_floating_point() else "input_ids"
    attention_cache, outputs = model.new_attention_cache(), []
    for chunk in tokens.split(list(lengths), dim=1):
        output = model(**{name: chunk}, initial_state=state, output_final_state=True, attention_cache=attention_cache)
        outputs.append(output[0])
        state = output.final_state
    assert state is not None
    return torch.cat(outputs, dim=1), state


def relative_error(actual: list[Tensor], expected: list[Tensor]) -> float:
    """Largest error of any tensor relative to its largest entry; entries near zero for all of them count as equal."""
    scales = [float(value.detach().abs().max()) if value.numel() else 0.0 for value in expected]
    errors = [0.0]
    for one, other, scale in zip(actual, expected, scales, strict=True):
        if scale > 1e-5 * max(scales):
            errors.append(float((one - other).detach().abs().max()) / scale)
    return max(errors)


def weighted_sum(tensors: list[Tensor]) -> Tensor:
    """A number that depends on every entry."""
    generator = torch.Generator().manual_seed(3)
    return torch.stack([(x * torch.randn(x.shape, generator=generator).to(x)).sum() for x in tensors]).sum()


def gradients(objective: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    """Gradients, zero where there is none."""
    found = torch.autograd.grad(objective, leaves, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, found, strict=True)]


def parts(state: RecurrentState) -> list[Tensor]:
    """The tensors of a state that are not empty."""
    return [part for layer in state for part in layer if part.numel()]


def state_of_stock_cache(model: Any, cache: Any) -> list[Tensor]:
    """The parts of a state that a stock cache holds, without the columns of convolutions that no output reads."""
    if hasattr(cache, "rnn_state"):
        return [torch.cat([x.flatten(2) if x.ndim > 3 else x for x in one], -1) for one in cache.rnn_state.values()]
    if hasattr(cache, "linear_cache"):
        return [x for x in cache.linear_cache if isinstance(x, Tensor)]
    found = []
    for layer, shape in zip(cache.layers, model.state_shapes(), strict=True):
        found += [layer.recurrent_states[0]] if shape.recurrent != (0,) else []
        found += [layer.conv_states[0][..., -shape.conv[1] :]] if shape.conv != (0,) else []
    return found


def random_state(model: Any, rows: int) -> RecurrentState:
    """A state of nonzero values, that of two random tokens, with gradients."""
    with torch.no_grad():
        state = model(input_ids=random_tokens(rows, 2, seed=5), output_final_state=True).final_state
    return map_state(lambda part: part.detach().clone().requires_grad_(), state)


def with_stock_mixers(model: Any) -> Any:
    """A wrapped model with the mixers of Transformers, as of a type of which `MIXERS` has none."""
    for module in model.modules():
        if isinstance(module, StateMixer):
            module.__class__ = type(module).__bases__[-1]  # our class, then the stock one
    return model
