"""Statistics of states and of the inputs of recurrences, against a loop over tokens in float64."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import softplus
from transformers import AutoModelForCausalLM, Mamba2Config, MambaConfig

from hf_recurrent_lengthgen import forgetting, load_model
from hf_recurrent_lengthgen.evaluation.streaming import stream_nll
from hf_recurrent_lengthgen.hybrids import stateful
from hf_recurrent_lengthgen.metrics.maps.measure import attention_maps
from hf_recurrent_lengthgen.metrics.states.trajectory import StateObserver, sample_positions
from tests.hybrids.tiny_models import tiny_model
from tests.models.families import (
    DECAYING,
    FAMILIES,
    GLA,
    HGRN2,
    LINEAR_ATTENTION,
    MAMBA,
    MAMBA2,
    MAMBA3,
    RWKV5,
    RWKV6,
    Family,
    build,
    random_tokens,
    variant_id,
)

SEQUENCES, LENGTH = 3, 20
POSITIONS = (1, 2, 3, 9, 16, 17, 20)
CASES = [
    *((family, "default") for family in FAMILIES),
    (MAMBA2, "own state size in each layer"),
    (GLA, "short convolutions, gelu, grouped heads"),
    (HGRN2, "short convolutions, no bounds"),
]


def made(family: Family, variant: str = "default", dtype: torch.dtype = torch.float64) -> Any:
    return build(family, dtype, **family.variants.get(variant, {}))


def observed(model: Any, tokens: Tensor, positions: tuple[int, ...] = POSITIONS, **options: Any) -> Any:
    observer = StateObserver(model, len(tokens), positions)
    with observer:
        stream_nll(model, tokens, observer=observer, progress=False, **options)
    return observer.trajectory()


def states_by_token(family: Family, model: Any, tokens: Tensor) -> list[Any]:
    """The state after each token, from the family's equations."""
    state, states = model.zero_state(len(tokens)), []
    with torch.no_grad():
        embedded = model.get_input_embeddings()(tokens)
        for t in range(tokens.shape[1] - 1):
            _, state = family.loop(model, embedded[:, t : t + 1], state)
            states.append(state)
    return states


def units_of(recurrent: np.ndarray) -> np.ndarray:
    """(S, U, E): heads as they are, channels in 16 groups (of 2 in the tiny models)."""
    return recurrent.reshape(len(recurrent), recurrent.shape[1] if recurrent.ndim == 4 else 16, -1)


@pytest.mark.thinned(3)
@pytest.mark.parametrize(("family", "variant"), CASES, ids=variant_id)
def test_statistics_are_those_of_the_states_after_each_token(family: Family, variant: str) -> None:
    model, tokens = made(family, variant), random_tokens(SEQUENCES, LENGTH + 1)
    states = states_by_token(family, model, tokens)
    trajectory = observed(model, tokens, batch_size=2, chunk_length=6)
    assert trajectory.positions == POSITIONS
    for place, position in enumerate(POSITIONS):
        for found, state in zip(trajectory.layers, states[position - 1], strict=True):
            units = units_of(state.recurrent.numpy())
            np.testing.assert_allclose(found.recurrent.mean[place], units.mean(-1), atol=1e-9)
            np.testing.assert_allclose(found.recurrent.variance[place], units.var(-1), atol=1e-9)
            index = np.abs(units).argmax(-1)
            extreme = np.take_along_axis(units, index[..., None], -1)[..., 0]
            np.testing.assert_allclose(found.recurrent.extreme[place], extreme, atol=1e-9)
            np.testing.assert_allclose(found.sketch[place] @ found.masses, units.mean(-1), atol=1e-5)
            assert (found.conv is None) == (not state.conv[0].numel())


def test_convolution_states_are_distinguished_by_part() -> None:
    tokens = random_tokens(SEQUENCES, LENGTH + 1)
    model = made(MAMBA2)
    found: Any = observed(model, tokens).layers[1].conv
    state = states_by_token(MAMBA2, model, tokens)[-1][1].conv.numpy()
    for part, channels in enumerate((slice(0, 32), slice(32, 42), slice(42, 52))):  # 4 heads of 8, 2 groups of 5
        np.testing.assert_allclose(found.mean[-1, :, part], state[:, channels].mean((1, 2)), atol=1e-9)
        np.testing.assert_allclose(found.variance[-1, :, part], state[:, channels].var((1, 2)), atol=1e-9)
        values = np.abs(state[:, channels]).reshape(SEQUENCES, -1)
        np.testing.assert_allclose(np.abs(found.extreme[-1, :, part]), values.max(1), atol=1e-9)
    parts = {family.name: observed(made(family), tokens).layers[0].conv_parts for family in (MAMBA, RWKV6, GLA)}
    assert parts == {"mamba": ("x",), "rwkv6": ("time mixing", "channel mixing"), "gla": ()}
    short = made(GLA, "short convolutions, gelu, grouped heads")
    assert observed(short, tokens).layers[0].conv_parts == ("q", "k", "v")


