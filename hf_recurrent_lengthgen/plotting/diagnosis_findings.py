"""What a diagnosis says, in sentences: every word follows from the numbers, also when nothing drifts or was measured.

All of it is plain text. Shares are those of the harm that `HeadPatching` measured; what its interval does not show to
be above zero is said not to be shown.
"""

import math
from typing import NamedTuple

from hf_recurrent_lengthgen.evaluation.diagnosis_results import (
    ConstantPrompt,
    DiagnosedModel,
    Diagnosis,
    RankCorrelation,
    Remembrance,
)
from hf_recurrent_lengthgen.evaluation.results import Estimate
from hf_recurrent_lengthgen.evaluation.state_results import (
    HeadPatching,
    HeadStates,
    LayerStates,
    PatchedHeads,
    StateDiagnosis,
    head_name,
)
from hf_recurrent_lengthgen.plotting.findings import HALF, findings, interval_text, number_text, sentence

SETTLED = 0.1
"""Octaves of spread per doubling of the position above which a head's spread is said to grow."""
LISTED_HEADS = 12
"""Most heads that are listed in a sentence."""
EXPLAINED_MODELS = 3
"""Most models of which the first lines say why they fail; of more, only the first that breaks."""
CHANCE = 0.05
"""p-value from which on a correlation is not said to be there."""
PART_NAMES = {
    "states": "States",
    "remembrance": "Effective Remembrance",
    "misalignment": "Long-short misalignment",
    "constant_prompt": "Constant prompt",
}
Pair = tuple[LayerStates, HeadStates]


class Verdict(NamedTuple):
    """A model's result in a sentence, and what its states say about it, which may be nothing."""

    headline: str
    reason: str


HARM_WORTH_KNOWING = 0.05
"""Nats per token; where an interval reaches above, one cannot say that there is no harm."""


def verdicts(diagnosis: Diagnosis) -> list[Verdict]:
    """What to know first, model by model."""
    found = findings(diagnosis.comparison)
    explained = range(len(found)) if len(found) <= EXPLAINED_MODELS else _first_broken([f.status for f in found])
    return [
        Verdict(sentence(finding.headline), sentence(reason) if index in explained and reason else "")
        for index, (finding, model) in enumerate(zip(found, diagnosis.models, strict=True))
        for reason in [_reason(model.states, finding.status)]
    ]


def diagnosis_summary(diagnosis: Diagnosis) -> str:
    """The verdicts as one sentence after another."""
    return " ".join(part for verdict in verdicts(diagnosis) for part in verdict if part)


def drift_text(states: StateDiagnosis) -> str:
    """Which heads drift, how far and since when."""
    ranking, drifting = states.ranking, states.drifting
    if not ranking:
        return "It has no heads whose states could drift."
    layer, head = ranking[0]
    distance = f"{distance_text(head)} standard deviations"
    if not states.names_heads:
        return (
            f"{states.sequences} texts are too few to say which heads drift: the furthest, {head_name(layer, head)}, "
            f"is {distance} from the states of training over the last octave of positions."
        )
    if not drifting:
        return (
            f"None of {_counted(ranking)} drifts: the furthest, {head_name(layer, head)}, is {distance} from the "
            "states of training over the last octave of positions."
        )
    leaves = "" if head.leaves_at is None else f" It leaves them at {head.leaves_at:,} tokens."
    growth = 2**head.growth - 1
    still = f"grows by {growth:.0%} with each doubling of the position" if head.growth > SETTLED else "no longer grows"
    return (
        f"{len(drifting):,} of {_counted(ranking)} {_verb(drifting, 'drift')}: {_listed(drifting)}. The furthest, "
        f"{head_name(layer, head)}, is {distance} from the states of training over the last octave of "
        f"positions.{leaves} Its spread {still}."
    )


def distance_text(head: HeadStates) -> str:
    """How far a head is over the last octave, in standard deviations: "47.3"."""
    return f"{head.late_distance:.3g}" if head.late_distance < 1000 else f"{head.late_distance:,.0f}"


def retention_text(states: StateDiagnosis) -> str:
    """How much the head that holds most of the first token holds at the training length and at the end."""
    known = [(pair, pair[1].inputs.log_retention) for pair in states.ranking if pair[1].inputs is not None]
    inside = [place for place, position in enumerate(states.positions) if position <= states.training_length]
    if not known or not inside:
        return ""
    pair, most = max(known, key=lambda found: found[1][inside[-1]])
    at, end = states.positions[inside[-1]], states.positions[-1]
    whom = "no head holds" if len(known) == len(states.ranking) else f"none of the {len(known)} looked at holds"
    return (
        f"At {at:,} tokens {head_name(*pair)} still holds {math.exp(most[inside[-1]]):.0%} of what the first token "
        f"wrote ({whom} more), at {end:,} tokens {math.exp(most[-1]):.0%}."
    )


