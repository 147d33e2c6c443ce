"""Symmetric cross-entropy against the formula in float64, and the metric against loops over recorded contexts."""

import math
from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM, Mamba2Config, Mamba2ForCausalLM

from hf_recurrent_lengthgen.hybrids import stateful
from hf_recurrent_lengthgen.metrics.misalignment import context_pairs, long_short_misalignment, symmetric_cross_entropy
from hf_recurrent_lengthgen.models import StatefulMamba2Config, StatefulMamba2ForCausalLM
from tests.versions import needs_hybrids

VOCABULARY = 7


def naive(logits_a: Tensor, logits_b: Tensor) -> Tensor:
    """Eq. 1 as it is written, in float64."""
    y, other = logits_a.double().softmax(-1), logits_b.double().softmax(-1)
    return -((other * y.log()).sum(-1) + (y * other.log()).sum(-1))


def random_pair(*shape: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).mul(3).to(dtype).requires_grad_() for _ in range(2)]


@pytest.mark.parametrize("chunk_size", [1, 3, None])
@pytest.mark.parametrize("shape", [(11,), (5, 11), (2, 7, 11), (2, 0, 11)], ids=str)
def test_values_and_gradients_are_those_of_the_formula(shape: tuple[int, ...], chunk_size: int | None) -> None:
    a, b = random_pair(*shape)
    weights = torch.rand(shape[:-1], dtype=torch.float64)
    ours, expected = symmetric_cross_entropy(a, b, chunk_size), naive(a, b)
    torch.testing.assert_close(ours, expected)
    ours_for = torch.autograd.grad((ours * weights).sum(), (a, b))
    torch.testing.assert_close(ours_for, torch.autograd.grad((expected * weights).sum(), (a, b)))


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 1e-2), (torch.float16, 2e-3)]
)
def test_low_precision_logits_are_worked_on_in_float32(dtype: torch.dtype, tolerance: float) -> None:
    a, b = random_pair(4, 300, dtype=dtype)
    ours, expected = symmetric_cross_entropy(a, b, 3), naive(a, b)
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours.double(), expected, rtol=1e-5, atol=1e-5)
    ours_for = torch.autograd.grad(ours.sum(), (a, b))
    exact_for = torch.autograd.grad(expected.sum(), (a, b))
    for gradient, exact in zip(ours_for, exact_for, strict=True):
        assert gradient.dtype == dtype
        torch.testing.assert_close(gradient, exact, rtol=tolerance, atol=2e-6)


def test_finite_differences_agree() -> None:
    assert torch.autograd.gradcheck(lambda a, b: symmetric_cross_entropy(a, b, 2), random_pair(3, 5))


