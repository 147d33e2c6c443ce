"""Forgetting that is induced at inference, without training: its settings in a configuration.

"Stuffed Mamba" (Chen et al. 2024, arXiv:2410.07145), section 3.2.2, weakens what a model keeps; "LongMamba" (see its
appendix C) shrinks the step sizes. forgetting_scans.py does both.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

NO_WINDOW_OF_DELTA_RULE = "every key changes what earlier tokens wrote, so that a state is no sum of decayed writes"


class Forgetting(NamedTuple):
    """How a model forgets more than it has learned to forget.

    Attributes:
        retention: Factor on the decays alpha_t (Eq. 2), above 0 and at most 1; the paper takes 0.9999.
        insertion: Factor on what is written into the state, that is on B_t or the keys, above 0; the paper takes
            0.75. Both together are its "reduced memory retention and insertion" (RRI).
        window: Number r of last tokens that the state of each layer holds (Eq. 8); None for all. Exact for each layer
            and its inputs; through these inputs, a model of several layers sees further back.
        delta_scale: Factor on the step sizes of Mamba-1 and Mamba-2, above 0 and at most 1; LongMamba takes 0.5.
    """

    retention: float = 1.0
    insertion: float = 1.0
    window: int | None = None
    delta_scale: float = 1.0

    @classmethod
    def of(cls, config: Any) -> "Forgetting":
        """The rule in the `forgetting` of a configuration; one that changes nothing if it has none."""
        given = getattr(config, "forgetting", None)
        if given is None:
            return NO_FORGETTING
        if not isinstance(given, Mapping) or not set(given) <= set(cls._fields):
            raise ValueError(f"forgetting must be None or a mapping with some of {list(cls._fields)}, got {given!r}.")
        rule = cls(**given)
        for name, value in zip(cls._fields, rule, strict=True):
            if name == "window":
                if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                    raise ValueError(f"forgetting: window must be None or a number of tokens, got {value!r}.")
                continue
            most = math.inf if name == "insertion" else 1.0
            number = value if isinstance(value, (int, float)) and not isinstance(value, bool) else math.nan
            if not (math.isfinite(number) and 0 < number <= most):
                allowed = "above 0 and finite" if name == "insertion" else "above 0 and at most 1"
                raise ValueError(f"forgetting: {name} must be {allowed}, got {value!r}.")
        return rule

    @property
    def in_recurrence(self) -> bool:
        """Whether the recurrence itself changes, and not only the step sizes."""
        return (self.retention, self.insertion, self.window) != (1.0, 1.0, None)


NO_FORGETTING = Forgetting()
