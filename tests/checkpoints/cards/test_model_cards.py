"""The checkpoints of model_cards/: each belongs to its records, and its card is still what these give."""

import json
import re
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from hf_recurrent_lengthgen.checkpoints.cards.card import CardSettings, figures, marked, own_words, render
from hf_recurrent_lengthgen.checkpoints.cards.facts import Checkpoint, read_checkpoint, read_evidence
from hf_recurrent_lengthgen.checkpoints.loading import load_language_model
from hf_recurrent_lengthgen.checkpoints.records import carded, read_verification
from hf_recurrent_lengthgen.evaluation.files import read_result
from hf_recurrent_lengthgen.metrics.retrieval.result import RetrievalComparison

MODEL_CARDS = Path(__file__).parents[3] / "model_cards"
NAMES = sorted(path.name for path in MODEL_CARDS.iterdir() if path.is_dir())
FAMILIES = [name.removesuffix("-state-passing") for name in NAMES if name.endswith("-state-passing")]
FAR = "passkey-far"


def recorded(name: str) -> Checkpoint:
    """A checkpoint with the verification of the day on which it was made, when it held its code, too."""
    checkpoint, verification = read_checkpoint(MODEL_CARDS / name), read_verification(MODEL_CARDS / name)
    assert verification.passed
    assert carded(verification.files) == checkpoint.files
    return replace(checkpoint, verification=verification)


@pytest.mark.parametrize("name", NAMES)
def test_the_classes_that_a_config_names_are_there(name: str) -> None:
    for entry in json.loads((MODEL_CARDS / name / "config.json").read_text()).get("auto_map", {}).values():
        module, _, named = entry.rpartition(".")
        assert hasattr(import_module(f"hf_recurrent_lengthgen.models.{module}"), named)


def test_each_family_has_a_base_and_a_post_trained_checkpoint() -> None:
    intervention = [f"{family}-{method}" for family in FAMILIES for method in ("base", "state-passing")]
    assert sorted([*intervention, "passkey-base", FAR]) == NAMES
    assert intervention


def test_checkpoints_are_small() -> None:
    weights = {name: (MODEL_CARDS / name / "model.safetensors").stat().st_size for name in NAMES}
    assert max(weights.values()) < 2e6, weights
    assert sum(file.stat().st_size for file in MODEL_CARDS.rglob("*.*")) < 40e6


@pytest.mark.thinned(5)
@pytest.mark.parametrize("name", NAMES)
def test_a_card_is_what_its_records_give(name: str) -> None:
    checkpoint, folder = recorded(name), MODEL_CARDS / name
    evidence = read_evidence(checkpoint, sorted((folder / "results").iterdir()))
    there = (folder / "README.md").read_text(encoding="utf-8")
    language = "en" if name.startswith("passkey") else "code"
    said = CardSettings(license="apache-2.0", language=(language,), own_words=own_words(there))
    assert there == marked(str(render(checkpoint, evidence, said)), checkpoint.files)
    assert sorted(item.file for item in evidence) == sorted(path.name for path in (folder / "results").iterdir())
    assert sorted(figures(evidence)) == sorted(path.name for path in folder.glob("figures/*"))


def test_far_memory_alone_finds_keys_64_training_lengths_back() -> None:
    base, far = read_result(MODEL_CARDS / FAR / "results/retrieval.json", RetrievalComparison).models
    assert (base.model, far.model, far.training_length) == ("passkey-base", FAR, 128)
    found = [dict(zip(each.lengths, each.by_length, strict=True)) for each in (base, far)]
    assert {found[1][length].accuracy for length in (128, 1024, 8192)} == {1.0}
    assert [found[0][length].right for length in (128, 8192)] == [20, 0]


def test_the_code_of_the_card_reads_8194_words_and_says_the_key(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(MODEL_CARDS.parent)
    (code,) = re.findall(r"```python\n(.*?)```", own_words((MODEL_CARDS / FAR / "README.md").read_text()), re.DOTALL)
    found: dict[str, Any] = {}
    exec(code, found)
    assert found["words"].input_ids.shape == (1, 8194)
    assert capsys.readouterr().out.split() == ["71", "43", "2"]
    base = load_language_model("model_cards/passkey-base")
    said = base.generate(**found["words"], max_new_tokens=3)[0, -3:]
    assert found["tokenizer"].decode(said).split() != ["71", "43", "2"]
