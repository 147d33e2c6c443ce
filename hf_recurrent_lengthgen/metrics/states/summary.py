"""The states as a part of a diagnosis, and sentences about them: which heads drift, and the excess loss from them.

A share of the excess loss counts as shown if the lower bound of its interval is above zero; that of the worst of
several heads, if it is with one confidence for all of them.
"""

from collections.abc import Sequence
from statistics import fmean

from hf_recurrent_lengthgen.evaluation.formatting import interval_text, number_text
from hf_recurrent_lengthgen.evaluation.results import Estimate
from hf_recurrent_lengthgen.evaluation.statistics import shown_above
from hf_recurrent_lengthgen.metrics.context_harm.summary import Status
from hf_recurrent_lengthgen.metrics.part import Part, Picture
from hf_recurrent_lengthgen.metrics.states import figure
from hf_recurrent_lengthgen.metrics.states.distance import SMALLEST_DRIFT
from hf_recurrent_lengthgen.metrics.states.measure import measure_states
from hf_recurrent_lengthgen.metrics.states.result import (
    AS_GOOD,
    HeadPatching,
    HeadStates,
    PatchedHeads,
    StateDiagnosis,
)

LOW_RANK = 0.5  # of the largest possible: with less, a head uses little of its state
LISTED_LAYERS = 6
"""Maximum number of layers that are listed in a sentence."""


def left_text(states: StateDiagnosis) -> str:
    """The layers whose heads drift first: "the states of layer 12 left the training distribution at 96,000 tokens"."""
    left: dict[int, int] = {}
    for head in states.heads:
        if head.leaves_at is not None:
            left[head.layer] = min(head.leaves_at, left.get(head.layer, head.leaves_at))
    if not left:
        return ""
    place = min(left.values())
    *most, last = (str(layer) for layer, leaves_at in left.items() if leaves_at == place)
    layers = f"layers {', '.join(most)} and {last}" if most else f"layer {last}"
    if len(most) >= LISTED_LAYERS:
        layers = f"{len(most) + 1} layers"
    later = len(left) - len(most) - 1
    more = f", of {later} more later" if later else ""
    return f"the states of {layers} left the training distribution at {place:,} tokens{more}"


def drift_text(states: StateDiagnosis) -> str:
    furthest, drifting, heads = states.ranking[0], states.drifting, _counted(states)
    if not states.names_heads:
        which = f"{states.sequences} sequences are too few to say which heads drift"
    elif drifting:
        which = f"{len(drifting):,} of {heads} drift{'s' * (len(drifting) == 1)}"
    else:
        which = f"None of {heads} drifts"
    leaves = "" if furthest.leaves_at is None else f" It leaves them at {furthest.leaves_at:,} tokens."
    distance = f"{furthest.late_distance:{'.3g' if furthest.late_distance < 1000 else ',.0f'}}"
    return (
        f"{which}. The furthest, {furthest.name}, is {distance} standard deviations from the states of training over "
        f"the last doubling of the position.{leaves}"
    )


def _counted(states: StateDiagnosis) -> str:
    count = len(states.heads)
    return f"{count:,} {states.heads[0].unit}{'s' * (count > 1)}"


def patching_text(states: StateDiagnosis, unit: str) -> str:
    """The excess loss from the carried state, and the heads that remove it."""
    patching = states.patching
    if patching is None:
        return ""
    text = (
        f"After {patching.position:,} tokens, the excess loss is {interval_text(patching.harm, sign=True)} nats per "
        f"{unit}: from the carried state, minus that from the state after only the last {patching.kept:,} tokens"
    )
    if not patching.harmful:
        return f"{text}. None is shown."
    sentences = [f"{text}."]
    exchanged = {
        "heads that drift": _group_of(states, states.drifting),
        "all other heads": _group_of(states, [head for head in states.heads if not head.drifts]),
        "keys and values": next((group for group in patching.groups if group.attention), None),
    }
    shares = [f"{name} {harm_share_text(patching, group.restored)}" for name, group in exchanged.items() if group]
    if shares:
        sentences.append(f"Share of it that goes away with the states of the short context: {', '.join(shares)}.")
    alone = list({group.heads: group for group in patching.groups if len(group.heads) == 1}.values())
    worst = max(alone, key=lambda group: group.broken.mean) if len(alone) > 1 else None
    low = [group.broken.low for group in alone if group.broken.low is not None] or None
    harmful = shown_above([group.broken.mean for group in alone], low, 0, states.sequences, states.confidence)
    if worst is not None and harmful[alone.index(worst)]:
        name = next(head.name for head in states.heads if (head.layer, head.head) == worst.heads[0])
        sentences.append(
            f"Of {len(alone)} heads exchanged one by one, {name} has the largest effect: its state alone brings "
            f"{harm_share_text(patching, worst.broken)} of the excess loss into a short context."
        )
    return " ".join(sentences)


