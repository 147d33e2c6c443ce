"""The rendered cards of model_cards/: each is still what its records and results give."""

import json
from pathlib import Path

import pytest

from hf_recurrent_lengthgen.cards.card import CardSettings, marked, render
from hf_recurrent_lengthgen.cards.facts import Checkpoint, read_evidence
from hf_recurrent_lengthgen.cards.results_section import figures, result_files
from hf_recurrent_lengthgen.records import carded, read_lineage, read_verification

MODEL_CARDS = Path(__file__).parents[2] / "model_cards"
RECORDS = Path(__file__).parent / "records"
NAMES = sorted(path.name for path in MODEL_CARDS.iterdir() if path.is_dir())


def recorded(name: str) -> Checkpoint:
    """A checkpoint whose weights are not in the repository: their number and digest are."""
    folder = RECORDS / name
    weights = json.loads((folder / "weights.json").read_text())
    verification = read_verification(folder)
    assert verification is not None
    return Checkpoint(
        name=name,
        config=json.loads((folder / "config.json").read_text()),
        parameters=weights["parameters"],
        tokenizer=weights["tokenizer"],
        lineage=read_lineage(folder),
        verification=verification,
        files=carded(verification.files),
        find_weights=lambda wanted: weights["sha256"] if weights["sha256"] in wanted else None,
    )


def test_every_card_has_its_records() -> None:
    assert sorted(path.name for path in RECORDS.iterdir()) == NAMES
    assert NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_card_is_what_its_records_give(name: str) -> None:
    checkpoint, folder = recorded(name), MODEL_CARDS / name
    settings = json.loads((RECORDS / name / "settings.json").read_text())
    results = [folder / "results" / file for file in settings.pop("results")]
    evidence = read_evidence(checkpoint, results)
    said = CardSettings().completed(settings)
    card = render(checkpoint, evidence, said)
    wrote = sorted(f"{kind}/{file.name}" for kind in ("figures", "results") for file in (folder / kind).iterdir())
    assert (folder / "README.md").read_text(encoding="utf-8") == marked(
        str(card), checkpoint.files, wrote, said.said()
    )
    assert sorted(result_files(evidence)) == sorted(path.name for path in (folder / "results").iterdir())
    assert sorted(figures(evidence)) == sorted(path.name for path in (folder / "figures").iterdir())


@pytest.mark.parametrize("name", NAMES)
def test_a_verification_is_of_the_recorded_config(name: str) -> None:
    checkpoint = recorded(name)
    assert checkpoint.verification is not None
    assert checkpoint.verification.passed
