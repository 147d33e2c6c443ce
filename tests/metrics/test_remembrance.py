"""Effective Remembrance against one plain forward pass per start point, models with a known answer, and figures."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from scipy.spatial.distance import cityblock, cosine, jensenshannon
from scipy.special import rel_entr
from torch import Tensor, nn
from transformers import MambaConfig, MambaForCausalLM

from hf_recurrent_lengthgen import forgetting
from hf_recurrent_lengthgen.evaluation.files import read_result, write_result
from hf_recurrent_lengthgen.evaluation.results import Curve, Estimate
from hf_recurrent_lengthgen.evaluation.settings import EvaluationSettings
from hf_recurrent_lengthgen.hybrids import stateful
from hf_recurrent_lengthgen.metrics.remembrance.measure import (
    DISTANCES,
    Remembrance,
    effective_remembrance,
    remembrance_values,
    start_points,
)
from hf_recurrent_lengthgen.metrics.remembrance.summary import remembrance_figure
from hf_recurrent_lengthgen.metrics.repeated_token import ConstantPrompt, constant_prompt_figure
from hf_recurrent_lengthgen.models import StatefulGLAConfig, StatefulGLAForCausalLM
from hf_recurrent_lengthgen.models.state_value import LayerState, RecurrentState
from hf_recurrent_lengthgen.plotting.style import ROLE_COLORS
from tests.hybrids.tiny_models import tiny_model
from tests.llamas import tiny_llama
from tests.models.families import MAMBA, MAMBA2, build

VOCABULARY = 11
SPECIAL = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SMALL = {"hidden_size": 8, "num_hidden_layers": 2, "initializer_range": 0.5, **SPECIAL}

QUIET = EvaluationSettings(progress=False)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mamba2": lambda: build(MAMBA2, vocab_size=VOCABULARY),
    "mamba1": lambda: build(MAMBA, vocab_size=VOCABULARY),
    "gla": lambda: StatefulGLAForCausalLM(StatefulGLAConfig(num_heads=2, intermediate_size=16, **SMALL)),
    "llama, by its cache": lambda: tiny_llama(num_hidden_layers=2, initializer_range=0.5, vocab_size=VOCABULARY),
    "stock mamba, as a whole": lambda: MambaForCausalLM(MambaConfig(state_size=4, **SMALL)),
}


def small_model(name: str) -> Any:
    torch.manual_seed(0)
    return MODELS[name]().double().eval()


def token_ids(length: int, sequences: int = 2) -> np.ndarray:
    return np.random.default_rng(length).integers(3, VOCABULARY, (sequences, length))


def by_definition(model: Any, tokens: np.ndarray, length: int, starts: list[int]) -> np.ndarray:
    """Definition 3.3 with scipy's distances: one forward pass for each start point, (S, 3, n)."""
    values = np.empty((len(tokens), 3, len(starts)))
    for sequence, text in enumerate(torch.from_numpy(tokens[:, :length])):
        with torch.no_grad():
            q = [
                model(input_ids=text[None, start:]).logits[0, -1].double().softmax(-1).numpy()
                for start in [0, *starts]
            ]
        for index, cut in enumerate(q[1:]):
            bits = sum(rel_entr(p, (q[0] + cut) / 2).sum() / math.log(2) / 2 for p in (q[0], cut))
            values[sequence, :, index] = cityblock(q[0], cut) / 2, math.sqrt(max(bits, 0)), cosine(q[0], cut)
    return values


@pytest.mark.thinned(3)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("length", "starts"), [(7, [0, 1, 2, 3, 4, 5, 6]), (67, [13, 64, 66, 1])], ids=str)
def test_values_are_those_of_the_definition(name: str, length: int, starts: list[int]) -> None:
    model, tokens = small_model(name), token_ids(length + 2)
    expected = by_definition(model, tokens, length, starts)
    assert expected[:, 0, starts.index(1)].min() > 1e-5
    values = remembrance_values(model, tokens, length, starts, distances=tuple(DISTANCES), progress=False)
    np.testing.assert_allclose(values, expected, rtol=1e-6, atol=1e-7)
    backwards = remembrance_values(model, tokens, length, starts, distances=("cosine", "total_variation"))
    np.testing.assert_array_equal(backwards, values[:, [2, 0]])
    assert values.min() >= 0
    assert values.max() <= 1


