"""Long attention and long states of a hybrid apart, as words, numbers and a picture of the part about states."""

from collections.abc import Sequence

from hf_recurrent_lengthgen.evaluation.results import Estimate
from hf_recurrent_lengthgen.evaluation.words import cell, interval_text, number_text
from hf_recurrent_lengthgen.metrics.attention.figure import attention_harm_figure
from hf_recurrent_lengthgen.metrics.attention.result import AttentionHarm
from hf_recurrent_lengthgen.metrics.context_harm.words import HALF
from hf_recurrent_lengthgen.metrics.part import Fact, PartRow, Picture
from hf_recurrent_lengthgen.metrics.states.result import StateDiagnosis

UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def attention_text(states: StateDiagnosis, unit: str) -> str:
    """What long states and long attention do, and how large the cache of keys was."""
    harm = states.attention
    if harm is None:
        return ""
    sentences = [
        f"After {harm.borders[-1]:,} tokens, the long states alone do {_signed(harm.recurrent[-1])} nats per {unit} "
        f"of harm, the long attention alone {_signed(harm.attention[-1])}, and both together "
        f"{_signed(harm.both[-1])}."
    ]
    onsets = {
        name: place
        for name, values in (("long states", harm.recurrent), ("long attention", harm.attention))
        if (place := first_harm(harm, values)) is not None
    }
    if onsets:
        ends = " and ".join(f"{name} from {place:,} tokens on" for name, place in onsets.items())
        sentences.append(f"Harm is shown of {ends}.")
    size, name = _size(harm.cache_bytes)
    layers = "layer" if len(harm.layers) == 1 else "layers"
    sentences.append(
        f"The keys and values of {layers} {listed(harm.layers)} then took {size:.3g} {name} per text; what else is "
        "carried has the same size at every length."
    )
    return " ".join(sentences)


def attention_reason(states: StateDiagnosis) -> str:
    """A clause of the verdict on a hybrid."""
    harm = states.attention
    if harm is None:
        return ""
    recurrent, attention = (number_text(values[-1].mean, "+.2f") for values in (harm.recurrent, harm.attention))
    clause = f"long states alone do {recurrent} nats of harm, long attention alone {attention}"
    patching = states.patching
    keys = next((group for group in patching.groups if group.attention), None) if patching is not None else None
    share = None if keys is None or patching is None else patching.share(keys.restored)
    if keys is None or share is None or share < HALF or keys.restored.low is None or keys.restored.low <= 0:
        return clause
    return f"{clause}; replacing its keys and values by those of a short context removes {share:.0%} of the harm"


def attention_facts(states: StateDiagnosis) -> Sequence[Fact]:
    harm = states.attention
    if harm is None:
        return ()
    return [
        Fact("Harm of long states alone", f"{number_text(harm.recurrent[-1].mean, '+.3f')} nats"),
        Fact("Harm of long attention alone", f"{number_text(harm.attention[-1].mean, '+.3f')} nats"),
    ]


def first_harm(harm: AttentionHarm, values: Sequence[Estimate]) -> int | None:
    """The first border from which on the harm is shown, up to the last."""
    first = None
    for border, value in zip(reversed(harm.borders), reversed(values), strict=True):
        if value.low is None or value.low <= 0:
            break
        first = border
    return first


def listed(numbers: Sequence[int]) -> str:
    """ "3", "3 and 5", "3, 5 and 7"."""
    *most, last = map(str, numbers)
    return f"{', '.join(most)} and {last}" if most else last


def _signed(estimate: Estimate) -> str:
    return interval_text(estimate, sign=True)


def _size(count: int) -> tuple[float, str]:
    name = max((name for name in UNITS if count >= UNITS[name]), key=UNITS.__getitem__, default="KiB")
    return count / UNITS[name], name


def _recurrent_cell(states: StateDiagnosis) -> str:
    return "" if states.attention is None else cell(states.attention.recurrent[-1], sign=True)


def _attention_cell(states: StateDiagnosis) -> str:
    return "" if states.attention is None else cell(states.attention.attention[-1], sign=True)


ATTENTION_ROWS = (
    PartRow(
        "Harm of long states alone", "attention reads the last tokens only, nats per {unit}", _recurrent_cell, True
    ),
    PartRow("Harm of long attention alone", "states start from zero, nats per {unit}", _attention_cell, True),
)
ATTENTION_PICTURE: Picture[StateDiagnosis] = Picture(
    lambda states, _, unit: attention_harm_figure(states, unit),
    "Harm of what the recurrent layers and what the attention layers keep of a long text, each alone and together. At "
    "zero, the long context does no harm.",
    lambda states: states.attention is not None,
    bands=True,
)
ATTENTION_DEFINITION = (
    "In a hybrid, a text is read to some position, and the next tokens, as many as the training length, are read with "
    "only the long states, only the keys and values of the long text, both, or neither; the second half of them is "
    "scored. Harm is the loss minus that with neither. The two need not add up, because the keys were computed from "
    "the states, too."
)
