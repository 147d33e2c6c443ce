"""What is said of states, and the states as a part of a diagnosis: which heads drift, what they hold, and their harm.

A share of the harm counts as shown if the lower bound of its interval is above zero.
"""

import math
from collections.abc import Sequence
from html import escape

from hf_recurrent_lengthgen.evaluation.results import Estimate
from hf_recurrent_lengthgen.evaluation.words import cell, interval_text
from hf_recurrent_lengthgen.metrics.attention.words import (
    ATTENTION_DEFINITION,
    ATTENTION_PICTURE,
    ATTENTION_ROWS,
    attention_facts,
    attention_reason,
    attention_text,
    listed,
)
from hf_recurrent_lengthgen.metrics.context_harm.words import HALF, Status
from hf_recurrent_lengthgen.metrics.part import Fact, Part, PartRow, Picture
from hf_recurrent_lengthgen.metrics.states.figure import (
    conv_std_figure,
    distance_map_figure,
    inputs_figure,
    outlier_figure,
    patching_figure,
    retention_figure,
    state_std_figure,
    whole_std_figure,
)
from hf_recurrent_lengthgen.metrics.states.measure import measure_states
from hf_recurrent_lengthgen.metrics.states.result import (
    HeadPatching,
    HeadStates,
    LayerStates,
    PatchedHeads,
    StateDiagnosis,
    head_name,
)

HARM_WORTH_KNOWING = 0.05
"""Nats per token; harm is not ruled out if its interval reaches above this."""
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
    pair, most = max(known, key=lambda entry: entry[1][inside[-1]])
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


def patching_text(states: StateDiagnosis, unit: str) -> str:
    """The share of the harm that drifting heads do, or that exchanging heads shows nothing."""
    patching = states.patching
    if patching is None:
        return ""
    hybrid = any(group.attention for group in patching.groups)
    subject, those = ("the states, keys and values", "those") if hybrid else ("the state", "the state")
    kept = f"{those} after only the last {patching.kept:,} tokens"
    if not patching.harmful:
        wide = patching.harm.high is None or patching.harm.high > HARM_WORTH_KNOWING
        return (
            f"After {patching.position:,} tokens, {subject} {'are' if hybrid else 'is'} not shown to be worse than "
            f"{kept}: {interval_text(patching.harm, sign=True)} nats per {unit}. "
            + ("More texts would tell." if wide else "There is no harm to attribute to heads.")
        )
    together, others = drifting_group(states), _other_group(states)
    sentences = [
        f"After {patching.position:,} tokens, {subject} {'do' if hybrid else 'does'} {interval_text(patching.harm)} "
        f"nats per {unit} of harm, compared with {kept}."
    ]
    if together is not None:
        heads = "the drifting head" if len(together.heads) == 1 else f"the {len(together.heads):,} drifting heads"
        sentences.append(f"With states of the short context in {heads}, {_goes_away(patching, together.restored)}.")
        if others is not None:
            sentences.append(f"With such states in all other heads, {_goes_away(patching, others.restored)}.")
    for group in patching.groups:
        if group.attention:
            sentences.append(f"With keys and values of the short context, {_goes_away(patching, group.restored)}.")
    layers = _layer_groups(states)
    if len(layers) > 1:
        index, most = max(layers.items(), key=lambda entry: entry[1].broken.mean)
        if _shown(most.broken):
            sentences.append(
                f"Of {len(layers)} layers whose drifting heads were exchanged together, layer {index} does most harm: "
                f"its states alone bring {_share(patching, most.broken)} of the harm into a short context."
            )
    alone = list({group.heads: group for group in patching.groups if len(group.heads) == 1}.values())
    worst = max(alone, key=lambda group: group.broken.mean, default=None)
    if worst is not None and _shown(worst.broken):
        names = {(layer.layer, head.head): head_name(layer, head) for layer, head in states.ranking}
        sentences.append(
            f"Of {len(alone)} heads exchanged one by one, {names[worst.heads[0]]} does most harm: its state alone "
            f"brings {_share(patching, worst.broken)} of the harm into a short context."
        )
    return " ".join(sentences)


