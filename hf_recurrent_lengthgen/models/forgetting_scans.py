"""Scans whose state forgets: weaker retention and insertion, and a state of the last r tokens only.

"Stuffed Mamba" (Chen et al. 2024, arXiv:2410.07145), Eq. 8: h_t^(r) = h_t - alpha_{t-r+1:t} h_{t-r}. (In its Eq. 6
the product should begin with alpha_{i+1}, and its sum over Delta has one term too many.)

The difference of Eq. 8 loses digits where h_t is much larger than what the window holds, and both of its terms keep
growing. So the window is computed as two sums, without a difference. A call is cut into pieces of at most r tokens.
With the last r tokens before a piece at hand (keys, values, log decays; "old" below), for token j of a piece:

    h_j^(r) = [state from the old tokens that stay for the whole piece, scanned on to j]
            + sum over old tokens i > j of those that leave within the piece: alpha_{i+1:j} k_i v_i

The first term is the plain scan from another initial state. In the second, alpha_{i+1:j} is that from i to the start
of the piece times that from there to j: both are exponentials of sums of log decays, at most 1 and without
cancellation, so that a window of thousands of tokens is safe in float32. The state from the staying tokens is
summed up from them, or, cheaper in short pieces, is h^(r) minus what leaves. The latter is exact up to the rounding of
what the window has held in the meantime. It is done for at most r tokens in a row, so that errors do not accumulate,
and not where what leaves is so much larger than what stays that its rounding would show.

A token is its keys, values and log decays (k, v, g), also of recurrences that name them otherwise: in Mamba-1 and
Mamba-2, k is B, v is x, and g holds the step sizes, and one more channel: the negative logarithm of a decay that all
states share. `Recurrence` is what a family says of itself, in a file `forgetting_*.py` beside its scan.

Shape suffixes as in scan_backends.py; r tokens in the window, F features of a token.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from .forgetting import Forgetting
from .recurrent_state import LayerShape, LayerState, WindowedLayerShape, layer_state
from .rows import Rows
from .rows_moved import zero_past_end

CHUNK = 64  # tokens of one step of a sum over tokens that leave
LOG2_E = math.log2(math.e)
# Error of a state, in units of the last place, at which it is summed up anew: 1e-5 in float32.
_MAX_ERROR = 100.0


class Recurrence:
    """A recurrence that can forget. Mixers name theirs as `recurrence`; `forgetting_*.py` have one for each scan.

    Attributes:
        scan: From q, k, v, g and a state to outputs and the final state.
    """

    scan: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]

    @classmethod
    def with_forgetting(
        cls,
        rule: Forgetting,
        scan: Callable[..., tuple[Tensor, Tensor]],
        inputs: Sequence[Tensor],
        state: LayerState,
        rows: Rows | None,
        **options: Any,
    ) -> tuple[Tensor, LayerState]:
        """Run a scan with forgetting around it: outputs, and the state after the last token.

        Args:
            rule: What to forget.
            scan: The scan.
            inputs: Its inputs, before the state.
            state: Before the first token, with a `window` part if the rule has one.
            rows: As layers get them.
            options: Its keywords.
        """
        raise NotImplementedError

    @classmethod
    def features(cls, shape: LayerShape) -> int:
        """F, for states of this shape."""
        raise NotImplementedError

    @classmethod
    def window_shape(cls, window: int, shape: LayerShape) -> LayerShape:
        """The shape of a layer's state with the `window` part for so many tokens."""
        windowed: Any = WindowedLayerShape(*shape, (1 + window, cls.features(shape)))
        return windowed

    def with_shared_decay(self, g: Tensor, log_decay_BT1: Tensor) -> Tensor:
        """g of recurrences that decay more, by a factor that all states share."""
        raise NotImplementedError

    def collect(self, old: Sequence[Tensor], after: Tensor) -> Tensor:
        """The state that tokens (k, v, g) make up, with `after` (B, ...) the sum of g over those after them."""
        raise NotImplementedError

    def with_leaving(self, y: Tensor, q: Tensor, g: Tensor, old: Sequence[Tensor], after: Tensor) -> Tensor:
        """Outputs y of new tokens (q, g), with what as many old tokens (k, v, g) add; `after` as in `collect`.

        Old token i is in the windows of the new ones before the i-th.
        """
        raise NotImplementedError


