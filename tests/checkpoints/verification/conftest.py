"""Checkpoints to verify, and damage to them."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_recurrent_lengthgen.checkpoints.verification import verify
from hf_recurrent_lengthgen.data import byte_tokenizer
from hf_recurrent_lengthgen.models import StatefulMamba2Config, StatefulMamba2ForCausalLM
from tests.without_package import Done, clean_process

SIZES: dict[str, Any] = {"vocab_size": 384, "hidden_size": 32, "num_hidden_layers": 2}
MAMBA2: dict[str, Any] = SIZES | {"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 1}


@pytest.fixture(autouse=True)
def forked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork the process of `lengthgen verify` from one that has imported torch, unless a test requires a new one."""

    def run(command: list[str], cwd: str, **_: Any) -> Done:
        assert command[:2] == [sys.executable, "-P"]
        return clean_process(Path(cwd), Path(command[2]).read_text(), Path(command[3]), check=False)

    if "new_process" not in request.fixturenames:
        monkeypatch.setattr(verify, "subprocess", SimpleNamespace(run=run))


@pytest.fixture
def new_process() -> None:
    """The process of `lengthgen verify` is that which users start."""


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A random Mamba-2 with a tokenizer."""
    torch.manual_seed(0)
    folder = tmp_path / "checkpoint"
    StatefulMamba2ForCausalLM(StatefulMamba2Config(**MAMBA2)).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def change_config(folder: Path, **changes: Any) -> None:
    """Other values in config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def change_weight(folder: Path, name: str, change: Any) -> None:
    """A tensor of model.safetensors replaced by what `change` makes of it."""
    weights = load_file(folder / "model.safetensors")
    weights[name] = change(weights[name])
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def add_to_code(folder: Path, name: str, old: str, new: str) -> None:
    """Other code in a file of the folder."""
    text = (folder / name).read_text()
    assert old in text
    (folder / name).write_text(text.replace(old, new, 1))
