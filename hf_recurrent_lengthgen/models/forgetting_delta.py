"""How the delta rule forgets at inference: DeltaNet, Gated DeltaNet, Kimi Delta Attention and RWKV-7.

With a retention r and an insertion i, and the transition A_t of scan_delta.py,

    S_t = r S_{t-1} A_t + i v_t k_t^T        (in `scan_delta`, the value is beta_t v_t)

The insertion scales values, not rates, since a smaller rate would also erase less. There is no window: what a token
has left is changed by every key after it, so S_t without what came before its last r tokens is
S_t - S_{t-r} A_{t-r+1} ... A_t, with a product of matrices for each r tokens, and no inverse where a rate is 1.

Shape suffixes as in scan_backends.py.
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


class DeltaRecurrence(Recurrence):
    """Of `scan_delta` and `scan_dplr`: q, k, v, g and what is erased."""

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
        q, k, v, g, *erased = inputs
        log_decay = g.new_full((*g.shape[:2], 1, 1), math.log(rule.retention))
        g = g + zero_past_end(log_decay, rows)
        if len(erased) == 2:  # a and b of `scan_dplr`, which are beside the decay, not after it
            erased[1] = erased[1] * rule.retention
        y, recurrent = scan(q, k, v * rule.insertion, g, *erased, state.recurrent, **options)
        return y, state._replace(recurrent=recurrent)
