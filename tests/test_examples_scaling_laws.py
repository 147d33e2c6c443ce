"""Scaling laws: thresholds from curves and accuracies by hand, laws from points on them, and the rows of trainings."""

import math
import re
import sys
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import curve_fit
from scipy.stats import linregress

from hf_recurrent_lengthgen import forgetting
from hf_recurrent_lengthgen.evaluation.files import read_result
from hf_recurrent_lengthgen.evaluation.json_schema import from_json, to_json
from hf_recurrent_lengthgen.evaluation.results import Curve
from hf_recurrent_lengthgen.models import StatefulMamba2Config, StatefulMamba2ForCausalLM
from hf_recurrent_lengthgen.models.state_value import LayerState

sys.path.append(str(Path(__file__).parents[1] / "examples" / "scaling_laws"))
from law import Law, fit_law
from scaling_laws import (
    LawFit,
    NoFitError,
    Relation,
    Threshold,
    fails,
    fit_exponential_law,
    fit_linear_law,
    forget_threshold,
    loss_ratio,
    recall_threshold,
    state_size,
)

TABLE_2 = ((48, 1536, 19.3), (48, 1024, 12.9), (24, 768, 4.8), (12, 768, 2.4), (12, 512, 1.6), (6, 512, 0.8))
"""Layers, width and state size in millions of the models of arXiv:2410.07145, Table 2."""
PAPER_SIZES = tuple(sorted(round(1e6 * size) for *_, size in TABLE_2))
MILLIONS = np.array(PAPER_SIZES) / 1e6


def curve(edges: Sequence[int], mean: Sequence[float]) -> Curve:
    return Curve(tuple(edges), tuple(mean), None, None)


def values(fit: LawFit) -> list[float]:
    return [estimate.mean for estimate in fit.coefficients.values()]


def paper_forget(size: int) -> float:
    return 1000 * (5.172 * size / 1e6 - 4.469)


def paper_recall(size: int) -> float:
    return 1000 * (4.756 * (1.365 ** (size / 1e6) - 1) - 0.742)


def mamba2(layers: int = 1, width: int = 4, state_size: int = 4, head_dim: int = 4) -> StatefulMamba2ForCausalLM:
    config = StatefulMamba2Config(
        **{"hidden_size": width, "num_heads": 2 * width // head_dim, "head_dim": head_dim, "n_groups": 1},
        **{"state_size": state_size, "num_hidden_layers": layers, "vocab_size": 8},
        **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1},
    )
    return StatefulMamba2ForCausalLM(config)


class TestStateElements:
    @pytest.mark.parametrize(("layers", "width", "millions"), TABLE_2)
    def test_is_the_state_size_of_the_papers_models(self, layers: int, width: int, millions: float) -> None:
        with torch.device("meta"):
            model = mamba2(layers, width, state_size=128, head_dim=64)
        assert math.floor(state_size(model) / 1e5) / 10 == millions  # the table cuts 19.35 and 4.85 off

    def test_a_window_of_tokens_does_not_count(self) -> None:
        model = mamba2()
        assert state_size(model) == 8 * 4 + 3 * (8 + 2 * 4)
        with forgetting(model, window=5):
            assert state_size(model) == 8 * 4 + 3 * (8 + 2 * 4)


EDGES = (0, 2, 4, 8, 16, 32, 64)


class TestFails:
    @pytest.mark.parametrize(
        ("losses", "failed"),
        [
            ((9, 3, 2, 2, 2, 2), False),
            ((9, 3, 2, 6, 6, 6), False),  # the limit is 2 * 3, and is not exceeded
            ((9, 3, 2, 2, 6.01, 2), True),  # ever, not at the end
            ((9, 3, 2, 2, 2, math.inf), True),
            ((9, 0, 0, 0, 0, 0), False),
            ((9, 0, 0, 0, 0.1, 0), True),
            ((1, 3, 3.01, 6.01, 1, 1), False),  # the greatest loss inside sets it
        ],
    )
    def test_compares_with_twice_the_greatest_loss_inside(self, losses: tuple[float, ...], failed: bool) -> None:
        assert fails(curve(EDGES, losses), 8) is failed

    def test_skips_the_first_bin_or_a_share(self) -> None:
        found = curve(EDGES, (9, 3, 2, 5, 5, 5))
        assert not fails(found, 8)
        assert fails(found, 8, skip=0.5)  # bins from 4 on: the limit is 2 * 2
        assert not fails(found, 8, skip=0.25)  # from 2 on
        assert not fails(found, 8, skip=0)  # from 0 on
        assert fails(found, 8, factor=1.5)
        assert loss_ratio(found, 8) == 5 / 3
        assert loss_ratio(found, 8, skip=0.5) == 5 / 2


