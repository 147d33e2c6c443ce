"""Decays, comparison and merging, against the recurrence itself."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_recurrent_lengthgen.models.forgetting_switch import forgetting
from hf_recurrent_lengthgen.readings import (
    Reading,
    compare_readings,
    load_reading,
    merge_readings,
    read_text,
    save_reading,
    without_attention,
)
from hf_recurrent_lengthgen.readings.merging import MERGINGS
from tests.models.families import DELTA_NET, FAMILIES, GLA, HGRN2, MAMBA2, Family, build, random_state, random_tokens
from tests.readings.test_reading import hybrid, text
from tests.versions import needs_hybrids


def one_layer(family: Family, **changes: Any) -> Any:
    return build(family, torch.float64, num_hidden_layers=1, **changes).eval()


def reading(model: Any, tokens: Tensor, **options: Any) -> Reading:
    return read_text(model, tokens, record_decays=True, **options)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_decay_and_state_are_the_affine_map_of_a_text(family: Family, tmp_path: Path) -> None:
    model, tokens = one_layer(family), random_tokens(2, 13)
    read = reading(model, tokens, chunk_length=4)
    save_reading(tmp_path / "reading", read)
    loaded = load_reading(tmp_path / "reading", model)
    [decay] = loaded.decays
    start = random_state(model, 2)
    start = tuple(layer._replace(conv=torch.zeros_like(layer.conv)) for layer in start)
    with torch.no_grad():
        expected = model(tokens, initial_state=start).final_state[0].recurrent
    found = decay.of(start[0].recurrent) + loaded.state[0].recurrent
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("family", "changes"), [(GLA, {}), (HGRN2, {}), (DELTA_NET, {"use_short_conv": False})])
def test_texts_in_order_are_one_text_for_a_layer_without_convolution(family: Family, changes: dict[str, Any]) -> None:
    model, tokens = one_layer(family, **changes), random_tokens(1, 30)
    assert model.state_shapes()[0].conv == (0,)
    parts = [reading(model, piece) for piece in tokens.split((11, 7, 12), dim=1)]
    merged = merge_readings(parts, "order")
    whole = reading(model, tokens)
    torch.testing.assert_close(merged.state, whole.state, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(merged.decays[0].factor, whole.decays[0].factor, rtol=1e-9, atol=1e-9)
    assert (merged.position, merged.prefix, merged.metadata) == (30, "", {"merged": "order"})
    assert max(*compare_readings(whole, merged)[0]) < 1e-9


def test_cyclic_and_all_are_means_over_orders() -> None:
    model = build(MAMBA2, torch.float64).eval()
    one, two, three = (reading(model, random_tokens(1, 9, seed=seed)) for seed in range(3))

    def ordered(*readings: Reading) -> Tensor:
        return merge_readings(readings, "order").state[1].recurrent

    cyclic = (ordered(one, two, three) + ordered(two, three, one) + ordered(three, one, two)) / 3
    torch.testing.assert_close(merge_readings([one, two, three], "cyclic").state[1].recurrent, cyclic)
    every = cyclic / 2 + (ordered(one, three, two) + ordered(three, two, one) + ordered(two, one, three)) / 6
    for order in ((one, two, three), (three, one, two)):  # no order is told apart
        torch.testing.assert_close(merge_readings(order, "all").state[1].recurrent, every)
    mean = (one.state[0].conv + two.state[0].conv) / 2
    torch.testing.assert_close(merge_readings([one, two]).state[0].conv, mean)
    torch.testing.assert_close(merge_readings([one, two], "sum").state[0].conv, 2 * mean)
    for how in MERGINGS:
        torch.testing.assert_close(merge_readings([one], how).state, one.state)


def test_a_text_shorter_than_the_convolution_leaves_columns_of_the_text_before() -> None:
    model, tokens = one_layer(MAMBA2), random_tokens(1, 9)
    parts = [reading(model, piece) for piece in tokens.split((8, 1), dim=1)]
    merged = merge_readings(parts, "order")
    torch.testing.assert_close(merged.state[0].conv, reading(model, tokens).state[0].conv)


def test_distances_are_relative_to_the_first_reading() -> None:
    model = build(MAMBA2).eval()
    read = read_text(model, random_tokens(1, 9))
    state = (read.state[0]._replace(recurrent=read.state[0].recurrent * 1.5), *read.state[1:])
    first, second = compare_readings(read, replace(read, state=state))
    assert first == pytest.approx((0.5, 0.0))
    assert second == (0.0, 0.0)
    zero = replace(read, state=model.zero_state(1))
    assert compare_readings(zero, zero)[0] == (0.0, 0.0)
    assert compare_readings(zero, read)[0].recurrent == float("inf")


def test_what_cannot_be_merged_is_refused() -> None:
    model = build(MAMBA2).eval()
    plain, recorded = read_text(model, random_tokens(1, 9)), reading(model, random_tokens(1, 9))
    with pytest.raises(ValueError, match="record_decays=True"):
        merge_readings([plain, plain], "order")
    assert merge_readings([plain, recorded], "order").decays == ()  # the first one needs none
    with pytest.raises(ValueError, match="got 'best'"):
        merge_readings([recorded], "best")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match='8 readings have 40,320 orders: use "cyclic"'):
        merge_readings([recorded] * 8, "all")
    with pytest.raises(ValueError, match="at least one"):
        merge_readings([])
    other = read_text(build(MAMBA2, seed=1), random_tokens(1, 9))
    for function in (lambda: merge_readings([plain, other]), lambda: compare_readings(plain, other)):
        with pytest.raises(ValueError, match="models with different weights"):
            function()
    with forgetting(model, window=4):
        windowed = read_text(model, random_tokens(1, 9))
        with pytest.raises(ValueError, match="made to forget"):
            reading(model, random_tokens(1, 9))
    with pytest.raises(ValueError, match="with a window cannot be merged"):
        merge_readings([windowed, windowed])


@needs_hybrids
def test_hybrids_merge_by_their_mean_without_keys() -> None:
    model = hybrid("falcon_h1")
    one, two = read_text(model, text(9)), read_text(model, text(9, seed=4))
    with pytest.raises(ValueError, match="cannot be merged, since they stand at the same positions"):
        merge_readings([one, two])
    merged = merge_readings([without_attention(one), without_attention(two)])
    torch.testing.assert_close(merged.state[0].recurrent, (one.state[0].recurrent + two.state[0].recurrent) / 2)
    with pytest.raises(ValueError, match="cannot be recorded"):
        read_text(model, text(9), record_decays=True)


def test_a_learned_state_is_not_counted_for_each_text() -> None:
    model, tokens = one_layer(GLA), random_tokens(1, 10)
    model.add_learned_state("one", random_state(model, 1))
    read = [reading(model, piece) for piece in tokens.split(5, dim=1)]
    merge_readings(read, "mean")
    for how in ("sum", "order", "cyclic", "all"):
        with pytest.raises(ValueError, match=f'start from a learned state, which how="{how}" would count more than'):
            merge_readings(read, how)  # type: ignore[arg-type]
    with model.learned_states.disable_adapter():
        merge_readings([reading(model, piece) for piece in tokens.split(5, dim=1)], "order")


@needs_hybrids
def test_states_with_scales_of_their_own_are_not_averaged() -> None:
    readings = [read_text(hybrid("xlstm"), text(5, seed)) for seed in (1, 2)]
    for how in MERGINGS:
        with pytest.raises(ValueError, match="States of xlstm cannot be merged"):
            merge_readings(readings, how)
