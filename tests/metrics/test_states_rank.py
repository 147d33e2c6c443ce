"""Effective rank of states: against numpy's singular values, in all families, in files, words and figures."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from hf_recurrent_lengthgen.evaluation.json_schema import from_json, to_json
from hf_recurrent_lengthgen.hybrids import stateful
from hf_recurrent_lengthgen.metrics.diagnosis.page import diagnosis_figures, diagnosis_page
from hf_recurrent_lengthgen.metrics.diagnosis.result import Diagnosis
from hf_recurrent_lengthgen.metrics.states import trajectory
from hf_recurrent_lengthgen.metrics.states.figure import DRIFT, STEADY, rank_figure
from hf_recurrent_lengthgen.metrics.states.measure import describe_states, diagnose_states
from hf_recurrent_lengthgen.metrics.states.result import StateDiagnosis, StateRank
from hf_recurrent_lengthgen.metrics.states.summary import STATES, rank_text
from hf_recurrent_lengthgen.metrics.states.trajectory import effective_ranks
from hf_recurrent_lengthgen.plotting.style import INK
from tests.hybrids.tiny_models import tiny_model
from tests.metrics.diagnoses import POSITIONS, diagnosed, states
from tests.metrics.test_states import LENGTH, QUIET, T
from tests.metrics.test_states_trajectory import made, observed, states_by_token
from tests.models.families import FALCON_MAMBA, FAMILIES, MAMBA, MAMBA2, Family, build, random_tokens, variant_id


def by_hand(matrices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Eq. 6 of Sun et al., and Definition 2 of Roy and Vetterli, of matrices (..., P, N) that are not zero."""
    values = np.linalg.svd(matrices.astype(np.float64), compute_uv=False)
    shares = values / values.sum(-1, keepdims=True)
    entropy = -(shares * np.log(np.maximum(shares, 1e-300))).sum(-1)
    return (values > 1e-4 * values[..., :1]).sum(-1), np.exp(entropy)


def ranks_of(matrix: Any) -> tuple[float, float]:
    counted, entropy = effective_ranks(torch.as_tensor(matrix)).tolist()
    return counted, entropy


def test_one_outer_product_has_rank_one_an_identity_all_and_zeros_none() -> None:
    random = np.random.default_rng(0)
    for dtype in (np.float32, np.float64):
        one = np.outer(random.normal(size=7), random.normal(size=5)).astype(dtype)
        assert ranks_of(one) == (1, pytest.approx(1, abs=2e-6))
        assert ranks_of(np.eye(6, dtype=dtype)) == (6, pytest.approx(6, rel=1e-12))
        assert ranks_of(np.zeros((3, 4), dtype)) == (0, 0)
    assert ranks_of(np.eye(2, 5)) == (2, pytest.approx(2, rel=1e-12))
    assert ranks_of(np.full((1, 1), 1e-30)) == (1, 1)


def test_ranks_count_singular_values_above_a_ten_thousandth_of_the_largest() -> None:
    matrix = np.zeros((4, 6))
    matrix[range(4), range(4)] = 1, 0.5, 1.01e-4, 0.99e-4
    rank, entropy = ranks_of(matrix)
    assert rank == 3
    assert entropy == pytest.approx(float(by_hand(matrix)[1]), rel=1e-6)
    assert entropy < 1.9  # exp of the entropy of 2/3 and 1/3 is 1.89


@pytest.mark.parametrize("shape", [(5, 7), (7, 5), (33, 16), (1, 9), (64, 64)])
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_ranks_are_those_of_numpys_singular_values_at_any_scale(shape: tuple[int, int], scale: float) -> None:
    random = np.random.default_rng(1)
    # singular values over many orders of magnitude
    columns = np.exp(-np.arange(shape[1]) / 2)
    matrices = random.normal(size=(2, 3, *shape)) * columns @ random.normal(size=(shape[1], shape[1]))
    found = effective_ranks(torch.as_tensor((scale * matrices).astype(np.float32)))
    rank, entropy = by_hand(matrices.astype(np.float32))
    np.testing.assert_array_equal(found[..., 0], rank)
    np.testing.assert_allclose(found[..., 1], entropy, rtol=1e-5)


