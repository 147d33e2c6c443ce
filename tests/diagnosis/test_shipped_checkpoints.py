"""The pairs of model_cards/ on real text: each base fails by states that drift, and its cured model does not."""

from typing import Any

import numpy as np
import pytest

from hf_recurrent_lengthgen.cli.inputs import load_stream
from hf_recurrent_lengthgen.data import byte_tokenizer, evaluation_sequences
from hf_recurrent_lengthgen.diagnosis.diagnose import diagnose_model
from hf_recurrent_lengthgen.diagnosis.part import DiagnosisSettings
from hf_recurrent_lengthgen.evaluation.diagnosis_results import DiagnosedModel
from hf_recurrent_lengthgen.evaluation.state_results import StateDiagnosis
from hf_recurrent_lengthgen.loading import load_language_model
from tests.cards.test_model_cards import MODEL_CARDS, NAMES

FAMILIES = [name.removesuffix("-base") for name in NAMES if name.endswith("-base")]


@pytest.fixture(scope="module")
def texts() -> np.ndarray:
    return evaluation_sequences(load_stream("stdlib", "validation", byte_tokenizer()).tokens, 16, 2049)


def diagnosed(name: str, texts: np.ndarray, **options: Any) -> tuple[DiagnosedModel, StateDiagnosis]:
    model = load_language_model(str(MODEL_CARDS / name))
    settings = DiagnosisSettings(command="test", progress=False, parts=("states",), **options)
    found = diagnose_model(model, texts, 128, settings=settings)
    states = found.found(StateDiagnosis)
    assert states is not None, found.refused
    return found, states


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_base_fails_by_the_heads_that_drift_and_its_cured_model_does_not(family: str, texts: np.ndarray) -> None:
    base, states = diagnosed(f"{family}-base", texts)
    cured, _ = diagnosed(f"{family}-state-passing", texts, patched_heads=0)
    harms = base.evaluation.harm.last, cured.evaluation.harm.last
    assert harms[0].low is not None
    assert harms[0].low > 0
    assert harms[1].mean < harms[0].mean / 3
    assert states.drifting
    assert states.patching is not None
    drifting = next(group for group in states.patching.groups if len(group.heads) == len(states.drifting))
    assert {(layer.layer, head.head) for layer, head in states.drifting} == {*drifting.heads}
    share = states.patching.share(drifting.restored)
    assert share is not None
    assert share > 0.8