@pytest.mark.thinned(3)
@pytest.mark.parametrize(("batch_size", "chunk_length"), [(1, 1), (4, 5), (7, None), (None, 3), (99, 99)])
def test_chunks_do_not_change_the_values(batch_size: int | None, chunk_length: int | None) -> None:
    for name in ("mamba2", "llama, by its cache"):
        model, tokens, starts = small_model(name), token_ids(17, 2), [0, 1, 7, 8, 16]
        values = remembrance_values(
            model, tokens, 17, starts, batch_size=batch_size, chunk_length=chunk_length, progress=False
        )
        np.testing.assert_allclose(values, by_definition(model, tokens, 17, starts)[:, :1], rtol=1e-6, atol=1e-7)


def test_values_of_a_hybrid_and_of_a_window_on_the_state() -> None:
    tokens, starts, model = token_ids(40), [0, 5, 30, 39], small_model("mamba2")
    with forgetting(model, window=6):
        values = remembrance_values(model, tokens, 40, starts, progress=False)
        np.testing.assert_allclose(values, by_definition(model, tokens, 40, starts)[:, :1], rtol=1e-6, atol=1e-7)
    model, tokens, starts = stateful(tiny_model("bamba")).eval(), token_ids(33), [0, 1, 16, 32]
    values = remembrance_values(model, tokens, 33, starts, chunk_length=5, progress=False)
    np.testing.assert_allclose(values, by_definition(model, tokens, 33, starts)[:, :1], rtol=1e-4, atol=1e-6)
    assert values[:, 0, 1].min() > 1e-5


def distances(p: Any, q: Any, dtype: torch.dtype = torch.float64) -> list[float]:
    return [float(distance(*(torch.as_tensor(x, dtype=dtype) for x in (p, q)))) for distance in DISTANCES.values()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_distances_of_equal_and_of_disjoint_predictions(dtype: torch.dtype) -> None:
    tiny = [1 - 2e-38, 1e-38, 1e-45, 0]  # the third one is subnormal in float32
    assert distances(tiny, tiny, dtype) == [0, 0, 0]
    assert distances([0.3, 0.7, 0, 0], [0, 0, 1e-38, 1], dtype) == pytest.approx([1, 1, 1], abs=1e-6)
    assert distances([1, 0], [1 - 1e-30, 1e-30], torch.float64)[0] == pytest.approx(5e-31)
    # The second token alone differs: its probability times log2 of it over its half, over 2.
    assert distances([1, 0], [1, 1e-30], dtype)[1] == pytest.approx(math.sqrt(0.5e-30), rel=1e-5)


@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 2e-6), (torch.float64, 1e-12)], ids=str)
def test_distances_are_those_of_scipy(dtype: torch.dtype, error: float) -> None:
    logits = torch.from_numpy(np.random.default_rng(3).normal(size=(2, 20, 5003))) * torch.logspace(-1, 2, 20)[:, None]
    p, q = logits.softmax(-1).to(dtype)  # from nearly uniform to one token, the others at 0 in float32
    assert float(p.min() == 0) == (dtype == torch.float32)
    for name, oracle in (
        ("total_variation", lambda a, b: cityblock(a, b) / 2),
        ("jensen_shannon", lambda a, b: jensenshannon(a, b, base=2)),
        ("cosine", cosine),
    ):
        expected = [oracle(a, b) for a, b in zip(p.double().numpy(), q.double().numpy(), strict=True)]
        np.testing.assert_allclose(DISTANCES[name](p, q), expected, rtol=error, atol=error)
        np.testing.assert_array_equal(DISTANCES[name](p, q), DISTANCES[name](q, p))


def test_distances_of_nearly_equal_predictions_do_not_cancel() -> None:
    p = torch.full((100,), 0.01, dtype=torch.float64)
    step = torch.tensor([1e-8, -1e-8], dtype=torch.float64).repeat(50)
    variation, shannon, angle = distances(p, p + step)
    assert variation == pytest.approx(5e-7, rel=1e-6)
    assert shannon == pytest.approx(1e-6 / math.sqrt(8 * math.log(2)), rel=1e-6)  # sum of step^2 / p / 8 nats
    assert angle == pytest.approx(5e-13, rel=1e-3)  # half the squared angle, |step| / |p| = 1e-7 / 0.1


class Shouter(nn.Module):
    """Is certain that the next token is the first one of the text."""

    def __init__(self) -> None:
        super().__init__()
        self.certainty = nn.Parameter(torch.tensor(1e4))
        self.config = SimpleNamespace(vocab_size=VOCABULARY)
        self.fed = 0

    def forward(
        self, input_ids: Tensor, initial_state: RecurrentState | None = None, output_final_state: bool = True
    ) -> SimpleNamespace:
        self.fed += input_ids.numel()
        first = torch.zeros(len(input_ids), 1) if initial_state is None else initial_state[0].recurrent
        first = torch.where(first == 0, input_ids[:, :1] + 1, first)  # 0 is: nothing read
        logits = nn.functional.one_hot(first.long() - 1, VOCABULARY) * self.certainty
        state = LayerState(first, torch.zeros(len(input_ids), 0))
        return SimpleNamespace(logits=logits.expand(-1, input_ids.shape[1], -1), final_state=(state,))


