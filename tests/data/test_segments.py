"""Rows cut at resets: the same losses, gradients and final states as every document run alone."""

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from hf_recurrent_lengthgen.data import split_at_resets
from hf_recurrent_lengthgen.data.segments import unpacked
from hf_recurrent_lengthgen.models.rows import read_rows
from hf_recurrent_lengthgen.models.state_value import LayerState, take_rows
from tests.models.families import SHELL_FAMILIES, Family, build, random_state, random_tokens, variant_id


def test_segments_by_hand() -> None:
    inputs = {
        "input_ids": torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]]),
        "labels": torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]]),
        "shift_labels": torch.tensor([[2, -100, 4, 5], [-100, 7, 8, 9]]),
        "output_final_state": True,
    }
    resets = torch.tensor([[False, False, True, False], [True, True, False, False]])
    segments = split_at_resets(inputs, resets)
    assert {name: getattr(value, "tolist", lambda v=value: v)() for name, value in segments.inputs.items()} == {
        "input_ids": [[1, 2, 0], [3, 4, 0], [5, 0, 0], [6, 7, 8]],
        "labels": [[1, 2, -100], [3, 4, -100], [5, -100, -100], [6, 7, 8]],
        "shift_labels": [[2, -100, -100], [4, 5, -100], [-100, -100, -100], [7, 8, 9]],
        "attention_mask": [[1, 1, 0], [1, 1, 0], [1, 0, 0], [1, 1, 1]],
        "output_final_state": True,
    }
    assert segments.first.tolist() == [0, 2]
    assert segments.last.tolist() == [1, 3]
    assert segments.continues.tolist() == [True, False]
    assert segments.inputs["attention_mask"].dtype == torch.int64
    assert inputs["input_ids"].tolist() == [[1, 2, 3, 4], [5, 6, 7, 8]]
    assert "attention_mask" not in inputs


def test_without_resets_inside_the_inputs_are_the_same() -> None:
    mask = torch.ones(2, 3, dtype=torch.int64)
    inputs = {"input_ids": torch.arange(6).view(2, 3), "attention_mask": mask, "inputs_embeds": torch.zeros(2, 3, 4)}
    segments = split_at_resets(inputs, torch.tensor([[True, False, False], [False, False, False]]))
    assert segments.inputs is inputs
    assert segments.first.tolist() == segments.last.tolist() == [0, 1]
    assert segments.continues.tolist() == [False, True]


@given(st.data())
@settings(max_examples=100)
def test_segments_are_the_rows_in_order(data: st.DataObject) -> None:
    rows, length = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 9))
    resets = torch.tensor(data.draw(st.lists(st.booleans(), min_size=rows * length, max_size=rows * length)))
    resets = resets.view(rows, length)
    tokens = torch.arange(rows * length).view(rows, length)
    cut, first, last, continues = split_at_resets({"input_ids": tokens}, resets)
    mask = cut.get("attention_mask", torch.ones_like(tokens)).bool()
    assert cut["input_ids"][mask].tolist() == tokens.flatten().tolist()
    assert mask[:, 0].all()
    assert mask.any(0).all()
    assert not (mask[:, 1:] & ~mask[:, :-1]).any()
    assert cut["input_ids"][first, 0].tolist() == tokens[:, 0].tolist()
    assert cut["input_ids"][last, mask[last].sum(1) - 1].tolist() == tokens[:, -1].tolist()
    assert continues.tolist() == [not row[0] for row in resets.tolist()]
    starts = set(cut["input_ids"][:, 0].tolist())
    assert starts == set(tokens[resets].tolist()) | set(tokens[:, 0].tolist())


