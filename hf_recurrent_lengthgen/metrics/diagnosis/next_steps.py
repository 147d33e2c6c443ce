"""What to do after a diagnosis, as commands that follow from what it found."""

import shlex
from itertools import pairwise
from typing import NamedTuple

from hf_recurrent_lengthgen.metrics.context_harm.words import findings
from hf_recurrent_lengthgen.metrics.diagnosis.result import DiagnosedModel, Diagnosis
from hf_recurrent_lengthgen.metrics.states.result import StateDiagnosis

SAME_DATA = ("--data", "--text-column", "--tokenizer", "--training-length", "--attention-window")
"""Options of the diagnosis that the next command needs, too."""
MORE = 4
"""Factor on texts or lengths of the next measurement, and the steps of a further training."""
STEPS = 100
"""The default of `lengthgen train`."""


class Step(NamedTuple):
    """What to do and why in a sentence, and commands."""

    why: str
    commands: tuple[str, ...]


def next_steps(diagnosis: Diagnosis) -> list[Step]:
    """A step for the first model that fails, unless one that cures it is there, else for what is not certain yet."""
    judged = list(zip(diagnosis.models, (finding.status for finding in findings(diagnosis.comparison)), strict=True))
    holding = [model for model, status in judged if status == "holds"]
    held = {_path(model) for model in holding if model.evaluation.attention_window}  # another window holds
    broken = [model for model, status in judged if status == "breaks" and model.role != "control"]
    broken = [model for model in broken if _path(model) not in held]
    cured = [model for model in broken if model.role == "cured"]
    if broken and not any(model.role == "cured" for model in holding):
        return [_after_failure((cured or broken)[-1 if cured else 0])]
    unclear = [model for model, status in judged if status == "unclear"]
    if unclear:
        evaluation = unclear[0].evaluation
        count = str(MORE * max(evaluation.sequences, 8))
        why = f"{evaluation.model} cannot be told from one that holds: measure more texts"
        return [Step(why, (_command("diagnose", unclear[0], "--sequences", count, length=True),))]
    if not holding:
        return []
    evaluation = holding[-1].evaluation
    why = f"{evaluation.model} holds as far as was measured: see how far it goes on"
    longer = str(MORE * evaluation.evaluated_length)
    return [Step(why, (_command("evaluate", holding[-1], "--length", longer),))]


def _after_failure(model: DiagnosedModel) -> Step:
    name, output = model.evaluation.model, f"{_path(model).rstrip('/').rpartition('/')[2]}-cured"
    states = model.found(StateDiagnosis)
    apart = None if states is None else states.attention
    window = None if apart is None else apart.best_window(model.evaluation.training_length)
    if window is not None and model.evaluation.attention_window is None:
        why = (
            f"most of the harm in {name} is attention's, which no initial state takes away: let a token see its last "
            f"{window:,} keys alone"
        )
        return Step(why, (_command("diagnose", model, "--attention-window", str(window), length=True),))
    if model.role == "cured":
        why = f"the states of {name} still leave training: train it longer from states of its own"
        steps = ("--intervention", "state_passing", "--max-steps", str(MORE * STEPS), "--output", output)
        training = _command("train", model, *steps)
    else:
        why = (
            f"{name} has never started from a state like those it reaches: train it from states of its own (state "
            "passing), best with a tenth of the learning rate of its pre-training (--learning-rate)"
        )
        training = _command("train", model, "--intervention", "state_passing", "--output", output)
    roles = ("--roles", "base,cured")
    return Step(why, (training, _command("diagnose", model, output, *roles, length=True)))


def _command(name: str, model: DiagnosedModel, *words: str, length: bool = False) -> str:
    given = _given(model)
    kept = [*SAME_DATA, *(("--length",) if length else ())]
    same = [word for option in kept if option in given and option not in words for word in (option, given[option])]
    first = ["--model", _path(model)] if name == "train" else [_path(model)]
    return shlex.join(["lengthgen", name, *first, *words, *same])


def _words(model: DiagnosedModel) -> list[str]:
    try:
        return shlex.split(model.evaluation.command)
    except ValueError:
        return []


def _given(model: DiagnosedModel) -> dict[str, str]:
    """The options of the command that measured a model, by name."""
    words = [part for word in _words(model) for part in (word.split("=", 1) if word.startswith("--") else [word])]
    given = {word: value for word, value in pairwise(words) if word.startswith("--")}
    if "--attention-window" in given:  # one of several
        given["--attention-window"] = str(model.evaluation.attention_window or "none")
    return given


def _path(model: DiagnosedModel) -> str:
    """The model as it was given, of which a result has the last part."""
    name = model.evaluation.model.partition(" (")[0]
    return next((word for word in _words(model)[2:] if f"/{word.rstrip('/')}".endswith(f"/{name}")), name)