def patching_text(states: StateDiagnosis) -> str:
    """How much of the harm the heads that drift do, or that the exchange of heads shows nothing."""
    patching = states.patching
    if patching is None:
        return ""
    unit, kept = states.data.token_unit, f"the last {patching.kept:,} tokens alone"
    if not patching.harmful:
        wide = patching.harm.high is None or patching.harm.high > HARM_WORTH_KNOWING
        return (
            f"After {patching.position:,} tokens its state is not shown to be worse than that of {kept}: "
            f"{interval_text(patching.harm, sign=True)} nats per {unit}. "
            + ("More texts would tell." if wide else "There is no harm to attribute to heads.")
        )
    together, others = drifting_group(states), _other_group(states)
    told = [
        f"After {patching.position:,} tokens its state does {interval_text(patching.harm)} nats per {unit} of harm "
        f"against that of {kept}."
    ]
    if together is not None:
        heads = "the one that drifts" if len(together.heads) == 1 else f"the {len(together.heads):,} that drift"
        told.append(f"With states of the short context in {heads}, {_goes_away(patching, together.restored)}.")
        if others is not None:
            told.append(f"With them in all others, {_goes_away(patching, others.restored)}.")
    alone = [group for group in patching.groups if len(group.heads) == 1]
    worst = max(alone, key=lambda group: group.broken.mean, default=None)
    if worst is not None and _shown(worst.broken):
        names = {(layer.layer, head.head): head_name(layer, head) for layer, head in states.ranking}
        told.append(
            f"Of {len(alone)} heads taken one by one, {names[worst.heads[0]]} does most: its state alone brings "
            f"{_share(patching, worst.broken)} of the harm into a short context."
        )
    return " ".join(told)


def far_tokens(found: Remembrance | None) -> Estimate | None:
    """Effective Remembrance of the tokens beyond the training length, where there are any and it was measured."""
    return None if found is None or found.length <= found.training_length else found.beyond_training


def remembrance_text(found: Remembrance) -> str:
    """How far the tokens beyond the training length move the prediction."""
    if found.length <= found.training_length:
        return f"Texts of {found.length:,} tokens do not show what tokens beyond the training length do."
    if (beyond := far_tokens(found)) is None:
        return "What tokens beyond the training length do was not measured."
    return (
        f"At {found.length:,} tokens, those further back than the last {found.training_length:,} move the prediction "
        f"by {interval_text(beyond)} of at most 1."
    )


def constant_prompt_text(found: ConstantPrompt) -> str:
    """Whether the loss of one repeated token rises beyond the training length."""
    highest = f"at most {found.inside:.3g} nats per token inside the training length and {found.beyond:.3g} beyond"
    if found.exceeded_from is None:
        return f"The loss is {highest}, never above {found.factor:g} times the former up to {found.length:,} tokens."
    return f"The loss is {highest}: it is above {found.factor:g} times the former at {found.exceeded_from:,} tokens."


def correlation_text(found: RankCorrelation) -> str:
    """How two numbers go together over the models."""
    pairings = "all pairings" if found.exact else f"{found.pairings:,} random pairings"
    count = len(found.models)
    shown = "" if found.p_value < CHANCE else " That does not show that they go together."
    least = (
        f"; {count} models allow {found.least_p_value:.2g} at the least" if found.least_p_value >= CHANCE / 5 else ""
    )
    return (
        f"Over {count} models, {found.metric} and {found.score} have a rank correlation of "
        f"{number_text(found.coefficient, '.2f')} (Spearman; p = {found.p_value:.2g} over {pairings}{least}).{shown}"
    )


def not_measured(diagnosis: Diagnosis) -> list[str]:
    """What is not on the page, and why."""
    told = []
    for model in diagnosis.models:
        name = model.evaluation.model
        told += [f"{name}, {part.replace('_', ' ')}: {reason}" for part, reason in model.refused.items()]
        if model.states is not None:
            told += [f"{name}: {reason}" for reason in model.states.left_out]
    refused = {part.replace(" ", "_") for model in diagnosis.models for part in model.refused}
    for part, name in PART_NAMES.items():
        if part not in refused and all(getattr(model, part) is None for model in diagnosis.models):
            told.append(f"{name}: not asked for.")
    return told


