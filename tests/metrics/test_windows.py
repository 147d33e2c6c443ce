from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hf_recurrent_lengthgen import forgetting
from hf_recurrent_lengthgen.evaluation import streaming
from hf_recurrent_lengthgen.evaluation.statistics import last_doubling
from hf_recurrent_lengthgen.evaluation.streaming import stream_nll
from hf_recurrent_lengthgen.metrics.context_harm import windows as context_harm
from hf_recurrent_lengthgen.metrics.context_harm.windows import context_use_bands, window_nll
from tests.models.families import MAMBA2, VOCABULARY, build

NLL = Callable[..., list[float]]


def fading(count: Any) -> Any:
    return 4 - count / 40


def expected_truncated(nll: NLL, row: np.ndarray, length: int, training_length: int) -> list[float]:
    """Read each position >= T from the latest multiple of h with more than T - h tokens of context."""
    half, result = training_length // 2, []
    for position in range(training_length, length):
        start = max(w for w in range(0, position + 1, half) if position - w + 1 > training_length - half)
        assert training_length - half < position - start + 1 <= training_length
        result.append(nll(row, start, position + 1, fading)[-1])
    return result


@pytest.mark.parametrize("training_length", [4, 5, 16, 20, 33, 128, 129])
@pytest.mark.parametrize("batch_size", [1, 7, None])
def test_windows_give_the_nll_of_the_definition(
    counter_model: Any, expected_nll: NLL, random_tokens: np.ndarray, training_length: int, batch_size: int | None
) -> None:
    chunk_length = 5 if batch_size == 7 else None
    model, sizes = counter_model(fading), {"batch_size": batch_size, "chunk_length": chunk_length}
    result = window_nll(model, random_tokens, training_length, **sizes, progress=False)
    truth = [expected_truncated(expected_nll, row, 130, training_length) for row in random_tokens]
    np.testing.assert_allclose(result.truncated, truth, atol=2e-6)
    starts = range(0, 130 - training_length + 1, training_length // 2)
    in_window = [
        np.mean([expected_nll(row, start, start + training_length, fading) for start in starts], axis=0)
        for row in random_tokens
    ]
    np.testing.assert_allclose(result.in_window, in_window, atol=2e-6)


def test_no_harm_where_the_reach_of_all_layers_fits_into_the_kept_context() -> None:
    """Two layers that each reach 3 taps and 1 token of the window back: 9 tokens, of at least 17 kept."""
    model = build(MAMBA2).eval()
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, (2, 101))
    with forgetting(model, window=2):
        near = (
            stream_nll(model, tokens, progress=False).nll[:, 32:]
            - window_nll(model, tokens, 32, progress=False).truncated
        )
    far = (
        stream_nll(model, tokens, progress=False).nll[:, 32:] - window_nll(model, tokens, 32, progress=False).truncated
    )
    assert np.abs(near).max() < 1e-5
    assert np.abs(far).max() > 1e-4


def test_windows_are_read_whole_as_rows_of_a_batch(
    counter_model: Any, random_tokens: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that no state is carried inside a window, as long as a forward pass may have its tokens."""
    seen = []

    def watched(reader: Any, rows: np.ndarray, chunk: int, *args: Any) -> Any:
        seen.append((len(rows), chunk))
        return streaming.stream_chunks(reader, rows, chunk, *args)

    monkeypatch.setattr(context_harm, "stream_chunks", watched)
    monkeypatch.setattr(streaming, "TOKENS_PER_FORWARD_ON_CPU", 100)
    window_nll(counter_model(fading), random_tokens[:1], 20, progress=False)  # 12 windows
    assert seen == [(5, 20), (5, 20), (2, 20)]
    seen.clear()
    window_nll(counter_model(fading), random_tokens[:1], 128, progress=False)
    assert seen == [(1, 100), (1, 66)]  # a whole window, and the one that the end of the text cuts


def test_lengths_that_leave_nothing_to_compare_are_refused(counter_model: Any, random_tokens: np.ndarray) -> None:
    with pytest.raises(ValueError, match="too few: give at least one sequence, and 132 tokens"):
        window_nll(counter_model(fading), random_tokens, 130, progress=False)
    with pytest.raises(ValueError, match="training_length must be at least 4, got 3"):
        window_nll(counter_model(fading), random_tokens, 3, progress=False)


def test_ranges_of_the_summaries() -> None:
    assert last_doubling(4096, 64) == (2048, 4096)
    assert last_doubling(100, 64) == (64, 100)
    assert context_use_bands(64) == ((12, 20), (56, 64))
    assert context_use_bands(4) == ((0, 2), (2, 4))
    assert context_use_bands(2048) == ((384, 640), (1792, 2048))
