"""What is said of diagnoses made by hand: each verdict names its numbers, and what takes the harm away."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from hf_recurrent_lengthgen.evaluation.formatting import sentence
from hf_recurrent_lengthgen.evaluation.results import Estimate
from hf_recurrent_lengthgen.metrics.diagnosis.page import diagnosis_summary, facts, not_measured, verdicts
from hf_recurrent_lengthgen.metrics.diagnosis.result import Diagnosis
from hf_recurrent_lengthgen.metrics.remembrance.summary import remembrance_text
from hf_recurrent_lengthgen.metrics.repeated_token import constant_prompt_text
from hf_recurrent_lengthgen.metrics.states.result import StateDiagnosis
from hf_recurrent_lengthgen.metrics.states.summary import (
    attention_text,
    drift_text,
    left_text,
    patching_text,
    windows_text,
)
from tests.metrics.diagnoses import (
    constant_prompt,
    diagnosed,
    expected,
    hybrid,
    remembrance,
    states,
    states_of,
    with_part,
    without_parts,
)

BASE, PASSED = expected().models


def reason(found: StateDiagnosis, harm: float = 1.4) -> str:
    return verdicts(Diagnosis("", (diagnosed("base", "b", harm, found),)))[0].reason


def of_states(**changes: Any) -> StateDiagnosis:
    return replace(states_of(BASE), **changes)


def of_attention(found: Any, **changes: Any) -> StateDiagnosis:
    """The diagnosis of a hybrid with another harm of its attention."""
    return replace(found, attention=replace(found.attention, **changes))


ONE, TWO = states({(0, 1): 3.0}), states({(1, 2): 9.0, (0, 0): 8.0}, restored=0.6)
GROUPS = states({(0, 1): 1234.5, (0, 2): 3.0}, unit="channel group")


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        (drift_text(states_of(BASE)), ("3 of 8 heads", "layer 1, head 2", "47.3 standard deviations", "32 tokens")),
        (drift_text(states_of(PASSED)), ("None of 8 heads", "layer 0, head 0", "0.3 standard deviations")),
        (drift_text(ONE), ("1 of 8 heads drifts.",)),
        (drift_text(GROUPS), ("2 of 8 channel groups drift.", "layer 0, channel group 1", "1,234 standard")),
        (drift_text(of_states(sequences=3)), ("3 sequences are too few", "47.3 standard deviations")),
        (patching_text(states_of(BASE), "byte"), ("1,016 tokens", "+1.000 (+0.990 to +1.010) nats per byte")),
        (patching_text(states_of(BASE), "byte"), ("last 8 tokens", "drift 97%, all other heads no significant share")),
        (
            patching_text(states_of(BASE), "byte"),
            ("Of 3 heads", "layer 0, head 3 has the largest effect", "brings all of"),
        ),
        (patching_text(states({(0, 0): 9.0}, others=0.3), "byte"), ("all other heads 30%",)),
        (patching_text(states({(0, 0): 9.0}, harm=0.005), "byte"), ("+0.005 (\N{MINUS SIGN}0.005", "None is shown")),
        (
            patching_text(hybrid(), "byte"),
            ("heads that drift 97%, all other heads no significant share, keys and values 10%",),
        ),
        (attention_text(hybrid(), "byte"), ("512 tokens", "+1.200 (+1.190 to +1.210)", "+0.020", "+1.300")),
        (windows_text(hybrid(), "byte"), ("+1.300", "256 to 512", "16 tokens +0.400", "4, 8, 16", "window=16")),
        (remembrance_text(remembrance(0.2)), ("64 tokens", "last 16", "0.200 (0.190 to 0.210)")),
        (remembrance_text(remembrance(0.2, length=16)), ("16 tokens do not show",)),
        (constant_prompt_text(constant_prompt(1.5, 4.0)), ("1.5 nats", "4 beyond", "At 32 tokens it exceeds 2 times")),
        (constant_prompt_text(constant_prompt(1.5, 1.4)), ("1.4 beyond", "1,024 tokens it never exceeds 2 times")),
        (
            reason(ONE),
            ("layer 0 left the training distribution at 32 tokens (1 of its 8 heads drifts, layer 0, head 1)", "97%"),
        ),
        (reason(TWO), ("layers 0 and 1 left", "2 of its 8 heads drift, layer 1, head 2 the furthest", "removes 60%")),
        (reason(states({(1, 2): 9.0}, restored=0.0)), ("not shown to remove any of the excess loss",)),
        (reason(states({(1, 2): 9.0}, harm=0.0), 0.0), ("layer 1, head 2, without excess loss",)),
        (reason(of_states(patching=None)), ("layer 1, head 2 the furthest).",)),
        (reason(of_states(sequences=3)), ("3 sequences are too few",)),
        (
            reason(hybrid()),
            (
                "removes 97% of the excess loss",
                "excess loss is +1.20 nats from long states alone",
                "+0.02 from long attention alone.",
            ),
        ),
    ],
)
def test_a_sentence_names_its_numbers(text: str, numbers: tuple[str, ...]) -> None:
    assert [number for number in numbers if number not in text] == [], text
    assert text[0].isupper() or text[0].isdigit()
    assert text.endswith(".")


def test_the_summary_has_the_verdict_and_the_reason_of_each_model() -> None:
    reported = verdicts(expected())
    assert diagnosis_summary(expected()) == " ".join(part for verdict in reported for part in verdict)
    assert [verdict.headline for verdict in reported] == [
        "base fails beyond 64 tokens.",
        "sp restores length generalization to 1,024 tokens.",
    ]
    assert [part in reported[0].reason for part in ("layers 0 and 1", "3 of its 8", "97%")] == [True] * 3
    model = without_parts(diagnosed("other", "llama", 1.4), "It has no state.")
    assert verdicts(Diagnosis("", (model,)))[0].reason == ""
    assert facts(model) == {}


def test_what_is_not_there_is_not_reported() -> None:
    assert patching_text(of_states(patching=None), "byte") == ""
    assert attention_text(ONE, "byte") == windows_text(ONE, "byte") == ""


def test_the_facts_have_the_numbers_of_all_parts() -> None:
    base, intervention = facts(BASE), facts(PASSED)
    values = ("3 of 8, layer 1, head 2 the furthest", "97%", "0.200", "3.600", "fails at 32 tokens")
    assert all(value.startswith(start) for value, start in zip(base.values(), values, strict=True)), base
    assert [intervention["Heads that drift"], intervention["Constant prompt"]] == ["none of 8", "passes"]
    few = replace(states({}), sequences=3)
    assert facts(diagnosed("base", "b", 1.4, few))["Heads that drift"] == "unknown from 3 sequences"
    assert facts(diagnosed("base", "b", 1.4, states({(1, 2): 9.0}, restored=0.0)))[
        "Share of the excess loss from heads that drift"
    ] == ("no significant share")
    of_hybrid = facts(diagnosed("base", "hybrid", 1.4, hybrid()))
    assert [value for name, value in of_hybrid.items() if name.startswith("Excess ")] == [
        "+1.200 nats",
        "+0.020 nats",
        "+0.400 nats",
    ]


def test_the_worst_of_several_heads_is_named_if_one_confidence_for_all_shows_it() -> None:
    heads = {(layer, number): 0.0 for layer in range(2) for number in range(4)}
    for share, sequences, named in ((0.02, 32, True), (0.011, 32, False), (0.02, 3, False)):  # intervals of +-0.01
        few = states({(1, 2): 9.0, (0, 3): 9.0}, broken=heads | {(0, 1): share})
        text = patching_text(replace(few, sequences=sequences), "byte")
        assert ("layer 0, head 1 has the largest effect" in text) == named


@pytest.mark.parametrize(
    ("places", "sentences"),
    [
        ({}, ""),
        ({3: None}, ""),
        ({2: 98304, 7: 98304}, "the states of layers 2 and 7 left the training distribution at 98,304 tokens"),
        (
            {7: 256, 3: 256, 1: 64, 4: 512},
            "the states of layer 1 left the training distribution at 64 tokens, of 3 more later",
        ),
        (dict.fromkeys(range(7), 512), "the states of 7 layers left the training distribution at 512 tokens"),
    ],
)
def test_the_layers_that_left_training_first_are_named(places: Mapping[int, int | None], sentences: str) -> None:
    """Head 0 of each of these layers drifts, from these positions on."""
    found = states(dict.fromkeys(((layer, 0) for layer in places), 9.0), layers=10)
    heads = (replace(head, leaves_at=None if head.head else places.get(head.layer)) for head in found.heads)
    found = replace(found, heads=tuple(heads))
    assert left_text(found) == sentences
    assert reason(found).startswith(sentence(sentences)[:-1] if sentences else "")


@pytest.mark.parametrize(
    ("means", "sentences"),
    [((0.3, 1.3, 1.295, 1.3), "no window of attention (4, 8, 16)"), ((0.3, 0.0, 0.0, 0.005), "None is shown")],
)
def test_a_window_that_does_not_help_is_not_recommended(means: tuple[float, ...], sentences: str) -> None:
    found: Any = hybrid()
    harm = tuple(Estimate(mean, mean - 0.01, mean + 0.01) for mean in means)
    found = of_attention(found, windows=replace(found.attention.windows, harm=harm))
    assert sentences in windows_text(found, "byte")
    assert not [name for name in facts(diagnosed("base", "b", 1.4, found)) if "window" in name]


def test_what_was_not_measured_is_reported_with_the_reason() -> None:
    assert not_measured(expected()) == []
    partly = with_part(BASE, "states", of_states(left_out=("Inputs were not read.",)))
    refused = replace(with_part(PASSED, "constant prompt", None), refused={"constant prompt": "No such token."})
    assert not_measured(Diagnosis("", (partly, refused))) == [
        "base, states: Inputs were not read.",
        "sp, constant prompt: No such token.",
    ]
    lines = not_measured(Diagnosis("", (without_parts(PASSED, "It keeps no state."),)))
    assert lines[0] == "sp, states: It keeps no state."
    assert [line.endswith(": not requested.") for line in lines] == [False, True, True, True]
