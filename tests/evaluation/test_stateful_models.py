"""The metrics on a real recurrent model, against plain forward passes over each chunk of text."""

from typing import Any

import numpy as np
import pytest
import torch

from hf_recurrent_lengthgen.evaluation.settings import EvaluationSettings
from hf_recurrent_lengthgen.evaluation.streaming import stream_nll
from hf_recurrent_lengthgen.metrics.context_harm.measure import evaluate_model
from tests.models.families import GLA, MAMBA, MAMBA2, RWKV6, VOCABULARY, build, variant_id

SEQUENCES, LENGTH, TRAINING_LENGTH = 3, 90, 24


@pytest.fixture(scope="module", params=[MAMBA2, MAMBA, GLA, RWKV6], ids=variant_id)
def model(request: pytest.FixtureRequest) -> Any:
    return build(request.param).train()


@pytest.fixture(scope="module")
def tokens() -> np.ndarray:
    return np.random.default_rng(1).integers(0, VOCABULARY, (SEQUENCES, LENGTH + 1))


def plain_nll(model: Any, chunk: np.ndarray) -> np.ndarray:
    """NLL (S, T) of chunk (S, T + 1) by one forward pass from the zero state."""
    ids = torch.from_numpy(chunk)
    with torch.no_grad():
        log_probabilities = model(input_ids=ids[:, :-1]).logits.double().log_softmax(-1)
    return -log_probabilities.gather(-1, ids[:, 1:, None])[..., 0].numpy()


@pytest.mark.thinned(3)
@pytest.mark.parametrize("chunk_length", [1, 17, 64, None])
def test_streaming_equals_one_forward_pass(model: Any, tokens: np.ndarray, chunk_length: int | None) -> None:
    result = stream_nll(model, tokens, chunk_length=chunk_length, batch_size=2, progress=False)
    np.testing.assert_allclose(result.nll, plain_nll(model, tokens), atol=2e-5)
    with torch.no_grad():
        final_state = model(input_ids=torch.from_numpy(tokens[:, :-1])).final_state
    for layer, expected in zip(result.final_state, final_state, strict=True):
        torch.testing.assert_close(layer.recurrent, expected.recurrent, atol=2e-5, rtol=1e-4)
        torch.testing.assert_close(layer.conv, expected.conv, atol=2e-5, rtol=1e-4)


@pytest.mark.thinned(3)
def test_evaluation_equals_separate_forward_passes(model: Any, tokens: np.ndarray) -> None:
    result = evaluate_model(model, tokens, TRAINING_LENGTH, settings=EvaluationSettings(progress=False))
    full = plain_nll(model, tokens)
    harm = np.empty((SEQUENCES, LENGTH - TRAINING_LENGTH))
    half = TRAINING_LENGTH // 2
    for position in range(TRAINING_LENGTH, LENGTH):
        start = (position - half) // half * half
        truncated = plain_nll(model, tokens[:, start : position + 2])[:, -1]
        harm[:, position - TRAINING_LENGTH] = full[:, position] - truncated
    assert np.abs(harm).max() > 2e-4  # the model does look further back than the kept context
    np.testing.assert_allclose(result.harm.curves.fine.mean, harm.mean(0), atol=4e-5)
    assert result.harm.last.mean == pytest.approx(harm[:, LENGTH // 2 - TRAINING_LENGTH :].mean(), abs=1e-5)
    starts = range(0, LENGTH - TRAINING_LENGTH + 1, half)
    windows = [plain_nll(model, tokens[:, start : start + TRAINING_LENGTH + 1]) for start in starts]
    np.testing.assert_allclose(result.in_window.curve.mean, np.mean(windows, axis=(0, 1)), atol=2e-5)
    assert model.training


@pytest.mark.gpu
def test_a_model_on_a_gpu_gives_the_same_numbers(
    model: Any, tokens: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = stream_nll(model, tokens, progress=False).nll
    monkeypatch.setattr(model.config, "scan_backend", "torch")  # kernels multiply in TF32
    model.cuda()
    try:
        found = stream_nll(model, tokens, chunk_length=40, progress=False)
    finally:
        model.cpu()
    assert found.final_state[0].recurrent.is_cuda
    np.testing.assert_allclose(found.nll, expected, atol=1e-4)