def _facts(states: StateDiagnosis) -> Sequence[Fact]:
    if not states.ranking:
        return ()
    drifting, total = states.drifting, len(states.ranking)
    furthest = f"{len(drifting):,} of {total:,}, {head_name(*states.ranking[0])} the furthest"
    none = f"none of {total:,}" if states.names_heads else f"unknown from {states.sequences} texts"
    facts = [Fact("Heads that drift", furthest if drifting else none)]
    if states.patching is not None and states.patching.harmful and (group := drifting_group(states)) is not None:
        facts.append(Fact("Their share of the harm", harm_share_text(states.patching, group.restored)))
    return [*facts, *attention_facts(states)]


def harm_share_text(patching: HeadPatching, estimate: Estimate) -> str:
    """ "97%", or "none shown"."""
    return _share(patching, estimate) if _shown(estimate) else "none shown"


def drifting_group(states: StateDiagnosis) -> PatchedHeads | None:
    return _group_of(states, {(layer.layer, head.head) for layer, head in states.drifting})


def _other_group(states: StateDiagnosis) -> PatchedHeads | None:
    return _group_of(states, {(layer.layer, head.head) for layer, head in states.ranking if not head.drifts})


def _layer_groups(states: StateDiagnosis) -> dict[int, PatchedHeads]:
    """By layer, the exchange of all its heads that drift, as far as there was one."""
    drifting = {
        layer.layer: {(layer.layer, head.head) for head in layer.heads if head.drifts} for layer in states.layers
    }
    groups = {layer: _group_of(states, heads) for layer, heads in drifting.items()}
    return {index: group for index, group in groups.items() if group is not None}


def _group_of(states: StateDiagnosis, heads: set[tuple[int, int]]) -> PatchedHeads | None:
    groups = () if states.patching is None or not heads else states.patching.groups
    return next((group for group in groups if set(group.heads) == heads), None)


def _reason(states: StateDiagnosis, status: Status) -> str:
    """The explanation of a verdict by the states, in clauses."""
    if not states.ranking:
        return ""
    return "; ".join(clause for clause in (_drift_reason(states, status), attention_reason(states)) if clause)


def _drift_reason(states: StateDiagnosis, status: Status) -> str:
    drifting, patching, group = states.drifting, states.patching, drifting_group(states)
    if not states.names_heads:
        return f"{states.sequences} texts are too few to say which heads drift"
    if not drifting:
        return f"none of its {counted(states.ranking)} drifts"
    clause = f"{len(drifting):,} of its {counted(states.ranking)} {with_number(drifting, 'drift')}"
    named = f"{head_name(*drifting[0])}{' the furthest' * (len(drifting) > 1)}"
    left = left_text(states)
    clause = f"{left} ({clause}, {named})" if left else f"{clause}{', ' if len(drifting) > 1 else ': '}{named}"
    if status == "holds":
        return f"{clause}, without harm"
    if patching is None or group is None or not patching.harmful:
        return clause
    share, those = patching.share(group.restored), "this head" if len(drifting) == 1 else "these heads"
    exchange = f"replacing the states of {those} by those of a short context"
    if share is None or not _shown(group.restored):
        return f"{clause}; but {exchange} is not shown to remove any of the harm"
    return (
        f"{clause}; {exchange} removes {share:.0%} of the harm"
        if share >= HALF
        else (f"{clause}; but {exchange} removes only {share:.0%} of the harm")
    )


def _goes_away(patching: HeadPatching, restored: Estimate) -> str:
    if not _shown(restored):
        return "none of the harm is shown to go away"
    return f"{_share(patching, restored)} of the harm goes away"


def _share(patching: HeadPatching, estimate: Estimate) -> str:
    share = patching.share(estimate)
    assert share is not None  # callers check that there is harm
    return f"{share:.0%}"


def _shown(estimate: Estimate) -> bool:
    return estimate.low is not None and estimate.low > 0


def _drift_cell(states: StateDiagnosis) -> str:
    if not states.ranking:
        return ""
    layer, head = states.ranking[0]
    furthest = f"{head_name(layer, head)}: {distance_text(head)}"
    return f"<b>{len(states.drifting):,} of {len(states.ranking):,}</b><small>{escape(furthest)}</small>"


