"""What a diagnosis tells one to do next follows from what it found, and its commands are commands."""

import shlex
from dataclasses import replace
from typing import Any

import pytest

from hf_recurrent_lengthgen.metrics.diagnosis.next_steps import Step, next_steps
from hf_recurrent_lengthgen.metrics.diagnosis.result import DiagnosedModel, Diagnosis
from tests.cli.helps import parser_of
from tests.metrics.diagnoses import diagnosed, hybrid, states

OPTIONS = {"data": "my text.txt", "length": 512, "sequences": 8}
DATA = " --data 'my text.txt'"


def step(*models: DiagnosedModel, **options: Any) -> Step:
    paths = [f"folder/{model.evaluation.model.partition(' ')[0]}" for model in models]
    (found,) = next_steps(Diagnosis("", models), paths, OPTIONS | options)
    for command in found.commands:
        program, name, *words = shlex.split(command)
        assert program == "lengthgen"
        assert not parser_of(name).parse_known_args(words)[1]
    return found


def test_a_model_that_fails_is_trained_and_measured_again() -> None:
    assert step(diagnosed("base", "a", 1.4, states({(1, 2): 47.3}))).commands == (
        f"lengthgen train --model folder/a --intervention state_passing --output a-cured{DATA}",
        f"lengthgen diagnose folder/a a-cured --roles base,cured{DATA} --length 512",
    )


def test_a_cure_that_is_not_enough_goes_on_and_one_that_holds_is_read_further() -> None:
    base = diagnosed("base", "a", 1.4, states({(1, 2): 47.3}))
    found = step(base, diagnosed("cured", "b", 0.4, states({(1, 2): 3.0})))
    assert found.commands[0].startswith(
        "lengthgen train --model folder/b --intervention state_passing --max-steps 400"
    )
    found = step(base, diagnosed("cured", "b", 0.0, states({})))
    assert found.commands == (f"lengthgen evaluate folder/b --length 4096{DATA}",)
    found = step(diagnosed("other", "b", 0.05, width=0.04))
    assert found.commands == (f"lengthgen diagnose folder/b --sequences 128{DATA} --length 512",)


def test_harm_of_attention_is_not_said_to_be_cured_by_states() -> None:
    found = hybrid()
    assert found.attention is not None
    assert "state_passing" in step(diagnosed("base", "a", 1.4, found)).commands[0]
    apart = replace(found.attention, recurrent=found.attention.attention, attention=found.attention.recurrent)
    model = diagnosed("base", "a", 1.4, replace(found, attention=apart))
    assert step(model).commands == (f"lengthgen diagnose folder/a --attention-window 16{DATA} --length 512",)
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