def facts(model: DiagnosedModel) -> list[tuple[str, str]]:
    """The numbers to see first; those that were measured."""
    told = []
    if (states := model.states) is not None and states.ranking:
        drifting, total = states.drifting, len(states.ranking)
        furthest = f"{len(drifting):,} of {total:,}, {head_name(*states.ranking[0])} the furthest"
        none = f"none of {total:,}" if states.names_heads else f"not told from {states.sequences} texts"
        told.append(("Heads that drift", furthest if drifting else none))
        if states.patching is not None and states.patching.harmful and (group := drifting_group(states)) is not None:
            told.append(("Their part of the harm", harm_share_text(states.patching, group.restored)))
    if (beyond := far_tokens(model.remembrance)) is not None:
        told.append(("Effective Remembrance", f"{beyond.mean:.2f} beyond training (0: no effect of far tokens)"))
    if model.constant_prompt is not None:
        start = model.constant_prompt.exceeded_from
        told.append(("Constant prompt", "holds" if start is None else f"fails at {start:,} tokens"))
    if model.misalignment is not None:
        told.append(("Misalignment", f"{model.misalignment.mean:.2f} nats (less is better)"))
    return told


def harm_share_text(patching: HeadPatching, estimate: Estimate) -> str:
    """ "97%", or that none is shown."""
    return _share(patching, estimate) if _shown(estimate) else "none shown"


def drifting_group(states: StateDiagnosis) -> PatchedHeads | None:
    """The exchange of all heads that drift."""
    return _group_of(states, {(layer.layer, head.head) for layer, head in states.drifting})


def _other_group(states: StateDiagnosis) -> PatchedHeads | None:
    return _group_of(states, {(layer.layer, head.head) for layer, head in states.ranking if not head.drifts})


def _group_of(states: StateDiagnosis, heads: set[tuple[int, int]]) -> PatchedHeads | None:
    groups = () if states.patching is None or not heads else states.patching.groups
    return next((group for group in groups if set(group.heads) == heads), None)


def _reason(states: StateDiagnosis | None, status: str) -> str:
    """What the states say about a verdict, in one clause each."""
    if states is None or not states.ranking:
        return ""
    drifting, patching, group = states.drifting, states.patching, drifting_group(states)
    if not states.names_heads:
        return f"{states.sequences} texts are too few to say which heads drift"
    if not drifting:
        return f"none of its {_counted(states.ranking)} drifts"
    furthest = f", {head_name(*drifting[0])} the furthest" if len(drifting) > 1 else f": {head_name(*drifting[0])}"
    told = f"{len(drifting):,} of its {_counted(states.ranking)} {_verb(drifting, 'drift')}{furthest}"
    if status == "holds":
        return f"{told}, without harm"
    if patching is None or group is None or not patching.harmful:
        return told
    share, those = patching.share(group.restored), "this head" if len(drifting) == 1 else "these heads"
    exchange = f"replacing the states of {those} by those of a short context"
    if share is None or not _shown(group.restored):
        return f"{told}; but {exchange} is not shown to remove any of the harm"
    return (
        f"{told}; {exchange} removes {share:.0%} of the harm"
        if share >= HALF
        else (f"{told}; but {exchange} removes only {share:.0%} of the harm")
    )


def _first_broken(statuses: list[str]) -> list[int]:
    return [statuses.index("breaks")] if "breaks" in statuses else []


def _counted(pairs: tuple[Pair, ...]) -> str:
    """ "12 heads"."""
    units = sorted({layer.unit for layer, _ in pairs})
    return f"{len(pairs):,} " + " and ".join(f"{unit}s" if len(pairs) > 1 else unit for unit in units)


def _verb(pairs: tuple[Pair, ...], verb: str) -> str:
    return f"{verb}s" if len(pairs) == 1 else verb


def _listed(pairs: tuple[Pair, ...]) -> str:
    """ "layer 0, heads 2, 3; layer 1, head 5": the furthest ones, by layer."""
    shown, more = pairs[:LISTED_HEADS], len(pairs) - LISTED_HEADS
    named = []
    for index in sorted({layer.layer for layer, _ in shown}):
        own = [(layer.unit, head.head) for layer, head in shown if layer.layer == index]
        unit = own[0][0] + "s" * (len(own) > 1)
        named.append(f"layer {index}, {unit} {', '.join(str(head) for head in sorted(head for _, head in own))}")
    return "; ".join(named) + (f"; and {more:,} less far" if more > 0 else "")


def _goes_away(patching: HeadPatching, restored: Estimate) -> str:
    if not _shown(restored):
        return "none of it is shown to go away"
    return f"{_share(patching, restored)} of it goes away"


def _share(patching: HeadPatching, estimate: Estimate) -> str:
    share = patching.share(estimate)
    assert share is not None  # asked for only where there is harm
    return f"{share:.0%}"


def _shown(estimate: Estimate) -> bool:
    return estimate.low is not None and estimate.low > 0