def family(failed: str) -> dict[int, Curve]:
    """Models trained on 4, 8, 16, ... tokens that fail where there is an x, out of order."""
    edges = (0, 1, 2, 4, 8, 16, 32, 64, 128)
    curves = {}
    for index, letter in enumerate(failed):
        bad = [7 if letter == "x" and edge >= 64 else 3 for edge in edges[:-1]]
        curves[4 * 2**index] = curve(edges, bad)
    return dict(reversed(curves.items()))


class TestForgetThreshold:
    @pytest.mark.parametrize(
        ("failed", "relation", "length"),
        [("xx..", "=", 16), ("x.x.", "=", 32), ("....", "<=", 4), ("xxxx", ">", 32), ("..x", ">", 16), (".", "<=", 4)],
    )
    def test_is_the_least_length_from_which_on_none_fails(self, failed: str, relation: Relation, length: int) -> None:
        tried = tuple(4 * 2**index for index in range(len(failed)))
        assert forget_threshold(1500, family(failed)) == Threshold(1500, relation, length, tried)


class TestRecallThreshold:
    @pytest.mark.parametrize(
        ("accuracies", "relation", "length"),
        [
            ({64: {32: 1, 64: 0.95, 128: 0.94}}, "=", 64),
            ({64: {128: 0.5, 64: 0.95, 32: 1}}, "=", 64),
            ({64: {32: 1, 64: 0.95, 128: 0.5}, 128: {32: 1, 64: 1, 128: 0.96, 256: 0.9}}, "=", 128),
            ({64: {32: 0.9, 64: 1}}, "<", 32),  # up to which, so not beyond a gap
            ({64: {32: 1, 64: 0.9, 128: 1}}, "=", 32),
            ({64: {32: 0.9, 64: 0.5}, 128: {16: 0.2}}, "<", 16),
            ({64: {32: 1, 64: 1}}, ">=", 64),
            ({64: {32: 1, 64: 1}, 128: {32: 1, 64: 1, 128: 1, 256: 0}}, ">=", 128),  # the first may do more than 128
        ],
    )
    def test_is_the_most_over_training_lengths(
        self, accuracies: dict[int, dict[int, float]], relation: Relation, length: int
    ) -> None:
        assert recall_threshold(500, accuracies) == Threshold(500, relation, length, tuple(sorted(accuracies)))


