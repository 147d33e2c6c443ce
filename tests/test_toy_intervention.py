"""What an intervention needs to be one: a source, a config and a trainer, and no other file is touched."""

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_recurrent_lengthgen.checkpoints.cards import CardSettings, write_card
from hf_recurrent_lengthgen.checkpoints.methods import Method
from hf_recurrent_lengthgen.checkpoints.papers import MIMETIC
from hf_recurrent_lengthgen.checkpoints.records import read_lineage
from hf_recurrent_lengthgen.cli.main import main
from hf_recurrent_lengthgen.data import byte_tokenizer
from hf_recurrent_lengthgen.models import StatefulMamba2Config, StatefulMamba2ForCausalLM
from hf_recurrent_lengthgen.models.state_value import RecurrentState, map_state
from hf_recurrent_lengthgen.trainers import (
    INTERVENTIONS,
    BatchPlace,
    InitialStateConfig,
    InitialStateSource,
    InitialStateTrainer,
)
from hf_recurrent_lengthgen.trainers.checks import zero_state_of

TITLE, SENTENCE = "states of ones", "Training texts start from a state in which all numbers are the same"
TEXT = "A text that is long enough for some rows of eight tokens. " * 40


class Ones(InitialStateSource):
    """The same number everywhere, one more in each step."""

    def __init__(self, size: float, zero_state: Any) -> None:
        self.size = size
        self._zero_state, self._steps = zero_state, torch.zeros(())

    def initial_state(self, place: BatchPlace) -> RecurrentState:
        return map_state(lambda part: part + self.size + float(self._steps), self._zero_state(place.rows))

    def end_step(self) -> None:
        self._steps = self._steps + 1

    def reset(self) -> None:
        self._steps = torch.zeros(())

    def state_dict(self) -> dict[str, Tensor]:
        return {"steps": self._steps}

    def load_state_dict(self, tensors: dict[str, Tensor], device: torch.device) -> None:
        self._steps = tensors["steps"]


@dataclass
class OnesConfig(InitialStateConfig):
    ones_size: float = field(default=0.5, metadata={"help": "The number. Default 0.5."})


@pytest.fixture
def ones() -> Iterator[type[InitialStateTrainer]]:
    """The trainer, which is no longer known after the test."""

    class OnesTrainer(InitialStateTrainer):
        config_class = OnesConfig
        about = Method("ones", TITLE, SENTENCE, "ones", MIMETIC)

        @staticmethod
        def initial_state_source(args: OnesConfig, trainer: Any) -> Ones:
            return Ones(args.ones_size, zero_state_of(trainer))

    yield OnesTrainer
    del INTERVENTIONS["ones"]


@pytest.fixture
def base(tmp_path: Path) -> list[str]:
    """Options of `lengthgen train` for a small checkpoint and a text."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "num_heads": 2, "head_dim": 8, "state_size": 4, "n_groups": 1, "num_hidden_layers": 1}
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}
    model = StatefulMamba2ForCausalLM(StatefulMamba2Config(vocab_size=384, **sizes, **special))
    model.save_pretrained(tmp_path / "base")
    byte_tokenizer().save_pretrained(tmp_path / "base")
    (tmp_path / "text.txt").write_text(TEXT)
    command = f"train --model {tmp_path}/base --data {tmp_path}/text.txt --use-cpu --training-length 8 --max-steps 4"
    return f"{command} --per-device-train-batch-size 2 --logging-steps 1 --save-steps 2".split()


def weights(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


def test_the_command_line_trains_and_resumes_it_and_its_record_and_card_name_it(
    ones: type[InitialStateTrainer], base: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    shown = capsys.readouterr().out
    assert "ones (states of ones)" in " ".join(shown.split())
    assert "--ones-size" in shown
    out = tmp_path / "out"
    toy = [*base, "--intervention", "ones", "--ones_size", "0.25", "--output"]
    assert main([*toy, str(out)]) == 0
    history = json.loads((out / "trainer_state.json").read_text())["log_history"]
    assert {entry["zero_states"] for entry in history if "loss" in entry} == {0.0}

    lineage = read_lineage(out)
    assert lineage is not None
    run = lineage.steps[-1].training
    assert run is not None
    assert run.methods == (ones.about,)
    write_card(out, settings=CardSettings("me/ones"))
    card = (out / "README.md").read_text()
    assert TITLE in card
    assert MIMETIC.arxiv in card
    whole = weights(out)
    shutil.rmtree(out / "checkpoint-4")
    assert main([*toy, str(out), "--resume"]) == 0
    assert weights(out) == whole
    assert main([*toy, str(out), "--resume", "--ones_size", "0.5"]) == 1
    assert "ones_size was 0.25 and is 0.5" in capsys.readouterr().err


def test_a_mixture_draws_from_it(
    ones: type[InitialStateTrainer], base: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mixed = [*base, "--intervention", "mixed", "--output", str(tmp_path / "out"), "--mixture"]
    assert main([*mixed, '{"zero": 0.5, "ones": {"share": 0.5, "ones_size": 2.0}}']) == 0
    history = json.loads((tmp_path / "out" / "trainer_state.json").read_text())["log_history"]
    assert 0.0 < sum(entry.get("zero_states", 0.0) for entry in history) < 4.0
    assert main([*mixed, '{"ones": {"share": 1.0, "noise_sigma": 2.0}}']) == 1
    assert (
        "noise_sigma is not a setting of ones in a mixture. Allowed settings: ['ones_size']" in capsys.readouterr().err
    )


def test_the_page_of_trainers_has_a_row_for_every_intervention() -> None:
    page = (Path(__file__).parents[1] / "docs" / "trainers" / "index.md").read_text(encoding="utf-8")
    rows = [row for row in page.splitlines() if re.match(r"\|[^|]+\| \[?`\w+Trainer`", row)]
    table = {row.split("|")[3].strip(" `").split()[0]: row for row in rows}
    assert table.keys() == INTERVENTIONS.keys()
    for name, trainer in INTERVENTIONS.items():
        assert f"`{trainer.__name__}`" in table[name]
