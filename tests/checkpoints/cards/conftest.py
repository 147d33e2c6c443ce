"""Checkpoints that were really trained and measured, small enough for a second."""

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from hf_recurrent_lengthgen.checkpoints.cards import CardSettings, write_card
from hf_recurrent_lengthgen.data import byte_tokenizer
from hf_recurrent_lengthgen.models import StatefulMamba2Config, StatefulMamba2ForCausalLM
from tests.cli.conftest import SIZES
from tests.cli.training import run, train_briefly


class Work:
    """A folder with base, intervention and results, made by the commands, and a place to copy from."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.text = folder / "text.txt"
        self.base, self.intervention = folder / "base", folder / "intervention"
        self.results = folder / "evaluation" / "result.json"
        self.diagnosis = folder / "diagnosis" / "result.json"
        self.retrieval = folder / "retrieval" / "retrieval.json"

    def copy(self, name: str, to: Path) -> Path:
        shutil.copytree(self.folder / name, to)
        return to


@pytest.fixture(scope="session")
def work(tmp_path_factory: pytest.TempPathFactory) -> Work:
    work = Work(tmp_path_factory.mktemp("work"))
    lines: Sequence[str] = [f"{number} times {number} is {number**2}." for number in range(200)]
    work.text.write_text(" ".join(lines), encoding="utf-8")
    torch.manual_seed(0)
    StatefulMamba2ForCausalLM(StatefulMamba2Config(**SIZES, training_length=8)).save_pretrained(work.base)
    byte_tokenizer().save_pretrained(work.base)
    assert train_briefly(work.base, work.intervention, work.text) == 0
    measured = ("--data", work.text, "--split", "train", "--length", 64, "--sequences", 3, "--no-cache")
    pair = (work.base, work.intervention, "--roles", "base,intervention")
    assert run("evaluate", *pair, *measured, "--output", work.results.parent) == 0
    return work


@pytest.fixture(scope="session")
def intervention(work: Work, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The intervention checkpoint with its card."""
    folder = work.copy("intervention", tmp_path_factory.mktemp("carded") / "intervention")
    said = CardSettings(license="apache-2.0", language=("en",), datasets=("owner/times",))
    write_card(folder, [work.results], said)
    return folder
