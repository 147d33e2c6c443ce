"""What a diagnosis tells one to do next follows from what it found, and its commands are commands."""

import shlex
from dataclasses import replace

import pytest

from hf_recurrent_lengthgen.metrics.diagnosis.next_steps import Step, next_steps
from hf_recurrent_lengthgen.metrics.diagnosis.result import DiagnosedModel, Diagnosis
from tests.cli.helps import parser_of
from tests.metrics.diagnoses import diagnosed, hybrid, states

COMMAND = "lengthgen diagnose folder/a folder/b --data 'my text.txt' --length 512 --sequences=8"


def steps(*models: DiagnosedModel) -> list[Step]:
    given = [replace(model, evaluation=replace(model.evaluation, command=COMMAND)) for model in models]
    return next_steps(Diagnosis("", tuple(given)))


def test_a_model_that_fails_is_trained_and_measured_again() -> None:
    (step,) = steps(diagnosed("base", "a", 1.4, states({(1, 2): 47.3})))
    assert step.commands == (
        "lengthgen train --model folder/a --intervention state_passing --output a-cured --data 'my text.txt'",
        "lengthgen diagnose folder/a a-cured --roles base,cured --data 'my text.txt' --length 512",
    )


def test_a_cure_that_is_not_enough_goes_on_and_one_that_holds_is_read_further() -> None:
    base = diagnosed("base", "a", 1.4, states({(1, 2): 47.3}))
    (step,) = steps(base, diagnosed("cured", "b", 0.4, states({(1, 2): 3.0})))
    assert "train it longer" in step.why
    assert step.commands[0].startswith("lengthgen train --model folder/b --intervention state_passing --max-steps 400")
    (step,) = steps(base, diagnosed("cured", "b", 0.0, states({})))
    assert step.commands == ("lengthgen evaluate folder/b --length 4096 --data 'my text.txt'",)
    (step,) = steps(diagnosed("other", "b", 0.05, width=0.04))
    assert step.commands == ("lengthgen diagnose folder/b --sequences 128 --data 'my text.txt' --length 512",)


def test_harm_of_attention_is_not_said_to_be_cured_by_states() -> None:
    found = hybrid()
    assert found.attention is not None
    (step,) = steps(diagnosed("base", "a", 1.4, found))
    assert "state_passing" in step.commands[0]
    apart = replace(found.attention, recurrent=found.attention.attention, attention=found.attention.recurrent)
    model = diagnosed("base", "a", 1.4, replace(found, attention=apart))
    (step,) = steps(model)
    assert step.why.endswith(
        "is attention's, which no initial state takes away: let a token see its last 16 keys alone"
    )
    assert step.commands == ("lengthgen diagnose folder/a --attention-window 16 --data 'my text.txt' --length 512",)
    (step,) = steps(replace(model, evaluation=replace(model.evaluation, attention_window=64)))
    assert "state_passing" in step.commands[0]


@pytest.mark.parametrize("role", ["base", "other"])
def test_a_model_that_holds_with_another_window_is_read_further_with_it(role: str) -> None:
    models = {label: diagnosed(role, label, 1.4, hybrid()) for label in ("a", "b")}  # type: ignore[arg-type]
    held = diagnosed(role, "a (attention window 8)", 0.0)  # type: ignore[arg-type]
    held = replace(held, evaluation=replace(held.evaluation, attention_window=8))
    (step,) = steps(models["a"], held)
    assert step.commands[0].startswith("lengthgen evaluate folder/a --length 4096")
    for order in ((models["a"], held, models["b"]), (models["b"], held, models["a"])):
        (step,) = steps(*order)
        assert step.commands[0].startswith("lengthgen train --model folder/b")


@pytest.mark.parametrize("role", ["base", "cured", "other", "control"])
@pytest.mark.parametrize("harm", [0.0, 0.05, 1.4])
def test_each_command_can_be_parsed(role: str, harm: float) -> None:
    model = diagnosed(role, "a", harm, width=0.04)  # type: ignore[arg-type]
    for step in steps(model):
        for command in step.commands:
            program, name, *words = shlex.split(command)
            assert program == "lengthgen"
            _, left = parser_of(name).parse_known_args(words)
            assert not left
