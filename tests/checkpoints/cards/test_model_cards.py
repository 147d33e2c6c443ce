"""The checkpoints of model_cards/: each belongs to its records, and its card is still what these give."""

from dataclasses import replace
from pathlib import Path

import pytest

from hf_recurrent_lengthgen.checkpoints.cards.card import CardSettings, figures, marked, render
from hf_recurrent_lengthgen.checkpoints.cards.facts import Checkpoint, read_checkpoint, read_evidence
from hf_recurrent_lengthgen.checkpoints.records import carded, read_verification
from tests.versions import needs_hybrids

MODEL_CARDS = Path(__file__).parents[3] / "model_cards"
NAMES = sorted(path.name for path in MODEL_CARDS.iterdir() if path.is_dir())
LOADABLE = [
    pytest.param(
        name, marks=() if (MODEL_CARDS / name / "config.json").read_text().count("Stateful") else needs_hybrids
    )
    for name in NAMES
]
"""For tests that load the checkpoint: hybrids have classes of Transformers, and need a newer one."""


def recorded(name: str) -> Checkpoint:
    """A checkpoint with the verification of the day on which it was made, when it held its code, too."""
    checkpoint, verification = read_checkpoint(MODEL_CARDS / name), read_verification(MODEL_CARDS / name)
    assert verification is not None
    assert verification.passed
    assert carded(verification.files) == checkpoint.files
    return replace(checkpoint, verification=verification)


def test_each_family_has_a_base_and_a_cured_checkpoint() -> None:
    families = {name.removesuffix("-base") for name in NAMES if name.endswith("-base")}
    assert sorted(f"{family}-{method}" for family in families for method in ("base", "cured")) == NAMES
    assert families


def test_checkpoints_are_small() -> None:
    weights = {name: (MODEL_CARDS / name / "model.safetensors").stat().st_size for name in NAMES}
    assert max(weights.values()) < 1.5e6, weights
    assert sum(file.stat().st_size for file in MODEL_CARDS.rglob("*.*")) < 40e6


@pytest.mark.parametrize("name", LOADABLE)
def test_a_card_is_what_its_records_give(name: str) -> None:
    checkpoint, folder = recorded(name), MODEL_CARDS / name
    evidence = read_evidence(checkpoint, sorted((folder / "results").iterdir()))
    said = CardSettings().completed({"language": ["code"], "license": "apache-2.0"})
    card = render(checkpoint, evidence, said)
    wrote = sorted(f"{kind}/{file.name}" for kind in ("figures", "results") for file in (folder / kind).iterdir())
    assert (folder / "README.md").read_text(encoding="utf-8") == marked(
        str(card), checkpoint.files, wrote, said.said()
    )
    assert sorted(item.file for item in evidence) == sorted(path.name for path in (folder / "results").iterdir())
    assert sorted(figures(evidence)) == sorted(path.name for path in (folder / "figures").iterdir())
