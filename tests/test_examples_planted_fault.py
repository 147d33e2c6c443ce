"""A head that keeps everything, planted into trained hybrids of two kinds, is named and found guilty."""

from typing import Any

import numpy as np
import pytest

from hf_recurrent_lengthgen.data import byte_tokenizer, evaluation_sequences, standard_library_corpus, token_stream
from hf_recurrent_lengthgen.evaluation.settings import DiagnosisSettings
from hf_recurrent_lengthgen.hybrids import stateful
from hf_recurrent_lengthgen.metrics.diagnosis.measure import diagnose_model
from hf_recurrent_lengthgen.metrics.diagnosis.page import verdicts
from hf_recurrent_lengthgen.metrics.diagnosis.result import DiagnosedModel, Diagnosis
from hf_recurrent_lengthgen.metrics.states.result import StateDiagnosis

T, LENGTH = 32, 512
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def texts() -> np.ndarray:
    stream = token_stream(standard_library_corpus().texts("validation"), byte_tokenizer())
    return evaluation_sequences(stream, 16, LENGTH + 1).numpy()


def states_of(model: DiagnosedModel) -> StateDiagnosis:
    states = model.part(StateDiagnosis)
    assert states is not None, model.refused
    return states


@pytest.mark.parametrize(("model_type", "steps"), [("bamba", 100), ("qwen3_next", 200)])
def test_the_planted_head_is_named_and_its_short_state_removes_the_harm(
    model_type: str, steps: int, texts: np.ndarray, example: Any
) -> None:
    """Mixers of Mamba-2 and of the delta rule."""
    names = example("planted_fault.py")
    sound = names["train"](names["new_hybrid"](model_type, T), steps)
    planted = names["planted"](sound)
    settings = DiagnosisSettings(command="test", progress=False, parts=("states",))
    broken, whole = (
        diagnose_model(stateful(model), texts, T, name, settings=settings)
        for name, model in (("planted", planted), ("sound", sound))
    )
    place, states = (names["LAYER"], names["HEAD"]), states_of(broken)
    worst_head = states.ranking[0]
    assert (worst_head.layer, worst_head.head) == place
    assert worst_head.drifts
    assert states.patching is not None
    assert states.patching.harmful
    (alone,) = (group for group in states.patching.groups[2:] if group.heads == (place,))
    share = states.patching.share(alone.restored)
    assert share is not None
    assert share > 0.8
    assert alone.restored.low is not None
    assert alone.restored.low > 0
    (keys,) = (group for group in states.patching.groups if group.attention)
    assert keys.restored.mean < 0.2 * states.patching.harm.mean
    assert states.attention is not None
    assert states.attention.recurrent[-1].mean > 5 * abs(states.attention.attention[-1].mean)
    failing, silent = verdicts(Diagnosis("t", (broken, whole)))
    assert failing.headline.startswith("planted fails beyond")
    assert failing.reason.startswith("The states of layer")
    assert f"left the training distribution at {worst_head.leaves_at}" in failing.reason
    assert f"layer {place[0]}, head {place[1]}" in failing.reason
    assert "% of the excess loss" in failing.reason
    assert place not in {(head.layer, head.head) for head in states_of(whole).drifting}
    assert f"layer {place[0]}, head {place[1]}" not in silent.reason
    assert "fails" not in silent.headline
