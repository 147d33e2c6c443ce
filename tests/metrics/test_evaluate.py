import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from hf_recurrent_lengthgen.evaluation.json_schema import from_json, to_json
from hf_recurrent_lengthgen.evaluation.provenance import token_digest
from hf_recurrent_lengthgen.evaluation.results import DataRecord, DataSource
from hf_recurrent_lengthgen.evaluation.settings import EvaluationSettings
from hf_recurrent_lengthgen.evaluation.streaming import stream_nll
from hf_recurrent_lengthgen.metrics.context_harm.measure import differences, evaluate_model, length_verdict
from hf_recurrent_lengthgen.metrics.context_harm.result import ComparedModel, EvaluationResult
from hf_recurrent_lengthgen.metrics.context_harm.windows import window_nll

NLL = Callable[..., list[float]]


def fading(count: Any) -> Any:
    return 4 - count / 40


def evaluate(model: Any, tokens: np.ndarray, training_length: int = 16, **options: Any) -> EvaluationResult:
    data, settings = DataRecord(DataSource("random ids")), EvaluationSettings(progress=False, **options)
    return evaluate_model(model, tokens, training_length, "toy", data, settings)


def test_every_number_of_a_model_that_worsens_with_every_token(
    counter_model: Any, expected_nll: NLL, random_tokens: np.ndarray
) -> None:
    result = evaluate(counter_model(fading), random_tokens, command="here", seed=5)
    stream = np.array([expected_nll(row, 0, 130, fading) for row in random_tokens])
    assert (result.evaluated_length, result.sequences, result.training_length) == (130, 3, 16)
    assert (result.command, result.seed, result.device) == ("here", 5, "cpu")

    fine = result.position_wise.fine
    assert fine.edges == tuple(range(131))
    np.testing.assert_allclose(fine.mean, stream.mean(0), atol=2e-6)
    coarse = result.position_wise.coarse
    first, second = coarse.edges[-3:-1]
    assert coarse.mean[-2] == pytest.approx(stream[:, first:second].mean(), abs=2e-6)

    # Windows begin at multiples of 8 and score the positions of their second half.
    truncated = np.array(
        [[expected_nll(row, (t - 8) // 8 * 8, t + 1, fading)[-1] for t in range(16, 130)] for row in random_tokens]
    )
    harm = stream[:, 16:] - truncated
    assert result.harm.curves.fine.edges == tuple(range(16, 131))
    np.testing.assert_allclose(result.harm.curves.fine.mean, harm.mean(0), atol=4e-6)
    assert result.harm.last_range == (65, 130)
    per_sequence = harm[:, 49:].mean(1)
    half = 4.302653 * per_sequence.std(ddof=1) / math.sqrt(3)  # t table, 2 degrees of freedom
    found = result.harm.last
    assert (found.mean, found.low, found.high) == pytest.approx(
        (per_sequence.mean(), per_sequence.mean() - half, per_sequence.mean() + half), abs=4e-6
    )

    starts = range(0, 115, 8)
    windows = np.array([np.mean([expected_nll(row, w, w + 16, fading) for w in starts], 0) for row in random_tokens])
    assert result.in_window.windows_per_sequence == len(starts)
    assert result.in_window.loss.mean == pytest.approx(windows.mean(), abs=2e-6)
    np.testing.assert_allclose(result.in_window.curve.mean, windows.mean(0), atol=2e-6)
    assert (result.in_window.early_band, result.in_window.late_band) == ((3, 5), (14, 16))
    use = windows[:, 3:5].mean() - windows[:, 14:16].mean()
    assert result.in_window.context_use.mean == pytest.approx(use, abs=4e-6)


def test_the_mean_over_texts_of_perplexity_is_definition_3_1_and_more_than_exp_of_the_mean_loss(
    counter_model: Any, expected_nll: NLL, random_tokens: np.ndarray
) -> None:
    result = evaluate(counter_model(fading), random_tokens)
    # Definition 3.1 of arXiv:2507.02782 at each position t: E_x[exp(-log q(x_t | x_0:t-1))]
    texts = [expected_nll(row, 0, 130, fading) for row in random_tokens]
    for t, found in enumerate(result.mean_perplexity.fine.mean):
        assert found == pytest.approx(sum(math.exp(nll[t]) for nll in texts) / len(texts), rel=1e-5)
    coarse = result.mean_perplexity.coarse
    for start, stop, found in zip(coarse.edges[:-1], coarse.edges[1:], coarse.mean, strict=True):
        values = [math.exp(loss) for nll in texts for loss in nll[start:stop]]
        assert found == pytest.approx(sum(values) / len(values), rel=1e-5)
    assert coarse.mean[-1] > math.exp(result.position_wise.coarse.mean[-1]) * 1.05


def test_a_perplexity_that_overflows_is_cut_so_that_it_can_be_written(counter_model: Any) -> None:
    def certain(count: Any) -> Any:  # of a wrong token from the 20th on, by 5,000 nats
        return 2.0 - 5002 * (count > 20)

    tokens = (np.arange(131)[None] + np.arange(3)[:, None]) % 7
    result = evaluate(counter_model(certain, last_only=True), tokens)
    assert result.position_wise.fine.mean[-1] == pytest.approx(5000 + math.log(6), rel=1e-5)
    assert result.mean_perplexity.fine.mean[-1] == pytest.approx(math.exp(300))
    assert result.mean_perplexity.fine.high[-1] == pytest.approx(math.exp(300))
    assert from_json(to_json(result), EvaluationResult) == result


def test_a_model_that_always_sees_the_same_has_no_harm_and_holds(counter_model: Any) -> None:
    tokens = (np.arange(260)[None] + np.arange(4)[:, None]) % 7
    result = evaluate(counter_model(lambda count: 2 + 0 * count, last_only=True), tokens)
    level = math.log(math.exp(2) + 6) - 2
    np.testing.assert_allclose(result.position_wise.fine.mean, level, atol=1e-6)
    np.testing.assert_allclose(result.harm.curves.fine.mean, 0, atol=1e-6)
    assert (result.harm.harmful_from, result.harm.onset) == (None, "nowhere")
    assert result.in_window.context_use.mean == pytest.approx(0, abs=1e-6)
    assert result.verdict.holds_to == 259
    assert result.verdict.violated_from is None


def test_the_first_harmful_bin_is_found(counter_model: Any) -> None:
    def breaks_after_100(count: torch.Tensor) -> torch.Tensor:
        return torch.where(count > 100, 0.0, 2.0)

    tokens = (np.arange(1025)[None] + np.arange(4)[:, None]) % 7
    result = evaluate(counter_model(breaks_after_100, last_only=True), tokens)
    level = math.log(math.exp(2) + 6) - 2
    # Positions from 100 on cost log(7): the coarse bin [91, 108) is the first to hold some of them.
    assert (result.harm.harmful_from, result.harm.onset) == (91, "91")
    assert result.harm.last.mean == pytest.approx(math.log(7) - level, abs=1e-6)
    assert result.verdict.holds_to == 91
    assert result.verdict.violated_from == 91
    assert (
        evaluate(counter_model(breaks_after_100, last_only=True), tokens, harm_threshold=0.8).harm.harmful_from == 108
    )


def test_one_sequence_has_no_intervals_and_nothing_is_called_harmful(counter_model: Any) -> None:
    result = evaluate(counter_model(fading, last_only=True), np.arange(131)[None] % 7)
    assert result.harm.last.mean > 0.1
    assert result.harm.last.low is None
    assert (result.harm.harmful_from, result.harm.onset) == (None, "unknown")
    assert (result.verdict.violated_from, result.verdict.excess.low) == (None, None)
    assert result.position_wise.fine.low is None
    assert from_json(to_json(result), EvaluationResult) == result


@pytest.mark.parametrize("length", [17, 18, 20, 24, 31])
def test_lengths_shortly_beyond_the_training_length_work(
    counter_model: Any, random_tokens: np.ndarray, length: int
) -> None:
    result = evaluate(counter_model(fading), random_tokens[:, : length + 1])
    assert result.harm.last_range == (16, length)
    assert from_json(to_json(result), EvaluationResult) == result


def test_the_digest_is_of_the_ids_whatever_their_type(random_tokens: np.ndarray) -> None:
    digest = token_digest(random_tokens)
    assert digest == token_digest(random_tokens.astype(np.uint8)) == token_digest(random_tokens.copy("F"))
    assert digest != token_digest(random_tokens[:, :-1])
    assert digest != token_digest(random_tokens.reshape(1, -1))


EDGES = (0, 4, 8, 16, 32, 64, 128)  # trained on 16


def sequences(means: list[float], spread: float) -> np.ndarray:
    """Four sequences around `means`; even bins differ between the first two of them, odd bins between the others."""
    signs = np.array([[1, -1, 0, 0], [0, 0, 1, -1]] * 3)[: len(means)].T
    return np.array(means) + spread * signs


@pytest.mark.parametrize(
    ("means", "tolerance", "best_bin", "holds_to", "violated_from"),
    [
        ([3, 2.5, 2, 1.9, 1.9, 1.8], 0.01, (8, 16), 128, None),
        ([3, 2.5, 2, 2.009, 2.02, 4], 0.01, (8, 16), 32, 32),
        ([3, 2, 2.5, 1, 1, 1], 0.01, (4, 8), 8, 8),  # never beyond the training length
        ([3, 2.5, 2, 2 + math.log(1.1) - 1e-9, 2 + math.log(1.1) + 1e-2, 4], 0.1, (8, 16), 32, 32),
        ([3, 2.5, 2, 2 + math.log(1.1) - 1e-9, 2 + math.log(1.1) + 1e-2, 4], 0.2, (8, 16), 64, 64),
    ],
)
def test_a_curve_holds_to_the_first_bin_above_the_tolerance(
    means: list[float], tolerance: float, best_bin: tuple[int, int], holds_to: int, violated_from: int | None
) -> None:
    verdict = length_verdict(EDGES, sequences(means, 0.001), 16, tolerance)
    assert (verdict.best_bin, verdict.holds_to, verdict.violated_from) == (best_bin, holds_to, violated_from)
    best = EDGES.index(best_bin[0])
    assert verdict.best_nll == pytest.approx(means[best])
    np.testing.assert_allclose(verdict.excess.mean, np.subtract(means, means[best]), atol=1e-12)


def test_noise_delays_the_proven_violation_and_pairing_removes_common_noise() -> None:
    # Bins 3 and 4 exceed bin 2 by 0.3 alike. Bin 3 varies on its own: differences of +-0.5, s^2 = 4 * 0.25 / 3, and
    # an interval of 0.3 +- 3.182 * s / 2. Bin 4 varies as bin 2 does.
    verdict: Any = length_verdict(EDGES, sequences([9, 9, 2, 2.3, 2.3, 5], 0.5), 16)
    assert verdict.holds_to == 16
    assert verdict.violated_from == 32
    assert verdict.excess.low[3] == pytest.approx(0.3 - 3.182446 * math.sqrt(1 / 3) / 2, abs=1e-6)
    assert verdict.excess.low[4] == pytest.approx(0.3, abs=1e-12)


def test_models_are_compared_text_by_text_and_methods_seed_by_seed(
    counter_model: Any, random_tokens: np.ndarray
) -> None:
    strengths = {"a0": 40, "a1": 50, "b0": 45, "b1": 90, "b2": 60, "c": 70}
    models = {name: counter_model(lambda count, fade=fade: 4 - count / fade) for name, fade in strengths.items()}
    arms = {
        name: ComparedModel("base" if name == "b0" else "other", evaluate(model, random_tokens), None)
        for name, model in models.items()
    }
    nll = {name: stream_nll(model, random_tokens).nll.astype(float) for name, model in models.items()}
    harm = {name: nll[name][:, 16:] - window_nll(model, random_tokens, 16).truncated for name, model in models.items()}

    def named(name: str, method: str = "", seed: str = "") -> ComparedModel:
        found = arms[name]
        evaluation = dataclasses.replace(found.evaluation, model=name)
        return dataclasses.replace(found, evaluation=evaluation, method=method, seed=seed)

    [one] = differences([named("c"), named("b0")])  # the base is what is subtracted, wherever it stands
    assert (one.model, one.minus, one.over, one.count) == ("c", "b0", "texts", 3)
    for values, first, found in ((nll, 65, one.loss), (harm, 49, one.harm)):
        test = stats.ttest_rel(values["c"][:, first:].mean(1), values["b0"][:, first:].mean(1))
        assert (found.low, found.high) == pytest.approx(tuple(test.confidence_interval(0.95)), abs=1e-7)
    assert one.in_window.mean == pytest.approx(
        arms["c"].evaluation.in_window.loss.mean - arms["b0"].evaluation.in_window.loss.mean
    )

    a, b = (
        [named(f"{method}{seed}", method, f"seed{seed}") for seed in range(n)] for method, n in (("a", 2), ("b", 3))
    )
    of_b, of_c = differences([*a, *b, named("c")])  # nothing but "b0" is a base
    assert [(each.model, each.minus, each.over, each.count) for each in (of_b, of_c)] == [
        ("a", "b", "seeds", 2),
        ("c", "b", "seeds", 3),
    ]
    losses = {name: values[:, 65:].mean() for name, values in nll.items()}
    test = stats.ttest_rel([losses["a0"], losses["a1"]], [losses["b0"], losses["b1"]])
    assert (of_b.loss.low, of_b.loss.high) == pytest.approx(tuple(test.confidence_interval(0.95)), abs=1e-6)
    assert of_c.loss.mean == pytest.approx(losses["c"] - np.mean([losses["b0"], losses["b1"], losses["b2"]]))
    assert [each.model for each in differences([a[0], named("b1", "b", "seed1"), named("c")])] == ["c"]
    old = dataclasses.replace(arms["c"], evaluation=dataclasses.replace(arms["c"].evaluation, by_text=None))
    assert differences([old, named("b0")]) == differences([]) == ()
