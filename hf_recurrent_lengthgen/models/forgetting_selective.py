"""How the recurrence of Mamba-1 forgets; see forgetting_scans.py.

Shape suffixes as in scan_backends.py.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .forgetting_scans import LOG2_E, SteppedRecurrence, chunks, plus, reversed_chunks, times
from .recurrent_state import LayerShape

# Tokens of one step of the sum over leaving tokens, and how much of a state it takes at once: 256 KiB in float32, for
# the cache of a CPU.
_SLAB_TOKENS, _SLAB_ELEMENTS = 16, 2**16
# How far inputs may be scaled up against a shared decay, as a logarithm.
_LARGEST_SCALE = 30.0


class SelectiveRecurrence(SteppedRecurrence):
    """One decay per channel and state: Mamba-1.

    q and k are (B, T, N), v is (B, T, D), g is (B, T, D + 1), a state is (B, D, N).
    """

    def __init__(self, scan: Callable[..., tuple[Tensor, Tensor]], A: Tensor, D: Tensor, retention: float) -> None:
        super().__init__(scan, A, D, retention)
        self._log2_A = (A.mT * LOG2_E).contiguous()  # (N, D): the channels last, as in scan_selective.py

    @classmethod
    def features(cls, shape: LayerShape) -> int:
        channels, states = shape.recurrent
        return states + 2 * channels + 1

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

    def _slab(self, batch: int, channels: slice) -> Tensor | None:
        """Memory for one tensor (Q, B, N, D), where no gradients are taken: fresh memory costs more than decays."""
        if torch.is_grad_enabled():
            return None
        return self.A.new_empty(_SLAB_TOKENS, batch, *self._log2_A[:, channels].shape)

    def _decays(self, sums: Tensor, channels: slice, slab: Tensor | None) -> Tensor:
        """Decays (Q, B, N, D) from sums (B, Q, D + 1) of g."""
        sums = sums.transpose(0, 1)[:, :, None]  # (Q, B, 1, D + 1)
        out = None if slab is None else slab[: len(sums)]
        exponents = torch.mul(sums[..., :-1][..., channels], self._log2_A[:, channels], out=out)
        if self.retention < 1:
            exponents.sub_(sums[..., -1:] * LOG2_E)
        if not torch.is_grad_enabled():  # as small as a normal number can be, since exp2 is slow where it underflows
            exponents.clamp_(min=math.log2(torch.finfo(exponents.dtype).tiny))
        return exponents.exp2_()

    def _written(
        self, channels: slice, slab: Tensor | None, rest: Tensor, k: Tensor, v: Tensor, g: Tensor
    ) -> tuple[Tensor, Tensor]:
        """What tokens write, decayed by `rest`, as factors (Q, B, N, D) and (Q, B, 1, D)."""
        steps = g[..., :-1][..., channels] * v[..., channels]
        keys = times(self._decays(rest, channels, slab), k.transpose(0, 1)[..., None])
        return keys, steps.transpose(0, 1)[:, :, None]

    def collect(self, old: Sequence[Tensor], after: Tensor) -> Tensor:
        parts = []
        for channels in self._slabs(len(after)):
            state, slab = torch.zeros(()), self._slab(len(after), channels)
            for old_chunk in reversed_chunks(_SLAB_TOKENS, old[2], after, *old):
                state = state + times(*self._written(channels, slab, *old_chunk)).sum(0)
            parts.append(state.mT)
        return torch.cat(parts, dim=1)

    def with_leaving(self, y: Tensor, q: Tensor, g: Tensor, old: Sequence[Tensor], after: Tensor) -> Tensor:
        parts = []
        old_chunks = list(reversed_chunks(_SLAB_TOKENS, old[2], after, *old))
        new_chunks = chunks(_SLAB_TOKENS, g, False, q, y)[::-1]
        for channels in self._slabs(len(q)):
            later = q.new_zeros(len(q), q.shape[2], self.A[channels].shape[0])  # over all old tokens after one
            outputs, slabs = [], [self._slab(len(q), channels) for _ in range(2)]
            for (since, q_chunk, y_chunk), old_chunk in zip(new_chunks, old_chunks, strict=True):
                decays, weights = self._decays(since, channels, slabs[0]), []
                keys, steps = self._written(channels, slabs[1], *old_chunk)
                for decay, key, step in zip(*(t.unbind(0)[::-1] for t in (decays, keys, steps)), strict=True):
                    weights.append(times(decay, later))
                    later = later.addcmul(key, step) if torch.is_grad_enabled() else later.addcmul_(key, step)
                all_weights = torch.stack(weights[::-1]) if torch.is_grad_enabled() else decays
                more = (q_chunk.transpose(0, 1)[:, :, None] @ all_weights)[:, :, 0]  # (Q, B, D)
                outputs.append(plus(y_chunk[..., channels], more.transpose(0, 1)))
            parts.append(outputs[::-1])
        if not torch.is_grad_enabled():
            return y
        return torch.cat([torch.cat(outputs, dim=1) for outputs in parts], dim=2)