@pytest.mark.parametrize("family", FAMILIES, ids=variant_id)
def test_ranks_are_those_of_the_states_after_each_token(family: Family) -> None:
    model, tokens = made(family), random_tokens(3, 18)
    positions = (1, 2, 9, 17)
    states, layers = states_by_token(family, model, tokens), observed(model, tokens, positions, batch_size=2).layers
    channels = family in (MAMBA, FALCON_MAMBA)
    for place, position in enumerate(positions):
        for layer, state in zip(layers, states[position - 1], strict=True):
            matrices = state.recurrent.numpy()
            matrices = matrices[:, None] if channels else matrices
            rank, entropy = by_hand(matrices)
            assert layer.ranks[place].shape == (3, 1 if channels else matrices.shape[1], 2)
            np.testing.assert_array_equal(layer.ranks[place, ..., 0], rank)
            np.testing.assert_allclose(layer.ranks[place, ..., 1], entropy, rtol=1e-5)
            assert channels or rank.max() <= position  # a token writes one outer product


@pytest.mark.parametrize(
    ("model_type", "layers", "most"),
    [("bamba", [0, 2], 6), ("jamba", [0, 2], 6), ("qwen3_next", [0, 2], 6), ("minimax", [0, 2], 8)],
)
def test_hybrids_have_ranks_in_their_recurrent_layers(model_type: str, layers: list[int], most: int) -> None:
    model, tokens = stateful(tiny_model(model_type)), random_tokens(2, 25)
    found = describe_states(model, observed(model, tokens, (4, 8, 12, 24)), 8)
    assert sorted({rank.layer for rank in found.ranks}) == layers
    assert {rank.most for rank in found.ranks} == {most}
    assert {rank.head is None for rank in found.ranks} == {model_type == "jamba"}
    assert all(0 < value <= most for rank in found.ranks for value in (*rank.counted, *rank.entropy))


def test_states_that_are_no_matrix_are_said() -> None:
    """xLSTM packs memory, normalizer and stabilizer into one tensor."""
    model, tokens = stateful(tiny_model("xlstm")), random_tokens(2, 25)
    found = describe_states(model, observed(model, tokens, (4, 8, 12, 24)), 8)
    assert found.ranks == ()
    count = len({head.layer for head in found.heads})
    reason = f"Effective rank was not measured in {count} of {count} layers: no matrices."
    assert reason in found.left_out


def test_the_mean_is_over_texts_and_of_a_large_model_over_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokens = build(MAMBA2), random_tokens(4, LENGTH + 1)

    def ranks() -> StateDiagnosis:
        return diagnose_states(model, tokens, T, replace(QUIET, batch_size=1), patched_heads=0)

    every = ranks()
    with torch.no_grad():
        state = model(tokens[:, :-1]).final_state[1].recurrent.numpy()
    rank, entropy = by_hand(state)  # (4 texts, 4 heads)
    assert [found.counted[-1] for found in every.ranks[4:]] == pytest.approx(rank.mean(0), rel=1e-3)
    assert [found.entropy[-1] for found in every.ranks[4:]] == pytest.approx(entropy.mean(0), rel=1e-3)
    assert every.left_out == ()
    monkeypatch.setattr(trajectory, "RANKED_MATRICES", 17)  # 8 heads: two texts
    few = ranks()
    assert [found.entropy[-1] for found in few.ranks[4:]] == pytest.approx(entropy[:2].mean(0), rel=1e-3)
    assert few.left_out == ("Effective rank was measured in the first 2 of 4 sequences: the model has many heads.",)
    monkeypatch.setattr(trajectory, "RANKED_MATRICES", 1)
    assert [found.entropy[-1] for found in ranks().ranks[4:]] == pytest.approx(entropy[0], rel=1e-3)


