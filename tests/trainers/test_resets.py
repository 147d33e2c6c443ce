"""Resets inside rows, as TBTT gives them to the model (`seq_idx`): every sequence gives what it gives as a row of its
own, from the carried state where it continues one, and from zero elsewhere."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from hf_recurrent_lengthgen.data.segments import unpacked
from hf_recurrent_lengthgen.hybrids import stateful
from hf_recurrent_lengthgen.hybrids.registry import SUPPORTED
from hf_recurrent_lengthgen.models.rows import read_rows
from hf_recurrent_lengthgen.models.state_value import RecurrentState, keep_rows, map_state, take_rows
from hf_recurrent_lengthgen.trainers.chunked_backprop import chunked_forward
from tests.hybrids.measures import parts
from tests.hybrids.measures import random_state as random_state_of_hybrid
from tests.hybrids.tiny_models import tiny_model
from tests.models.families import FAMILIES, Family, build, random_state, variant_id
from tests.models.law import weights_like

every_family = pytest.mark.parametrize("family", FAMILIES, ids=variant_id)
REFUSE_PADDING = ("minimax", "zaya")
ROWS, LENGTH = 3, 16
RESETS = torch.zeros(ROWS, LENGTH, dtype=torch.bool)
RESETS[0, [4, 5, 11]] = RESETS[2, [0, 9]] = True
NUMBERS = pad(RESETS[:, 1:].long(), (1, 0)).cumsum(1)
FIRST = NUMBERS.amax(1).add(1).cumsum(0) - NUMBERS.amax(1) - 1  # sequence that enters each row, among all


def results(model: Any, output: Any, logits: Tensor, final: RecurrentState, carried: RecurrentState) -> list[Tensor]:
    """Logits, final states, gradients of a functional of both by carried states and weights, and the loss."""
    outputs = [logits, *parts(final)]
    functional = torch.stack([(x * weights_like(x, place)).sum() for place, x in enumerate(outputs)]).sum()
    gradients = torch.autograd.grad(functional, [*parts(carried), *model.parameters()], allow_unused=True)
    return [*outputs, *(gradient for gradient in gradients if gradient is not None), output.loss]


def check(model: Any, carried: RecurrentState, tolerance: float) -> None:
    vocabulary = model.config.get_text_config().vocab_size
    tokens = torch.randint(3, vocabulary, (ROWS, LENGTH), generator=torch.Generator().manual_seed(2))
    targets = pad(tokens[:, 1:], (0, 1), value=7).masked_fill(pad(RESETS[:, 1:], (0, 1)), -100)
    inputs = {"input_ids": tokens, "labels": targets, "shift_labels": targets}
    carried = map_state(lambda part: part.detach().clone().requires_grad_(), carried)
    given = keep_rows(carried, ~RESETS[:, 0])
    output = model(**inputs, seq_idx=NUMBERS, initial_state=given, output_final_state=True)
    found = results(model, output, output.logits, output.final_state, carried)

    cut = unpacked(inputs, read_rows(inputs | {"seq_idx": NUMBERS}))
    count, last = len(cut["input_ids"]), FIRST + NUMBERS.amax(1)
    given = keep_rows(carried, ~RESETS[:, 0])
    alone = map_state(lambda part: part.new_zeros(count, *part.shape[1:]).index_copy(0, FIRST, part), given)
    output = model(**cut, initial_state=alone, output_final_state=True)
    logits = output.logits[cut["attention_mask"].bool()].view(ROWS, LENGTH, -1)
    expected = results(model, output, logits, take_rows(output.final_state, last), carried)

    assert len(found) == len(expected)
    for one, other in zip(found[:-1], expected[:-1], strict=True):
        assert not other.numel() or (one - other).abs().max() <= tolerance * other.abs().max()
    torch.testing.assert_close(found[-1], expected[-1])  # in float32, as Transformers computes it


@every_family
def test_families(family: Family) -> None:
    model = build(family, torch.float64).train()
    check(model, random_state(model, ROWS), 1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", sorted(set(SUPPORTED) - set(REFUSE_PADDING)))
def test_hybrids(model_type: str) -> None:
    """In float64 but for mixtures of experts, which Transformers computes in float32 at most."""
    model = stateful(copy.deepcopy(tiny_model(model_type))).train()
    try:
        check(model.double(), random_state_of_hybrid(model, ROWS), 1e-9)
    except RuntimeError as error:
        if "got Double" not in str(error):
            raise
        check(model.float(), random_state_of_hybrid(model, ROWS), 1e-3)


@every_family
@pytest.mark.parametrize("chunk_length", [1, 4, 5])
def test_chunks(family: Family, chunk_length: int) -> None:
    """Chunked backpropagation, with sequences that begin with a chunk and inside one."""
    model = build(family, torch.float64).train()
    tokens = torch.randint(3, model.config.vocab_size, (ROWS, LENGTH), generator=torch.Generator().manual_seed(2))
    state = map_state(lambda part: part.detach().clone().requires_grad_(), random_state(model, ROWS))
    inputs = {"input_ids": tokens, "shift_labels": tokens.roll(-1, 1), "seq_idx": NUMBERS, "initial_state": state}
    gradients = []
    for output in (model(**inputs), chunked_forward(model.forward, inputs, chunk_length)):
        functional = output.loss + torch.stack([part.square().sum() for part in parts(output.final_state)]).sum()
        leaves = [*parts(state), *model.parameters()]
        gradients.append([functional, *torch.autograd.grad(functional, leaves, allow_unused=True)])
    for one, other in zip(*gradients, strict=True):
        assert (one is None) == (other is None)
        assert one is None or not one.numel() or (one - other).abs().max() <= 1e-5 * other.abs().max().clamp(min=1e-9)