@pytest.mark.parametrize("family", SHELL_FAMILIES, ids=variant_id)
def test_loss_gradients_and_states_are_those_of_documents_run_alone(family: Family) -> None:
    model: Any = build(family).train()
    tokens, rows = random_tokens(3, 12), [[0, 4, 5, 12], [0, 12], [0, 7, 12]]
    resets = torch.zeros(3, 12, dtype=torch.bool)
    for row, cuts in zip(resets, rows, strict=True):
        row[cuts[1:-1]] = True
    resets[2, 0] = True
    targets = F.pad(tokens[:, 1:], (0, 1), value=7).masked_fill(F.pad(resets[:, 1:], (0, 1)), -100)
    carried = random_state(model, 3)

    cut, first, last, continues = split_at_resets({"input_ids": tokens, "shift_labels": targets}, resets)
    start = tuple(
        LayerState(*(place_rows(part, first, continues, len(cut["input_ids"])) for part in layer)) for layer in carried
    )
    output = model(**cut, initial_state=start)
    output.loss.backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()

    total, count = torch.zeros(()), 0
    for row, cuts in enumerate(rows):
        for begin, end in itertools.pairwise(cuts):
            state = None if resets[row, begin] else take_rows(carried, slice(row, row + 1))
            alone = model(tokens[row : row + 1, begin:end], initial_state=state)
            target = targets[row, begin:end]
            total = total + F.cross_entropy(alone.logits[0], target, ignore_index=-100, reduction="sum")
            count += int((target != -100).sum())
        for layer, expected in zip(output.final_state, alone.final_state, strict=True):
            for part, whole in zip(layer, expected, strict=True):
                torch.testing.assert_close(part[last[row]], whole[0], rtol=1e-4, atol=1e-5)
    assert count == int((targets != -100).sum()) == 33
    torch.testing.assert_close(output.loss, total / count)
    (total / count).backward()
    for gradient, parameter in zip(gradients, model.parameters(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-4, atol=1e-6)


def place_rows(part: Tensor, first: Tensor, continues: Tensor, rows: int) -> Tensor:
    placed = part.new_zeros(rows, *part.shape[1:])
    placed[first[continues]] = part[continues]
    return placed


@pytest.mark.parametrize(
    ("extra", "resets", "message"),
    [
        ({"position_ids": torch.ones(2, 3)}, None, r"inputs\['position_ids'\] \(2, 3\) cannot be cut"),
        ({"inputs_embeds": torch.ones(2, 3, 4)}, None, r"inputs\['inputs_embeds'\]"),
        ({"labels": torch.ones(2, 4)}, None, r"inputs\['labels'\] \(2, 4\)"),
        ({}, torch.ones(2, 3), r"\(2, 3\) torch.float32, but must be \(2, 3\) torch.bool"),
        ({}, torch.ones(2, 4, dtype=torch.bool), r"\(2, 4\) torch.bool, but must be \(2, 3\)"),
    ],
)
def test_what_cannot_be_cut_is_refused(extra: dict[str, Tensor], resets: Tensor | None, message: str) -> None:
    inputs = {"input_ids": torch.zeros(2, 3, dtype=torch.int64), **extra}
    with pytest.raises(ValueError, match=message):
        split_at_resets(inputs, torch.ones(2, 3, dtype=torch.bool) if resets is None else resets)


def test_packed_sequences_become_padded_rows() -> None:
    ids = torch.arange(1, 8)[None]
    batch = {"input_ids": ids, "labels": ids * 10, "position_ids": torch.tensor([[0, 1, 2, 0, 1, 0, 1]]), "weight": 0}
    found = unpacked(batch, read_rows(batch))
    assert found["input_ids"].tolist() == [[1, 2, 3], [4, 5, 0], [6, 7, 0]]
    assert found["labels"].tolist() == [[10, 20, 30], [40, 50, -100], [60, 70, -100]]
    assert found["attention_mask"].tolist() == [[1, 1, 1], [1, 1, 0], [1, 1, 0]]
    assert found.keys() == {"input_ids", "labels", "weight", "attention_mask"}


def test_padding_stays_padding_in_the_row_of_its_sequence() -> None:
    ids = torch.arange(1, 7)[None]
    batch = {"input_ids": ids, "attention_mask": torch.tensor([[0, 1, 1, 0, 2, 0]])}
    found = unpacked(batch, read_rows(batch))
    assert found["input_ids"].tolist() == [[1, 2, 3, 4], [5, 6, 0, 0]]
    assert found["attention_mask"].tolist() == [[0, 1, 1, 0], [1, 0, 0, 0]]
