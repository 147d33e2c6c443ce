"""The methods that a lineage may name: what they are in words, their tags, and the papers they come from."""

import re
from collections.abc import Iterable
from typing import NamedTuple

from hf_recurrent_lengthgen.papers import ALIGNMENT, MIMETIC, STATEX, STUFFED_MAMBA, UNEXPLORED_STATES, Paper
from hf_recurrent_lengthgen.records import Lineage, Step


class Method(NamedTuple):
    """A method: its name in text, a sentence of what it does, a tag for the Hub, its paper."""

    title: str
    sentence: str
    tag: str | None
    paper: Paper | None


PLAIN = Method("plain training", "", None, None)
TRAININGS = {
    "none": PLAIN,
    "state_passing": Method(
        "state passing",
        "In state passing, training texts start from the final states of other texts instead of from nothing, so that "
        "the model also learns from the states that long texts lead to",
        "state-passing",
        UNEXPLORED_STATES,
    ),
    "random_noise": Method(
        "random noise states", "Training texts start from random states", "noise-states", UNEXPLORED_STATES
    ),
    "fitted_noise": Method(
        "fitted noise states",
        "Training texts start from random states with the mean and variance of final states",
        "noise-states",
        UNEXPLORED_STATES,
    ),
    "tbtt": Method(
        "truncated backpropagation through time",
        "Long texts are trained on in chunks, and each chunk starts from the final state of the one before",
        "tbtt",
        UNEXPLORED_STATES,
    ),
    "mixed": Method(
        "mixed initial states",
        "Each training text starts from a state drawn from several sources (zero, noise, other texts, the same text)",
        None,
        UNEXPLORED_STATES,
    ),
    "learned": Method("a learned initial state", "All texts start from one state that is trained, too", None, None),
    "statex": Method(
        "state expansion and training", "Some layers got larger states, and the model was trained on", "statex", STATEX
    ),
}
OUTPUT_ALIGNMENT = Method(
    "output alignment",
    "The output alignment loss asks for like predictions after long and short contexts",
    "output-alignment",
    ALIGNMENT,
)
EXPANSION = Method("state expansion", "Some layers got larger states", "statex", STATEX)
FORGETTING = Method(
    "forgetting at inference", "The states are made to forget more than they learned to", None, STUFFED_MAMBA
)
MIMETIC_START = Method(
    "mimetic initialization", "Its first weights were close to linear attention", "mimetic-initialization", MIMETIC
)
CONVERSION = Method("conversion", "", None, None)


def methods_of(step: Step) -> list[Method]:
    """What a step used, the main one first."""
    if step.kind == "expand":
        return [EXPANSION]
    if step.kind == "forget":
        return [FORGETTING]
    if step.kind in ("convert", "merge"):
        return [CONVERSION]
    if step.training is None:
        return [PLAIN]
    name = re.split(r" with |output alignment", step.training.method)[0]
    found = [TRAININGS.get(name, Method(name, "", None, None))] if name else [PLAIN]
    if "output alignment" in step.training.method:
        found.append(OUTPUT_ALIGNMENT)
    if "mimetic" in step.training.settings.get("initial weights", ""):
        found.append(MIMETIC_START)
    return found


def methods_in(lineage: Lineage | None) -> list[Method]:
    """All that a lineage used, each once, in its order."""
    steps: Iterable[Step] = () if lineage is None else lineage.steps
    return list(dict.fromkeys(method for step in steps for method in methods_of(step)))