def harm_share_text(patching: HeadPatching, estimate: Estimate) -> str:
    """ "97%", "all" also for more, or "no significant share"."""
    share = patching.share(estimate)
    if share is None or not _shown(estimate):
        return "no significant share"
    return "all" if share >= 1 else f"{share:.0%}"


def _shown(estimate: Estimate) -> bool:
    return estimate.low is not None and estimate.low > 0


def _group_of(states: StateDiagnosis, heads: Sequence[HeadStates]) -> PatchedHeads | None:
    """The exchange of exactly these heads, if there was one."""
    places = {(head.layer, head.head) for head in heads}
    groups = () if states.patching is None or not places else states.patching.groups
    return next((group for group in groups if set(group.heads) == places), None)


def attention_text(states: StateDiagnosis, unit: str) -> str:
    harm = states.attention
    if harm is None:
        return ""
    recurrent, attention, both = (
        interval_text(each[-1], sign=True) for each in (harm.recurrent, harm.attention, harm.both)
    )
    return (
        f"After {harm.borders[-1]:,} tokens, the excess loss is {recurrent} nats per {unit} from the long states "
        f"alone, {attention} from the long attention alone, and {both} from both together."
    )


def windows_text(states: StateDiagnosis, unit: str) -> str:
    windows = None if states.attention is None else states.attention.windows
    if windows is None:
        return ""
    (start, stop), whole = windows.last_range, windows.at(None)
    measured = ", ".join(f"{window:,}" for window in windows.windows if window is not None)
    text = (
        f"With full attention, the excess loss from context is {interval_text(whole, sign=True)} nats per {unit} at "
        f"positions {start:,} to {stop:,}"
    )
    if not _shown(whole):
        return f"{text}. None is shown."
    if (best := windows.best) is None:
        less = f"removes more than {AS_GOOD} of it at no cost inside the training length"
        return f"{text}; no window of attention ({measured}) {less}."
    return (
        f"{text}, with a window of the last {best:,} tokens {interval_text(windows.at(best), sign=True)}: the largest "
        f"of {measured} that is not worse than the best. It requires no training (attention_window={best})."
    )


def rank_text(states: StateDiagnosis, _: str = "") -> str:
    """How many heads use little of their state, and the mean, at the training length and at the last position."""
    if not (ranks := states.ranks):
        return ""
    kind, most = "layers" if ranks[0].head is None else "heads", fmean(rank.most for rank in ranks)
    low, means = [], []
    for place in (states.last_inside, -1):
        n = states.positions[place]
        low.append(f"{sum(r.counted[place] < LOW_RANK * min(r.most, n) for r in ranks):,} after {n:,} tokens")
        means.append(f"{fmean(rank.entropy[place] for rank in ranks):.3g} after {n:,} tokens")
    return (
        f"Of {len(ranks):,} {kind}, {' and '.join(low)} have an effective rank below {LOW_RANK:g} of the largest "
        f"possible. Their mean effective rank by entropy is {' and '.join(means)}, of {most:.3g}."
    )


def _facts(states: StateDiagnosis) -> dict[str, str]:
    drifting, total, harm = states.drifting, len(states.heads), states.attention
    furthest = f"{len(drifting):,} of {total:,}, {states.ranking[0].name} the furthest"
    none = f"none of {total:,}" if states.names_heads else f"unknown from {states.sequences} sequences"
    facts = {"Heads that drift": furthest if drifting else none}
    if ranks := states.ranks:
        inside, last = (fmean(rank.counted[place] for rank in ranks) for place in (states.last_inside, -1))
        facts["Effective rank"] = f"{inside:.3g}, at the end {last:.3g}, of {fmean(rank.most for rank in ranks):.3g}"
    group = _group_of(states, drifting)
    if states.patching is not None and not states.patching.harmful:
        facts["Share of the excess loss from heads that drift"] = "no excess loss shown"
    elif states.patching is not None and group is not None:
        facts["Share of the excess loss from heads that drift"] = harm_share_text(states.patching, group.restored)
    if harm is not None:
        for name, values in (("states", harm.recurrent), ("attention", harm.attention)):
            facts[f"Excess loss from long {name} alone"] = f"{number_text(values[-1].mean, '+.3f')} nats"
        windows = harm.windows
        if windows is not None and _shown(windows.at(None)) and (best := windows.best) is not None:
            left = number_text(windows.at(best).mean, "+.3f")
            facts[f"Excess loss with a window of {best:,} tokens"] = f"{left} nats"
    return facts


def _reason(states: StateDiagnosis, status: Status) -> str:
    clauses = [_drift_reason(states, status)]
    if (harm := states.attention) is not None:
        recurrent, attention = (number_text(values[-1].mean, "+.2f") for values in (harm.recurrent, harm.attention))
        clauses.append(
            f"the excess loss is {recurrent} nats from long states alone, {attention} from long attention alone"
        )
    return "; ".join(clauses)


