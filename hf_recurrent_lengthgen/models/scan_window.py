"""A state of Mamba-2 that holds the last r tokens only.

"Stuffed Mamba" (Chen et al. 2024, arXiv:2410.07145), Eq. 8: h_t^(r) = h_t - alpha_{t-r+1:t} h_{t-r}. (In its Eq. 6
the product should begin with alpha_{i+1}, and its sum over Delta has one term too many.)

The difference of Eq. 8 loses digits where h_t is much larger than what the window holds, and both of its terms keep
growing. So the window is computed as two sums, without a difference. A call is cut into blocks of at most r tokens.
With the last r tokens before a block at hand (keys, values, step sizes; "old" below), for token j of a block:

    h_j^(r) = [state from the old tokens that stay for the whole block, scanned on to j]
            + sum over old tokens i > j of those that leave within the block: alpha_{i+1:j} k_i v_i

The first term is the plain scan from another initial state. In the second, alpha_{i+1:j} is that from i to the start
of the block times that from there to j: both are exponentials of sums of log decays, at most 1 and without
cancellation, so that a window of thousands of tokens is safe in float32. The state from the staying tokens is
summed up from them, or, cheaper in short blocks, is h^(r) minus what leaves. The latter is exact up to the rounding of
what the window has held in the meantime. It is done for at most r tokens in a row, so that errors do not accumulate,
and not where what leaves is so much larger than what stays that its rounding would show.

A token is k (B in Mamba-2), (B, T, G, N), v (x), (B, T, H, P), and g, (B, T, H + 1): step sizes and a shared negative
log decay (scan_forgetting.py). Rates A are (H,). Shape suffixes as in scan_backends.py; r tokens in the window, F
features of a token.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from .rows import Rows
from .rows_moved import joined, zero_past_end
from .state_value import LayerShape, LayerState, WindowedLayerShape, layer_state

CHUNK = 64  # tokens of one step of a sum over tokens that leave
LOG2_E = math.log2(math.e)
# Error of a state, in units of the last place, at which it is summed up anew: 1e-5 in float32.
_MAX_ERROR = 100.0


def window_shape(window: int, shape: LayerShape) -> LayerShape:
    """The shape of a layer's state with the `window` part for so many tokens."""
    heads, values, _ = shape.recurrent
    inner = heads * values
    features = (shape.conv[0] - inner) // 2 + inner + heads + 1  # B has half of the other channels
    windowed: Any = WindowedLayerShape(*shape, (1 + window, features))
    return windowed


def windowed_scan(
    r: int,
    scan: Callable[..., tuple[Tensor, Tensor]],
    A: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    state: LayerState,
    rows: Rows | None,
) -> tuple[Tensor, LayerState]:
    """Outputs of T tokens by states of the last r, and the state after the last token; `scan` is the plain one."""
    parts: Any = state
    recurrent, conv, window = parts
    marks, old = _unpacked(window, (k, v, g))
    outputs, lengths = [], None if rows is None else rows.lengths
    for start in range(0, q.shape[1], r):
        block = slice(start, start + r)
        new = [t[:, block] for t in (k, v, g)]
        real = None if lengths is None else (lengths - start).clamp(0, new[0].shape[1])
        y, recurrent, marks = _block_with_window(scan, A, q[:, block], new, recurrent, old, marks, real)
        old = [_last_tokens(*parts, real) for parts in zip(old, new, strict=True)]
        outputs.append(y)
    return joined(outputs, 1), layer_state((recurrent, conv, _packed(marks, old)))


