"""How the recurrence of Mamba-3 forgets at inference; see forgetting.py.

A retention is a factor on the decays, so on the late write of a token, too. An insertion is a factor on all keys.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from .forgetting import Forgetting
from .forgetting_scans import Recurrence
from .recurrent_state import LayerState
from .rows import Rows
from .rows_moved import zero_past_end


class TrapezoidRecurrence(Recurrence):
    """Of `scan_trapezoid`."""

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
        dt, g, share, w, x, B, C, D = inputs
        log_decay = g.new_full((*g.shape[:2], 1), math.log(rule.retention))
        g = rule.delta_scale * g + zero_past_end(log_decay, rows)
        y, recurrent = scan(
            rule.delta_scale * dt, g, share, w, x, rule.insertion * B, C, D, state.recurrent, **options
        )
        return y, state._replace(recurrent=recurrent)