def _drift_reason(states: StateDiagnosis, status: Status) -> str:
    drifting, patching, group = states.drifting, states.patching, _group_of(states, states.drifting)
    if not states.names_heads:
        return f"{states.sequences} sequences are too few to say which heads drift"
    if not drifting:
        return f"none of its {_counted(states)} drifts"
    one = len(drifting) == 1
    clause = f"{len(drifting):,} of its {_counted(states)} drift{'s' * one}"
    named = f"{drifting[0].name}{'' if one else ' the furthest'}"
    left = left_text(states) if status != "generalizes" else ""  # such a training may have covered other states
    clause = f"{left} ({clause}, {named})" if left else f"{clause}{': ' if one else ', '}{named}"
    if status == "generalizes":
        return f"{clause}, without excess loss"
    if patching is None or group is None or not patching.harmful:
        return clause
    exchange = f"replacing the states of {'this head' if one else 'these heads'} by those of a short context"
    if not _shown(group.restored):
        return f"{clause}; but {exchange} is not shown to remove any of the excess loss"
    return f"{clause}; {exchange} removes {harm_share_text(patching, group.restored)} of the excess loss"


def _definitions(results: Sequence[StateDiagnosis]) -> list[str]:
    sentences = [
        "The distance of a head at a position is the 2-Wasserstein distance between the elements of its states there "
        "and those in the second half of the training length, in standard deviations of the latter. A head drifts if "
        "its mean distance over the last doubling of the position is above "
        f"{SMALLEST_DRIFT:g} and above the distances of training positions from each other, and if the interval over "
        "sequences shows that it rises."
    ]
    if any(states.ranks for states in results):
        sentences.append(
            "The effective rank of a state is the number of its singular values above 1/10,000 of the largest (Sun et "
            "al., 2026, Eq. 6). The effective rank by entropy is exp of the entropy of the singular values divided by "
            "their sum, to which small ones add little. Both are means over sequences, and 0 for a state of zeros."
        )
    if patching := next((states.patching for states in results if states.patching is not None), None):
        sentences.append(
            f"Heads are exchanged between the state after {patching.position:,} tokens and the state after only the "
            f"last {patching.kept:,} of them. The next {patching.width:,} tokens are scored. Excess loss is "
            "the loss from the former state minus that from the latter. If several heads fail at once, replacing one "
            "may help little, so shares need not add up to 100%."
        )
    if any(states.attention is not None for states in results):
        sentences.append(
            "In a hybrid, a text is read to some position, and the next tokens, as many as the training length, are "
            "read with only the long states, only the keys and values of the long text, both, or neither; the second "
            "half of them is scored. Excess loss is the loss minus that with neither. The two need not add up, as the "
            "keys were computed from the states, too."
        )
    return sentences


STATES = Part(
    name="states",
    title="States",
    summary="heads whose states leave the training distribution, and the excess loss from them",
    compute=measure_states,
    section="Why: the states",
    texts=lambda result, unit: [
        drift_text(result),
        *filter(None, (text(result, unit) for text in (patching_text, attention_text, windows_text, rank_text))),
    ],
    facts=_facts,
    pictures={
        "state_distance": Picture(
            lambda result, *_: figure.distance_map_figure(result),
            "Each row is a head, the furthest at the top. Orange: more than one standard deviation from training.",
        ),
        "state_patching": Picture(
            lambda result, _, unit: figure.patching_figure(result, unit),
            "States exchanged between a long and a short context. Blue up to the dashed line: all of the excess loss "
            "is removed. Thin lines: intervals.",
            lambda result: result.patching is not None,
        ),
        "attention_harm": Picture(
            lambda result, _, unit: figure.attention_harm_figure(result, unit),
            "Excess loss from the states and from the keys and values of a long text, each alone and together. Above "
            "zero, the long context makes predictions worse.",
            lambda result: result.attention is not None,
            bands=True,
        ),
        "attention_windows": Picture(
            lambda result, _, unit: figure.attention_windows_figure(result, unit),
            "Excess loss from context by window of attention. Windows below the training length also hide "
            "context that the model uses.",
            lambda result: result.attention is not None and result.attention.windows is not None,
            bands=True,
        ),
        "state_std": Picture(
            lambda result, *_: figure.state_std_figure(result),
            "A state that has settled has a flat line. Dashed: the whole.",
        ),
        "state_mean": Picture(
            lambda result, *_: figure.state_mean_figure(result),
            "A state that has settled has a flat line; between -1 and 1 the scale is linear.",
            lambda result: any(head.mean for head in result.heads),
        ),
        "state_retention": Picture(
            lambda result, *_: figure.retention_figure(result),
            "A head that retains the first token accumulates its inputs instead of replacing them.",
            lambda result: any(head.log_retention for head in result.heads),
        ),
        "state_rank": Picture(
            lambda its, *_: figure.rank_figure(its),
            "A low line: little of the state is used.",
            lambda its: bool(its.ranks),
        ),
    },
    definitions=_definitions,
    reason=_reason,
)