def decays_and_writes(model: Any, tokens: Tensor, layer: int) -> tuple[np.ndarray, np.ndarray]:
    """alpha_t and what token t writes, (L, S, ...) in a layer: its state is linear in where it began, and nothing it
    is fed depends on it."""

    def states(offset: float) -> np.ndarray:
        state, found = list(model.zero_state(len(tokens))), []
        state[layer] = state[layer]._replace(recurrent=state[layer].recurrent + offset)
        carried = tuple(state)
        for t in range(tokens.shape[1] - 1):
            with torch.no_grad():
                carried = model(tokens[:, t : t + 1], initial_state=carried).final_state
            found.append(carried[layer].recurrent)
        return np.stack([part.numpy() for part in found])

    from_zero, from_one = states(0.0), states(1.0)
    products = from_one - from_zero
    before = np.concatenate([np.ones_like(products[:1]), products[:-1]])
    decays = products / before
    history = np.concatenate([np.zeros_like(from_zero[:1]), from_zero[:-1]])
    return decays, from_zero - decays * history


@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    ("family", "variant"),
    [*((family, "default") for family in DECAYING), (GLA, "short convolutions, gelu, grouped heads")],
    ids=variant_id,
)
@pytest.mark.parametrize("layer", [0, 1])
def test_retention_is_the_product_of_the_decays_after_the_first_token(
    family: Family, variant: str, layer: int
) -> None:
    model, tokens = made(family, variant), random_tokens(SEQUENCES, 10)
    positions = (1, 2, 5, 9)
    decays, _ = decays_and_writes(model, tokens, layer)
    inputs: Any = observed(model, tokens, positions, batch_size=2, chunk_length=3).layers[layer].inputs
    before = 0
    for place, position in enumerate(positions):
        kept = units_of(decays[1:position].prod(0))
        np.testing.assert_allclose(np.exp(inputs.log_retention[place]), kept.mean(-1), rtol=1e-8)
        logs = np.log(decays[before:position]).mean(0)
        np.testing.assert_allclose(inputs.log_decay[place], units_of(logs).mean(-1), rtol=1e-5, atol=1e-12)
        before = position


@torch.no_grad()
def test_retention_of_mamba_3_is_what_is_left_of_the_norm_of_a_state() -> None:
    """Rotations keep norms."""
    model, tokens = made(MAMBA3), random_tokens(SEQUENCES, 10)
    zero = model.zero_state(SEQUENCES)
    one = (*zero[:1], zero[1]._replace(recurrent=zero[1].recurrent + 1))

    def norms(length: int) -> np.ndarray:
        states = [model(tokens[:, :length], initial_state=start).final_state[1].recurrent for start in (zero, one)]
        return (states[1] - states[0]).norm(dim=(2, 3)).numpy()

    inputs: Any = observed(model, tokens, (1, 4, 9)).layers[1].inputs
    for place, length in enumerate((1, 4, 9)):
        np.testing.assert_allclose(np.exp(inputs.log_retention[place]), norms(length) / norms(1), rtol=1e-8)


@pytest.mark.parametrize("family", [MAMBA2, GLA, HGRN2, LINEAR_ATTENTION, RWKV6, RWKV5], ids=variant_id)
def test_norms_of_keys_and_values_and_steps_make_up_what_is_written(family: Family) -> None:
    model, tokens = made(family), random_tokens(SEQUENCES, 5)
    _, writes = decays_and_writes(model, tokens, 1)
    inputs: Any = observed(model, tokens, (1, 2, 3, 4)).layers[1].inputs
    # a write is an outer product, whose norm is the product of the norms
    found = inputs.key * inputs.value * (1 if inputs.step is None else inputs.step)
    np.testing.assert_allclose(found, np.linalg.norm(writes, axis=(-2, -1)), rtol=1e-6)
    assert (inputs.step is None) == (family is not MAMBA2)


def test_steps_keys_and_values_are_what_the_modules_compute() -> None:
    model, tokens = made(MAMBA), random_tokens(SEQUENCES, 5)
    mixer, seen = model.backbone.layers[1].mixer, {}
    for name in ("x_proj", "dt_proj"):
        mixer.get_submodule(name).register_forward_hook(
            lambda _, args, out, name=name: seen.__setitem__(name, (args[0], out))
        )
    with torch.no_grad():
        model(tokens[:, :-1])
    N = mixer.state_size
    means = {
        "value": units_of(seen["x_proj"][0].abs().mean(1).numpy()).mean(-1),
        "step": units_of(softplus(seen["dt_proj"][1]).mean(1).numpy()).mean(-1),
        "key": np.repeat(seen["x_proj"][1][..., -2 * N : -N].norm(dim=-1).mean(1).numpy()[:, None], 16, 1),
    }
    inputs: Any = observed(model, tokens, (4,)).layers[1].inputs
    for name, expected in means.items():
        np.testing.assert_allclose(getattr(inputs, name)[0], expected, rtol=1e-8)


