"""How the recurrence of Mamba-2 forgets; see forgetting_scans.py.

Shape suffixes as in scan_backends.py.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from .forgetting_scans import CHUNK, SteppedRecurrence, chunks, fast_exp, later_attention, plus, reversed_chunks, times
from .recurrent_state import LayerShape


class SSDRecurrence(SteppedRecurrence):
    """One decay per head, keys and queries per group: Mamba-2.

    q and k are (B, T, G, N), v is (B, T, H, P), g is (B, T, H + 1), a state is (B, H, P, N).
    """

    @classmethod
    def features(cls, shape: LayerShape) -> int:
        heads, values, _ = shape.recurrent
        inner = heads * values
        return (shape.conv[0] - inner) // 2 + inner + heads + 1  # B has half of the other channels

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
        return fast_exp(sums[..., :-1] * self.A - sums[..., -1:])

    def _written(self, v: Tensor, g: Tensor, rest: Tensor, groups: int) -> Tensor:
        """What tokens write, decayed by `rest`: (B, G, T, R*P)."""
        v = v * (g[..., :-1] * self._decays(rest))[..., None]
        return v.unflatten(2, (groups, -1)).flatten(3).transpose(1, 2)

    def collect(self, old: Sequence[Tensor], after: Tensor) -> Tensor:
        k, v, g = old
        state = torch.zeros(())
        for rest, k_chunk, v_chunk, g_chunk in reversed_chunks(CHUNK, g, after, k, v, g):
            state = state + self._written(v_chunk, g_chunk, rest, k.shape[2]).mT @ k_chunk.transpose(1, 2)
        return state.reshape(len(k), *v.shape[2:], k.shape[3])  # from (B, G, R*P, N)

    def with_leaving(self, y: Tensor, q: Tensor, g: Tensor, old: Sequence[Tensor], after: Tensor) -> Tensor:
        outputs, later, groups = [], None, q.shape[2]
        old_chunks = reversed_chunks(CHUNK, old[2], after, *old)
        new_chunks = chunks(CHUNK, g, False, y, q)[::-1]
        for (since, y_chunk, q), (rest, k, v, old_g) in zip(new_chunks, old_chunks, strict=True):
            written = self._written(v, old_g, rest, groups)
            more, later = later_attention(q.transpose(1, 2), k.transpose(1, 2), written, later, True)
            more = more.transpose(1, 2).reshape(y_chunk.shape)
            outputs.append(plus(y_chunk, times(more, self._decays(since)[..., None])))
        return torch.cat(outputs[::-1], dim=1) if torch.is_grad_enabled() else y