class SteppedRecurrence(Recurrence):
    """What the recurrences of Mamba share: g (B, T, H + 1) has step sizes, and a shared negative log decay.

    Args:
        scan: From x, dt, A, B, C, D and a state to outputs and the final state.
        A: Negative decay rates, one or several for each head or channel.
        D: Skip weights.
        retention: The shared decay of a token.
    """

    def __init__(self, scan: Callable[..., tuple[Tensor, Tensor]], A: Tensor, D: Tensor, retention: float) -> None:
        self._scan, self.A, self.D, self.retention = scan, A, D, retention

    @classmethod
    def with_forgetting(
        cls,
        rule: Forgetting,
        scan: Callable[..., tuple[Tensor, Tensor]],
        inputs: Sequence[Tensor],
        state: LayerState,
        rows: Rows | None,
        **options: Any,
    ) -> tuple[Tensor, LayerState]:
        x, dt, A, B, C, D = inputs
        dt = dt * rule.delta_scale
        if not rule.in_recurrence:
            y, recurrent = scan(x, dt, A, B, C, D, state.recurrent, **options)
            return y, state._replace(recurrent=recurrent)
        wide = state.recurrent.dtype
        recurrence = cls(partial(scan, **options), A.to(wide), D.to(wide), rule.retention)
        C, B, x = (part.to(wide) for part in (C, B, x))
        return forgetful_scan(rule, recurrence, C, B, x, pad(dt, (0, 1)), state, rows)

    def with_shared_decay(self, g: Tensor, log_decay_BT1: Tensor) -> Tensor:
        return torch.cat([g[..., :-1], g[..., -1:] - log_decay_BT1], dim=-1)


def forgetful_scan(
    rule: Forgetting,
    recurrence: Recurrence,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    state: LayerState,
    rows: Rows | None = None,
) -> tuple[Tensor, LayerState]:
    """Run a recurrence that forgets as `rule` says over T tokens: outputs, and the state after the last.

    The class of `recurrence` gives the shapes of q, k, v, g and the recurrent part. Past the end of a row, g is zero,
    and so are k or the step sizes. The state has a `window` part if the rule has one.
    """
    with torch.autocast(q.device.type, enabled=False):
        if rule.insertion != 1:
            k = k * rule.insertion
        if rule.retention < 1:
            log_decay = g.new_full((*g.shape[:2], 1), math.log(rule.retention))
            g = recurrence.with_shared_decay(g, zero_past_end(log_decay, rows))
        if rule.window is None:
            y, recurrent = recurrence.scan(q, k, v, g, state.recurrent)
            return y, state._replace(recurrent=recurrent)
        parts: Any = state
        recurrent, conv, window = parts
        marks, old = _unpacked(window, (k, v, g))
        outputs, whole, lengths = [], None, None if rows is None else rows.lengths
        for start in range(0, q.shape[1], rule.window):
            piece = slice(start, start + rule.window)
            new = [t[:, piece] for t in (k, v, g)]
            real = None if lengths is None else (lengths - start).clamp(0, new[0].shape[1])
            y, recurrent, marks = _piece_with_window(recurrence, q[:, piece], new, recurrent, old, marks, real)
            old = [_last_tokens(*parts, real) for parts in zip(old, new, strict=True)]
            if torch.is_grad_enabled() or rule.window >= q.shape[1]:
                outputs.append(y)
                continue
            whole = y.new_empty(len(y), q.shape[1], *y.shape[2:]) if whole is None else whole
            whole[:, piece] = y  # the next piece reuses its memory
        if whole is None:
            whole = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)
        return whole, layer_state((recurrent, conv, _packed(marks, old)))