def test_a_model_that_shouts_its_first_token_remembers_all() -> None:
    tokens = token_ids(50)
    tokens[:, 0] = 0  # the others are from 3 on
    result = effective_remembrance(Shouter(), tokens, 12, QUIET, length=50, distances=("cosine", "jensen_shannon"))
    assert list(result.distances) == ["total_variation", "cosine", "jensen_shannon"]
    for values in result.distances.values():
        assert [value.mean for value in values] == pytest.approx([0.0] + [1.0] * (len(values) - 1), abs=1e-12)
    assert result.beyond_training == Estimate(1.0, 1.0, 1.0)


@pytest.mark.parametrize("sequences", [1, 3])
def test_each_start_point_reads_its_own_tail_and_nothing_else(sequences: int) -> None:
    model, starts = Shouter(), start_points(1024, 256)
    remembrance_values(model, token_ids(1024, sequences), 1024, starts, progress=False)
    assert model.fed == sequences * sum(1024 - start for start in starts)
    assert model.fed <= sequences * 1024 * 32.5 + sequences * 16


def test_default_start_points() -> None:
    points = start_points(8192, 2048)
    assert points[:64] == tuple(range(0, 8192, 128))
    assert points[64:] == (8128, 8160, 8176, 8184, 8188, 8190, 8191)
    assert sum(8192 - point for point in points) <= 33.5 * 8192
    assert start_points(5, 100) == (0, 1, 2, 3, 4)
    assert start_points(1000, 7, count=4) == (0, 250, 500, 750, 872, 936, 968, 984, 992, 993, 996, 998, 999)


def test_the_result_has_intervals_over_sequences_and_a_file_form(tmp_path: Any) -> None:
    model, tokens = small_model("mamba2"), token_ids(16, 3)
    result = effective_remembrance(model, tokens, 4, QUIET, starts=[12, 3, 0], distances=["jensen_shannon"])
    assert replace(result, others={}) == effective_remembrance(model, tokens, 4, QUIET, starts=[0, 3, 12])
    assert (result.length, result.starts, result.sequences) == (16, (0, 3, 12), 3)
    expected = by_definition(model, tokens, 16, [12])[:, :2, 0]
    for values, by_sequence in zip(result.distances.values(), expected.T, strict=True):
        half = 4.302653 * by_sequence.std(ddof=1) / math.sqrt(3)  # t table, 2 degrees of freedom
        found, mean = values[2], by_sequence.mean()
        np.testing.assert_allclose([found.mean, found.low, found.high], [mean, mean - half, mean + half], rtol=1e-5)
    assert result.beyond_training == result.at(12) == result.total_variation[2]
    assert {(metric, start, stop) for metric, start, stop, _ in result.bins()} == {
        (metric, start, 16) for metric in ("remembrance", "remembrance_jensen_shannon") for start in (0, 3, 12)
    }
    write_result(tmp_path / "remembrance.json", result)
    assert read_result(tmp_path / "remembrance.json", Remembrance) == result
    alone = effective_remembrance(model, tokens[:1], 4, QUIET, starts=[3])
    assert alone.at(3).low is None
    assert alone.beyond_training is None


def test_broken_predictions_are_named(counter_model: type, random_tokens: np.ndarray) -> None:
    model = counter_model(lambda count: torch.where(count < 90, 1.0, math.nan))
    message = r"The prediction after token 100 of sequence 0, read from token 0 on, is not finite"
    with pytest.raises(ValueError, match=message):
        remembrance_values(model, random_tokens, 100, [0, 50], progress=False)
    model = counter_model(lambda count: torch.where(count != 30, 1.0, math.inf))
    with pytest.raises(ValueError, match="after token 100 of sequence 0, read from token 70 on"):
        remembrance_values(model, random_tokens, 100, [0, 70], chunk_length=100, progress=False)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"starts": [100]}, r"different positions from 0 to 99, got \(100,\); without any token \(t = 100\)"),
        ({"starts": [3, 3]}, "different positions"),
        ({"length": 132}, r"\(3, 131\) are too few"),
        ({"distances": ["js"]}, "Distances must be some of total_variation, jensen_shannon, cosine; got js"),
    ],
    ids=str,
)
def test_unusable_arguments_are_refused(
    counter_model: type, random_tokens: np.ndarray, arguments: dict[str, Any], message: str
) -> None:
    model = counter_model(lambda count: 0.1 * count)
    with pytest.raises(ValueError, match=message):
        effective_remembrance(model, random_tokens, **{"training_length": 25, "settings": QUIET, **arguments})


