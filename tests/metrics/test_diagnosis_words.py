"""What is said of diagnoses made by hand."""

from collections.abc import Mapping
from dataclasses import replace

import pytest

from hf_recurrent_lengthgen.evaluation.results import Estimate
from hf_recurrent_lengthgen.evaluation.words import sentence
from hf_recurrent_lengthgen.metrics.diagnosis import page
from hf_recurrent_lengthgen.metrics.diagnosis.page import diagnosis_summary, not_measured, verdicts
from hf_recurrent_lengthgen.metrics.diagnosis.result import DiagnosedModel, Diagnosis
from hf_recurrent_lengthgen.metrics.remembrance.words import remembrance_text
from hf_recurrent_lengthgen.metrics.repeated_token import constant_prompt_text
from hf_recurrent_lengthgen.metrics.states import words as states_part
from hf_recurrent_lengthgen.metrics.states.result import StateDiagnosis
from hf_recurrent_lengthgen.metrics.states.words import (
    _drift_cell,
    attention_text,
    drift_text,
    left_text,
    retention_text,
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


def patching_text(found: StateDiagnosis) -> str:
    return states_part.patching_text(found, "byte")


def facts(model: DiagnosedModel) -> dict[str, str]:
    return {fact.name: fact.value + fact.note for fact in page.facts(model)}


def reason(model: DiagnosedModel) -> str:
    return verdicts(Diagnosis("", (model,)))[0].reason


def test_the_expected_pair_is_told_in_two_lines() -> None:
    base, cured = verdicts(expected())
    assert base == (
        "Base breaks beyond 64 tokens.",
        "The states of layers 0 and 1 left training at 32 tokens (3 of its 8 heads drift, layer 1, head 2 the "
        "furthest); replacing the states of these heads by those of a short context removes 97% of the harm.",
    )
    assert cured == ("Sp cures it: holds to 1,024 tokens.", "None of its 8 heads drifts.")
    assert diagnosis_summary(expected()) == f"{base.headline} {base.reason} {cured.headline} {cured.reason}"


def test_the_cards_name_the_head_and_its_share() -> None:
    base, cured = ((facts(model)) for model in expected().models)
    assert base == {
        "Heads that drift": "3 of 8, layer 1, head 2 the furthest",
        "Their share of the harm": "97%",
        "Effective Remembrance": "0.200 beyond training (0: no effect of distant tokens)",
        "Constant prompt": "fails at 32 tokens",
        "Misalignment": "3.600 nats (lower is better)",
    }
    assert cured["Heads that drift"] == "none of 8"
    assert cured["Constant prompt"] == "holds"
    assert "Their share of the harm" not in cured


def test_drift_is_told_with_all_heads_and_how_far_the_furthest_is() -> None:
    base, cured = map(states_of, expected().models)
    assert drift_text(base) == (
        "3 of 8 heads drift. The furthest, layer 1, head 2, is 47.3 standard deviations from the states of training "
        "over the last octave of positions. It leaves them at 32 tokens."
    )
    assert drift_text(cured) == (
        "None of 8 heads drifts. The furthest, layer 0, head 0, is 0.3 standard deviations from the states of "
        "training over the last octave of positions."
    )


def test_one_head_and_channel_groups_are_told_in_their_words() -> None:
    assert drift_text(states({(0, 1): 3.0})).startswith("1 of 8 heads drifts. The furthest")
    groups = states({(0, 1): 1234.5, (0, 2): 3.0}, unit="channel group")
    assert drift_text(groups).startswith("2 of 8 channel groups drift. ")
    assert "layer 0, channel group 1, is 1,234 standard deviations" in drift_text(groups)
    assert reason(diagnosed("base", "b", 1.4, states({(0, 1): 3.0}))) == (
        "The states of layer 0 left training at 32 tokens (1 of its 8 heads drifts, layer 0, head 1); replacing the "
        "states of this head by those of a short context removes 97% of the harm."
    )


def test_retention_is_that_of_the_head_that_holds_most() -> None:
    some = states({(1, 2): 5.0})
    assert retention_text(some) == (
        "At 16 tokens, layer 1, head 2 still holds 90% of what the first token wrote, the most of all heads, and 0% "
        "at 1,024 tokens."
    )
    assert retention_text(states({(1, 2): 5.0}, known=False)) == ""
    heads = tuple(replace(head, log_retention=None) if head.layer == 0 else head for head in some.heads)
    assert "the most of 4 measured heads, and" in retention_text(replace(some, heads=heads))


def test_patching_names_the_group_the_others_and_the_worst_head_alone() -> None:
    base = states_of(expected().models[0])
    assert patching_text(base) == (
        "After 1,016 tokens, what the model carries does +1.000 (+0.990 to +1.010) nats per byte of harm, compared "
        "with what it carries after only the last 8 tokens. Share of it that goes away with the short context's: "
        "heads that drift 97%, all other heads none shown. Of 3 heads exchanged one by one, layer 0, head 3 does most "
        "harm: its state alone brings 120% of the harm into a short context."
    )
    assert "all other heads 30%" in patching_text(states({(0, 0): 9.0}, others=0.3))
    assert patching_text(replace(base, patching=None)) == ""


def test_the_worst_of_several_heads_is_named_if_one_confidence_for_all_shows_it() -> None:
    heads = {(layer, number): 0.0 for layer in range(2) for number in range(4)}
    for share, sequences, named in ((0.02, 32, True), (0.011, 32, False), (0.02, 3, False)):  # intervals of +-0.01
        few = states({(1, 2): 9.0, (0, 3): 9.0}, broken=heads | {(0, 1): share})
        text = patching_text(replace(few, sequences=sequences))
        assert ("layer 0, head 1 does most harm" in text) == named


def test_without_harm_nothing_is_attributed() -> None:
    text = patching_text(states({(0, 0): 9.0}, harm=0.005))
    assert text == (
        "After 1,016 tokens, what the model carries does +0.005 (\N{MINUS SIGN}0.005 to +0.015) nats per byte of harm,"
        " compared with what it carries after only the last 8 tokens: none is shown."
    )


def test_few_texts_name_no_heads() -> None:
    few = replace(states({}, harm=1.0), sequences=3)
    assert reason(diagnosed("base", "b", 1.4, few)) == "3 texts are too few to say which heads drift."
    assert drift_text(few).startswith("3 texts are too few to say which heads drift. The furthest, ")
    assert (facts(diagnosed("base", "b", 1.4, few)))["Heads that drift"] == "unknown from 3 texts"
    assert _drift_cell(few).startswith("<b>unknown</b><small>")
    assert _drift_cell(states({}, harm=1.0)).startswith("<b>0 of 8</b><small>")


@pytest.mark.parametrize(
    ("restored", "told"),
    [
        (0.6, "; replacing the states of these heads by those of a short context removes 60% of the harm."),
        (0.2, "; replacing the states of these heads by those of a short context removes 20% of the harm."),
        (
            0.0,
            "; but replacing the states of these heads by those of a short context is not shown to remove any of the "
            "harm.",
        ),
    ],
)
def test_drifting_heads_that_do_little_harm_are_not_blamed(restored: float, told: str) -> None:
    found = states({(1, 2): 9.0, (0, 0): 8.0}, restored=restored)
    drift = "2 of its 8 heads drift, layer 1, head 2 the furthest"
    left = f"The states of layers 0 and 1 left training at 32 tokens ({drift})"
    assert reason(diagnosed("base", "b", 1.4, found)) == left + told
    share = (facts(diagnosed("base", "b", 1.4, found)))["Their share of the harm"]
    assert share == ("none shown" if restored == 0 else f"{restored:.0%}")


def test_drift_that_does_no_harm_is_told() -> None:
    holding = diagnosed("cured", "sp", 0.0, states({(1, 2): 9.0}, harm=0.0))
    left = "The states of layer 1 left training at 32 tokens (1 of its 8 heads drifts, layer 1, head 2)"
    assert reason(holding) == f"{left}, without harm."
    unpatched = diagnosed("base", "b", 1.4, replace(states({(1, 2): 9.0}), patching=None))
    assert reason(unpatched) == f"{left}."


def leaving(places: Mapping[int, int | None]) -> StateDiagnosis:
    """Head 0 of each of these layers drifts, from these positions on."""
    found = states(dict.fromkeys(((layer, 0) for layer in places), 9.0), layers=10)
    heads = (replace(head, leaves_at=None if head.head else places.get(head.layer)) for head in found.heads)
    return replace(found, heads=tuple(heads))


@pytest.mark.parametrize(
    ("places", "told"),
    [
        ({}, ""),
        ({3: None}, ""),
        ({2: 98304, 7: 98304}, "the states of layers 2 and 7 left training at 98,304 tokens"),
        ({7: 256, 3: 256, 1: 64, 4: 512}, "the states of layer 1 left training at 64 tokens, of 3 more later"),
        (dict.fromkeys(range(7), 512), "the states of 7 layers left training at 512 tokens"),
    ],
)
def test_the_layers_that_left_training_first_are_told(places: Mapping[int, int | None], told: str) -> None:
    found = leaving(places)
    assert left_text(found) == told
    assert reason(diagnosed("base", "b", 1.4, found)).startswith(sentence(told)[:-1] if told else "")
    if places == {3: None}:
        assert reason(diagnosed("base", "b", 1.4, found)).startswith("1 of its 40 heads drifts: layer 3, head 0; ")


def test_a_hybrid_is_told_what_states_and_attention_do_apart() -> None:
    model = diagnosed("base", "hybrid", 1.4, hybrid())
    assert reason(model).endswith(
        "removes 97% of the harm; long states alone do +1.20 nats of harm, long attention alone +0.02."
    )
    found = hybrid()
    assert found.patching is not None
    keys = replace(found.patching.groups[-1], restored=Estimate(0.9, 0.8, 1.0))
    attention = replace(found, patching=replace(found.patching, groups=(*found.patching.groups[:-1], keys)))
    assert reason(diagnosed("base", "hybrid", 1.4, attention)).endswith(
        "attention alone +0.02; replacing its keys and values by those of a short context removes 90% of the harm."
    )
    assert attention_text(hybrid(), "byte") == (
        "After 512 tokens, the long states alone do +1.200 (+1.190 to +1.210) nats per byte of harm, the long "
        "attention alone +0.020 (+0.010 to +0.030), and both together +1.300 (+1.290 to +1.310)."
    )
    assert windows_text(hybrid(), "byte") == (
        "With all keys, the long context does +1.300 (+1.290 to +1.310) nats per byte of harm at positions 256 to "
        "512, with a window of 16 keys +0.400 (+0.390 to +0.410): the largest of 4, 8, 16 that is as good as any. It "
        "needs no training (attention_window=16)."
    )
    assert facts(model)["Harm with a window of 16 keys"] == "+0.400 nats"
    assert found.attention is not None
    assert found.attention.windows is not None
    harm = found.attention.windows.harm
    costly = ((0.3, 1.3, 1.295, 1.3), "+1.300", "; no window of attention (4, 8, 16) takes more ")
    for means, shown, told in (costly, ((0.3, 0.0, 0.0, 0.005), "+0.005", ": none is shown.")):
        values = tuple(Estimate(mean, mean - 0.01, mean + 0.01) for mean in means)
        assert len(values) == len(harm)
        windows = replace(found.attention.windows, harm=values)
        other = replace(found, attention=replace(found.attention, windows=windows))
        text = windows_text(other, "byte")
        assert f"does {shown} (" in text
        assert f"nats per byte of harm at positions 256 to 512{told}" in text
        assert not [name for name in facts(diagnosed("base", "b", 1.4, other)) if "window" in name]
    assert "heads that drift 97%, all other heads none shown, keys and values 10%." in patching_text(hybrid())
    assert facts(model)["Harm of long states alone"] == "+1.200 nats"
    assert facts(model)["Harm of long attention alone"] == "+0.020 nats"
    assert attention_text(states({}), "byte") == windows_text(states({}), "byte") == ""


def test_models_without_states_have_a_verdict_and_no_reason() -> None:
    model = without_parts(diagnosed("other", "llama", 1.4), "It has no state.")
    assert verdicts(Diagnosis("", (model,)))[0] == ("Llama breaks beyond 64 tokens.", "")
    assert facts(model) == {}


def test_remembrance_is_that_of_the_training_length() -> None:
    assert remembrance_text(remembrance(0.2)) == (
        "At 64 tokens, the tokens before the last 16 change the prediction by 0.200 (0.190 to 0.210), on a scale from "
        "0 to 1."
    )
    assert remembrance_text(remembrance(0.2, length=16)) == (
        "Texts of 16 tokens do not show the effect of tokens beyond the training length."
    )


def test_the_constant_prompt_is_told_with_its_limit() -> None:
    assert constant_prompt_text(constant_prompt(1.5, 4.0)) == (
        "The loss is at most 1.5 nats per token inside the training length and 4 beyond it. At 32 tokens it exceeds 2 "
        "times the highest loss inside."
    )
    assert constant_prompt_text(constant_prompt(1.5, 1.4)) == (
        "The loss is at most 1.5 nats per token inside the training length and 1.4 beyond it. Up to 1,024 tokens it "
        "never exceeds 2 times the highest loss inside."
    )


def test_what_was_not_measured_is_told_with_the_reason() -> None:
    base, cured = expected().models
    assert not_measured(expected()) == []
    partly = with_part(base, "states", replace(states_of(base), left_out=("Inputs were not read.",)))
    refused = replace(with_part(cured, "constant prompt", None), refused={"constant prompt": "No such token."})
    assert not_measured(Diagnosis("", (partly, refused))) == [
        "base, states: Inputs were not read.",
        "sp, constant prompt: No such token.",
    ]
    bare = without_parts(cured, "It keeps no state.")
    assert not_measured(Diagnosis("", (bare,))) == [
        "sp, states: It keeps no state.",
        "Effective Remembrance: not requested.",
        "Long-short misalignment: not requested.",
        "Constant prompt: not requested.",
    ]
