"""One state of several texts: weighted sums, and compositions, which come close to reading one text after another.

A composition is exact for a layer and its inputs. Earlier texts change these above the first layer, and for the first
tokens after a short convolution or token shift; without either it is the state of the concatenation.
"""

import json
import math
from collections.abc import Sequence
from contextlib import suppress
from functools import reduce
from itertools import zip_longest
from typing import Any, Literal, get_args

import torch
from numpy.polynomial.legendre import leggauss
from torch import Tensor

from hf_recurrent_lengthgen.models.modeling_protocols import base_of
from hf_recurrent_lengthgen.models.state_value import RecurrentState, layer_state
from hf_recurrent_lengthgen.state_files.text_state import TextState
from hf_recurrent_lengthgen.state_files.transitions import is_matrix, moved_on

Orders = Literal["listed", "cyclic", "all"]


def mix_states(states: Sequence[RecurrentState], weights: Sequence[float] | None = None) -> RecurrentState:
    """The weighted sum of states of one model, in all parts (State Soup, arXiv:2406.08423), by default the mean.

    The mean is document souping (arXiv:2505.24033). Weights may have any sum: 1 interpolates, ones add up.

    Raises:
        ValueError: for states of different shapes, dtypes or devices, or with a window, and for unfit weights.
    """
    weights = [1 / max(1, len(states))] * len(states) if weights is None else [*weights]
    if not states or len(weights) != len(states) or not all(map(math.isfinite, weights)):
        raise ValueError(f"Give at least one state, and a finite weight for each: {len(states)} states, {weights}.")
    forms = [[[(*part.shape, part.dtype, part.device) for part in layer] for layer in state] for state in states]
    unfit = [one for one in zip_longest(*forms) if any(form != one[0] for form in one) or len(one[0]) > 2]
    if unfit:
        need = "of the same layers, rows, shapes, dtype and device, without a window"
        raise ValueError(f"Give states {need}: a layer has {unfit[0]}.")
    layers = [[torch.stack(parts) for parts in zip(*layer, strict=True)] for layer in zip(*states, strict=True)]
    return tuple(layer_state(torch.tensordot(x.new_tensor(weights), x, 1) for x in layer) for layer in layers)


def compose(written: Sequence[Tensor], transitions: Sequence[Tensor], orders: Orders = "listed") -> Tensor:
    """The recurrent part of a layer after several texts, from zero (PICASO, Liu et al., 2025, arXiv:2502.17605).

    Args:
        written: x(u) of each text, the recurrent part after it from zero, (B, ...).
        transitions: A(u) of each, as in transitions.py.
        orders: "listed" is CASO (Proposition 1). The mean over the n rotations, "cyclic", is PICASO-R, that over "all"
            orders PICASO-S, for transitions that commute: decays.
    """
    count, zero = len(written), torch.zeros_like(written[0])
    if orders != "all":
        rotations = [(*range(first, count), *range(first)) for first in range(count if orders == "cyclic" else 1)]
        ends = [reduce(lambda state, i: moved_on(state, transitions[i]) + written[i], one, zero) for one in rotations]
        return torch.stack(ends).mean(0)
    if is_matrix(transitions[0]):
        raise ValueError('The transitions of this model are matrices, which do not commute: give orders="cyclic".')
    # A text has the weight 1/n Σ_m e_m(A of the others) / C(n-1, m) (Proposition 2), which is the integral of their
    # Π (1 - t + t A) over t in [0, 1]: exact with n // 2 + 1 Gauss points, in O(n²), and also where an A is 0.
    total = zero
    for point, weight in zip(*leggauss(count // 2 + 1), strict=True):
        state, product = zero, torch.ones_like(transitions[0])
        for own, decay in zip(written, transitions, strict=True):
            factor = 1 + (decay - 1) * (float(1 + point) / 2)
            state, product = state * factor + product * own, product * factor
        total = total + state * (float(weight) / 2)
    return total


def mix_text_states(
    text_states: Sequence[TextState], weights: Sequence[float] | None = None, orders: Orders | None = None
) -> TextState:
    """One text state of several that one model has read, each of a text of its own: `mix_states`, or a composition.

    Its position is the number of tokens in all texts, its prefix unknown; metadata["mixed"] says of what it is.
    `weights` are as in `mix_states`. `orders`, as in `compose`, require texts read with transitions; the convolution
    part is that of the last text, of several orders the mean, and the "listed" order has transitions, too.

    Raises:
        ValueError: as `mix_states` and `compose`, and for text states of different origins, or with keys and values.
    """
    weights = None if weights is None else [*map(float, weights)]
    if orders is not None and (orders not in get_args(Orders) or weights is not None):
        raise ValueError(f"Give either weights, or orders of {get_args(Orders)}: got {weights} and {orders!r}.")
    if any(one.keys for one in text_states):
        raise ValueError("Keys and values of attention layers cannot be mixed: read one text after another instead.")
    for name in ("config", "dtype", "weights", "revision", "tokenizer"):
        known = [value for one in text_states if (value := getattr(one.origin, name))]
        if any(value != known[0] for value in known):
            raise ValueError(f"The text states differ in {name}: give those that one model read with one tokenizer.")
    state, transitions = [*mix_states([one.state for one in text_states], weights)], dict[int, Tensor]()
    if orders is not None:
        if not all(one.transitions for one in text_states):
            raise ValueError("Texts read without transitions cannot be composed: read them with these, or mix them.")
        for i, layer in enumerate(state):
            written, moves = zip(*((one.state[i].recurrent, one.transitions[i]) for one in text_states), strict=True)
            if orders == "listed":
                layer, transitions[i] = text_states[-1].state[i], reduce(moved_on, moves)
            state[i] = layer._replace(recurrent=compose(written, moves, orders))
    parts: list[Any] = [{**one.metadata, "position": one.position, "prefix_sha256": one.prefix} for one in text_states]
    for part in parts:
        with suppress(KeyError, ValueError, RecursionError):  # JSON in JSON would double its escapes each time
            part["mixed"] = json.loads(part["mixed"])
    mixed = json.dumps({"orders": orders, "weights": weights, "texts": parts})
    position, origin = sum(one.position for one in text_states), text_states[0].origin
    return TextState(tuple(state), position, "", origin, metadata={"mixed": mixed}, transitions=transitions)


def add_weighted_adapter(model: Any, adapters: Sequence[str], weights: Sequence[float], adapter_name: str) -> Any:
    """Add the weighted sum of learned states under a new name, frozen, make it the active one, and return all.

    The arguments after the model are those of the method of this name in PEFT.
    """
    model = base_of(model)
    if model.learned_states is None:
        raise ValueError(f"This {type(model).__name__} has no learned states: add them with load_learned_state.")
    states = [model.learned_states[name]() for name in adapters]
    return model.add_learned_state(adapter_name, mix_states(states, weights))