STARTS = (0, 16, 32, 48, 60, 63)


def remembrance(values: Sequence[float], width: float | None = 0.05) -> Remembrance:
    """At 64 tokens of a model trained on 16."""
    estimates = (
        Estimate(v, None if width is None else v - width, None if width is None else v + width) for v in values
    )
    return Remembrance(16, 64, 1 if width is None else 8, 0.95, STARTS, tuple(estimates))


def prompt(factor: float = 2.0) -> ConstantPrompt:
    curve = Curve((0, 1, 4, 16, 64), (9.0, 2.0, 1.0, 5.0), None, None)
    return ConstantPrompt(13, 16, 64, curve, 2.0, 5.0, factor, 16)


PAIR = {"base": remembrance([0, 0.3, 0.4, 0.5, 0.6, 0.7]), "intervention": remembrance([0, 0, 0, 0.1, 0.2, 0.8])}


def test_lines_show_the_means_and_bands_the_intervals() -> None:
    axes = remembrance_figure(PAIR, ["base", "intervention"]).axes[0]
    for line, band, result, role in zip(
        axes.lines, axes.collections, PAIR.values(), ("base", "intervention"), strict=False
    ):
        assert list(line.get_xdata()) == [64 - start for start in STARTS]
        assert list(line.get_ydata()) == [value.mean for value in result.total_variation]
        assert line.get_color() == ROLE_COLORS[role]
        heights = band.get_paths()[0].vertices[:, 1]
        bounds = [bound for value in result.total_variation for bound in (value.low, value.high)]
        assert (heights.min(), heights.max()) == pytest.approx((min(bounds), max(bounds)))
    assert axes.get_ylim() == (0, 1)
    assert any(list(line.get_xdata()) == [16] * 2 for line in axes.lines)
    bold = [text for text in axes.texts if text.get_fontweight() == "bold"]
    order = [text.get_text() for text in sorted(bold, key=lambda text: text.get_position()[1])]
    assert order == ["intervention", "base"]


def test_each_distance_has_a_panel_with_the_models_that_have_it() -> None:
    base, intervention = PAIR.values()
    base = replace(
        base, others={"cosine": tuple(Estimate(value.mean / 4, None, None) for value in base.total_variation)}
    )
    figure = remembrance_figure({"base": base, "intervention": intervention}, ["base", "intervention"])
    variation, cosine = figure.axes
    assert [axes.get_title(loc="left").partition(" (")[2] for axes in figure.axes] == [
        "total variation)",
        "1 - cosine)",
    ]
    assert [axes.get_xlabel() for axes in figure.axes] == ["", "Length of the truncated context"]
    curve, mark = cosine.lines
    assert list(curve.get_ydata()) == [value.mean for value in base.others["cosine"]]
    assert (curve.get_color(), list(mark.get_xdata())) == (ROLE_COLORS["base"], [16, 16])
    assert [list(line.get_ydata()) for line in variation.lines[:2]] == [
        [value.mean for value in result.total_variation] for result in PAIR.values()
    ]
    assert (variation.get_ylim(), cosine.get_ylim()) == ((0, 1), pytest.approx((0, 0.2)))


def test_one_sequence_has_no_band() -> None:
    axes = remembrance_figure({"one": remembrance([0, 0.1, 0.1, 0.2, 0.2, 0.3], None)}, ["other"]).axes[0]
    assert not axes.collections
    assert axes.get_ylim() == pytest.approx((0, 0.4))


def test_the_prompt_s_curve_and_its_limit() -> None:
    axes = constant_prompt_figure({"base": prompt(), "other": prompt(3.0)}, ["base", "other"]).axes[0]
    curve, limit = axes.lines[:2]
    np.testing.assert_allclose(curve.get_xdata(), [math.sqrt(2 * 4), math.sqrt(5 * 16), math.sqrt(17 * 64)])
    assert list(curve.get_ydata()) == [2.0, 1.0, 5.0]
    assert (list(limit.get_xdata()), list(limit.get_ydata())) == ([16, 64], [4, 4])
    assert list(axes.lines[3].get_ydata()) == [6, 6]
    assert "3x the highest inside" in [text.get_text() for text in axes.texts]
