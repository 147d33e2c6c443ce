"""The files of ours that a training step enters on its way to the scan are those of docs/how_it_works.md."""

import re
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from tests.trainers import toys

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "how_it_works.md").read_text()
DOCUMENTED = re.findall(r"^\d+\. `((?:trainers|models)/\S+\.py)`", PAGE, flags=re.MULTILINE)
OURS = re.compile(r"/((?:trainers|models|data|hybrids|evaluation)/(?:run/)?\w+\.py)$")


def entered(step: Any) -> list[str]:
    """Our files whose functions `step` calls, in the order of their first calls."""
    files: dict[str, None] = {}
    roots = tuple(str(ROOT / folder) for folder in ("trainers", "hf_recurrent_lengthgen"))

    def note(frame: FrameType, event: str, _: Any) -> None:
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(roots) and (ours := OURS.search(name)):
            files[ours[1]] = None

    sys.setprofile(note)
    try:
        step()
    finally:
        sys.setprofile(None)
    return list(files)


def test_a_step_takes_the_way_that_the_page_draws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = toys.resumable_trainer(tmp_path, max_steps=2, save_strategy="no", gradient_accumulation_steps=1)
    original, ways = trainer.training_step, []

    def traced(*given: Any) -> Any:
        losses = []
        ways.append(entered(lambda: losses.append(original(*given))))
        return losses[0]

    monkeypatch.setattr(trainer, "training_step", traced)
    trainer.train()
    way = ways[1]  # the first step has no state to pass
    assert way[: way.index(DOCUMENTED[-1]) + 1] == DOCUMENTED
    assert len(DOCUMENTED) <= 16