class TestFits:
    @pytest.mark.parametrize("unit", [1, 1000, 10**6])
    @pytest.mark.parametrize("growth", [-12.0, -3.0, -0.01, 0.01, 1.0, 12.0])
    def test_any_growth_comes_back_in_any_unit(self, growth: float, unit: int) -> None:
        sizes, (a, c, b) = (1, 2, 3, 5, 8), (2.0, math.exp(growth / 7), 3.0)
        lengths = [10 * (a * math.expm1(math.log(c) * size) + b) for size in sizes]
        fit = fit_exponential_law([unit * size for size in sizes], lengths, size_unit=unit, length_unit=10)
        assert values(fit) == pytest.approx([a, c, b], rel=1e-5)
        assert fit.line.sizes[0] == unit
        assert fit.line.sizes[-1] == 8 * unit
        assert fit.line.mean[-1] == pytest.approx(lengths[-1])

    def test_the_band_of_a_line_by_hand(self) -> None:
        # N 1, 2, 3 and T 1, 3, 2 thousand: residuals -1/2, 1, -1/2, so s^2 = 3 / 2 with one degree of freedom,
        # t = 12.7062. At N = 2, the middle, the error of the line is s / sqrt(3).
        line: Any = fit_linear_law([1, 2, 3], [1000, 3000, 2000], size_unit=1).line
        assert (line.sizes[50], line.mean[50]) == (2, pytest.approx(2000))
        error = 12706.205 * math.sqrt(0.5)
        assert (line.low[50], line.high[50]) == pytest.approx((2000 - error, 2000 + error))

    @pytest.mark.parametrize("seed", range(20))
    def test_agrees_with_scipy_on_noisy_points(self, seed: int) -> None:
        noise = np.random.default_rng(seed).normal(size=6)
        linear = [paper_forget(size) + 2000 * e for size, e in zip(PAPER_SIZES, noise, strict=True)]
        mine, known = fit_linear_law(PAPER_SIZES, linear), linregress(MILLIONS, np.array(linear) / 1000)
        assert values(mine) == pytest.approx([known.slope, known.intercept])
        assert mine.r_squared == pytest.approx(known.rvalue**2)
        quantile = 2.7764451052  # t table, 4 degrees of freedom
        for estimate, error in zip(mine.coefficients.values(), (known.stderr, known.intercept_stderr), strict=True):
            assert estimate.high - estimate.mean == pytest.approx(quantile * error)
            assert estimate.mean - estimate.low == pytest.approx(quantile * error)

        lengths = np.array([paper_recall(size) + 1000 * e for size, e in zip(PAPER_SIZES, noise, strict=True)])
        fit = fit_exponential_law(PAPER_SIZES, lengths.tolist())
        best, covariance = curve_fit(
            lambda n, a, c, b: a * (c**n - 1) + b,
            *(MILLIONS, lengths / 1000, (4.756, 1.365, -0.742)),
            **{"xtol": 1e-13, "ftol": 1e-13},
        )
        assert values(fit) == pytest.approx(best, rel=1e-5)
        errors = np.sqrt(np.diag(covariance))
        quantile = 3.1824463053  # 3 degrees of freedom
        for estimate, error in zip(fit.coefficients.values(), errors, strict=True):
            assert estimate.high is not None
            assert estimate.high - estimate.mean == pytest.approx(quantile * error, rel=1e-3)

    def test_as_many_points_as_coefficients_give_no_intervals(self) -> None:
        linear = fit_linear_law([1, 2], [1000, 3000], size_unit=1)
        exponential = fit_exponential_law(
            [1, 2, 3], [1000, 3000, 7000], size_unit=1
        )  # a c^N with differences 2, 4: c = 2
        assert values(linear) == pytest.approx([2, -1])
        assert values(exponential) == pytest.approx([1, 2, 0])
        for fit in (linear, exponential):
            assert {bound for e in fit.coefficients.values() for bound in (e.low, e.high)} == {None}
            assert fit.line.low is fit.line.high is None

    @pytest.mark.parametrize(
        ("fit", "sizes", "lengths", "message"),
        [
            (fit_linear_law, [1], [5], "exact thresholds of at least 2 different state sizes, got 1"),
            (fit_linear_law, [1, 1, 1], [5, 6, 7], "exact thresholds of at least 2 different state sizes, got 1"),
            (fit_linear_law, [], [], "exact thresholds of at least 2 different state sizes, got 0"),
            (fit_exponential_law, [1, 2], [5, 6], "exact thresholds of at least 3 different state sizes, got 2"),
            (fit_exponential_law, [1, 1, 2, 2], [5, 6, 7, 8], "at least 3 different state sizes"),
            (fit_linear_law, [1, 2, 3], [64, 64, 64], "All thresholds are 64 tokens"),
            (fit_exponential_law, [1, 2, 3], [64, 64, 64], "All thresholds are 64 tokens"),
            (fit_exponential_law, [1, 2, 3, 4], [64, 128, 192, 256], "on a straight line"),
            (fit_exponential_law, [1, 2, 3, 4], [64, 64, 64, 256], "have a step"),
            (fit_exponential_law, [1, 2, 3, 4], [64, 256, 256, 256], "have a step"),
        ],
    )
    def test_points_that_determine_no_law_are_refused(
        self, fit: object, sizes: list[float], lengths: list[float], message: str
    ) -> None:
        with pytest.raises(NoFitError, match=message):
            fit(sizes, lengths, size_unit=1)  # type: ignore[operator]


def forgotten(relations: str) -> list[Threshold]:
    return [
        Threshold(size, relation, round(1000 * (5.172 * size / 1e6 - 4.469)), (64,))  # type: ignore[arg-type]
        for size, relation in zip((10**6, 2 * 10**6, 3 * 10**6, 5 * 10**6), relations, strict=True)
    ]


