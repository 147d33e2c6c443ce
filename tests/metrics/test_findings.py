"""What is said of results, and to do next, follows from their numbers, also where an intervention did not work."""

import shlex
from dataclasses import replace
from typing import Any

import pytest

from hf_recurrent_lengthgen.evaluation.formatting import interval_text
from hf_recurrent_lengthgen.evaluation.results import Estimate
from hf_recurrent_lengthgen.metrics.context_harm.result import ComparedModel, Comparison
from hf_recurrent_lengthgen.metrics.context_harm.summary import findings, status
from hf_recurrent_lengthgen.metrics.diagnosis.next_steps import Recipe, Step, next_steps
from hf_recurrent_lengthgen.metrics.diagnosis.result import DiagnosedModel, Diagnosis
from tests.cli.training import parser_of
from tests.metrics.conftest import compared
from tests.metrics.diagnoses import diagnosed, hybrid, states


def headlines(*models: ComparedModel) -> list[str]:
    return [finding.headline for finding in findings(Comparison("", models))]


def test_a_finding_names_its_numbers(demo: Comparison) -> None:
    base, intervention, control = (finding.detail for finding in findings(demo))
    for numbers in (
        "positions 512 to 1,024",
        "+1.400 (+1.390 to +1.410) nats per byte",
        "last 16 tokens",
        "multiplies the perplexity by 4.06",
    ):
        assert numbers in base
    for numbers in (
        "1% of that of base",
        "minus that of base is +0.030",
        "more context lowers its loss: the loss around position 4 minus that around 15 is +0.250",
    ):
        assert numbers in intervention
    assert "86% of that of base" in control
    useless = findings(Comparison("", (compared("intervention", "sp", 0.0, context_use=0.005),)))[0]
    assert "more context is not shown to lower its loss" in useless.detail


@pytest.mark.parametrize(
    ("harm", "width", "expected"),
    [
        (1.4, 0.01, "fails"),
        (0.02, 0.01, "generalizes"),
        (-0.3, 0.01, "generalizes"),
        (0.05, 0.01, "inconclusive"),
        (0.02, 0.1, "inconclusive"),
        (1.4, None, "inconclusive"),
    ],
)
def test_the_status_needs_the_whole_interval_on_one_side(harm: float, width: float | None, expected: str) -> None:
    evaluation = compared("base", "base", harm, width).evaluation
    assert status(evaluation) == expected
    short = replace(evaluation, evaluated_length=2 * evaluation.training_length - 1)
    assert status(short) == {"generalizes": "inconclusive"}.get(expected, expected)


BREAKS, HOLDS, BARELY = compared("base", "a", 1.4), compared("base", "a", 0.01), compared("base", "a", 0.06, 0.005)


@pytest.mark.parametrize(
    ("base", "other", "headline"),
    [
        (BREAKS, BREAKS, "a fails beyond 64 tokens"),
        (BREAKS, compared("intervention", "sp", 0.02), "sp restores length generalization to 1,024 tokens"),
        (BREAKS, compared("intervention", "sp", 0.4), "sp fails beyond 64 tokens, with less excess loss"),
        (BREAKS, compared("intervention", "sp", 1.3), "sp fails beyond 64 tokens"),
        (BREAKS, compared("intervention", "sp", 2.0), "sp fails beyond 64 tokens"),
        (BREAKS, compared("intervention", "sp", 0.05, 0.02), "sp: inconclusive at 1,024 tokens"),
        (
            BREAKS,
            compared("intervention", "sp", 0.05, None),
            "sp: inconclusive at 1,024 tokens, one sequence gives no interval",
        ),
        (BREAKS, compared("control", "p", 1.2), "p fails beyond 64 tokens"),
        (BREAKS, compared("control", "p", 0.0), "p generalizes to 1,024 tokens too: more steps alone are enough"),
        (HOLDS, compared("intervention", "sp", 0.0), "sp generalizes to 1,024 tokens"),
        (HOLDS, compared("control", "p", 0.01), "p generalizes to 1,024 tokens"),
        (BARELY, compared("intervention", "sp", 0.045, 0.004), "sp generalizes to 1,024 tokens"),
        (compared("other", "x", 3.0), compared("intervention", "sp", 0.0), "sp generalizes to 1,024 tokens"),
    ],
)
def test_a_model_is_judged_against_the_base(base: ComparedModel, other: ComparedModel, headline: str) -> None:
    models = (base,) if base is other else (base, other)
    assert headlines(*models)[-1] == headline
    if base is HOLDS:
        assert "% of the excess loss" not in findings(Comparison("", models))[1].detail


def test_interval_text_has_real_minus_signs() -> None:
    text = interval_text(Estimate(-0.5, -0.75, -0.25), sign=True)
    assert text == "-0.500 (-0.750 to -0.250)".replace("-", "\N{MINUS SIGN}")
    assert interval_text(Estimate(0.5, None, None)) == "0.500"


