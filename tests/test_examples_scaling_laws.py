"""The study of scaling laws runs in miniature, and its README holds its results."""

import math
import re
import sys
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hf_recurrent_lengthgen.evaluation.files import read_result
from hf_recurrent_lengthgen.models.state_value import LayerState

sys.path.append(str(Path(__file__).parents[1] / "examples" / "scaling_laws"))
from law import Law

FOLDER = Path(__file__).parents[1] / "examples" / "scaling_laws"


@pytest.fixture
def modules(example: Any) -> Any:
    """Names of run.py."""
    return example("scaling_laws/run.py")


@pytest.mark.slow
@pytest.mark.usefixtures("small_corpus")
def test_the_runs_without_a_mimetic_start_take_the_best_rate(
    example: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--tiny", "--sizes", "4", "--lengths", "16", "64", "--seeds", "0", "--results", tmp_path]
    example("scaling_laws/forgetting.py", *arguments)
    printed = capsys.readouterr().out
    losses = dict(re.findall(r"T=64 seed=0 lr=(\S+): loss (\S+),", printed))
    assert set(losses) == {"0.003", "0.01", "0.03"}
    best = min(losses, key=lambda rate: float(losses[rate]))
    assert printed.count("T=16 seed=0 lr=") == printed.count(f"T=16 seed=0 lr={best}:") == 1
    assert f"| {best} | 0 | " in printed
    assert read_result(tmp_path / "law.json", Law).thresholds[0].tried == (16, 64)


@pytest.mark.usefixtures("modules")
def test_rows_go_on_with_the_text_and_the_state_of_the_step_before(monkeypatch: pytest.MonkeyPatch) -> None:
    training = sys.modules["training"]
    monkeypatch.setattr(training, "_text", lambda _: torch.arange(500))
    given: list[tuple[list[int], Any]] = []

    class Counting(torch.nn.Module):
        """Its state is the last byte that each row has read."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(()))

        def forward(self, input_ids: torch.Tensor, initial_state: Any = None, **_: Any) -> SimpleNamespace:
            given.append((input_ids[:, 0].tolist(), initial_state and initial_state[0].recurrent.tolist()))
            final = (LayerState(input_ids[:, -1].float(), torch.zeros(len(input_ids), 0)),)
            return SimpleNamespace(logits=torch.zeros(*input_ids.shape, 500) * self.weight, final_state=final)

    run = training.Run("text", state_size=4, length=8, seed=0, tokens=16, chunks=3)
    losses = training._text_losses(Counting(), run, torch.Generator().manual_seed(0))
    assert all(loss.item() == pytest.approx(math.log(500)) for loss in islice(losses, 6))
    for first in (0, 3):
        starts, state = given[first]
        assert state is None
        for number in (1, 2):
            begins, carried = given[first + number]
            assert begins == [start + 8 * number for start in starts]
            assert carried == [begin - 1 for begin in begins]
    assert given[0][0] != given[3][0]


@pytest.mark.usefixtures("modules")
def test_a_needle_stands_where_it_should_and_is_the_answer() -> None:
    training = sys.modules["training"]
    places = torch.tensor([0, 5, 17])
    rows, values = training.needle_rows(20, places, torch.Generator().manual_seed(0))
    assert rows.shape == (3, 20)
    assert (rows == training.MARK).nonzero().tolist() == [[0, 0], [1, 5], [2, 17]]
    assert rows[:, -1].tolist() == [training.QUESTION] * 3
    assert (rows == training.QUESTION).sum() == 3
    assert values.tolist() == [int(row[place + 1]) for row, place in zip(rows, places, strict=True)]
    assert int(values.max()) < training.VALUES
