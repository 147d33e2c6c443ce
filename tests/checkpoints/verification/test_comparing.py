"""Differences of outputs."""

import math

import pytest
import torch

from hf_recurrent_lengthgen.checkpoints.verification.comparing import (
    compare,
    compare_outputs,
    count,
    difference,
    not_finite,
)

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("actual", "expected", "apart"),
    [
        ([0.0, 0.5], [0.0, 0.25], 0.25),
        ([10.0, 1.0], [10.0, 0.0], 0.1),  # relative to 10
        ([-40.0, 8.0], [-40.0, 0.0], 0.2),
        ([1.0, NAN], [1.0, 1.0], INF),
        ([1.0, 1.0], [1.0, NAN], INF),
        ([1.0, INF], [1.0, 1.0], INF),
        ([INF, NAN], [INF, NAN], 0.0),  # counted by not_finite
        ([1.0], [1.0, 1.0], INF),
        ([], [], 0.0),
    ],
)
def test_a_difference_is_absolute_up_to_values_of_one_and_relative_above(
    actual: list[float], expected: list[float], apart: float
) -> None:
    assert difference(torch.tensor(actual), torch.tensor(expected)) == pytest.approx(apart)


def test_the_worst_of_all_tensors_counts_and_none_may_be_missing() -> None:
    one = {"a": torch.tensor([1.0]), "b": torch.tensor([2.0])}
    assert compare("x", "y", 3, one, one | {"b": torch.tensor([2.5])}).difference == pytest.approx(0.2)
    assert compare("x", "y", 3, one, {"a": one["a"]}).difference == INF
    assert compare("x", "y", 3, {"a": one["a"]}, one).difference == INF
    assert compare("x", "y", 3, one, one).passed


def test_states_are_compared_where_both_readings_have_them() -> None:
    logits = {"logits": torch.zeros(1, 4, 3)}
    assert [check.what for check in compare_outputs("", logits, logits | {"state.0.0": torch.ones(1)})] == ["logits"]
    both = compare_outputs("", logits | {"state.0.0": torch.zeros(1)}, logits | {"state.0.0": torch.ones(1)})
    assert [(check.what, check.tokens, check.passed) for check in both] == [
        ("logits", 4, True),
        ("final states", 4, False),
    ]


def test_what_is_not_finite_is_counted() -> None:
    number = not_finite({"logits": torch.tensor([1.0, NAN, INF]), "state.0.0": torch.tensor([-INF])})
    assert number == 3
    assert not count("x", "y", 1, number).passed
    assert count("x", "y", 1, 0).passed