def test_retention_over_long_streams_does_not_underflow() -> None:
    model = made(MAMBA2, dtype=torch.float32)
    tokens = random_tokens(1, 5001)
    inputs: Any = observed(model, tokens, (1, 100, 5000)).layers[0].inputs
    assert float(inputs.log_retention[-1].min()) < -800  # exp is 0 there
    np.testing.assert_allclose(
        inputs.log_retention[-1] - inputs.log_retention[-2], 4900 * inputs.log_decay[-1], rtol=1e-6
    )


def test_the_sketch_holds_means_of_neighbours_among_the_sorted_elements() -> None:
    model = made(MAMBA2, "own state size in each layer")  # 8 * 12 elements: all of them are sketched
    tokens = random_tokens(2, 9)
    layer: Any = observed(model, tokens, (8,)).layers[0]
    state = states_by_token(MAMBA2, model, tokens)[-1][0].recurrent.numpy().reshape(2, 4, -1)
    counts = np.round(layer.masses * 96).astype(int)
    assert counts.sum() == 96
    ordered, start = np.sort(state, -1), 0
    for group, count in enumerate(counts):
        np.testing.assert_allclose(
            layer.sketch[0, ..., group], ordered[..., start : start + count].mean(-1), rtol=1e-5
        )
        start += count


SOFTMAX = "softmax attention"
STOCK: dict[str, Any] = {
    "mamba2": (Mamba2Config, {"num_heads": 4, "head_dim": 8, "n_groups": 2, "time_step_limit": (0.2, 0.7)}),
    "mamba": (MambaConfig, {"time_step_rank": 3}),
}


@pytest.mark.parametrize("model_type", STOCK)
def test_wrapped_models_of_transformers_have_the_inputs_of_our_classes(model_type: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config_class, sizes = STOCK[model_type]
    config = config_class(vocab_size=29, hidden_size=16, num_hidden_layers=2, state_size=5, **sizes)
    stock = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    stock.save_pretrained(tmp_path)
    tokens = random_tokens(2, 21)
    found, expected = observed(stateful(stock), tokens), observed(load_model(str(tmp_path)), tokens)
    for layer, ours in zip(found.layers, expected.layers, strict=True):
        np.testing.assert_allclose(layer.recurrent.mean, ours.recurrent.mean, atol=1e-6)
        for values, ours_values in zip(layer.inputs, ours.inputs, strict=True):
            np.testing.assert_allclose(values, ours_values, rtol=1e-4)
    assert not any(module._forward_pre_hooks for module in stock.modules())
    maps, our_maps = (attention_maps(model, tokens[0]) for model in (stock, load_model(str(tmp_path))))
    for map_, our_map in zip(maps.layers, our_maps.layers, strict=True):
        assert map_.kind == our_map.kind
        np.testing.assert_allclose(map_.average, our_map.average, atol=1e-6)


@pytest.mark.parametrize(
    ("model_type", "known", "kind"),
    [("zamba", [], None), ("qwen3_next", [], "delta rule"), ("jamba", [0, 2], "Mamba-1")],
)
def test_hybrids_have_inputs_in_their_mamba_layers(model_type: str, known: list[int], kind: str | None) -> None:
    model, tokens = stateful(tiny_model(model_type)), random_tokens(2, 9)
    layers = observed(model, tokens, (1, 4, 8)).layers
    assert [index for index, layer in enumerate(layers) if layer.inputs is not None] == known
    if kind is not None:
        assert [layer.kind for layer in attention_maps(model, tokens[0]).layers] == [kind, SOFTMAX, kind]
        return
    with pytest.raises(ValueError, match=r"The layers \[0, 1, 2\] of .* have no attention maps"):
        attention_maps(model, tokens[0])


def test_a_model_that_forgets_has_no_inputs_and_a_plain_one_no_recorder_left() -> None:
    model, tokens = made(MAMBA2), random_tokens(2, 9)
    with forgetting(model, retention=0.9):
        assert observed(model, tokens, (8,)).layers[0].inputs is None
    without = StateObserver(model, 2, (8,))
    stream_nll(model, tokens, observer=without, progress=False)
    assert without.trajectory().layers[0].inputs is None


@pytest.mark.parametrize(
    ("length", "training_length", "expected"),
    [
        (1024, 64, (1, 2, 4, 8, 16, 32, 40, 48, 56, 64, 91, 128, 181, 256, 362, 512, 724, 1024)),
        (50, 64, (1, 2, 4, 8, 16, 32, 40, 48, 50)),
        (3, 1, (1, 2, 3)),
    ],
)
def test_positions(length: int, training_length: int, expected: tuple[int, ...]) -> None:
    assert sample_positions(length, training_length) == expected


def test_a_text_that_was_not_read_to_its_end_is_refused() -> None:
    model, tokens = made(MAMBA2), random_tokens(2, 9)
    observer = StateObserver(model, 2, (4, 9))
    stream_nll(model, tokens, observer=observer, chunk_length=20, progress=False)
    with pytest.raises(ValueError, match="Sequence 0 was not read to position 9"):
        observer.trajectory()
