"""Forgetting that is induced at inference, without training: its settings, and scans that forget.

"Stuffed Mamba" (Chen et al. 2024, arXiv:2410.07145), section 3.2.2, weakens retention and insertion, and lets a state
hold the last tokens only (scan_window.py); "LongMamba" (see its appendix C) shrinks the step sizes. All of them are
defined where a state is a sum of decayed writes: not where a token changes what others wrote (the delta rule), nor
where it writes twice (Mamba-3).

A token is its keys, values and log decays (k, v, g), also of recurrences that name them otherwise: in Mamba-1 and
Mamba-2, k is B, v is x, and g holds the step sizes, and one more channel: the negative logarithm of a decay that all
states share. Shape suffixes as in scan_backends.py.
"""

import copy
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from .rows import Rows
from .rows_moved import zero_past_end
from .scan_window import windowed_scan
from .state_value import LayerState

_GATED = "GLA, HGRN-2, linear attention, RWKV-5 and RWKV-6"
WHERE = {
    "retention": f"Mamba-1, Mamba-2, {_GATED}",
    "insertion": f"Mamba-1, Mamba-2, {_GATED}",
    "window": "Mamba-2",
    "delta_scale": "Mamba-1 and Mamba-2",
}
"""The families that have each setting."""
# How far inputs may be scaled up against a shared decay, as a logarithm.
_LARGEST_SCALE = 30.0


class Forgetting(NamedTuple):
    """How a model forgets more than it has learned to forget.

    Attributes:
        retention: Factor on the decays alpha_t (Eq. 2), above 0 and at most 1; the paper takes 0.9999.
        insertion: Factor on what is written into the state, that is on B_t or the keys, above 0; the paper takes
            0.75. Both together are its "reduced memory retention and insertion" (RRI).
        window: Number r of last tokens that the state of each layer of Mamba-2 holds (Eq. 8); None for all. Exact for
            each layer and its inputs; through these inputs, a model of several layers sees further back.
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

    def changed(self) -> dict[str, Any]:
        """The settings that differ from no forgetting."""
        return {name: value for name, value in self._asdict().items() if value != self._field_defaults[name]}

    def check_for(self, name: str, allowed: Sequence[str], why: str = "") -> None:
        """Raise a `ValueError` for a setting that is not `allowed` for what has this name, with the reason if any."""
        for setting in self.changed():
            if setting not in allowed:
                raise ValueError(
                    f"forgetting: {name} takes no {setting}{f', since {why}' if why else ''}; it is for "
                    f"{WHERE[setting]} of this package: set {' or '.join(allowed) or 'forgetting to None'}."
                )


NO_FORGETTING = Forgetting()


class Recurrence:
    """A recurrence that can forget, of a scan; mixers name theirs as `recurrence`.

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

    def with_shared_decay(self, g: Tensor, log_decay_BT1: Tensor) -> Tensor:
        """g of recurrences that decay more, by a factor that all states share."""
        raise NotImplementedError


class GatedRecurrence(Recurrence):
    """Decays per head and key channel: GLA and its like, and RWKV.

    q, k and g are (B, T, H, N), v is (B, T, H, P), a state is (B, H, P, N).

    Args:
        scan: From q, k, v, g and a state to outputs and the final state.
    """

    def __init__(self, scan: Callable[..., tuple[Tensor, Tensor]]) -> None:
        self.scan = scan

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

        dtype = q.dtype
        q, k, v, g = (part.to(state.recurrent.dtype) for part in (q, k, v, g))
        y, state = forgetful_scan(rule, cls(gated), q, k, v, g, state, rows)
        return y.to(dtype), state

    def with_shared_decay(self, g: Tensor, log_decay_BT1: Tensor) -> Tensor:
        return g + log_decay_BT1[..., None]


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


class SelectiveRecurrence(SteppedRecurrence):
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


class SSDRecurrence(SteppedRecurrence):
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


RECURRENCES: dict[str, type[Recurrence]] = {
    "gated": GatedRecurrence,
    "selective": SelectiveRecurrence,
    "ssd": SSDRecurrence,
}
"""By the name that a mixer has as `recurrence`."""


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
        if not isinstance(recurrence, SSDRecurrence):
            raise ValueError(f"{type(recurrence).__name__} has no window: set window to None.")
        return windowed_scan(rule.window, recurrence.scan, recurrence.A, q, k, v, g, state, rows)


class _Block:
    """An open `with` block: its thread, and the configuration of the model before and inside."""

    def __init__(self, thread: int, before: Any, inside: Any) -> None:
        self.thread, self.before, self.inside = thread, before, inside


_BLOCKS: list[_Block] = []


@contextmanager
def forgetting(model: Any, **settings: Any) -> Iterator[Any]:
    """Switch forgetting on in a loaded model, for the time of a `with` block.

    Inside, the model has a copy of its configuration with these settings, and `save_pretrained` writes a checkpoint
    that forgets by itself. States with another `window` do not fit. With activation checkpointing, call `backward`
    inside as well, since it recomputes layers.

    Args:
        model: A model of a family of this package, also with PEFT adapters.
        settings: Fields of `Forgetting`. Fields that are not given are off, so no settings switch all forgetting off.

    Raises:
        ValueError: for a model that cannot forget in this way, and settings out of range.
    """
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "check_forgetting"):
        raise ValueError(
            f"{type(model).__name__} cannot be made to forget: give a model of a family of this package; hybrids and "
            "other models of Transformers are refused."
        )
    thread = threading.get_ident()
    if any(block.inside is config and block.thread != thread for block in _BLOCKS):
        raise ValueError("Another thread has switched forgetting on in this model: take turns, or copy the model.")
    changed = copy.copy(config)
    changed.forgetting = dict(settings) or None
    this = _Block(thread, config, changed)
    # vars: a wrapper that passes attributes on would keep the one that is set on it
    names = ("config", "_config")  # the second is that of the learned states
    owners = [(module, name) for module in model.modules() for name in names if vars(module).get(name) is config]
    _BLOCKS.append(this)
    try:
        for module, name in owners:
            setattr(module, name, changed)
        changed.check_forgetting()
        yield model
    finally:
        _BLOCKS.remove(this)
        for later in _BLOCKS:  # begun inside this block, and still open
            if later.before is changed:
                later.before = this.before
        if model.config is changed and "learned_states" in vars(changed):  # they are those of the model
            this.before.learned_states = changed.learned_states
        for module in model.modules():
            for name in names:
                if vars(module).get(name) is changed:
                    setattr(module, name, this.before)


def in_words(rule: Forgetting) -> str:
    """The settings that differ from no forgetting: "retention 0.9999, insertion 0.75", "window 4,096"."""
    words = [
        f"{name.replace('_', ' ')} {value:{',' if name == 'window' else ''}}" for name, value in rule.changed().items()
    ]
    return ", ".join(words) or "no forgetting"
