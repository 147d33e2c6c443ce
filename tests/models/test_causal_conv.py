"""The short convolution against its definition, with states, lengths and gradients."""

import pytest
import torch
from torch import Tensor

from hf_recurrent_lengthgen.models.layers_conv import causal_conv
from hf_recurrent_lengthgen.models.rows import Rows

BATCH, CHANNELS = 2, 3


def make_inputs(length: int, taps: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(BATCH, length, CHANNELS), (CHANNELS, taps), (CHANNELS,), (BATCH, CHANNELS, taps - 1)]
    x, weight, bias, state = (torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes)
    return x, weight, bias, state


def by_hand(x: Tensor, weight: Tensor, bias: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """y_t = silu(bias + sum_k w_k x_{t-K+1+k}) entry by entry, over the state's columns and then x."""
    taps, rows, finals = weight.shape[1], [], []
    for b in range(x.shape[0]):
        columns = [state[b, :, k] for k in range(taps - 1)] + list(x[b])
        a = [bias + sum(weight[:, k] * columns[t + k] for k in range(taps)) for t in range(x.shape[1])]
        rows.append(torch.stack([value * torch.sigmoid(value) for value in a]))
        last = columns[len(columns) - taps + 1 :]
        finals.append(torch.stack(last, 1) if last else x.new_zeros(CHANNELS, 0))
    return torch.stack(rows), torch.stack(finals)


def gradients(function: object, inputs: tuple[Tensor, ...], **options: object) -> list[Tensor]:
    leaves = [value.clone().requires_grad_() for value in inputs if value.numel()]
    y, final = function(*leaves, *inputs[len(leaves) :], **options)  # type: ignore[operator]
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(r.shape, generator=generator, dtype=torch.float64).to(r.dtype) for r in (y, final)]
    return [y, final, *torch.autograd.grad((y * weights[0]).sum() + (final * weights[1]).sum(), leaves)]


@pytest.mark.parametrize("taps", [1, 2, 4])
@pytest.mark.parametrize("length", [1, 2, 3, 4, 9])
def test_it_is_the_definition_with_all_gradients(length: int, taps: int) -> None:
    inputs = make_inputs(length, taps)
    for ours, theirs in zip(gradients(causal_conv, inputs), gradients(by_hand, inputs), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("cuts", [[1], [2, 3], [1, 2, 3, 4, 5], [6]], ids=str)
def test_chunks_equal_the_whole(cuts: list[int]) -> None:
    x, weight, bias, state = make_inputs(7, 4)
    whole, final = causal_conv(x, weight, bias, state)
    outputs = []
    for chunk in x.tensor_split(cuts, dim=1):
        y, state = causal_conv(chunk, weight, bias, state)
        outputs.append(y)
    torch.testing.assert_close(torch.cat(outputs, 1), whole)
    assert torch.equal(state, final)


@pytest.mark.parametrize("lengths", [[0, 5], [1, 2], [3, 4], [5, 5]], ids=str)
def test_only_real_tokens_enter_the_final_state(lengths: list[int]) -> None:
    x, weight, bias, state = make_inputs(5, 4)
    poisoned = x.clone()
    for row, length in enumerate(lengths):
        poisoned[row, length:] = float("nan")
    y, final = causal_conv(poisoned, weight, bias, state, Rows.of_lengths(torch.tensor(lengths), 5))
    for row, length in enumerate(lengths):
        columns = torch.cat([state[row], x[row, :length].T], 1)
        assert torch.equal(final[row], columns[:, columns.shape[1] - 3 :])
        truth, _ = by_hand(x[row : row + 1], weight, bias, state[row : row + 1])
        torch.testing.assert_close(y[row, :length], truth[0, :length])


def test_no_bias_is_a_zero_bias() -> None:
    x, weight, bias, state = make_inputs(5, 4)
    assert torch.equal(causal_conv(x, weight, None, state)[0], causal_conv(x, weight, 0 * bias, state)[0])


def test_bf16_inputs_are_convolved_in_float32_and_the_state_is_not_rounded() -> None:
    x, weight, bias, state = make_inputs(2, 4, torch.float32)
    y, final = causal_conv(x.bfloat16(), weight.bfloat16(), bias.bfloat16(), state)
    assert (y.dtype, final.dtype) == (torch.bfloat16, torch.float32)
    truth, _ = by_hand(x.bfloat16().float(), weight.bfloat16().float(), bias.bfloat16().float(), state)
    assert torch.equal(y, truth.bfloat16()) or (y - truth).abs().max() < 2**-8 * truth.abs().max()
    assert torch.equal(final[:, :, 0], state[:, :, 2])  # one old column is left after two tokens
    _, unread = causal_conv(x.bfloat16(), weight, bias, state, Rows.of_lengths(torch.zeros(BATCH).long(), 2))
    assert torch.equal(unread, state)


def test_the_final_state_is_a_copy() -> None:
    x, weight, bias, state = make_inputs(9, 4)
    _, final = causal_conv(x, weight, bias, state)
    x.zero_()
    state.zero_()
    assert (final != 0).all()
    assert final.untyped_storage().nbytes() == final.numel() * final.element_size()


def test_backward_inside_autocast_stays_in_full_precision() -> None:
    inputs = [value.requires_grad_() for value in make_inputs(9, 4, torch.float32)]
    expected = torch.autograd.grad(causal_conv(*inputs)[0].sum(), inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = torch.autograd.grad(causal_conv(*inputs)[0].sum(), inputs)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
