"""Symmetric cross-entropy against the formula in float64, and the metric against loops over recorded contexts."""

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import Mamba2Config, Mamba2ForCausalLM

from hf_recurrent_lengthgen.hybrids import stateful
from hf_recurrent_lengthgen.metrics.misalignment import context_pairs, long_short_misalignment, symmetric_cross_entropy
from hf_recurrent_lengthgen.models import StatefulMamba2Config, StatefulMamba2ForCausalLM
from tests.llamas import tiny_llama

VOCABULARY = 7


def naive(logits_a: Tensor, logits_b: Tensor) -> Tensor:
    """Eq. 1 as it is written, in float64."""
    y, other = logits_a.double().softmax(-1), logits_b.double().softmax(-1)
    return -((other * y.log()).sum(-1) + (y * other.log()).sum(-1))


def random_pair(*shape: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).mul(3).to(dtype) for _ in range(2)]


@pytest.mark.parametrize("shape", [(11,), (5, 11), (2, 0, 11), (3, 100, 3000)], ids=str)
def test_values_are_those_of_the_formula(shape: tuple[int, ...]) -> None:
    """`tests/trainers/test_alignment_loss.py` has the gradients of the same functions."""
    a, b = random_pair(*shape)
    torch.testing.assert_close(symmetric_cross_entropy(a, b), naive(a, b))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_logits_are_worked_on_in_float32(dtype: torch.dtype) -> None:
    a, b = random_pair(4, 300, dtype=dtype)
    ours = symmetric_cross_entropy(a, b)
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours.double(), naive(a, b), rtol=1e-5, atol=1e-5)


def test_pairs_are_uniform_over_ends_and_different_lengths() -> None:
    pairs = context_pairs(10, 5, 6000, seed=0, sequence=0)
    lengths, ends = Counter(lengths for _, lengths in pairs), Counter(end for end, _ in pairs)
    assert set(lengths) == {(x, y) for x in (3, 4, 5) for y in (3, 4, 5) if x != y}
    assert set(ends) == {5, 6, 7, 8, 9, 10}
    for count in (*lengths.values(), *ends.values()):
        assert abs(count - 1000) < 5 * math.sqrt(6000 * 5 / 36)


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


def tiny_mamba2(model_class: type, config_class: type) -> nn.Module:
    sizes = {"hidden_size": 8, "state_size": 4, "num_hidden_layers": 2, "num_heads": 2, "head_dim": 8, "n_groups": 1}
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    model: nn.Module = model_class(config_class(vocab_size=VOCABULARY, initializer_range=0.5, **sizes, **special))
    return model


MODELS = {
    "llama": lambda: tiny_llama(vocab_size=VOCABULARY, num_hidden_layers=2, initializer_range=0.5),
    "ours": lambda: tiny_mamba2(StatefulMamba2ForCausalLM, StatefulMamba2Config),
    "wrapped": lambda: stateful(tiny_mamba2(Mamba2ForCausalLM, Mamba2Config)),
}


@pytest.mark.parametrize("name", ["llama", "ours", "wrapped"])
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
    values = np.reshape(expected, (-1, 2)).mean(1)
    np.testing.assert_allclose(result.by_sequence, values, rtol=1e-5)
    half = 4.302653 * values.std(ddof=1) / math.sqrt(3)  # t table, 2 degrees of freedom
    mean = values.mean()
    np.testing.assert_allclose([result.mean, result.low, result.high], [mean, mean - half, mean + half], rtol=1e-4)
    assert np.ptp(expected) > 1e-3


def test_texts_shorter_than_the_training_length_are_refused(counter_model: type, random_tokens: np.ndarray) -> None:
    with pytest.raises(ValueError, match="too few"):
        long_short_misalignment(counter_model(torch.ones_like), random_tokens[:, :7], 8, progress=False)


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

    def ruled_out(*args: Any, **arguments: Any) -> Any:
        output = forward(*args, **arguments)
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
