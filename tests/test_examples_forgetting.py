"""The study of forgetting: the best one is found where it is known, as by a loop, and the page has its numbers."""

import json
import math
import statistics
import sys
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hf_recurrent_lengthgen import Forgetting, forgetting
from hf_recurrent_lengthgen.evaluation.files import read_result
from hf_recurrent_lengthgen.evaluation.results import DataRecord, DataSource
from hf_recurrent_lengthgen.evaluation.settings import EvaluationSettings
from hf_recurrent_lengthgen.models import StatefulMamba2Config as Config
from hf_recurrent_lengthgen.models import StatefulMamba2ForCausalLM as Model
from hf_recurrent_lengthgen.models.scan_forgetting import in_words
from hf_recurrent_lengthgen.models.state_value import LayerState, RecurrentState

sys.path.append(str(Path(__file__).parents[1] / "examples" / "forgetting"))
import forgetting_search
import scales
from forgetting_search import PAPER, ForgettingSearch, forgetting_grid, rule_of, search_forgetting

FOLDER = Path(__file__).parents[1] / "examples" / "forgetting"
SYMBOLS = 6
GRID = forgetting_grid((1.0, 0.99, 0.95, 0.8), (1.0, 0.5))


class Statistician(nn.Module):
    """Predicts each symbol as often as it has seen it, plus one; forgetting makes old symbols count less.

    Bayes' rule for symbols that are drawn independently with probabilities that never change: then forgetting can only
    hurt. Where they change, the past misleads it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.zeros(()))
        self.config = SimpleNamespace(vocab_size=SYMBOLS, forgetting=None, check_forgetting=lambda: None)

    def forward(
        self, input_ids: Tensor, initial_state: RecurrentState | None = None, output_final_state: bool = True
    ) -> SimpleNamespace:
        rule = Forgetting.of(self.config)
        seen = torch.zeros(len(input_ids), SYMBOLS) if initial_state is None else initial_state[0].recurrent
        logits = []
        for symbol in input_ids.T:
            seen = rule.retention * seen + rule.insertion * nn.functional.one_hot(symbol, SYMBOLS)
            logits.append((seen + 1).log())
        final = LayerState(seen, torch.zeros(len(input_ids), 0))
        return SimpleNamespace(logits=torch.stack(logits, 1), final_state=(final,))


def losses_by_counting(row: np.ndarray, rule: Forgetting) -> float:
    """Mean loss of a Statistician on a row, from the weights of all symbols before each."""
    total = 0.0
    for t in range(len(row) - 1):
        weights = rule.insertion * rule.retention ** np.arange(t, -1, -1.0)
        counts = np.bincount(row[: t + 1], weights, SYMBOLS) + 1
        total -= math.log(counts[row[t + 1]] / counts.sum())
    return total / (len(row) - 1)


@pytest.fixture
def steady() -> np.ndarray:
    """Symbols of one distribution: four texts of 401."""
    return np.random.default_rng(0).choice(SYMBOLS, (4, 401), p=[0.5, 0.3, 0.1, 0.05, 0.03, 0.02])


@pytest.fixture
def changing() -> np.ndarray:
    """One symbol for forty places, then another."""
    steps = np.random.default_rng(1).integers(1, SYMBOLS, (4, 11)).cumsum(1) % SYMBOLS
    return steps.repeat(40, axis=1)[:, :401]


def search(model: nn.Module, tokens: np.ndarray, **options: Any) -> ForgettingSearch:
    arguments = {"rules": GRID, "label": "toy", "data": DataRecord(DataSource("made up"))} | options
    reading = {name: arguments.pop(name) for name in ("batch_size", "chunk_length") if name in arguments}
    return search_forgetting(model, tokens, settings=EvaluationSettings(progress=False, **reading), **arguments)


def test_where_the_past_misleads_some_forgetting_is_best(changing: np.ndarray) -> None:
    found = search(Statistician(), changing)
    assert [rule_of(trial) for trial in found.trials] == GRID
    expected = {rule: [losses_by_counting(row, rule) for row in changing] for rule in GRID}
    for trial in found.trials:
        losses = expected[rule_of(trial)]
        assert trial.losses == pytest.approx(losses, rel=1e-5)
        assert trial.loss.mean == pytest.approx(np.mean(losses), rel=1e-5)
        assert trial.gain.mean == pytest.approx(np.mean(expected[Forgetting()]) - np.mean(losses), abs=1e-5)
    best = min(GRID, key=lambda rule: np.mean(expected[rule]))
    assert best.retention == 0.8
    assert rule_of(found.best) == best


def test_where_the_past_never_misleads_no_forgetting_is_best(steady: np.ndarray) -> None:
    found = search(Statistician(), steady)
    assert rule_of(found.best) == Forgetting()


def mamba2(**fields: Any) -> Model:
    torch.manual_seed(0)
    sizes = {"vocab_size": SYMBOLS, "hidden_size": 8, "num_heads": 2, "head_dim": 8, "state_size": 4, "n_groups": 1}
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return Model(Config(**sizes, **special, num_hidden_layers=2, **fields))


@pytest.mark.slow
def test_a_model_of_this_package_is_measured_under_each_setting_and_left_as_it_was(steady: np.ndarray) -> None:
    model = mamba2(forgetting={"insertion": 0.3})
    config = model.config
    settings = [PAPER, Forgetting(window=5), Forgetting(delta_scale=0.5)]
    found = search(model, steady, rules=settings, batch_size=3, chunk_length=50)
    assert model.config is config
    tokens = torch.from_numpy(steady)
    for trial, rule in zip(found.trials, [Forgetting(), *settings], strict=True):
        with forgetting(model, **rule._asdict()), torch.no_grad():
            logits = model(tokens[:, :-1]).logits
        nll = nn.functional.cross_entropy(logits.mT, tokens[:, 1:], reduction="none")
        assert trial.losses == pytest.approx(nll.mean(1).tolist(), rel=1e-5)
    assert len({trial.loss.mean for trial in found.trials}) == 4


def test_a_search_goes_on_where_it_stopped_and_ends_the_same(
    changing: np.ndarray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "search.json"
    whole = search(Statistician(), changing)
    count = 0

    def stops(*arguments: Any, **options: Any) -> Any:
        nonlocal count
        count += 1
        if count == 4:
            raise KeyboardInterrupt
        return original(*arguments, **options)

    original = forgetting_search.stream_nll
    monkeypatch.setattr(forgetting_search, "stream_nll", stops)
    with pytest.raises(KeyboardInterrupt):
        search(Statistician(), changing, file=file)
    assert [rule_of(trial) for trial in read_result(file, ForgettingSearch).trials] == GRID[:3]
    assert search(Statistician(), changing, file=file) == whole
    assert count == 4 + len(GRID) - 3
    assert read_result(file, ForgettingSearch) == whole
    with pytest.raises(ValueError, match="another model or on other texts"):
        search(Statistician(), changing[:, ::-1].copy(), file=file)


def test_the_grid_has_each_setting_once() -> None:
    grid = forgetting_grid((1.0, 0.9), (1.0, 0.5), windows=(8, 16), delta_scales=(0.5, 1.0))
    assert [in_words(rule) for rule in grid] == [
        "no forgetting",
        "insertion 0.5",
        "retention 0.9",
        "retention 0.9, insertion 0.5",
        "window 8",
        "window 16",
        "delta scale 0.5",
    ]
    assert PAPER in forgetting_grid()
    assert in_words(Forgetting(window=4096)) == "window 4,096"


@pytest.mark.slow
@pytest.mark.usefixtures("small_corpus")
def test_the_settings_are_compared(example: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    example("forgetting/run.py", "--tiny", "--output", out, "--seeds", 3)
    printed, text = capsys.readouterr().out, (out / "forgetting.md").read_text()
    assert text in printed
    assert (out / "forgetting.png").read_bytes().startswith(b"\x89PNG")
    stages = json.loads((out / "forgetting.json").read_text())["stages"]
    assert [found["3"]["setting"] for found in stages.values()][:2] == [
        "no forgetting",
        "retention 0.9999, insertion 0.75",
    ]
    assert len(text.splitlines()) == 2 * (2 + len(stages)) + 1 == 2 * (2 + 9) + 1
    searched = stages["rri_searched"]["3"]
    assert searched["setting"] == min(searched["search"], key=searched["search"].get)
    assert len(searched["search"]) == 6 * 4
    # a window is what the model sees anyway where the text is no longer than it
    for name, window in (("window_1", 16), ("window_4", 64)):
        kept, plain = stages[name]["3"]["nll"], stages["base"]["3"]["nll"]
        inside = sum(edge <= window for edge in kept["edges"][1:])
        assert kept["mean"][:inside] == plain["mean"][:inside]
        assert kept["mean"][inside:] != plain["mean"][inside:]


def test_the_tables_of_the_page_hold_the_numbers_of_the_result_file() -> None:
    page = (FOLDER / "README.md").read_text().partition("## Calibrated scales")[0]
    rows = [line for line in page.splitlines() if line.startswith("| ")]
    stages = json.loads((FOLDER / "forgetting.json").read_text())["stages"]
    tables = rows[2 : 2 + len(stages)], rows[-len(stages) :]
    for line, by_doubling, seeds in zip(*tables, stages.values(), strict=True):
        for quantity in ("harm_last", "in_window", "context_use"):
            mean = statistics.fmean(found[quantity]["mean"] for found in seeds.values())
            assert f"| {mean:{'+' if quantity == 'harm_last' else ''}.3f} " in line
        assert f"| {', '.join(seeds)} |" in line
        curves = [found["nll"] for found in seeds.values()]
        doublings = by_doubling.split(" | ")[1:]
        assert len(doublings) == 7  # 64 to 8,192
        for number, shown in enumerate(doublings):
            start = 64 * 2**number
            weights = [(b - a) * (start <= a < 2 * start) for a, b in pairwise(curves[0]["edges"])]
            means = [
                sum(w * x for w, x in zip(weights, curve["mean"], strict=True)) / sum(weights) for curve in curves
            ]
            assert shown.rstrip(" |") == f"{statistics.fmean(means):.3f}"


def test_the_table_of_scales_holds_the_numbers_of_its_file() -> None:
    results = json.loads((FOLDER / "scales.json").read_text())
    assert f"<!-- scales -->\n{scales.table(results)}<!-- end -->" in (FOLDER / "README.md").read_text()
    for arms in results.values():
        for arm, seeds in arms.items():
            by_chance = arm in ("delta_scale", "decay_scale", "state_passing")
            assert list(seeds) == (["0", "1", "2"] if by_chance else ["0"])


@pytest.mark.slow
@pytest.mark.usefixtures("small_corpus")
def test_scales_are_compared_with_training(example: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    example("forgetting/scales.py", "--tiny", "--output", tmp_path, "--seeds", 3, "--families", "gla")
    arms = json.loads((tmp_path / "scales.json").read_text())["gla"]
    assert list(arms) == ["base", "rri", "decay_scale", "state_passing"]  # no Delta, and insertion would do nothing
    assert arms["rri"]["3"]["rule"] == {"retention": 0.9999}
    assert len(arms["decay_scale"]["3"]["rule"]["decay_scale"]) == 2
    assert scales.table({"gla": arms}) in capsys.readouterr().out
    assert (tmp_path / "scales.png").read_bytes().startswith(b"\x89PNG")