def _harm_cell(states: StateDiagnosis) -> str:
    return "" if states.patching is None else cell(states.patching.harm, sign=True)


def _removed_cell(states: StateDiagnosis) -> str:
    if states.patching is None:
        return ""
    group = drifting_group(states)
    if group is None:
        return "<small>none drifts</small>"
    if not states.patching.harmful:
        return "<small>no harm shown</small>"
    return f"{cell(group.restored, sign=True)}<small>{harm_share_text(states.patching, group.restored)}</small>"


def _definitions(results: Sequence[StateDiagnosis]) -> list[str]:
    sentences = [
        "The distance of a head at a position is the 2-Wasserstein distance between the elements of its states there "
        "and those in the second half of the training length, in standard deviations of the latter. A head drifts if "
        "its mean distance over the last octave of positions is above "
        f"{results[0].smallest_drift:g} and above the distances of training positions from each other, and if the "
        "interval over texts shows that it rises."
    ]
    if patching := next((states.patching for states in results if states.patching is not None), None):
        sentences.append(
            f"Heads are exchanged between the state after {patching.position:,} tokens and the state after only the "
            f"last {patching.kept:,} of them. The next {patching.width:,} tokens are scored. Harm is the loss from "
            "the former state minus the loss from the latter. If several heads fail at once, replacing one may help "
            "little, so shares need not add up to 100%."
        )
    if any(states.attention is not None for states in results):
        sentences.append(ATTENTION_DEFINITION)
    return sentences


def _has_heads(states: StateDiagnosis) -> bool:
    return bool(states.ranking)


STATES = Part(
    name="states",
    title="States",
    summary="which heads' states leave the range of training, and their harm, in hybrids apart from attention's",
    result=StateDiagnosis,
    compute=measure_states,
    section="Why: the states",
    texts=lambda result, unit: [
        words
        for words in (
            *(drift_text(result), retention_text(result), patching_text(result, unit)),
            attention_text(result, unit),
        )
        if words
    ],
    facts=_facts,
    rows=(
        PartRow("Heads that drift", "of all; the furthest, in standard deviations of training", _drift_cell),
        PartRow("Harm of a long context's state", "compared with a short one's, nats per {unit}", _harm_cell),
        PartRow("Removed", "with states of a short context in the heads that drift", _removed_cell),
        *ATTENTION_ROWS,
    ),
    pictures={
        "state_distance": Picture(
            lambda result, *_: distance_map_figure(result),
            "Each row is a head, the furthest at the top. Orange: more than one standard deviation from training.",
            _has_heads,
        ),
        "state_patching": Picture(
            lambda result, _, unit: patching_figure(result, unit),
            "States exchanged between a long and a short context. Blue up to the dashed line: all of the harm goes "
            "away. Thin lines: intervals.",
            lambda result: result.patching is not None,
        ),
        "attention_harm": ATTENTION_PICTURE,
        "state_std": Picture(
            lambda result, *_: state_std_figure(result), "A state that has settled has a flat line.", _has_heads
        ),
        "whole_std": Picture(
            lambda result, *_: whole_std_figure(result),
            "All elements of the state together. The number is the standard deviation at the last position.",
            further=True,
        ),
        "state_outliers": Picture(
            lambda result, *_: outlier_figure(result),
            "A rising line: ever fewer elements make the spread of the head. Normally distributed elements would stay "
            "below 5.",
            lambda result: any(head.extremes for _, head in result.ranking),
            further=True,
        ),
        "state_inputs": Picture(
            lambda result, *_: inputs_figure(result),
            "Flat lines: the head gets what it got in training, so a state that grows does so because it forgets too "
            "little.",
            lambda result: any(head.inputs for _, head in result.ranking),
            further=True,
        ),
        "state_retention": Picture(
            lambda result, *_: retention_figure(result),
            "A head that still holds the first token accumulates what it reads instead of replacing it.",
            lambda result: any(head.inputs for _, head in result.ranking),
        ),
        "conv_std": Picture(
            lambda result, *_: conv_std_figure(result),
            "Convolution states hold only the last tokens: they show whether the inputs of a layer change.",
            lambda result: any(layer.conv for layer in result.layers),
            further=True,
        ),
    },
    definitions=_definitions,
    reason=_reason,
)
