"""Texts and checkpoints small enough to train and evaluate in a second."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from transformers import Mamba2Config, Mamba2ForCausalLM
from transformers.utils import logging

from hf_recurrent_lengthgen.cli.main import main
from hf_recurrent_lengthgen.data import byte_tokenizer
from hf_recurrent_lengthgen.models import StatefulMamba2Config, StatefulMamba2ForCausalLM
from tests.cli.training import TINY, Train, flags

Evaluate = Callable[..., int]
SIZES = {
    "vocab_size": 384,
    "hidden_size": 8,
    "num_heads": 2,
    "head_dim": 8,
    "state_size": 4,
    "n_groups": 1,
    "num_hidden_layers": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 1,
}


@pytest.fixture(autouse=True)
def no_bars() -> Iterator[None]:
    """As in a log: `main` switches bars off for the libraries that it imports, which tests have imported before."""
    logging.disable_progress_bar()
    datasets.disable_progress_bars()
    yield
    logging.enable_progress_bar()
    datasets.enable_progress_bars()


@pytest.fixture(scope="session")
def config_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A config.json to train from scratch."""
    folder = tmp_path_factory.mktemp("config")
    StatefulMamba2Config(**SIZES).save_pretrained(folder)
    return folder / "config.json"


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of ours with its tokenizer; its training length is 8."""
    folder = tmp_path_factory.mktemp("ours") / "checkpoint"
    torch.manual_seed(0)
    StatefulMamba2ForCausalLM(StatefulMamba2Config(**SIZES, training_length=8)).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def stock_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of Transformers' own Mamba-2, without tokenizer."""
    folder = tmp_path_factory.mktemp("stock") / "checkpoint"
    torch.manual_seed(1)
    Mamba2ForCausalLM(Mamba2Config(**SIZES)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About 4000 bytes."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(" ".join(f"{number} times {number} is {number**2}." for number in range(200)), encoding="utf-8")
    return path


def measured(command: str, text_file: Path, output: Path, *arguments: Any) -> int:
    """Run a command on 3 sequences of 64 bytes."""
    common = ["--data", text_file, "--split", "train", "--sequences", 3, "--length", 64, "--training-length", 8]
    return main([command, *map(str, [*common, "--output", output, *arguments])])


@pytest.fixture
def evaluate(tmp_path: Path, text_file: Path) -> Evaluate:
    """Run `lengthgen evaluate` on 3 sequences of 64 bytes, into `tmp_path / "out"`."""
    return partial(measured, "evaluate", text_file, tmp_path / "out")


@pytest.fixture
def diagnose(tmp_path: Path, text_file: Path) -> Evaluate:
    """Run `lengthgen diagnose` on 3 sequences of 64 bytes, into `tmp_path / "out"`."""
    return partial(measured, "diagnose", text_file, tmp_path / "out")


@pytest.fixture
def train(tmp_path: Path, text_file: Path) -> Train:
    """Run `lengthgen train` with tiny settings into `tmp_path / "out"`; an option of None is left out."""

    def run(*first: str, **options: Any) -> int:
        fields = {"data": text_file, "output_dir": tmp_path / "out"} | TINY | options
        return main(["train", *first, *flags(**{name: value for name, value in fields.items() if value is not None})])

    return run
