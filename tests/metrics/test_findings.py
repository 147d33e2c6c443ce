from collections.abc import Callable
from dataclasses import replace

import pytest

from hf_recurrent_lengthgen.evaluation.results import Estimate
from hf_recurrent_lengthgen.evaluation.words import interval_text
from hf_recurrent_lengthgen.metrics.context_harm.result import ComparedModel, Comparison
from hf_recurrent_lengthgen.metrics.context_harm.words import findings, status

ModelOf = Callable[..., ComparedModel]


def headlines(*models: ComparedModel) -> list[str]:
    return [finding.headline for finding in findings(Comparison("", models))]


def test_the_expected_demo_is_told_in_three_sentences(demo: Comparison) -> None:
    base, cured, control = findings(demo)
    assert base.headline == "base breaks beyond 64 tokens"
    assert cured.headline == "state passing cures it: holds to 1,024 tokens"
    assert control.headline == "control does not cure it"
    assert "At positions 512 to 1,024 the loss is +1.400 (+1.390 to +1.410) nats per byte" in base.detail
    assert "only the last 16 tokens as context: 4.06 times the perplexity" in base.detail
    assert "That is 1% of the harm of base." in cured.detail
    assert "Inside the training length, its loss is +0.030 compared with base." in cured.detail
    assert "It still uses its context: from around position 4 to 15 the loss falls by 0.250" in cured.detail
    assert "That is 86% of the harm of base." in control.detail


@pytest.mark.parametrize(
    ("harm", "width", "expected"),
    [
        (1.4, 0.01, "breaks"),
        (0.02, 0.01, "holds"),
        (-0.3, 0.01, "holds"),
        (0.05, 0.01, "unclear"),
        (0.02, 0.1, "unclear"),
        (1.4, None, "unclear"),
    ],
)
def test_the_status_needs_the_whole_interval_on_one_side(
    model_of: ModelOf, harm: float, width: float | None, expected: str
) -> None:
    assert status(model_of("base", "base", harm, width).evaluation) == expected


def test_a_base_that_does_not_break_is_not_said_to_be_cured(model_of: ModelOf) -> None:
    models = model_of("base", "base", 0.01), model_of("cured", "sp", 0.0), model_of("control", "plain", 0.01)
    assert headlines(*models) == [
        "base holds to 1,024 tokens",
        "sp holds to 1,024 tokens",
        "plain holds to 1,024 tokens",
    ]
    assert "% of the harm" not in findings(Comparison("", models))[1].detail


@pytest.mark.parametrize(
    ("harm", "width", "expected"),
    [
        (0.4, 0.01, "sp eases it, but does not cure it"),
        (1.3, 0.01, "sp does not cure it"),
        (2.0, 0.01, "sp does not cure it"),
        (0.05, 0.02, "sp is on the border at 1,024 tokens"),
        (0.05, None, "sp: one sequence cannot tell whether it holds to 1,024 tokens"),
    ],
)
def test_a_cure_that_does_not_work_is_told(model_of: ModelOf, harm: float, width: float | None, expected: str) -> None:
    assert headlines(model_of("base", "base", 1.4), model_of("cured", "sp", harm, width))[1] == expected


def test_a_base_barely_above_the_threshold_is_not_cured_by_a_model_barely_below(model_of: ModelOf) -> None:
    base, cured = model_of("base", "base", 0.06, 0.005), model_of("cured", "sp", 0.045, 0.004)
    assert headlines(base, cured) == ["base breaks beyond 64 tokens", "sp holds to 1,024 tokens"]


def test_a_control_that_holds_is_told(model_of: ModelOf) -> None:
    control = headlines(model_of("base", "base", 1.4), model_of("control", "plain", 0.0))[1]
    assert control == "plain holds to 1,024 tokens too: more steps alone are enough"


def test_a_cured_model_that_ignores_its_context_is_told(model_of: ModelOf) -> None:
    cured = findings(Comparison("", (model_of("base", "base", 1.4), model_of("cured", "sp", 0.0, context_use=0.005))))[
        1
    ]
    assert "is not shown to use its context" in cured.detail


def test_models_stand_alone_without_a_base(model_of: ModelOf) -> None:
    assert headlines(model_of("cured", "sp", 0.0), model_of("other", "x", 3.0)) == [
        "sp holds to 1,024 tokens",
        "x breaks beyond 64 tokens",
    ]


def test_interval_text_has_real_minus_signs() -> None:
    assert (
        interval_text(Estimate(-0.5, -0.75, -0.25), sign=True)
        == "\N{MINUS SIGN}0.500 (\N{MINUS SIGN}0.750 to \N{MINUS SIGN}0.250)"
    )
    assert interval_text(Estimate(0.5, None, None)) == "0.500"


def test_a_cure_is_judged_against_the_base_with_its_window_of_attention(model_of: ModelOf) -> None:
    models = []
    for role, window, harm in (("base", None, 1.4), ("base", 8, 0.0), ("cured", None, 0.5), ("cured", 8, 0.0)):
        model = model_of(role, f"{role} {window}", harm)
        models.append(replace(model, evaluation=replace(model.evaluation, attention_window=window)))
    for order in (models, [models[1], models[0], *models[2:]]):
        told = {finding.model.evaluation.model: finding for finding in findings(Comparison("", tuple(order)))}
        assert told["cured None"].headline == "cured None eases it, but does not cure it"
        assert told["cured 8"].headline == "cured 8 holds to 1,024 tokens"  # as the base does
        assert "compared with base 8." in told["cured 8"].detail
    assert "0% of the harm of base None" in findings(Comparison("", tuple(models)))[1].detail