def test_an_intervention_is_judged_against_the_base_with_its_window_of_attention() -> None:
    models = []
    for role, window, harm in (
        ("base", None, 1.4),
        ("base", 8, 0.0),
        ("intervention", None, 0.5),
        ("intervention", 8, 0.0),
    ):
        model = compared(role, f"{role} {window}", harm)  # type: ignore[arg-type]
        models.append(replace(model, evaluation=replace(model.evaluation, attention_window=window)))
    for order in (models, [models[1], models[0], *models[2:]]):
        named = {finding.model.evaluation.model: finding for finding in findings(Comparison("", tuple(order)))}
        assert named["intervention None"].headline == "intervention None fails beyond 64 tokens, with less excess loss"
        assert named["intervention 8"].headline == "intervention 8 generalizes to 1,024 tokens"  # as the base does
        assert "minus that of base 8 is" in named["intervention 8"].detail
    assert "excess loss is 0% of that of base None" in findings(Comparison("", tuple(models)))[1].detail


OPTIONS = {"data": "my text.txt", "length": 512, "sequences": 8}
DATA = " --data 'my text.txt'"


def step(*models: DiagnosedModel, recipe: Recipe | None = None, **options: Any) -> Step:
    paths = [f"folder/{model.evaluation.model.partition(' ')[0]}" for model in models]
    (found,) = next_steps(Diagnosis("", models), paths, OPTIONS | options, [recipe] * len(models))
    for command in found.commands:
        program, name, *words = shlex.split(command)
        assert program == "lengthgen"
        assert not parser_of(name).parse_known_args(words)[1]
    return found


def test_a_model_that_fails_is_trained_and_measured_again() -> None:
    assert step(diagnosed("base", "a", 1.4, states({(1, 2): 47.3}))).commands == (
        f"lengthgen train --model folder/a --intervention state_passing --output a-state-passing{DATA}",
        f"lengthgen diagnose folder/a a-state-passing --roles base,intervention{DATA} --length 512 --sequences 8",
    )


def test_an_intervention_that_is_not_enough_goes_on_and_one_that_holds_is_read_further() -> None:
    base = diagnosed("base", "a", 1.4, states({(1, 2): 47.3}))
    found = step(base, diagnosed("intervention", "b", 0.4, states({(1, 2): 3.0})))
    assert found.commands[0].startswith(
        "lengthgen train --model folder/b --intervention state_passing --max-steps 400"
    )
    found = step(base, diagnosed("intervention", "b", 0.0, states({})))
    assert found.commands == (f"lengthgen evaluate folder/b --length 4096{DATA} --sequences 8",)
    found = step(diagnosed("other", "b", 0.05, width=0.04))
    assert found.commands == (f"lengthgen diagnose folder/b --sequences 128{DATA} --length 512",)
    model = diagnosed("other", "b", 0.0)
    short = replace(model, evaluation=replace(model.evaluation, evaluated_length=17))
    assert step(short).commands == (f"lengthgen diagnose folder/b --length 64{DATA} --sequences 8",)


def test_a_training_goes_by_the_one_before_it() -> None:
    recipe = Recipe(learning_rate=0.003, sequences=16)
    (base, _), (again, measure) = (
        step(diagnosed(role, name, 1.4, states({(1, 2): 47.3})), recipe=recipe).commands
        for role, name in (("base", "a"), ("intervention", "a-state-passing-2"))
    )
    assert "--learning-rate 0.0003 --per-device-train-batch-size 16 --output a-state-passing " in base
    assert "--max-steps 400 --learning-rate 0.003" in again
    assert "--output a-state-passing-3 " in again
    assert "folder/a-state-passing-2 a-state-passing-3 " in measure
    learned = step(diagnosed("intervention", "b", 1.4, states({(1, 2): 47.3})), recipe=recipe._replace(base="a"))
    assert "which does not change the weights: train its base" in learned.why
    assert learned.commands[0].startswith(
        "lengthgen train --model a --intervention state_passing --output a-state-passing --data"
    )
    held_out = {"split": "train[90%:]"}
    model = diagnosed("other", "a", 1.4, states({(1, 2): 47.3}))
    again, measure = step(model, recipe=recipe._replace(plain=False, split="train[:80%]"), **held_out).commands
    assert "--learning-rate 0.003 " in again
    assert "--split 'train[:80%]'" in again
    assert "--split 'train[90%:]'" in measure
    assert "--split 'train[:90%]'" in step(model, **held_out).commands[0]


def test_harm_of_attention_is_not_said_to_be_fixed_by_states() -> None:
    found: Any = hybrid()
    assert "state_passing" in step(diagnosed("base", "a", 1.4, found)).commands[0]
    apart = replace(found.attention, recurrent=found.attention.attention, attention=found.attention.recurrent)
    model = diagnosed("base", "a", 1.4, replace(found, attention=apart))
    command = f"lengthgen diagnose folder/a --attention-window 16{DATA} --length 512 --sequences 8"
    assert step(model).commands == (command,)
    windowed = replace(model, evaluation=replace(model.evaluation, attention_window=64))
    for command in step(windowed, attention_window="32,64").commands:
        assert "--attention-window 64" in command


@pytest.mark.parametrize("role", ["base", "other"])
def test_a_model_that_holds_with_another_window_is_read_further_with_it(role: Any) -> None:
    models = {label: diagnosed(role, label, 1.4, hybrid()) for label in ("a", "b")}
    held = diagnosed(role, "a (attention window 8)", 0.0)
    held = replace(held, evaluation=replace(held.evaluation, attention_window=8))
    assert step(models["a"], held).commands[0].startswith("lengthgen evaluate folder/a --length 4096")
    for order in ((models["a"], held, models["b"]), (models["b"], held, models["a"])):
        assert step(*order).commands[0].startswith("lengthgen train --model folder/b")
