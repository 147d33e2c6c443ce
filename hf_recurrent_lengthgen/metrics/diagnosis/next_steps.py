"""What to do after a diagnosis, as commands that follow from its results."""

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from hf_recurrent_lengthgen.data import rest_of
from hf_recurrent_lengthgen.metrics.context_harm.summary import findings, too_short
from hf_recurrent_lengthgen.metrics.diagnosis.result import DiagnosedModel, Diagnosis
from hf_recurrent_lengthgen.metrics.states.result import StateDiagnosis

SHARED = ("data", "split", "text_column", "tokenizer", "training_length", "attention_window", "length", "sequences")
"""Options of the diagnosis that the next commands require, too."""
MORE = 4
"""Factor on texts or lengths of the next measurement, and the steps of a further training."""
STEPS = 100
"""The default of `lengthgen train`."""


class Step(NamedTuple):
    """What to do and why in a sentence, and commands."""

    why: str
    commands: tuple[str, ...]


class Recipe(NamedTuple):
    """The learning rate (its peak) of a training, the sequences of a step, whether it had no method, its split, if it
    read the data of the diagnosis, and the checkpoint below a learned state, which is trained in its place."""

    learning_rate: float
    sequences: int
    plain: bool = True
    split: str | None = None
    base: str | None = None


class Measured(NamedTuple):
    """A diagnosed model, its folder or Hub name, the `SHARED` options of the diagnosis, and its last training."""

    model: DiagnosedModel
    path: str
    options: dict[str, str]
    recipe: Recipe | None

    @property
    def label(self) -> str:
        return self.model.evaluation.model

    def command(self, name: str, *words: str, without: Sequence[str] = ()) -> str:
        """A command on this model, with the options of its diagnosis except `without`."""
        options = {f"--{key.replace('_', '-')}": value for key, value in self.options.items() if key not in without}
        shared = [word for option, value in options.items() if option not in words for word in (option, value)]
        return shlex.join(["lengthgen", name, *(["--model"] * (name == "train")), self.path, *words, *shared])


def next_steps(
    diagnosis: Diagnosis,
    paths: Sequence[str],
    options: Mapping[str, object],
    recipes: Sequence[Recipe | None] | None = None,
) -> list[Step]:
    """A step for the first model that fails, unless one after state passing generalizes, else for an inconclusive one.

    `paths` are the folders or Hub names of the models, `options` the parsed options of `lengthgen diagnose`, `recipes`
    the last trainings of the models, as far as they are known.
    """
    shared = {name: str(options[name]) for name in SHARED if options.get(name) is not None}
    judged = []
    found, known = findings(diagnosis.comparison), recipes or [None] * len(paths)
    for model, path, finding, recipe in zip(diagnosis.models, paths, found, known, strict=True):
        window = str(model.evaluation.attention_window or "none")  # one of several
        options_of_one = shared | ({"attention_window": window} if "attention_window" in shared else {})
        judged.append((Measured(model, path, options_of_one, recipe), finding.status))
    general = [one for one, status in judged if status == "generalizes"]
    windowed = {one.path for one in general if one.model.evaluation.attention_window}  # with another window
    failing = [one for one, status in judged if status == "fails" and one.model.role != "control"]
    failing = [one for one in failing if one.path not in windowed]
    post_trained = [one for one in failing if one.model.role == "intervention"]
    if failing and not any(one.model.role == "intervention" for one in general):
        return [_after_failure((post_trained or failing)[-1 if post_trained else 0])]
    if inconclusive := [one for one, status in judged if status == "inconclusive"]:
        evaluation = inconclusive[0].model.evaluation
        more = "more", "--sequences", str(MORE * max(evaluation.sequences, 8))
        if too_short(evaluation):
            more = "longer", "--length", str(MORE * evaluation.training_length)
        why = f"{inconclusive[0].label} is inconclusive: measure {more[0]} sequences"
        return [Step(why, (inconclusive[0].command("diagnose", *more[1:]),))]
    if not general:
        return []
    why = f"{general[-1].label} generalizes to the measured length: measure longer sequences"
    longer = str(MORE * general[-1].model.evaluation.evaluated_length)
    return [Step(why, (general[-1].command("evaluate", "--length", longer),))]


def _after_failure(one: Measured) -> Step:
    states = one.model.part(StateDiagnosis)
    apart = None if states is None else states.attention
    window = None if apart is None else apart.best_window(one.model.evaluation.training_length)
    if window is not None and one.model.evaluation.attention_window is None:
        why = (
            f"most of the excess loss of {one.label} is from attention, which no initial state removes: limit "
            f"attention to a window of the last {window:,} tokens"
        )
        return Step(why, (one.command("diagnose", "--attention-window", str(window)),))
    longer: tuple[str, ...] = ()
    share = 0.1
    why = (
        f"{one.label} was not trained from states like those of long texts: train it with state passing, best with a "
        "tenth of the learning rate of its pre-training (--learning-rate)"
    )
    part = (one.recipe and one.recipe.split) or rest_of(one.options.get("split", ""))
    if one.recipe is not None and one.recipe.base is not None:
        why = f"{one.label} has a learned state, which does not change the weights: train its base with state passing"
        one = one._replace(path=one.recipe.base, recipe=None)
    elif one.model.role == "intervention" or (one.recipe is not None and not one.recipe.plain):
        longer = ("--max-steps", str(MORE * STEPS))
        drifts = states is not None and states.drifting
        cause = f"the states of {one.label} still leave the training distribution" if drifts else f"{one.label} fails"
        why = f"{cause}: train longer with state passing, at the learning rate of its last training (--learning-rate)"
        share = 1.0
    if one.recipe is not None:
        rate, sequences = f"{share * one.recipe.learning_rate:.3g}", str(one.recipe.sequences)
        longer += ("--learning-rate", rate, "--per-device-train-batch-size", sequences)
    if part not in (None, "train"):
        longer += ("--split", part)
    output = _output(one.path)
    steps = ("--intervention", "state_passing", *longer, "--output", output)
    training = one.command("train", *steps, without=["split", "length", "sequences"])
    return Step(why, (training, one.command("diagnose", output, "--roles", "base,intervention")))


def _output(path: str) -> str:
    """ "NAME-state-passing" for a model, then "NAME-state-passing-2" and so on."""
    name = Path(path).name or Path(path).resolve().name
    before = re.fullmatch(r"(.+-state-passing)(?:-(\d+))?", name)
    return f"{before[1]}-{int(before[2] or 1) + 1}" if before else f"{name}-state-passing"