def test_two_tokens_by_hand() -> None:
    # p = (1/4, 3/4), q = (1/2, 1/2): <p, log q> = -log 2, <q, log p> = (log 1/4 + log 3/4) / 2.
    a, b = torch.tensor([0.25, 0.75]).log().requires_grad_(), torch.zeros(2, requires_grad=True)
    value = symmetric_cross_entropy(a, b)
    assert value.item() == pytest.approx(math.log(2) + math.log(16 / 3) / 2)
    value.backward()
    # For a: p - q, as log q is constant. For b: q - p - q (log p - mean log p), log p differs by log 3.
    torch.testing.assert_close(a.grad, torch.tensor([-0.25, 0.25]))
    step = 0.25 + math.log(3) / 4
    torch.testing.assert_close(b.grad, torch.tensor([step, -step]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_logits_far_apart_stay_finite(dtype: torch.dtype) -> None:
    a = torch.tensor([1e4, -1e4, 0.0], dtype=dtype, requires_grad=True)
    b = torch.tensor([-1e4, 1e4, 0.0], dtype=dtype, requires_grad=True)
    value = symmetric_cross_entropy(a, b)
    assert value.item() == pytest.approx(4e4, rel=1e-2 if dtype == torch.bfloat16 else 1e-6)
    value.backward()
    assert a.grad is not None
    assert b.grad is not None
    assert a.grad.tolist() == [1, -1, 0]
    assert b.grad.tolist() == [-1, 1, 0]


def test_views_and_one_sided_gradients() -> None:
    logits = random_pair(2, 9, 5)[0]
    long, short = logits[:1, 4:], logits[1:, 2:7]
    expected = torch.autograd.grad(naive(long, short.detach()).sum(), logits)
    ours = torch.autograd.grad(symmetric_cross_entropy(long, short.detach(), 2).sum(), logits)
    torch.testing.assert_close(ours, expected)
    torch.testing.assert_close(symmetric_cross_entropy(logits, logits), naive(logits, logits))


class Allocations(TorchDispatchMode):
    """Numbers of elements of the tensors that operations make, views not counted."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs or {})
        if not func.is_view:
            inputs = {x.untyped_storage().data_ptr() for x in args if isinstance(x, Tensor)}
            for x in result if isinstance(result, tuple) else (result,):
                if isinstance(x, Tensor) and x.untyped_storage().data_ptr() not in inputs:
                    self.sizes.append(x.numel())
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_probability_tensor_is_kept_or_made(dtype: torch.dtype) -> None:
    positions, vocabulary, chunk = 40, 64, 4
    a, b = random_pair(positions, vocabulary, dtype=dtype)
    kept: list[Tensor] = []
    with (
        torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x),
        Allocations() as forward,
    ):
        value = symmetric_cross_entropy(a, b, chunk)
    large = [x for x in kept if x.numel() > 2 * positions]
    assert {x.data_ptr() for x in large} == {a.data_ptr(), b.data_ptr()}
    assert max(forward.sizes) == chunk * vocabulary
    upstream = torch.ones_like(value)
    with Allocations() as backward:
        torch.autograd.grad(value, (a, b), upstream)
    assert sorted(backward.sizes)[-3:] == [chunk * vocabulary, positions * vocabulary, positions * vocabulary]


@pytest.mark.parametrize(
    ("a", "b", "chunk_size", "message"),
    [
        (torch.zeros(2, 3), torch.zeros(3, 3), None, r"same shape and dtype, got \(2, 3\)"),
        (torch.zeros(3), torch.zeros(3).double(), None, "same shape and dtype"),
        (torch.zeros(()), torch.zeros(()), None, "floating-point logits"),
        (torch.zeros(3).long(), torch.zeros(3).long(), None, "floating-point logits"),
        (torch.zeros(3, 0), torch.zeros(3, 0), None, "floating-point logits"),
        (torch.zeros(3), torch.zeros(3), 0, "chunk_size must be at least 1"),
    ],
)
def test_unusable_logits_are_refused(a: Tensor, b: Tensor, chunk_size: int | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        symmetric_cross_entropy(a, b, chunk_size)


def test_pairs_are_uniform_over_ends_and_different_lengths() -> None:
    pairs = context_pairs(10, 5, 6000, seed=0, sequence=0)
    lengths, ends = Counter(pair.lengths for pair in pairs), Counter(pair.end for pair in pairs)
    assert set(lengths) == {(x, y) for x in (3, 4, 5) for y in (3, 4, 5) if x != y}
    assert set(ends) == {5, 6, 7, 8, 9, 10}
    for count in (*lengths.values(), *ends.values()):
        assert abs(count - 1000) < 5 * math.sqrt(6000 * 5 / 36)


def counter_sce(contexts: list[list[int]]) -> float:
    """Eq. 1 for the two predictions of the counter model below, by a loop."""
    distributions = []
    for ids in contexts:
        weights = [1.0] * VOCABULARY
        weights[sum(ids) % VOCABULARY] = math.exp(0.1 * len(ids))
        distributions.append([weight / sum(weights) for weight in weights])
    y, other = distributions
    return -sum(p * math.log(q) + q * math.log(p) for p, q in zip(y, other, strict=True))


def test_metric_compares_suffixes_that_end_together(counter_model: type, random_tokens: np.ndarray) -> None:
    training_length, samples = 20, 5
    seen: list[list[int]] = []

    class Recorder(counter_model):  # type: ignore[misc]
        def forward(self, input_ids: Tensor) -> SimpleNamespace:
            assert not self.dropout.training
            assert not torch.is_grad_enabled()
            seen.append(input_ids[0].tolist())
            result: SimpleNamespace = super().forward(input_ids)
            return result

    model = Recorder(lambda count: 0.1 * count).train()
    result = long_short_misalignment(model, random_tokens, training_length, samples=samples, progress=False)
    assert model.training
    assert model.dropout.training

    values = np.empty((len(random_tokens), samples))
    for index in range(values.size):
        sequence, contexts = index // samples, seen[2 * index : 2 * index + 2]
        shorter, longer = sorted(contexts, key=len)
        assert training_length / 2 <= len(shorter) < len(longer) <= training_length
        assert longer[-len(shorter) :] == shorter
        text, width = random_tokens[sequence].tolist(), len(longer)
        assert longer in [text[end - width : end] for end in range(training_length, len(text) + 1)]
        values[sequence, index % samples] = counter_sce(contexts)
    np.testing.assert_allclose(result.by_sequence, values.mean(1), rtol=1e-5)
    mean, half = values.mean(), 4.302653 * values.mean(1).std(ddof=1) / math.sqrt(3)  # t table, 2 degrees of freedom
    np.testing.assert_allclose([result.mean, result.low, result.high], [mean, mean - half, mean + half], rtol=1e-5)


def test_a_model_of_the_last_token_has_twice_its_entropy(counter_model: type, random_tokens: np.ndarray) -> None:
    model = counter_model(lambda count: torch.full_like(count, math.log(2)), last_only=True)
    result = long_short_misalignment(model, random_tokens, 4, samples=2, progress=False)
    entropy = math.log(VOCABULARY + 1) - 2 / (VOCABULARY + 1) * math.log(2)  # one weight of 2, the others 1
    np.testing.assert_allclose(result.by_sequence, 2 * entropy, rtol=1e-6)


def test_draws_depend_on_the_seed_and_the_sequence_alone(counter_model: type, random_tokens: np.ndarray) -> None:
    def values(tokens: np.ndarray, seed: int) -> list[float]:
        model = counter_model(lambda count: 0.1 * count)
        found = long_short_misalignment(model, tokens, 20, samples=3, seed=seed, progress=False)
        return list(found.by_sequence)

    assert values(random_tokens, 0) == values(random_tokens, 0)
    assert values(random_tokens, 0)[:1] == values(random_tokens[:1], 0)
    assert values(random_tokens, 0) != values(random_tokens, 1)
    assert context_pairs(131, 20, 3, seed=0, sequence=0) != context_pairs(131, 20, 3, seed=0, sequence=1)


def tiny_llama() -> nn.Module:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, initializer_range=0.5, **sizes))


def tiny_mamba2(model_class: type, config_class: type) -> nn.Module:
    sizes = {"hidden_size": 8, "state_size": 4, "num_hidden_layers": 2, "num_heads": 2, "head_dim": 8, "n_groups": 1}
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    model: nn.Module = model_class(config_class(vocab_size=VOCABULARY, initializer_range=0.5, **sizes, **special))
    return model


MODELS = {
    "llama": tiny_llama,
    "ours": lambda: tiny_mamba2(StatefulMamba2ForCausalLM, StatefulMamba2Config),
    "wrapped": lambda: stateful(tiny_mamba2(Mamba2ForCausalLM, Mamba2Config)),
}


@pytest.mark.parametrize("name", ["llama", "ours", pytest.param("wrapped", marks=needs_hybrids)])
def test_metric_of_real_models_is_that_of_plain_forward_passes(name: str, random_tokens: np.ndarray) -> None:
    torch.manual_seed(0)
    model: Any = MODELS[name]().eval()
    result = long_short_misalignment(model, random_tokens, 16, samples=2, progress=False)
    expected = []
    for sequence, tokens in enumerate(torch.from_numpy(random_tokens)):
        with torch.no_grad():
            expected += [
                naive(*(model(input_ids=tokens[None, end - n : end]).logits[0, -1] for n in lengths)).item()
                for end, lengths in context_pairs(len(tokens), 16, 2, 0, sequence)
            ]
    np.testing.assert_allclose(result.by_sequence, np.reshape(expected, (-1, 2)).mean(1), rtol=1e-5)
    assert np.ptp(expected) > 1e-3


@pytest.mark.parametrize(
    ("length", "settings", "message"),
    [
        (7, {"training_length": 8}, "too few"),
        (8, {"training_length": 1}, "training_length must be at least 2, got 1"),
        (8, {"training_length": 8, "samples": 0}, "samples must be at least 1, got 0"),
        (8, {"training_length": 8, "seed": -1}, "seed must be at least 0, got -1"),
    ],
)
def test_unusable_settings_are_refused(
    length: int, settings: dict[str, int], message: str, counter_model: type, random_tokens: np.ndarray
) -> None:
    with pytest.raises(ValueError, match=message):
        long_short_misalignment(counter_model(torch.ones_like), random_tokens[:, :length], progress=False, **settings)


def test_predictions_that_are_not_finite_are_named(counter_model: type, random_tokens: np.ndarray) -> None:
    model = counter_model(lambda count: torch.full_like(count, math.nan))
    with pytest.raises(ValueError, match=r"in sequence 0 after the .* not finite"):
        long_short_misalignment(model, random_tokens, 8, progress=False)


@pytest.mark.parametrize("hidden", [[4], [0, 2, 4]])
def test_tokens_that_both_contexts_rule_out_count_nothing(
    hidden: list[int], counter_model: type, random_tokens: np.ndarray
) -> None:
    """The formula, over the other tokens alone."""
    masked = counter_model(torch.ones_like).eval()
    forward = masked.forward

    def ruled_out(*given: Any, **arguments: Any) -> Any:
        output = forward(*given, **arguments)
        output.logits[..., hidden] = -math.inf
        return output

    masked.forward = ruled_out
    tokens = random_tokens[:, :20]
    found = long_short_misalignment(masked, tokens, 8, progress=False)
    assert np.isfinite(found.by_sequence).all()
    for sequence, row in enumerate(tokens):
        nats = []
        for end, lengths in context_pairs(20, 8, 8, 0, sequence):
            contexts = (torch.from_numpy(row[None, end - length : end].astype(np.int64)) for length in lengths)
            allowed = [token for token in range(VOCABULARY) if token not in hidden]
            nats.append(naive(*(masked(ids).logits[0, -1, allowed].detach() for ids in contexts)).item())
        assert found.by_sequence[sequence] == pytest.approx(np.mean(nats), rel=1e-5)


def test_a_token_that_one_context_alone_rules_out_is_refused(counter_model: type, random_tokens: np.ndarray) -> None:
    model = counter_model(torch.ones_like)
    forward = model.forward

    def ruled_out(input_ids: Tensor, **arguments: Any) -> Any:
        output = forward(input_ids, **arguments)
        output.logits[..., 1] = -math.inf if input_ids.shape[1] % 2 else 0.0
        return output

    model.forward = ruled_out
    with pytest.raises(ValueError, match="one prediction rules out a token that the other allows"):
        long_short_misalignment(model, random_tokens, 8, progress=False)


def test_one_sequence_of_the_training_length_is_enough(counter_model: type, random_tokens: np.ndarray) -> None:
    result = long_short_misalignment(counter_model(torch.ones_like), random_tokens[:1, :8], 8, progress=False)
    assert result.low is None
    assert result.high is None
    assert result.mean == result.by_sequence[0]
