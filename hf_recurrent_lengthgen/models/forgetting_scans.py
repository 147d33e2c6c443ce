"""Scans whose state forgets: weaker retention and insertion, and a state that holds the last r tokens only.

"Stuffed Mamba" (Chen et al. 2024, arXiv:2410.07145), Eq. 8: h_t^(r) = h_t - alpha_{t-r+1:t} h_{t-r}. (In its Eq. 6
the product should begin with alpha_{i+1}, and its sum over Delta has one term too many.)

The difference of Eq. 8 loses digits where h_t is much larger than what the window holds, and both of its terms go on
growing. So the window is taken as two sums without a difference. A call is cut into pieces of at most r tokens. With
the last r tokens before a piece at hand (keys, values, log decays; "old" below), for token j of a piece:

    h_j^(r) = [state from the old tokens that stay for the whole piece, scanned on to j]
            + sum over old tokens i > j of those that leave within the piece: alpha_{i+1:j} k_i v_i

The first term is the plain scan from another initial state. In the second, alpha_{i+1:j} is that from i to the start
of the piece times that from there to j: both are exponentials of sums of log decays, at most 1 and without
cancellation, so that a window of thousands of tokens is safe in float32. The state from the staying tokens is
summed up from them, or, cheaper in short pieces, is h^(r) minus what leaves; the latter at most r tokens long, so that
rounding errors do not pile up, nor does an outlier leave a trace.

Keys, values and log decays (k, v, g) are the B, Delta x and Delta A of Mamba-2; those of GLA, HGRN-2, linear
attention, RWKV-5 and RWKV-6. In Mamba-1 g holds the step sizes, and one more channel whose decay is the same in all
states.

Shape suffixes as in scan_backends.py; r tokens in the window, F features of a token.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .forgetting import Forgetting
from .padding import zero_past_end
from .recurrent_state import LayerShape, LayerState, layer_state

# Tokens per matrix product of the sum over leaving tokens.
_CHUNK = 128
# Elements of one slab of that sum in Mamba-1.
_SLAB_ELEMENTS = 2**20
# Smaller steps than this are taken for it: they decay nothing, and nothing overflows when divided by them.
_SMALLEST_STEP = 2.0**-60
# How far inputs may be scaled up against a uniform decay, as a logarithm.
_LARGEST_SCALE = 30.0

Scan = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


class GatedRecurrence:
    """Decays per head and key channel: GLA and its like, and RWKV.

    q, k and g are (B, T, H, N), v is (B, T, H, P), a state is (B, H, P, N).

    Args:
        scan: From q, k, v, g and a state to outputs and the final state.
        reads_before: Whether an output reads the state before its token is written, as in RWKV.
    """

    def __init__(self, scan: Scan, reads_before: bool = False) -> None:
        self.scan = scan
        self.reads_before = reads_before

    def with_uniform_decay(self, g: Tensor, log_decay_BT1: Tensor) -> Tensor:
        """Log decays with one more that all channels share."""
        return g + log_decay_BT1[..., None]

    def collect(self, k: Tensor, v: Tensor, rest: Tensor) -> Tensor:
        """The state that tokens make up: sum_i exp(rest_i) k_i v_i, with `rest` the sums of g after each token."""
        return torch.einsum("bthp,bthn->bhpn", v, k * rest.exp())

    def leaving(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, rest: Tensor) -> Tensor:
        """What the old tokens k, v, `rest` add to the outputs of new ones q, g while they are in the window."""
        since = g.cumsum(1)
        if self.reads_before:
            since = torch.cat([torch.zeros_like(g[:, :1]), since[:, :-1]], dim=1)
        return _later_attention(q * since.exp(), k * rest.exp(), v, not self.reads_before)


class SSDRecurrence:
    """One decay per head, keys and queries per group: Mamba-2.

    q and k are (B, T, G, N), v is (B, T, H, P), g is (B, T, H), a state is (B, H, P, N).

    Args:
        scan: `scan_ssd` from x, dt, A, B, C and a state, to outputs without D x and the final state.
    """

    def __init__(self, scan: Callable[..., tuple[Tensor, Tensor]]) -> None:
        self._scan = scan

    def scan(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """The plain scan, with steps -g and decay rates -1."""
        steps = (-g).clamp(min=_SMALLEST_STEP)
        return self._scan(v / steps[..., None], steps, -torch.ones_like(g[0, 0]), k, q, state)

    def with_uniform_decay(self, g: Tensor, log_decay_BT1: Tensor) -> Tensor:
        """See `GatedRecurrence`."""
        return g + log_decay_BT1

    def collect(self, k: Tensor, v: Tensor, rest: Tensor) -> Tensor:
        """See `GatedRecurrence`."""
        v_BTGM = self._by_group(v * rest.exp()[..., None], k.shape[2])
        state = torch.einsum("btgm,btgn->bgmn", v_BTGM, k)
        return state.reshape(len(k), *v.shape[2:], k.shape[3])

    def leaving(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, rest: Tensor) -> Tensor:
        """See `GatedRecurrence`."""
        y = _later_attention(q, k, self._by_group(v * rest.exp()[..., None], k.shape[2]), True)
        return y.reshape(*g.shape, v.shape[3]) * g.cumsum(1).exp()[..., None]

    @staticmethod
    def _by_group(v_BTHP: Tensor, groups: int) -> Tensor:
        return v_BTHP.unflatten(2, (groups, -1)).flatten(3)


class SelectiveRecurrence:
    """One decay per channel and state: Mamba-1.

    q and k are (B, T, N), v is (B, T, D), a state is (B, D, N). g is (B, T, D + 1): the step sizes, and the negative
    logarithm of a decay that all states share.

    Args:
        scan: `scan_selective` from x, dt, B, C and a state, to outputs without D x and the final state.
        A: Negative decay rates, (D, N).
        retention: The shared decay of a token.
    """

    def __init__(self, scan: Callable[..., tuple[Tensor, Tensor]], A: Tensor, retention: float) -> None:
        self._scan = scan
        self.A = A
        # how many tokens' inputs can be scaled up against the shared decay
        self._tokens = None if retention == 1 else max(1, int(_LARGEST_SCALE / -math.log(retention)))

    def scan(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """The plain scan; of inputs that grow as the shared decay makes the past shrink, if there is one."""
        steps = g[..., :-1].clamp(min=_SMALLEST_STEP)
        if self._tokens is None:
            return self._scan(v / steps, steps, k, q, state)
        outputs = []
        for start in range(0, g.shape[1], self._tokens):
            piece = slice(start, start + self._tokens)
            grown = g[:, piece, -1:].cumsum(1)  # (B, T, 1)
            dt = steps[:, piece]
            y, state = self._scan(v[:, piece] * grown.exp() / dt, dt, k[:, piece], q[:, piece], state)
            outputs.append(y * (-grown).exp())
            state = state * (-grown[:, -1:]).exp()
        return torch.cat(outputs, dim=1), state

    def with_uniform_decay(self, g: Tensor, log_decay_BT1: Tensor) -> Tensor:
        """See `GatedRecurrence`."""
        return torch.cat([g[..., :-1], g[..., -1:] - log_decay_BT1], dim=-1)

    def _decays(self, sums_TBD: Tensor) -> Tensor:
        """Decays (T, B, D, N) from sums of g."""
        return torch.exp(sums_TBD[..., :-1, None] * self.A - sums_TBD[..., -1:, None])

    def _slabs(self, g: Tensor) -> list[slice]:
        size = max(1, _SLAB_ELEMENTS // (len(g) * self.A.numel()))
        return [slice(start, start + size) for start in range(0, g.shape[1], size)]

    def collect(self, k: Tensor, v: Tensor, rest: Tensor) -> Tensor:
        """See `GatedRecurrence`."""
        state = v.new_zeros(len(v), *self.A.shape)
        k, v, rest = (t.transpose(0, 1) for t in (k, v, rest))
        for piece in self._slabs(rest.transpose(0, 1)):
            slab = self._decays(rest[piece]) * v[piece][..., None]
            state = state + (slab * k[piece][:, :, None]).sum(0)
        return state

    def leaving(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, rest: Tensor) -> Tensor:
        """See `GatedRecurrence`."""
        later = v.new_zeros(len(v), *self.A.shape)
        slabs = self._slabs(g)
        q, k, v, rest, since = (t.transpose(0, 1) for t in (q, k, v, rest, g.cumsum(1)))
        outputs = []
        for piece in reversed(slabs):
            slab = self._decays(rest[piece]) * v[piece][..., None] * k[piece][:, :, None]
            sums = []  # over all old tokens after each
            for written in reversed(slab.unbind(0)):
                sums.append(later)
                later = later + written
            weights = self._decays(since[piece]) * torch.stack(sums[::-1])
            outputs.append((weights @ q[piece][..., None])[..., 0])
        return torch.cat(outputs[::-1]).transpose(0, 1)


Recurrence = GatedRecurrence | SSDRecurrence | SelectiveRecurrence


def forgetful_scan(
    rule: Forgetting,
    recurrence: Recurrence,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    state: LayerState,
    lengths: Tensor | None = None,
) -> tuple[Tensor, LayerState]:
    """Run a recurrence that forgets as `rule` says over T tokens.

    Args:
        rule: Retention, insertion and window; not the scale of the steps.
        recurrence: Which recurrence; its class says the shapes of q, k, v, g and the recurrent part.
        q: What reads the state.
        k: Keys.
        v: Values, zero past the end of a row if the keys are not.
        g: Log decays, in Mamba-1 step sizes; zero past the end of a row.
        state: State before the first token, with a `window` part if the rule has one.
        lengths: Number of real tokens of each row, (B,), None for all.

    Returns:
        Outputs, without a skip connection, and the state after the last token.
    """
    k = k * rule.insertion
    if rule.retention < 1:
        shared = torch.full_like(g[:, :, :1].flatten(2)[..., :1], math.log(rule.retention))
        g = recurrence.with_uniform_decay(g, zero_past_end(shared, lengths))
    if rule.window is None:
        y, recurrent = recurrence.scan(q, k, v, g, state.recurrent)
        return y, state._replace(recurrent=recurrent)
    parts: Any = state
    recurrent, conv, window = parts
    outputs = []
    for start in range(0, q.shape[1], rule.window):
        piece = slice(start, start + rule.window)
        size = q[:, piece].shape[1]
        real = None if lengths is None else (lengths - start).clamp(0, size)
        y, recurrent, window = _piece_with_window(
            recurrence, q[:, piece], k[:, piece], v[:, piece], g[:, piece], recurrent, window, real
        )
        outputs.append(y)
    return torch.cat(outputs, dim=1), layer_state((recurrent, conv, window))


def gated_scan(
    config: Any,
    scan: Scan,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    state: LayerState,
    lengths: Tensor | None,
    reads_before: bool = False,
) -> tuple[Tensor, LayerState]:
    """Run a scan of the shapes of `GatedRecurrence` with the forgetting of a configuration, if it has one.

    Where outputs read the state before their token, a window is of r tokens and the current one.
    """
    rule = Forgetting.of(config)
    if not rule.in_recurrence:
        y, recurrent = scan(q, k, v, g, state.recurrent)
        return y, state._replace(recurrent=recurrent)
    dtype = q.dtype
    q, k, v, g = (part.to(state.recurrent.dtype) for part in (q, k, v, g))
    y, state = forgetful_scan(rule, GatedRecurrence(scan, reads_before), q, k, v, g, state, lengths)
    return y.to(dtype), state


def gated_token_features(shape: LayerShape) -> int:
    """What a window keeps of one token of a `GatedRecurrence`: keys, values and log decays."""
    heads, values, keys = shape.recurrent
    return heads * (2 * keys + values)


def _piece_with_window(
    recurrence: Recurrence,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    recurrent: Tensor,
    window: Tensor,
    lengths: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """At most r tokens, by the two sums of the module's description: outputs, recurrent and window part.

    The window part is (B, 1 + r, F): first a row whose first entry is how many tokens were taken off the state since
    it was summed up, then k, v and g of the last r tokens, zeros for those before the first.
    """
    age, old = window[:, 0, 0], window[:, 1:]
    tokens = q.shape[1]
    r = old.shape[1]
    old_k, old_v, old_g = (
        part.unflatten(-1, new.shape[2:]) if new.ndim > 3 else part
        for part, new in zip(old.split([t[0, 0].numel() for t in (k, v, g)], dim=-1), (k, v, g), strict=True)
    )
    sums = old_g.flip(1).cumsum(1).flip(1)
    rest = torch.cat([sums[:, 1:], torch.zeros_like(sums[:, :1])], dim=1)  # of the tokens after each
    left, left_v, left_rest = (t[:, :tokens] for t in (old_k, old_v, rest))
    taken = age.new_full(age.shape, tokens) if lengths is None else lengths.to(age.dtype)
    if lengths is not None:
        left = zero_past_end(left, lengths)
    if tokens == r and lengths is None:  # all of them leave
        base, age = torch.zeros_like(recurrent), torch.zeros_like(age)
    elif torch.compiler.is_compiling() or bool((age + taken > r).any()):
        stay = old_k[:, tokens:] if lengths is None else old_k - zero_past_end(old_k, lengths)
        base = recurrence.collect(stay, old_v[:, -stay.shape[1] :], rest[:, -stay.shape[1] :])
        age = torch.zeros_like(age)
    else:
        base, age = recurrent - recurrence.collect(left, left_v, left_rest), age + taken
    y, recurrent = recurrence.scan(q, k, v, g, base)
    y = y + recurrence.leaving(q, left, left_v, g, left_rest)

    new = torch.cat([t.flatten(2) for t in (k, v, g)], dim=-1)
    if lengths is None:
        kept = [old[:, tokens:], new]
    else:
        index = torch.arange(r, device=old.device) + lengths[:, None]
        kept = [torch.cat([old, new], dim=1).gather(1, index[..., None].expand(-1, -1, old.shape[2]))]
    first = torch.nn.functional.pad(age[:, None, None], (0, old.shape[2] - 1))
    return y, recurrent, torch.cat([first, *kept], dim=1)


def _later_attention(q: Tensor, k: Tensor, v: Tensor, strictly: bool) -> Tensor:
    """y_j = sum over i > j (or i >= j) of (q_j . k_i) v_i; q and k (B, T, G, N), v (B, T, G, M), y like v."""
    batch, groups = q.shape[0], q.shape[2]
    q, k, v = (t.transpose(1, 2).flatten(0, 1) for t in (q, k, v))  # (B*G, T, ...)
    later = v.new_zeros(len(v), k.shape[2], v.shape[2])
    outputs = []
    for q_chunk, k_chunk, v_chunk in reversed(list(zip(*(t.split(_CHUNK, dim=1) for t in (q, k, v)), strict=True))):
        inside = (q_chunk @ k_chunk.mT).triu(int(strictly)) @ v_chunk
        outputs.append(torch.baddbmm(inside, q_chunk, later))
        later = torch.baddbmm(later, k_chunk.mT, v_chunk)
    return torch.cat(outputs[::-1], dim=1).unflatten(0, (batch, groups)).transpose(1, 2)
