"""What forgetting_scans.py needs of a recurrence: its scan, a further decay, what tokens add to state and outputs.

Keys, values and log decays (k, v, g) are those of GLA, HGRN-2, linear attention, RWKV-5 and RWKV-6. In Mamba-1 and
Mamba-2, k is B, v is x, and g holds the step sizes, and one more channel: the negative logarithm of a decay that all
states share.

Shape suffixes as in scan_backends.py.
"""

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

# Tokens of one step of the sum over leaving tokens.
_CHUNK = 64
# The same in Mamba-1, and how much of a state it takes at once there: 256 KiB in float32, for the cache of a CPU.
_SLAB_TOKENS, _SLAB_ELEMENTS = 16, 2**16
# How far inputs may be scaled up against a shared decay, as a logarithm.
_LARGEST_SCALE = 30.0
_LOG2_E = math.log2(math.e)

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

    def with_shared_decay(self, g: Tensor, log_decay_BT1: Tensor) -> Tensor:
        """g of recurrences that decay more, by a factor that all states share."""
        return g + log_decay_BT1[..., None]

    def collect(self, old: Sequence[Tensor], after: Tensor) -> Tensor:
        """The state that tokens (k, v, g) make up, with `after` (B, ...) the sum of g over those after them."""
        state = torch.zeros(())
        for rest, k, v in _reversed_chunks(_CHUNK, old[2], after, old[0], old[1]):
            state = state + v.permute(0, 2, 3, 1) @ (k * _exp(rest)).transpose(1, 2)
        return state

    def with_leaving(self, y: Tensor, q: Tensor, g: Tensor, old: Sequence[Tensor], after: Tensor) -> Tensor:
        """Outputs y of new tokens (q, g), with what as many old tokens (k, v, g) add; `after` as in `collect`.

        Old token i is in the windows of the new ones before the i-th.
        """
        outputs, later = [], None
        old_chunks = _reversed_chunks(_CHUNK, old[2], after, old[0], old[1])
        new_chunks = _chunks(_CHUNK, g, self.reads_before, y, q)[::-1]
        for (since, y_chunk, q), (rest, k, v) in zip(new_chunks, old_chunks, strict=True):
            q, k, v = (t.transpose(1, 2) for t in (q * _exp(since), k * _exp(rest), v))  # (B, H, Q, ...)
            more, later = _later_attention(q, k, v, later, not self.reads_before)
            outputs.append(_plus(y_chunk, more.transpose(1, 2)))
        return torch.cat(outputs[::-1], dim=1) if torch.is_grad_enabled() else y


class _SteppedRecurrence:
    """What the recurrences of Mamba share: g (B, T, H + 1) has step sizes, and a shared negative log decay.

    Args:
        scan: From x, dt, A, B, C, D and a state to outputs and the final state.
        A: Negative decay rates, (H,) in Mamba-2, (D, N) in Mamba-1.
        D: Skip weights.
        retention: The shared decay of a token.
    """

    def __init__(self, scan: Callable[..., tuple[Tensor, Tensor]], A: Tensor, D: Tensor, retention: float) -> None:
        self._scan, self.A, self.D, self.retention = scan, A, D, retention

    def with_shared_decay(self, g: Tensor, log_decay_BT1: Tensor) -> Tensor:
        return torch.cat([g[..., :-1], g[..., -1:] - log_decay_BT1], dim=-1)


