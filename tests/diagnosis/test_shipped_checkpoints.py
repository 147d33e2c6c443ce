"""The pairs of model_cards/ on real text: each base fails by states that drift, and its cured model does not."""

from typing import Any

import numpy as np
import pytest

from hf_recurrent_lengthgen.cli.inputs import load_stream
from hf_recurrent_lengthgen.data import byte_tokenizer, evaluation_sequences
from hf_recurrent_lengthgen.diagnosis.diagnose import diagnose_model
from hf_recurrent_lengthgen.diagnosis.part import DiagnosisSettings
from hf_recurrent_lengthgen.evaluation.state_results import StateDiagnosis
from hf_recurrent_lengthgen.loading import load_language_model
from tests.cards.test_model_cards import MODEL_CARDS, NAMES

FAMILIES = [name.removesuffix("-base") for name in NAMES if name.endswith("-base")]


@pytest.fixture(scope="module")
def texts() -> np.ndarray:
    return evaluation_sequences(load_stream("stdlib", "validation", byte_tokenizer()).tokens, 16, 2049)


def diagnosed(name: str, texts: np.ndarray) -> tuple[float, StateDiagnosis]:
    """The harm of the recurrent states beyond training, in hybrids without attention's, and what is known of them."""
    model: Any = load_language_model(str(MODEL_CARDS / name))
    settings = DiagnosisSettings(command="test", progress=False, parts=("states",))
    found = diagnose_model(model, texts, model.config.training_length, settings=settings)
    states, harm = found.found(StateDiagnosis), found.evaluation.harm.last
    assert states is not None, found.refused
    if states.attention is not None:
        return states.attention.recurrent[-1].mean, states
    if name.endswith("-base"):
        assert harm.low is not None
        assert harm.low > 0
    return harm.mean, states


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_base_fails_by_the_heads_that_drift_and_its_cured_model_does_not(family: str, texts: np.ndarray) -> None:
    (base, states), (cured, _) = (diagnosed(f"{family}-{name}", texts) for name in ("base", "cured"))
    assert cured < base / 3
    assert states.drifting
    assert states.patching is not None
    drifting = {(layer.layer, head.head) for layer, head in states.drifting}
    (patched,) = (group for group in states.patching.groups if {*group.heads} == drifting)
    share = states.patching.share(patched.restored)
    assert share is not None
    if states.attention is not None:  # attention fails, too, so less goes away with the states than they do alone
        assert patched.broken.mean > 0.8 * base
        (keys,) = (group for group in states.patching.groups if group.attention)
        assert keys.broken.mean > 0.8 * states.attention.attention[-1].mean > 0.2
        return
    # in KDA, whose harm is small, patching the heads that do not drift removes a quarter of it, too
    assert share > (0.7 if family == "kda-short" else 0.8)