def ranked(inside: tuple[float, ...], beyond: tuple[float, ...], layers: bool = False) -> StateDiagnosis:
    """Two heads or layers of at most rank 8, of which layer 0, head 1 drifts beyond 16 tokens."""
    curves = [tuple(a if n <= 16 else b for n in POSITIONS) for a, b in zip(inside, beyond, strict=True)]
    places = [(0, None), (1, None)] if layers else [(0, 0), (0, 1)]
    halves = [tuple(value / 2 for value in curve) for curve in curves]
    ranks = (StateRank(*place, 8, curve, half) for place, curve, half in zip(places, curves, halves, strict=True))
    return replace(states({(0, 1): 9.0}), ranks=tuple(ranks))


def test_files_have_ranks_and_earlier_ones_are_read_without() -> None:
    found = ranked((2, 8), (3, 8))
    assert from_json(to_json(found), StateDiagnosis) == found
    plain = json.loads(to_json(found))
    assert plain["schema_version"] == 6
    plain["schema_version"] = 5
    del plain["ranks"]
    earlier = from_json(json.dumps(plain), StateDiagnosis)
    assert earlier == replace(found, ranks=())
    assert rank_text(earlier) == ""
    assert "Effective rank" not in STATES.facts(earlier)
    assert "state_rank" not in diagnosis_figures(Diagnosis("t", (diagnosed("base", "b", 1.4, earlier),)))


def test_words_say_how_many_heads_use_little_of_their_state() -> None:
    found = ranked((2, 8), (3, 2))
    assert rank_text(found) == (
        "Of 2 heads, 1 after 16 tokens and 2 after 1,024 tokens have an effective rank below 0.5 of the largest "
        "possible. Their mean effective rank by entropy is 2.5 after 16 tokens and 1.25 after 1,024 tokens, of 8."
    )
    assert STATES.facts(found)["Effective rank"] == "5, at the end 2.5, of 8"
    assert "Of 2 layers, 1 after 16 tokens and 0 after 1,024" in rank_text(ranked((2, 8), (8, 8), layers=True))
    short = replace(found, training_length=4)  # 2 of at most 4 after 4 tokens is not below half
    assert "0 after 4 tokens and" in rank_text(short)
    page = diagnosis_page(
        Diagnosis("t", (diagnosed("base", "a", 1.4, found), diagnosed("intervention", "b", 0.0, found)))
    )
    for words in (rank_text(found), "5, at the end 2.5, of 8"):
        assert page.count(words) >= 2
    assert 'id="state_rank-figure_1"' in page
    assert page.count("The effective rank of a state is the number of its singular values") == 1


@pytest.mark.parametrize("layers", [False, True])
def test_the_figure_has_the_shares_of_both_numbers_and_drifting_heads_orange(layers: bool) -> None:
    figure = rank_figure({"base": ranked((2, 8), (4, 8), layers), "b": ranked((2, 0), (4, 0), layers)})
    assert [axes.get_title("left") for axes in figure.axes] == [
        *("base: counted", "base: entropy", "b: counted", "b: entropy")
    ]
    lines = [
        {line.get_color(): line.get_ydata() for line in axes.get_lines() if len(line.get_xdata()) == len(POSITIONS)}
        for axes in figure.axes
    ]
    drifting, steady = (0.5, 1.0) if layers else (1.0, 0.5)  # the layer of the drifting head, or that head
    assert (lines[0][DRIFT][-1], lines[0][STEADY][-1]) == (drifting, steady)
    assert (lines[1][DRIFT][-1], lines[1][STEADY][-1]) == (drifting / 2, steady / 2)
    np.testing.assert_allclose(lines[0][INK], [min(1, n / 8) for n in POSITIONS])
    names = {text.get_text() for text in figure.axes[0].texts}
    assert {"L0", "L1"} <= names if layers else {"L0 H0", "L0 H1"} <= names
