from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hf_recurrent_lengthgen.evaluation import readers
from hf_recurrent_lengthgen.evaluation.streaming import forward_plan, stream_nll
from hf_recurrent_lengthgen.models.state_value import take_rows

NLL = Callable[..., list[float]]


def slow(count: Any) -> Any:
    return 1 + count / 50


@pytest.mark.parametrize("chunk_length", [1, 2, 63, 64, 65, 129, 130, 131, 1000, None])
def test_nll_is_that_of_the_definition_for_every_chunk_length(
    counter_model: Any, expected_nll: NLL, random_tokens: np.ndarray, chunk_length: int | None
) -> None:
    result = stream_nll(counter_model(slow), random_tokens, chunk_length=chunk_length, progress=False)
    truth = [expected_nll(row, 0, 130, slow) for row in random_tokens]
    assert result.nll.dtype == np.float32
    np.testing.assert_allclose(result.nll, truth, atol=2e-6)
    torch.testing.assert_close(
        result.final_state[0].recurrent, torch.tensor([[130.0, float(row[:130].sum())] for row in random_tokens])
    )


@pytest.mark.parametrize("batch_size", [1, 2, 3, 50])
def test_batches_of_rows_do_not_change_results(
    counter_model: Any, expected_nll: NLL, random_tokens: np.ndarray, batch_size: int
) -> None:
    model = counter_model(slow)
    result = stream_nll(model, random_tokens, batch_size=batch_size, chunk_length=40, progress=False)
    np.testing.assert_allclose(result.nll, [expected_nll(row, 0, 130, slow) for row in random_tokens], atol=2e-6)
    assert result.final_state[0].recurrent[:, 1].tolist() == random_tokens[:, :130].sum(1).tolist()
    assert max(rows for rows, _ in model.shapes) == min(batch_size, 3)
    assert sum(rows * width for rows, width in model.shapes) == 3 * 130


def test_two_calls_with_the_state_between_equal_one_call(counter_model: Any, random_tokens: np.ndarray) -> None:
    model = counter_model(slow)
    whole = stream_nll(model, random_tokens, progress=False)
    first = stream_nll(model, random_tokens[:, :51], progress=False)
    second = stream_nll(model, random_tokens[:, 50:], initial_state=first.final_state, batch_size=2, progress=False)
    np.testing.assert_array_equal(np.concatenate([first.nll, second.nll], 1), whole.nll)
    state = first.final_state[0].recurrent  # from which gradients can start
    state.requires_grad_().square().sum().backward()
    assert state.grad is not None
    with pytest.raises(ValueError, match="initial_state must have one row per sequence, 3, got 2"):
        stream_nll(model, random_tokens, initial_state=take_rows(first.final_state, slice(0, 2)), progress=False)


@pytest.mark.parametrize("dtype", ["uint8", "int16", "uint16", "int32", "int64"])
def test_tokens_of_every_integer_type(counter_model: Any, random_tokens: np.ndarray, dtype: str) -> None:
    model = counter_model(slow)
    expected = stream_nll(model, random_tokens, progress=False).nll
    array = random_tokens.astype(dtype)
    np.testing.assert_array_equal(stream_nll(model, array, progress=False).nll, expected)
    np.testing.assert_array_equal(stream_nll(model, torch.from_numpy(array), progress=False).nll, expected)


def test_a_failing_model_returns_to_training_mode(counter_model: Any, random_tokens: np.ndarray) -> None:
    model = counter_model(lambda count: count * torch.nan)
    with pytest.raises(ValueError, match="NLL is nan at position 0 of sequence 0"):
        stream_nll(model, random_tokens, progress=False)
    assert model.training


@pytest.mark.parametrize("chunk_length", [1, 10, 200])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_the_first_broken_position_is_named(
    counter_model: Any, random_tokens: np.ndarray, chunk_length: int, batch_size: int
) -> None:
    def broken_at_57(count: Tensor) -> Tensor:
        return torch.where(count >= 58, torch.nan, 1.0)

    with pytest.raises(ValueError, match="NLL is nan at position 57 of sequence 0"):
        stream_nll(
            counter_model(broken_at_57),
            random_tokens,
            chunk_length=chunk_length,
            batch_size=batch_size,
            progress=False,
        )


def test_a_broken_state_behind_finite_losses_is_named(counter_model: Any, random_tokens: np.ndarray) -> None:
    class Overflowing(counter_model):  # type: ignore[misc]
        def forward(self, input_ids: Tensor, initial_state: Any = None, **kwargs: Any) -> SimpleNamespace:
            output = super().forward(input_ids, initial_state)
            if initial_state is not None and initial_state[0].recurrent[0, 0] == 20:
                output.final_state[0].recurrent[2, 0] = torch.inf
            return output

    with pytest.raises(ValueError, match=r"state of layer 0 .* after position 29 of sequence 2.* before position 20"):
        stream_nll(Overflowing(slow), random_tokens, chunk_length=10, progress=False)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (np.zeros(5, np.int64), r"shape \(sequences, length \+ 1\), got int64 of shape \(5,\)"),
        (np.zeros((2, 5)), "got float64"),
        (np.zeros((0, 5), np.int64), "at least one sequence"),
        (np.zeros((2, 1), np.int64), "2 tokens in each"),
        (np.array([[0, 7]]), "must be from 0 to 6, the model's vocabulary, got 0 to 7"),
        (np.array([[-100, 3]]), "got -100 to 3"),
    ],
)
def test_unusable_tokens_are_refused(counter_model: Any, tokens: np.ndarray, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        stream_nll(counter_model(slow), tokens, progress=False)


def test_forward_plan_keeps_to_its_limits() -> None:
    assert forward_plan(32, 4096, 384, None, None) == (16, 256)
    assert forward_plan(32, 4096, 384, None, None, most=2048) == (8, 256)
    assert forward_plan(32, 1000, 384, None, None, shortest=1000) == (4, 1000)
    assert forward_plan(32, 5000, 384, None, None, shortest=5000) == (1, 4096)
    assert forward_plan(1, 2**20, 384, None, None) == (1, 4096)
    assert forward_plan(4096, 64, 384, None, None) == (64, 64)
    assert forward_plan(32, 4096, 50_280, None, None) == (2, 333)
    assert forward_plan(5, 30, 2**26, None, None) == (1, 1)
    assert forward_plan(32, 4096, 384, 2, 10_000) == (2, 4096)
    assert forward_plan(32, 4096, 384, None, None, state=2**25) == (8, 512)
    assert forward_plan(32, 4096, 384, None, None, state=2**30) == (1, 4096)
    with pytest.raises(ValueError, match="chunk_length must be at least 1"):
        forward_plan(1, 10, 10, None, 0)


def test_nll_in_chunks_is_that_of_all_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, targets = torch.randn(3, 5, 7, dtype=torch.float64), torch.randint(0, 7, (3, 5))
    expected = -logits.log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    for most in (1, 28, 2**18):
        monkeypatch.setattr(readers, "LOGITS_PER_LOSS", most)
        found = readers.nll_of(logits, targets)
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, expected.float())


def test_losses_of_a_half_precision_model_are_taken_in_float32(counter_model: Any, expected_nll: NLL) -> None:
    tokens = np.arange(41)[None] % 7
    model = counter_model(lambda count: torch.full_like(count, 3, dtype=torch.bfloat16), last_only=True).bfloat16()
    nll = stream_nll(model, tokens, progress=False).nll
    np.testing.assert_allclose(nll[0], expected_nll(tokens[0], 0, 40, lambda count: 3, last_only=True), atol=1e-6)