def _piece_with_window(
    recurrence: Recurrence,
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
        base, age, error = recurrent - recurrence.collect(left, after), age + taken, error.hypot(_norm(recurrent))
        fresh = (age <= r) & (error <= _MAX_ERROR * _norm(base))  # not where the state is not finite
        if torch.compiler.is_compiling() or not bool(fresh.all()):
            first = tokens if lengths is None else 0
            k_stay = k[:, first:] if lengths is None else k - pad(k_left, (0, 0) * (k.ndim - 2) + (0, r - tokens))
            base = recurrence.collect([k_stay, v[:, first:], g[:, first:]], torch.zeros_like(after))
            age, error = torch.zeros_like(age), torch.zeros_like(age)
    y, recurrent = recurrence.scan(q, new[0], new[1], new[2], base)
    y = recurrence.with_leaving(y, q, new[2], left, after)
    return y, recurrent, torch.stack([age, error], dim=1)


def _norm(state: Tensor) -> Tensor:
    return state.flatten(1).norm(dim=1)


def _unpacked(window: Tensor, like: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Marks (B, 2), and k, v and g (B, r, ...), of a window part (B, 1 + r, F), whose first row begins with the marks.

    The marks are those of `_piece_with_window`.
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


def fast_exp(x: Tensor) -> Tensor:
    """exp by way of exp2: on a CPU, exp is many times slower where it underflows."""
    return (x * LOG2_E).exp2_()


def times(new: Tensor, factor: Tensor | float) -> Tensor:
    """Product with a tensor that nothing else uses: in place, unless gradients are needed."""
    kept = new.requires_grad or (isinstance(factor, Tensor) and factor.requires_grad)
    return new * factor if kept else new.mul_(factor)


def chunks(size: int, g: Tensor, before: bool, *tensors: Tensor) -> list[tuple[Tensor, ...]]:
    """Chunks of the sums of g up to each token, or up to the token before it, and of tensors; all (B, T, ...)."""
    found, total = [], torch.zeros_like(g[:, :1])
    for g_chunk, *parts in zip(*(t.split(size, dim=1) for t in (g, *tensors)), strict=True):
        sums = torch.cat([total, g_chunk], dim=1).cumsum(1)
        found.append((sums[:, :-1] if before else sums[:, 1:], *parts))
        total = sums[:, -1:]
    return found


def reversed_chunks(size: int, g: Tensor, after: Tensor, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Chunks, the last first, of the sums of g over the tokens after each, and of tensors; all (B, T, ...).

    `after` (B, ...) is the sum over what follows the tokens.
    """
    total = after[:, None]
    for g_chunk, *parts in reversed(list(zip(*(t.split(size, dim=1) for t in (g, *tensors)), strict=True))):
        sums = torch.cat([g_chunk, total], dim=1).flip(1).cumsum(1).flip(1)
        yield sums[:, 1:], *parts
        total = sums[:, :1]


def plus(y: Tensor, more: Tensor) -> Tensor:
    """Sum with outputs of a chunk that nothing else uses: in place where no gradients are taken."""
    return y + more if torch.is_grad_enabled() else y.add_(more)


def later_attention(q: Tensor, k: Tensor, v: Tensor, later: Tensor | None, strictly: bool) -> tuple[Tensor, Tensor]:
    """y_j = sum over i > j (or i >= j) of (q_j . k_i) v_i, and over the chunks after this one; and their new sum.

    q and k are (B, G, Q, N), v and y (B, G, Q, M), sums (B*G, N, M).
    """
    shape = v.shape
    q, k, v = (t.flatten(0, 1) for t in (q, k, v))
    y = (q @ k.mT).triu(int(strictly)) @ v
    if later is None:
        return y.view(shape), k.mT @ v
    if torch.is_grad_enabled():
        return torch.baddbmm(y, q, later).view(shape), torch.baddbmm(later, k.mT, v)
    return y.baddbmm_(q, later).view(shape), later.baddbmm_(k.mT, v)
