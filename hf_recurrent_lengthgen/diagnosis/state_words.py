"""What is said of drifting states: which layers left training and where, which heads drift, and what they hold."""

import math
from collections.abc import Sequence

from hf_recurrent_lengthgen.diagnosis.attention import listed
from hf_recurrent_lengthgen.evaluation.state_results import HeadStates, LayerStates, StateDiagnosis, head_name

SETTLED = 0.1
"""Octaves of spread per doubling of the position above which a head's spread is said to grow."""
LISTED_LAYERS = 6
"""Maximum number of layers whose positions are listed in a sentence."""
LISTED_HEADS = 12
"""Maximum number of heads listed in a sentence."""
Pair = tuple[LayerStates, HeadStates]


def left_text(states: StateDiagnosis) -> str:
    """Which layers' states left training, and where: "layers 12 and 17 left training at 96,000 tokens"; maybe ""."""
    left: dict[int, list[int]] = {}
    for layer in states.layers:
        if layer.leaves_at is not None:
            left.setdefault(layer.leaves_at, []).append(layer.layer)
    places = sorted(left.items())
    count = sum(len(layers) for _, layers in places)
    if not places:
        return ""
    first, layers = places[0]
    if count > LISTED_LAYERS:
        where = f"of {count:,} of {len(states.layers):,} layers left training, first {_layers(layers)} at {first:,}"
    else:
        later = "".join(f", of {_layers(layers)} at {place:,}" for place, layers in places[1:])
        where = f"of {_layers(layers)} left training at {first:,}{later}"
    return f"the states {where} tokens"


def drift_text(states: StateDiagnosis) -> str:
    ranking, drifting = states.ranking, states.drifting
    if not ranking:
        return "It has no heads whose states could drift."
    layer, head = ranking[0]
    distance = f"{distance_text(head)} standard deviations"
    if not states.names_heads:
        return (
            f"{states.sequences} texts are too few to say which heads drift. The furthest, {head_name(layer, head)}, "
            f"is {distance} from the states of training over the last octave of positions."
        )
    if not drifting:
        return (
            f"None of {counted(ranking)} drifts. The furthest, {head_name(layer, head)}, is {distance} from the "
            "states of training over the last octave of positions."
        )
    leaves = "" if head.leaves_at is None else f" It leaves them at {head.leaves_at:,} tokens."
    growth = 2**head.growth - 1
    still = f"grows by {growth:.0%} with each doubling of the position" if head.growth > SETTLED else "no longer grows"
    those = f"{len(drifting):,} of {counted(ranking)} {with_number(drifting, 'drift')}"
    return (
        f"{those}: {named_heads(drifting)}. The furthest, {head_name(layer, head)}, is {distance} from the states of "
        f"training over the last octave of positions.{leaves} Its spread {still}."
    )


def distance_text(head: HeadStates) -> str:
    """The distance of a head over the last octave, in standard deviations: "47.3"."""
    return f"{head.late_distance:.3g}" if head.late_distance < 1000 else f"{head.late_distance:,.0f}"


def retention_text(states: StateDiagnosis) -> str:
    known = [(pair, pair[1].inputs.log_retention) for pair in states.ranking if pair[1].inputs is not None]
    inside = [place for place, position in enumerate(states.positions) if position <= states.training_length]
    if not known or not inside:
        return ""
    pair, most = max(known, key=lambda found: found[1][inside[-1]])
    at, end = states.positions[inside[-1]], states.positions[-1]
    whom = "no head holds" if len(known) == len(states.ranking) else f"none of the {len(known)} measured heads holds"
    return (
        f"At {at:,} tokens, {head_name(*pair)} still holds {math.exp(most[inside[-1]]):.0%} of what the first token "
        f"wrote ({whom} more), and {math.exp(most[-1]):.0%} at {end:,} tokens."
    )


def counted(pairs: tuple[Pair, ...]) -> str:
    units = sorted({layer.unit for layer, _ in pairs})
    return f"{len(pairs):,} " + " and ".join(f"{unit}s" if len(pairs) > 1 else unit for unit in units)


def with_number(pairs: tuple[Pair, ...], verb: str) -> str:
    return f"{verb}s" if len(pairs) == 1 else verb


def named_heads(pairs: tuple[Pair, ...]) -> str:
    """The furthest heads by layer: "layer 0, heads 2, 3; layer 1, head 5"."""
    shown, more = pairs[:LISTED_HEADS], len(pairs) - LISTED_HEADS
    named = []
    for index in sorted({layer.layer for layer, _ in shown}):
        own = [(layer.unit, head.head) for layer, head in shown if layer.layer == index]
        unit = own[0][0] + "s" * (len(own) > 1)
        named.append(f"layer {index}, {unit} {', '.join(str(head) for head in sorted(head for _, head in own))}")
    return "; ".join(named) + (f"; and {more:,} less far" if more > 0 else "")


def _layers(layers: Sequence[int]) -> str:
    return f"layer{'s' * (len(layers) > 1)} {listed(layers)}"
