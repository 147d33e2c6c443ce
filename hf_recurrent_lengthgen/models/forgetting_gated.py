"""How the recurrences of GLA, HGRN-2, linear attention, RWKV-5 and RWKV-6 forget; see forgetting_scans.py.

Shape suffixes as in scan_backends.py.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .forgetting import Forgetting
from .forgetting_scans import (
    CHUNK,
    Recurrence,
    chunks,
    fast_exp,
    forgetful_scan,
    later_attention,
    plus,
    reversed_chunks,
    times,
)
from .recurrent_state import LayerShape, LayerState
from .rows import Rows


class GatedRecurrence(Recurrence):
    """Decays per head and key channel: GLA and its like, and RWKV.

    q, k and g are (B, T, H, N), v is (B, T, H, P), a state is (B, H, P, N).

    Args:
        scan: From q, k, v, g and a state to outputs and the final state.
        reads_before: Whether an output reads the state before its token is written, as in RWKV.
    """

    def __init__(self, scan: Callable[..., tuple[Tensor, Tensor]], reads_before: bool = False) -> None:
        self.scan, self.reads_before = scan, reads_before

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
        q, k, v, g, *bonus = inputs
        # a bonus reads the current token past the state: a weaker insertion leaves it as it is
        bonus = [u / rule.insertion for u in bonus]

        def gated(q: Tensor, k: Tensor, v: Tensor, g: Tensor, recurrent: Tensor) -> tuple[Tensor, Tensor]:
            return scan(q, k, v, g, *bonus, recurrent, **options)

        recurrence, dtype = cls(gated, reads_before=bool(bonus)), q.dtype
        q, k, v, g = (part.to(state.recurrent.dtype) for part in (q, k, v, g))
        y, state = forgetful_scan(rule, recurrence, q, k, v, g, state, rows)
        return y.to(dtype), state

    @classmethod
    def features(cls, shape: LayerShape) -> int:
        heads, values, keys = shape.recurrent
        return heads * (2 * keys + values)

    def with_shared_decay(self, g: Tensor, log_decay_BT1: Tensor) -> Tensor:
        return g + log_decay_BT1[..., None]

    def collect(self, old: Sequence[Tensor], after: Tensor) -> Tensor:
        state = torch.zeros(())
        for rest, k, v in reversed_chunks(CHUNK, old[2], after, old[0], old[1]):
            state = state + v.permute(0, 2, 3, 1) @ times(fast_exp(rest), k).transpose(1, 2)
        return state

    def with_leaving(self, y: Tensor, q: Tensor, g: Tensor, old: Sequence[Tensor], after: Tensor) -> Tensor:
        outputs, later = [], None
        old_chunks = reversed_chunks(CHUNK, old[2], after, old[0], old[1])
        new_chunks = chunks(CHUNK, g, self.reads_before, y, q)[::-1]
        for (since, y_chunk, q), (rest, k, v) in zip(new_chunks, old_chunks, strict=True):
            q, k = times(fast_exp(since), q), times(fast_exp(rest), k)
            q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # (B, H, Q, ...)
            more, later = later_attention(q, k, v, later, not self.reads_before)
            outputs.append(plus(y_chunk, more.transpose(1, 2)))
        return torch.cat(outputs[::-1], dim=1) if torch.is_grad_enabled() else y
