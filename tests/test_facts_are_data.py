"""What a program reads again is a field: words are made where a person reads them, and are never read back."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from hf_recurrent_lengthgen.checkpoints.cards.card import CardSettings, render
from hf_recurrent_lengthgen.checkpoints.cards.facts import Checkpoint, read_evidence
from hf_recurrent_lengthgen.checkpoints.records import Lineage
from tests.checkpoints.cards.test_model_cards import MODEL_CARDS, recorded

ROOT = Path(__file__).parents[1]
PACKAGE = "hf_recurrent_lengthgen"
NAME = "mamba2-state-passing"


def in_other_words(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint with other words wherever its lineage has some for people."""
    assert checkpoint.lineage is not None
    steps = []
    for step in checkpoint.lineage.steps:
        assert step.training is not None
        data = dataclasses.replace(step.training.data, sizes="9 files", selection="with mimetic output alignment 0.1")
        run = dataclasses.replace(step.training, data=data)
        steps.append(dataclasses.replace(step, description="forgetting (window 4), split test", training=run))
    return dataclasses.replace(checkpoint, lineage=Lineage(None, tuple(steps)))


def relabelled(file: Path, to: Path) -> Path:
    plain = json.loads(file.read_text())
    for number, model in enumerate(plain["models"]):
        evaluation = model.get("evaluation", model)
        evaluation["model"] = f"model {number} (window 4)"
        evaluation["data"]["source"] |= {"sizes": "2 files, split train", "selection": "test files"}
    to.write_text(json.dumps(plain))
    return to


def facts(checkpoint: Checkpoint, files: list[Path]) -> dict[str, Any]:
    """The metadata of a card but for the words in it, and its sections that judge."""
    card = render(checkpoint, read_evidence(checkpoint, files), CardSettings())
    data = card.data.to_dict()
    for result in data["model-index"][0]["results"]:
        result["dataset"].pop("args", None)
    sections = {part.partition("\n")[0]: part for part in card.text.split("\n## ")}
    return {"data": data} | {name: sections[name] for name in ("Use", "Limits", "Citation")} | {"top": sections[""]}


def test_other_words_give_the_same_facts(tmp_path: Path) -> None:
    checkpoint, folder = recorded(NAME), MODEL_CARDS / NAME / "results"
    files = sorted(folder.iterdir())
    others = [relabelled(file, tmp_path / file.name) for file in files]
    assert facts(in_other_words(checkpoint), others) == facts(checkpoint, files)


@pytest.mark.parametrize("window", [None, 4])
def test_what_a_model_forgot_is_reported_by_its_field(window: int | None, tmp_path: Path) -> None:
    checkpoint = recorded(NAME)
    if window is not None:
        config = checkpoint.config | {"forgetting": {"window": window}}
        checkpoint = dataclasses.replace(checkpoint, config=config)
    plain = json.loads((MODEL_CARDS / NAME / "results" / "comparison.json").read_text())
    for model in plain["models"]:
        model["evaluation"]["model"] += " (window 9)"
        model["evaluation"]["forgetting"]["window"] = window
    (tmp_path / "result.json").write_text(json.dumps(plain))
    assert read_evidence(checkpoint, [tmp_path / "result.json"])
    plain["models"][1]["evaluation"]["forgetting"]["window"] = 5
    (tmp_path / "result.json").write_text(json.dumps(plain))
    with pytest.raises(ValueError, match="needs results with"):
        read_evidence(checkpoint, [tmp_path / "result.json"])