def test_bounds_are_kept_but_not_fitted() -> None:
    law = fit_law("forget", [*forgotten("===="), Threshold(9 * 10**6, ">", 512, (256, 512))], "twice the loss")
    assert law.fit is not None
    assert law.fit.points == 4
    assert law.fit.form == "linear"
    assert [estimate.mean for estimate in law.fit.coefficients.values()] == pytest.approx([5.172, -4.469], rel=1e-3)
    assert law.fit.line.sizes[0] == 10**6
    assert law.fit.line.sizes[-1] == 5 * 10**6
    assert len(law.thresholds) == 5
    assert from_json(to_json(law), Law) == law


def test_says_why_there_is_no_fit() -> None:
    law = fit_law("forget", forgotten("<<=>"), "twice the loss")
    assert law.fit is None
    assert law.why_no_fit is not None
    assert "exact thresholds of at least 2 different state sizes, got 1" in law.why_no_fit
    assert from_json(to_json(law), Law) == law


@pytest.fixture
def modules(example: Any) -> Any:
    """Names of run.py."""
    return example("scaling_laws/run.py")


@pytest.mark.slow
@pytest.mark.usefixtures("small_corpus")
def test_the_runs_without_a_mimetic_start_take_the_best_rate(
    example: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--tiny", "--sizes", "4", "--lengths", "16", "64", "--seeds", "0", "--results", tmp_path]
    example("scaling_laws/forgetting.py", *arguments)
    printed = capsys.readouterr().out
    losses = dict(re.findall(r"T=64 seed=0 lr=(\S+): loss (\S+),", printed))
    assert set(losses) == {"0.003", "0.01", "0.03"}
    best = min(losses, key=lambda rate: float(losses[rate]))
    assert printed.count("T=16 seed=0 lr=") == printed.count(f"T=16 seed=0 lr={best}:") == 1
    assert f"| {best} | 0 | " in printed
    assert read_result(tmp_path / "law.json", Law).thresholds[0].tried == (16, 64)


@pytest.mark.usefixtures("modules")
def test_rows_go_on_with_the_text_and_the_state_of_the_step_before(monkeypatch: pytest.MonkeyPatch) -> None:
    training = sys.modules["training"]
    monkeypatch.setattr(training, "_text", lambda _: torch.arange(500))
    read: list[tuple[list[int], Any]] = []

    class Counting(torch.nn.Module):
        """Its state is the last byte that each row has read."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(()))

        def forward(self, input_ids: torch.Tensor, initial_state: Any = None, **_: Any) -> SimpleNamespace:
            read.append((input_ids[:, 0].tolist(), initial_state and initial_state[0].recurrent.tolist()))
            final = (LayerState(input_ids[:, -1].float(), torch.zeros(len(input_ids), 0)),)
            return SimpleNamespace(logits=torch.zeros(*input_ids.shape, 500) * self.weight, final_state=final)

    run = training.Run("text", state_size=4, length=8, seed=0, tokens=16, chunks=3)
    losses = training._text_losses(Counting(), run, torch.Generator().manual_seed(0))
    assert all(loss.item() == pytest.approx(math.log(500)) for loss in islice(losses, 6))
    for first in (0, 3):
        starts, state = read[first]
        assert state is None
        for number in (1, 2):
            begins, carried = read[first + number]
            assert begins == [start + 8 * number for start in starts]
            assert carried == [begin - 1 for begin in begins]
    assert read[0][0] != read[3][0]


@pytest.mark.usefixtures("modules")
def test_a_needle_stands_where_it_should_and_is_the_answer() -> None:
    training = sys.modules["training"]
    places = torch.tensor([0, 5, 17])
    rows, values = training.needle_rows(20, places, torch.Generator().manual_seed(0))
    assert rows.shape == (3, 20)
    assert (rows == training.MARK).nonzero().tolist() == [[0, 0], [1, 5], [2, 17]]
    assert rows[:, -1].tolist() == [training.QUESTION] * 3
    assert (rows == training.QUESTION).sum() == 3
    assert values.tolist() == [int(row[place + 1]) for row, place in zip(rows, places, strict=True)]
    assert int(values.max()) < training.VALUES
