"""A metric that one file defines is measured, kept, drawn, reported and carded, with no other file touched."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

from hf_recurrent_lengthgen.checkpoints.cards import build_card
from hf_recurrent_lengthgen.cli.main import main
from hf_recurrent_lengthgen.evaluation.files import read_result
from hf_recurrent_lengthgen.evaluation.json_schema import document, from_json, to_json
from hf_recurrent_lengthgen.evaluation.measurement import Measurement
from hf_recurrent_lengthgen.evaluation.results import PartResult, Role
from hf_recurrent_lengthgen.metrics.diagnosis.result import Diagnosis
from hf_recurrent_lengthgen.metrics.part import Part, Picture
from hf_recurrent_lengthgen.metrics.parts import PARTS
from hf_recurrent_lengthgen.plotting.style import new_axes
from tests.cli.conftest import checkpoint, text_file

__all__ = ["checkpoint", "text_file"]


@document("toy_entropy")
@dataclass(frozen=True)
class ToyEntropy(PartResult):
    """Entropy of the first predictions of the first text, in nats."""

    entropies: tuple[float, ...]


@torch.no_grad()
def measured(task: Measurement) -> ToyEntropy:
    if task.training_length > 8:
        raise ValueError("The toy reads 8 tokens at most.")

    def compute() -> ToyEntropy:
        ids = torch.from_numpy(task.tokens[:1, : task.training_length].astype(np.int64))
        log_p = task.reader.read(ids)[0].log_softmax(-1)
        return ToyEntropy(tuple((-log_p.exp() * log_p).sum(-1)[0].tolist()))

    return task.kept("toy entropy", ToyEntropy, compute)


def toy_figure(results: Mapping[str, ToyEntropy], roles: Sequence[Role], unit: str) -> Figure:
    figure, axes = new_axes(f"Entropy (nats per {unit})")
    for found in results.values():
        axes.plot(found.entropies)
    return figure


TOY = Part(
    name="toy entropy",
    title="Toy entropy",
    summary="how undecided the first predictions are",
    compute=measured,
    section="How undecided it is",
    texts=lambda found, unit: (f"Its first prediction has {found.entropies[0]:.3f} nats per {unit}.",),
    facts=lambda found: {"First entropy": f"{found.entropies[0]:.2f} nats"},
    pictures={"toy_entropy": Picture(toy_figure, "A line.")},
    definitions=lambda found: ("Entropy is minus the mean of log p.",),
)


@pytest.fixture
def listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PARTS, TOY.name, TOY)


def diagnose(checkpoint: Path, text: Path, output: Path, training_length: int = 8) -> int:
    options = ["--data", text, "--split", "train", "--sequences", 3, "--length", 64, "--output", output]
    further = ["--training-length", training_length, "--parts", "toy entropy, misalignment"]
    return main(["diagnose", str(checkpoint), *map(str, [*options, *further])])


def words(html: str) -> str:
    return re.sub(r"\s+", " ", re.sub(r"<(style|svg).*?</\1>|<[^>]*>", " ", html, flags=re.DOTALL))


@pytest.mark.slow
@pytest.mark.usefixtures("listed")
def test_a_metric_of_one_file_is_everywhere(
    checkpoint: Path, text_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert diagnose(checkpoint, text_file, out) == 0
    plain: Any = json.loads((out / "result.json").read_text())
    stored = plain["models"][0]["parts"]["toy entropy"]
    assert (stored["kind"], stored["schema_version"], len(stored["entropies"])) == ("toy_entropy", 1, 8)
    [model] = read_result(out / "result.json", Diagnosis).models
    found = model.part(ToyEntropy)
    assert found is not None
    assert list(found.entropies) == stored["entropies"]
    first = found.entropies[0]

    shown = capsys.readouterr().out
    assert re.search(rf"Misalignment +First entropy\n{checkpoint.name} +\S+ \(.+\) nats +{first:.2f} nats\n", shown)
    page = (out / "index.html").read_text(encoding="utf-8")
    for text in (
        f"How undecided it is A line. {checkpoint.name} Its first prediction has {first:.3f} nats per byte.",
        f"First entropy {first:.2f} nats",
        "Entropy is minus the mean of log p.",
    ):
        assert text in words(page), text
    assert 'id="toy_entropy-figure_1"' in page
    assert (out / "toy_entropy.png").is_file()
    card = str(build_card(checkpoint, [out / "result.json"]))
    assert f"- First entropy: {first:.2f} nats." in card

    assert diagnose(checkpoint, text_file, tmp_path / "again") == 0
    assert "Results taken from the cache" in capsys.readouterr().out


def test_a_cell_that_defines_a_result_may_run_again() -> None:
    cell = "@document('toy_cell')\n@dataclass(frozen=True)\nclass Cell(PartResult):\n    value: float\n"
    names = {"document": document, "dataclass": dataclass, "PartResult": PartResult, "__name__": "__main__"}
    for _ in range(2):
        exec(cell, names)
        assert from_json(to_json(names["Cell"](1.0)), PartResult).value == 1.0  # type: ignore[operator, attr-defined]


@pytest.mark.slow
@pytest.mark.usefixtures("listed")
def test_where_it_cannot_be_measured_the_reason_is_reported(
    checkpoint: Path, text_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert diagnose(checkpoint, text_file, tmp_path / "out", training_length=16) == 0
    reason = f"{checkpoint.name}, toy entropy: The toy reads 8 tokens at most."
    assert reason in capsys.readouterr().out
    assert reason in words((tmp_path / "out" / "index.html").read_text(encoding="utf-8"))


@pytest.mark.slow
def test_a_metric_that_is_not_listed_is_refused_and_its_results_are_reported(
    checkpoint: Path, text_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    assert diagnose(checkpoint, text_file, tmp_path / "out") == 1
    assert "parts must be some of states, remembrance" in capsys.readouterr().err
    with monkeypatch.context() as patch:
        patch.setitem(PARTS, TOY.name, TOY)
        assert diagnose(checkpoint, text_file, tmp_path / "out") == 0
    file = tmp_path / "out" / "result.json"
    assert "measured by a part that is not installed" in " ".join(page_reasons(file))
    file.write_text(file.read_text().replace('"toy_entropy"', '"newer_metric"'))
    with pytest.raises(ValueError, match=r"models\[0\]\.parts\.toy entropy: .*got 'newer_metric'.*update"):
        read_result(file, Diagnosis)


def page_reasons(file: Path) -> list[str]:
    from hf_recurrent_lengthgen.metrics.diagnosis.page import reasons

    return reasons(read_result(file, Diagnosis))