def _block_with_window(
    scan: Callable[..., tuple[Tensor, Tensor]],
    A: Tensor,
    q: Tensor,
    new: Sequence[Tensor],
    recurrent: Tensor,
    old: Sequence[Tensor],
    marks: Tensor,
    lengths: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """At most r tokens (k, v, g), with the r before them, by the two sums of the module's description.

    Returns:
        Outputs, recurrent part, and two marks (B, 2): how many tokens were taken off the state since it was summed up,
        and the rounding error that this may have left, in units of the last place.
    """
    k, v, g = old
    age, error = marks.unbind(1)
    tokens, r = q.shape[1], k.shape[1]
    after = g[:, tokens:].sum(1)
    k_left = k[:, :tokens] if lengths is None else zero_past_end(k[:, :tokens], Rows.of_lengths(lengths, tokens))
    left = [k_left, v[:, :tokens], g[:, :tokens]]
    taken = age.new_full(age.shape, tokens) if lengths is None else lengths.to(age.dtype)
    if tokens == r and lengths is None:  # all of them leave
        base, age, error = torch.zeros_like(recurrent), torch.zeros_like(age), torch.zeros_like(age)
    else:
        base, age, error = recurrent - _collected(A, left, after), age + taken, error.hypot(_norm(recurrent))
        fresh = (age <= r) & (error <= _MAX_ERROR * _norm(base))  # not where the state is not finite
        if torch.compiler.is_compiling() or not bool(fresh.all()):
            first = tokens if lengths is None else 0
            k_stay = k[:, first:] if lengths is None else k - pad(k_left, (0, 0) * (k.ndim - 2) + (0, r - tokens))
            base = _collected(A, [k_stay, v[:, first:], g[:, first:]], torch.zeros_like(after))
            age, error = torch.zeros_like(age), torch.zeros_like(age)
    y, recurrent = scan(q, new[0], new[1], new[2], base)
    y = _with_leaving(A, y, q, new[2], left, after)
    return y, recurrent, torch.stack([age, error], dim=1)


def _norm(state: Tensor) -> Tensor:
    return state.flatten(1).norm(dim=1)


def _unpacked(window: Tensor, like: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Marks (B, 2), and k, v and g (B, r, ...), of a window part (B, 1 + r, F), whose first row begins with the marks.

    The marks are those of `_block_with_window`.
    """
    parts = window[:, 1:].split([t[0, 0].numel() for t in like], dim=-1)
    return window[:, 0, :2], [part.reshape(*part.shape[:2], *t.shape[2:]) for part, t in zip(parts, like, strict=True)]


def _packed(marks: Tensor, parts: Sequence[Tensor]) -> Tensor:
    """Inverse of `_unpacked`."""
    widths = [part[0, 0].numel() for part in parts]
    window = marks.new_zeros(len(marks), 1 + parts[0].shape[1], sum(widths))
    window[:, 0, :2] = marks
    for part, end, width in zip(parts, itertools.accumulate(widths), widths, strict=True):
        window[:, 1:, end - width : end] = part.flatten(2)
    return window


def _last_tokens(old: Tensor, new: Tensor, lengths: Tensor | None) -> Tensor:
    """The last r real tokens of r old and at most r new ones."""
    r = old.shape[1]
    if lengths is None:
        return new if new.shape[1] == r else torch.cat([old[:, new.shape[1] :], new], dim=1)
    index = torch.arange(r, device=old.device) + lengths[:, None]
    index = index.reshape(*index.shape, *[1] * (old.ndim - 2)).expand(-1, -1, *old.shape[2:])
    return torch.cat([old, new], dim=1).gather(1, index)


def _decays(A: Tensor, sums: Tensor) -> Tensor:
    return _fast_exp(sums[..., :-1] * A - sums[..., -1:])


def _written(A: Tensor, v: Tensor, g: Tensor, rest: Tensor, groups: int) -> Tensor:
    """What tokens write, decayed by `rest`: (B, G, T, R*P)."""
    v = v * (g[..., :-1] * _decays(A, rest))[..., None]
    return v.unflatten(2, (groups, -1)).flatten(3).transpose(1, 2)


def _collected(A: Tensor, old: Sequence[Tensor], after: Tensor) -> Tensor:
    """The state that tokens (k, v, g) make up, with `after` (B, H + 1) the sum of g over those after them."""
    k, v, g = old
    state = torch.zeros(())
    for rest, k_chunk, v_chunk, g_chunk in _reversed_chunks(g, after, k, v, g):
        state = state + _written(A, v_chunk, g_chunk, rest, k.shape[2]).mT @ k_chunk.transpose(1, 2)
    return state.reshape(len(k), *v.shape[2:], k.shape[3])  # from (B, G, R*P, N)


def _with_leaving(A: Tensor, y: Tensor, q: Tensor, g: Tensor, old: Sequence[Tensor], after: Tensor) -> Tensor:
    """Outputs y of new tokens (q, g), with what as many old tokens (k, v, g) add; `after` as in `_collected`.

    Old token i is in the windows of the new ones before the i-th.
    """
    outputs, later, groups = [], None, q.shape[2]
    old_chunks = _reversed_chunks(old[2], after, *old)
    new_chunks = _chunks(g, y, q)[::-1]
    for (since, y_chunk, q), (rest, k, v, old_g) in zip(new_chunks, old_chunks, strict=True):
        written = _written(A, v, old_g, rest, groups)
        more, later = _later_attention(q.transpose(1, 2), k.transpose(1, 2), written, later)
        more = more.transpose(1, 2).reshape(y_chunk.shape) * _decays(A, since)[..., None]
        if torch.is_grad_enabled():
            outputs.append(y_chunk + more)
        else:
            y_chunk.add_(more)  # a part of y
    return joined(outputs[::-1], 1) if outputs else y


def _fast_exp(x: Tensor) -> Tensor:
    """exp by way of exp2: on a CPU, exp is many times slower where it underflows."""
    return (x * LOG2_E).exp2_()


def _chunks(g: Tensor, *tensors: Tensor) -> list[tuple[Tensor, ...]]:
    """Chunks of the sums of g up to each token, and of tensors; all (B, T, ...)."""
    chunks, total = [], torch.zeros_like(g[:, :1])
    for g_chunk, *parts in zip(*(t.split(CHUNK, dim=1) for t in (g, *tensors)), strict=True):
        sums = torch.cat([total, g_chunk], dim=1).cumsum(1)
        chunks.append((sums[:, 1:], *parts))
        total = sums[:, -1:]
    return chunks


def _reversed_chunks(g: Tensor, after: Tensor, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Chunks, the last first, of the sums of g over the tokens after each, and of tensors; all (B, T, ...).

    `after` (B, ...) is the sum over what follows the tokens.
    """
    total = after[:, None]
    for g_chunk, *parts in reversed(list(zip(*(t.split(CHUNK, dim=1) for t in (g, *tensors)), strict=True))):
        sums = torch.cat([g_chunk, total], dim=1).flip(1).cumsum(1).flip(1)
        yield sums[:, 1:], *parts
        total = sums[:, :1]


def _later_attention(q: Tensor, k: Tensor, v: Tensor, later: Tensor | None) -> tuple[Tensor, Tensor]:
    """y_j = sum over i > j of (q_j . k_i) v_i, and over the chunks after this one; and their new sum.

    q and k are (B, G, Q, N), v and y (B, G, Q, M), sums (B*G, N, M).
    """
    shape = v.shape
    q, k, v = (t.flatten(0, 1) for t in (q, k, v))
    y = (q @ k.mT).triu(1) @ v
    if later is None:
        return y.view(shape), k.mT @ v
    if torch.is_grad_enabled():
        return torch.baddbmm(y, q, later).view(shape), torch.baddbmm(later, k.mT, v)
    return y.baddbmm_(q, later).view(shape), later.baddbmm_(k.mT, v)
