"""The study of scaling laws runs in miniature, and its README holds its results."""

import math
import re
import sys
from collections.abc import Iterator
from dataclasses import is_dataclass
from itertools import islice, pairwise, takewhile
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
def test_the_study_runs(example: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "out"
    example("scaling_laws/run.py", "--quick", "--output", output, "--seeds", 3)
    printed = capsys.readouterr().out
    assert printed.count("seed=3: ") == 2 * 3 + 3
    tables = (output / "tables.md").read_text()
    assert tables in printed
    for name, sizes, lengths in (("forget", 2, (16, 64, 128)), ("recall", 3, (128,))):
        law = read_result(output / f"{name}.json", Law)
        assert [threshold.tried for threshold in law.thresholds] == [lengths] * sizes
        assert (output / f"{name}.png").read_bytes().startswith(b"\x89PNG")


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


def test_the_readme_holds_the_results(modules: dict[str, Any]) -> None:
    kept = modules["ArmResults"](FOLDER, "runs")
    results = [kept.get(*arm) for arm in kept.arms()]
    readme = (FOLDER / "README.md").read_text()
    for name, table in modules["tables"](results).items():
        assert f"<!-- {name} -->\n{table}<!-- end -->" in readme
    for name in ("forget", "recall"):
        law, _ = modules[name](results)
        stored = read_result(FOLDER / f"{name}.json", Law)
        # the fit is computed anew, and every processor rounds its own way
        assert dict(leaves(stored)) == pytest.approx(dict(leaves(law)))

    # One cell of each table, from the numbers of the run.
    text = next(r for r in results if r["run"]["task"] == "text" and r["run"]["length"] == 8)
    bins = list(zip(pairwise(text["edges"]), text["mean"], strict=True))
    inside = max(loss for (start, stop), loss in bins if start >= 1 and stop <= 8)
    beyond = max(loss for (start, _), loss in bins if start >= 8)
    row = f"| {text['run']['state_size']} | {text['state_elements']:,} | {text['run']['seed']} |"
    assert f"{row} {beyond / inside:.2f} |" in readme
    needles = [r for r in results if (r["run"]["task"], r["run"]["state_size"]) == ("needle", 4)]
    reach = []
    for needle in needles:
        shares = sorted((int(length), share) for length, share in needle["accuracy"].items())
        reach.append(max((length for length, _ in takewhile(lambda each: each[1] >= 0.95, shares)), default=0))
    cells = [f"{length:,}" if length else "< 8" for length in sorted(reach)]
    row = f"| 4 | {needles[0]['state_elements']:,} | {', '.join(cells)} | {cells[(len(cells) - 1) // 2]} |"
    assert row in readme


def leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """The numbers and words of a result, each with its place."""
    if is_dataclass(value):
        value = vars(value)
    if isinstance(value, dict | tuple):
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(part, f"{name}.{key}")
        yield f"{name}.parts", len(value)
    else:
        yield name, value