class SSDRecurrence(_SteppedRecurrence):
    """One decay per head, keys and queries per group: Mamba-2.

    q and k are (B, T, G, N), v is (B, T, H, P), g is (B, T, H + 1), a state is (B, H, P, N).
    """

    def scan(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """The plain scan; with a shared decay, of other steps and rates that give the same decays and insertions."""
        dt = g[..., :-1]
        if self.retention == 1:
            return self._scan(v, dt, self.A, k, q, self.D, state)
        steps = g[..., -1:] - dt * self.A
        inputs = v * (dt / steps.masked_fill(steps == 0, 1))[..., None]
        y, state = self._scan(inputs, steps, -torch.ones_like(self.A), k, q, torch.zeros_like(self.D), state)
        return torch.addcmul(y, v, self.D[:, None]), state

    def _decays(self, sums: Tensor) -> Tensor:
        return _exp(sums[..., :-1] * self.A - sums[..., -1:])

    def _written(self, v: Tensor, g: Tensor, rest: Tensor, groups: int) -> Tensor:
        """What tokens write, decayed by `rest`: (B, G, T, R*P)."""
        v = v * (g[..., :-1] * self._decays(rest))[..., None]
        return v.unflatten(2, (groups, -1)).flatten(3).transpose(1, 2)

    def collect(self, old: Sequence[Tensor], after: Tensor) -> Tensor:
        k, v, g = old
        state = torch.zeros(())
        for rest, k_chunk, v_chunk, g_chunk in _reversed_chunks(_CHUNK, g, after, k, v, g):
            state = state + self._written(v_chunk, g_chunk, rest, k.shape[2]).mT @ k_chunk.transpose(1, 2)
        return state.reshape(len(k), *v.shape[2:], k.shape[3])  # from (B, G, R*P, N)

    def with_leaving(self, y: Tensor, q: Tensor, g: Tensor, old: Sequence[Tensor], after: Tensor) -> Tensor:
        outputs, later, groups = [], None, q.shape[2]
        old_chunks = _reversed_chunks(_CHUNK, old[2], after, *old)
        new_chunks = _chunks(_CHUNK, g, False, y, q)[::-1]
        for (since, y_chunk, q), (rest, k, v, old_g) in zip(new_chunks, old_chunks, strict=True):
            written = self._written(v, old_g, rest, groups)
            more, later = _later_attention(q.transpose(1, 2), k.transpose(1, 2), written, later, True)
            more = more.transpose(1, 2).reshape(y_chunk.shape)
            outputs.append(_plus(y_chunk, _times(more, self._decays(since)[..., None])))
        return torch.cat(outputs[::-1], dim=1) if torch.is_grad_enabled() else y


class SelectiveRecurrence(_SteppedRecurrence):
    """One decay per channel and state: Mamba-1.

    q and k are (B, T, N), v is (B, T, D), g is (B, T, D + 1), a state is (B, D, N).
    """

    def scan(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """The plain scan; with a shared decay, of inputs that grow as it makes the past shrink."""
        dt = g[..., :-1]
        if self.retention == 1:
            return self._scan(v, dt, self.A, k, q, self.D, state)
        outputs, no_skip = [], torch.zeros_like(self.D)
        size = max(1, int(_LARGEST_SCALE / -math.log(self.retention)))  # tokens until they have grown too much
        for start in range(0, g.shape[1], size):
            piece = slice(start, start + size)
            grown = g[:, piece, -1:].cumsum(1).clamp(max=2 * _LARGEST_SCALE)  # (B, T, 1); below that, nothing is left
            inputs = v[:, piece] * grown.exp()
            y, state = self._scan(inputs, dt[:, piece], self.A, k[:, piece], q[:, piece], no_skip, state)
            outputs.append(torch.addcmul(y * (-grown).exp(), v[:, piece], self.D))
            state = state * (-grown[:, -1:]).exp()
        return torch.cat(outputs, dim=1), state

    def _slabs(self, batch: int) -> list[slice]:
        """Channels of a state that are taken at once."""
        channels, state_dim = self.A.shape
        size = max(1, _SLAB_ELEMENTS // (batch * state_dim))
        return [slice(start, start + size) for start in range(0, channels, size)]

    def _decays(self, sums: Tensor, channels: slice) -> Tensor:
        """Decays (Q, B, N, D) from sums (B, Q, D + 1) of g: the channels come last, as in scan_selective.py."""
        sums = sums.transpose(0, 1)[:, :, None] * _LOG2_E  # (Q, B, 1, D + 1)
        exponents = sums[..., :-1][..., channels] * self.A[channels].mT
        if self.retention < 1:
            exponents = exponents - sums[..., -1:]
        return exponents.exp2_()

    def _written(self, channels: slice, k: Tensor, v: Tensor, g: Tensor, rest: Tensor) -> Tensor:
        """What tokens write, decayed by `rest`: (Q, B, N, D)."""
        steps = g[..., :-1][..., channels] * v[..., channels]
        decays = self._decays(rest, channels)
        return _times(_times(decays, k.transpose(0, 1)[..., None]), steps.transpose(0, 1)[:, :, None])

    def collect(self, old: Sequence[Tensor], after: Tensor) -> Tensor:
        parts = []
        for channels in self._slabs(len(after)):
            state = torch.zeros(())
            for rest, k, v, g in _reversed_chunks(_SLAB_TOKENS, old[2], after, *old):
                state = state + self._written(channels, k, v, g, rest).sum(0)
            parts.append(state.mT)
        return torch.cat(parts, dim=1)

    def with_leaving(self, y: Tensor, q: Tensor, g: Tensor, old: Sequence[Tensor], after: Tensor) -> Tensor:
        parts = []
        old_chunks = list(_reversed_chunks(_SLAB_TOKENS, old[2], after, *old))
        new_chunks = _chunks(_SLAB_TOKENS, g, False, q)[::-1]
        for channels in self._slabs(len(q)):
            later = q.new_zeros(len(q), q.shape[2], self.A[channels].shape[0])
            outputs = []
            for (since, q_chunk), (rest, k, v, old_g) in zip(new_chunks, old_chunks, strict=True):
                sums = []  # over all old tokens after each
                for written in reversed(self._written(channels, k, v, old_g, rest).unbind(0)):
                    sums.append(later)
                    later = later + written
                weights = _times(self._decays(since, channels), torch.stack(sums[::-1]))
                outputs.append((q_chunk.transpose(0, 1)[:, :, None] @ weights)[:, :, 0])  # (Q, B, D)
            parts.append(torch.cat(outputs[::-1]).transpose(0, 1))
        return y + torch.cat(parts, dim=2)


Recurrence = GatedRecurrence | SSDRecurrence | SelectiveRecurrence


def _exp(x: Tensor) -> Tensor:
    """exp; the exp of a CPU takes many times as long where it underflows."""
    return torch.exp2(x * _LOG2_E)


def _times(new: Tensor, factor: Tensor | float) -> Tensor:
    """Product with a tensor that nobody else needs: in place, unless gradients do."""
    kept = new.requires_grad or (isinstance(factor, Tensor) and factor.requires_grad)
    return new * factor if kept else new.mul_(factor)


def _chunks(size: int, g: Tensor, before: bool, *tensors: Tensor) -> list[tuple[Tensor, ...]]:
    """Chunks of the sums of g up to each token, or up to the token before it, and of tensors; all (B, T, ...)."""
    chunks, total = [], torch.zeros_like(g[:, :1])
    for g_chunk, *parts in zip(*(t.split(size, dim=1) for t in (g, *tensors)), strict=True):
        sums = torch.cat([total, g_chunk], dim=1).cumsum(1)
        chunks.append((sums[:, :-1] if before else sums[:, 1:], *parts))
        total = sums[:, -1:]
    return chunks


def _reversed_chunks(size: int, g: Tensor, after: Tensor, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Chunks, the last first, of the sums of g over the tokens after each, and of tensors; all (B, T, ...).

    `after` (B, ...) is the sum over what follows the tokens.
    """
    total = after[:, None]
    for g_chunk, *parts in reversed(list(zip(*(t.split(size, dim=1) for t in (g, *tensors)), strict=True))):
        sums = torch.cat([g_chunk, total], dim=1).flip(1).cumsum(1).flip(1)
        yield sums[:, 1:], *parts
        total = sums[:, :1]


def _plus(y: Tensor, more: Tensor) -> Tensor:
    """Outputs of a chunk, which nobody else has, with more; in place where no gradients are taken."""
    return y + more if torch.is_grad_enabled() else y.add_(more)


def _later_attention(q: Tensor, k: Tensor, v: Tensor, later: Tensor | None, strictly: bool) -> tuple[Tensor, Tensor]:
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
