"""How the recurrence of Mamba-1 forgets; see forgetting_scans.py.

Shape suffixes as in scan_backends.py.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .forgetting_scans import LOG2_E, SteppedRecurrence, chunks, reversed_chunks, times
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

    def _decays(self, sums: Tensor, channels: slice) -> Tensor:
        """Decays (Q, B, N, D) from sums (B, Q, D + 1) of g: the channels come last, as in scan_selective.py."""
        sums = sums.transpose(0, 1)[:, :, None] * LOG2_E  # (Q, B, 1, D + 1)
        exponents = sums[..., :-1][..., channels] * self.A[channels].mT
        if self.retention < 1:
            exponents = exponents - sums[..., -1:]
        return exponents.exp2_()

    def _written(self, channels: slice, k: Tensor, v: Tensor, g: Tensor, rest: Tensor) -> Tensor:
        """What tokens write, decayed by `rest`: (Q, B, N, D)."""
        steps = g[..., :-1][..., channels] * v[..., channels]
        decays = self._decays(rest, channels)
        return times(times(decays, k.transpose(0, 1)[..., None]), steps.transpose(0, 1)[:, :, None])

    def collect(self, old: Sequence[Tensor], after: Tensor) -> Tensor:
        parts = []
        for channels in self._slabs(len(after)):
            state = torch.zeros(())
            for rest, k, v, g in reversed_chunks(_SLAB_TOKENS, old[2], after, *old):
                state = state + self._written(channels, k, v, g, rest).sum(0)
            parts.append(state.mT)
        return torch.cat(parts, dim=1)

    def with_leaving(self, y: Tensor, q: Tensor, g: Tensor, old: Sequence[Tensor], after: Tensor) -> Tensor:
        parts = []
        old_chunks = list(reversed_chunks(_SLAB_TOKENS, old[2], after, *old))
        new_chunks = chunks(_SLAB_TOKENS, g, False, q)[::-1]
        for channels in self._slabs(len(q)):
            later = q.new_zeros(len(q), q.shape[2], self.A[channels].shape[0])
            outputs = []
            for (since, q_chunk), (rest, k, v, old_g) in zip(new_chunks, old_chunks, strict=True):
                sums = []  # over all old tokens after each
                for written in reversed(self._written(channels, k, v, old_g, rest).unbind(0)):
                    sums.append(later)
                    later = later + written
                weights = times(self._decays(since, channels), torch.stack(sums[::-1]))
                outputs.append((q_chunk.transpose(0, 1)[:, :, None] @ weights)[:, :, 0])  # (Q, B, D)
            parts.append(torch.cat(outputs[::-1]).transpose(0, 1))
        return y + torch.cat(parts, dim=2)
