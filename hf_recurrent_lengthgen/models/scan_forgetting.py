"""Forgetting that is induced at inference, without training: its settings, and scans that forget.

"Stuffed Mamba" (Chen et al. 2024, arXiv:2410.07145), section 3.2.2, weakens retention and insertion of Mamba-2, and
lets a state hold the last tokens only (scan_window.py); "LongMamba" (see its appendix C) shrinks the step sizes.
MambaExtend (Azizi et al. 2025, ICLR) scales the steps of each layer, "Mamba Modulation" (arXiv:2509.19633) its A.

A token is its keys k (B), values v (x), and g: the step sizes, and one more channel, the negative logarithm of a decay
that all states share. Shape suffixes as in scan_backends.py.
"""

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .rows import Rows
from .rows_moved import zero_past_end
from .scan_window import windowed_scan
from .state_value import LayerState

WHERE = {
    "retention": "all families but Mamba-1, whose scan decays by products of steps and rates only",
    "insertion": "Mamba-1, Mamba-2 and Mamba-3; others norm what they read, so that it would change nothing",
    "window": "Mamba-2",
    "delta_scale": "Mamba-1, Mamba-2 and Mamba-3, which have step sizes",
    "decay_scale": "families that decay, which linear attention and DeltaNet do not",
}
"""The families that have each setting."""

SCALED: dict[str, dict[str, tuple[int, ...]]] = {
    "scan_selective": {"delta_scale": (1,), "decay_scale": (2,), "insertion": (3,)},  # dt, A, B
    "scan_ssd": {"delta_scale": (1,), "decay_scale": (2,)},  # dt, A
    "scan_trapezoid": {"delta_scale": (0, 1), "decay_scale": (1,), "insertion": (5,)},  # dt, g = dt A, B
    **{scan: {"decay_scale": (3,)} for scan in ("scan_gla", "scan_rwkv6", "scan_delta", "scan_dplr")},  # g
}
"""The inputs of each scan that a setting multiplies, by their places."""


class Forgetting(NamedTuple):
    """How a model forgets more than it has learned to, or less; all but the window is a number, or one for each layer.

    Attributes:
        retention: Factor on the decays alpha_t (Eq. 2), above 0 and at most 1; the paper takes 0.9999.
        insertion: Factor on what is written into the state, that is on B_t, above 0; the paper takes 0.75. Both
            together are its "reduced memory retention and insertion" (RRI).
        window: Number r of last tokens that the state of each layer of Mamba-2 holds (Eq. 8); None for all. Exact for
            each layer and its inputs; through these inputs, a model of several layers sees further back.
        delta_scale: Factor on the step sizes of Mamba, above 0; LongMamba takes 0.5, MambaExtend one for each layer.
        decay_scale: Factor s on the log decays, above 0: alpha_t becomes alpha_t^s, and what is written stays
            ("Mamba Modulation", where it is a factor on A). Of the delta rule, the decays and not the erasing.
    """

    retention: float | tuple[float, ...] = 1.0
    insertion: float | tuple[float, ...] = 1.0
    window: int | None = None
    delta_scale: float | tuple[float, ...] = 1.0
    decay_scale: float | tuple[float, ...] = 1.0

    @classmethod
    def of(cls, config: Any, layer: int | None = None) -> "Forgetting":
        """The rule in the `forgetting` of a configuration, for one layer or all; without one it changes nothing."""
        settings = getattr(config, "forgetting", None)
        if settings is None:
            return NO_FORGETTING
        if not isinstance(settings, Mapping) or not set(settings) <= set(cls._fields):
            raise ValueError(
                f"forgetting must be None or a mapping with some of {list(cls._fields)}, got {settings!r}."
            )
        layers = getattr(config, "num_hidden_layers", None)
        return cls(**{name: _checked(name, value, layers, layer) for name, value in settings.items()})

    @property
    def in_recurrence(self) -> bool:
        """Whether the recurrence itself changes, and not only the step sizes."""
        return (self.retention, self.insertion, self.window) != (1.0, 1.0, None)

    def changed(self) -> dict[str, Any]:
        """The settings that differ from no forgetting."""
        return {name: value for name, value in self._asdict().items() if value != self._field_defaults[name]}

    def check_for(self, name: str, allowed: Sequence[str]) -> None:
        """Raise a `ValueError` for a setting that is not `allowed` for what has this name."""
        for setting in self.changed():
            if setting not in allowed:
                raise ValueError(
                    f"forgetting: {name} takes no {setting}; it is for {WHERE[setting]}. "
                    f"Set {' or '.join(allowed) or 'nothing'}."
                )


NO_FORGETTING = Forgetting()


def _checked(name: str, value: Any, layers: int | None, layer: int | None) -> Any:
    """The value of a setting, for one layer or all; equal numbers of all layers are one number."""
    if name == "window":
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ValueError(f"forgetting: window must be None or a number of tokens, got {value!r}.")
        return value
    numbers = value if isinstance(value, (list, tuple)) else [value]
    if numbers is value and len(value) != (layers or len(value) or 1):
        raise ValueError(
            f"forgetting: {name} must be one number, or one for each of the {layers} layers, got {len(value)} numbers."
        )
    numbers = numbers if layer is None or numbers is not value else [numbers[layer]]
    largest = 1.0 if name == "retention" else math.nextafter(math.inf, 0)
    for number in numbers:
        if isinstance(number, bool) or not (isinstance(number, (int, float)) and 0 < number <= largest):
            allowed = "at most 1" if name == "retention" else "finite"
            raise ValueError(f"forgetting: {name} must be above 0 and {allowed}, got {number!r}.")
    return numbers[0] if len(set(numbers)) == 1 else tuple(numbers)


def scaled_inputs(
    rule: Forgetting, scan: str, inputs: Sequence[Tensor], rows: Rows | None
) -> tuple[tuple[Tensor, ...], bool]:
    """The inputs of a scan of this name, before its state, under the rule of a layer, and whether that is not all.

    The rest changes the recurrence of Mamba-2 itself (`with_forgetting`).
    """
    changed, places = list(inputs), SCALED[scan]
    for setting, of_setting in places.items():
        for place in of_setting:
            if (factor := getattr(rule, setting)) != 1:
                changed[place] = changed[place] * factor
    if rule.retention != 1 and scan != "scan_ssd":
        (place,) = places["decay_scale"]
        log_retention = torch.full_like(changed[place], math.log(rule.retention))  # type: ignore[arg-type]
        changed[place] = changed[place] + zero_past_end(log_retention, rows)
    return tuple(changed), scan == "scan_ssd" and rule.in_recurrence


def with_forgetting(
    rule: Forgetting,
    scan: Callable[..., tuple[Tensor, Tensor]],
    inputs: Sequence[Tensor],
    state: LayerState,
    rows: Rows | None = None,
    **options: Any,
) -> tuple[Tensor, LayerState]:
    """Run the scan of Mamba-2 with another recurrence: outputs, and the state after the last token.

    Args:
        rule: What the layer forgets.
        scan: The scan.
        inputs: Its `scaled_inputs`, before the state.
        state: Before the first token, with a `window` part if the rule has one.
        rows: As layers get them.
        options: Its keywords.
    """
    x, dt, A, B, C, D = inputs
    x, A, B, C, D = (part.to(state.recurrent.dtype) for part in (x, A, B, C, D))
    insertion, retention = float(rule.insertion), float(rule.retention)  # type: ignore[arg-type]  # as of one layer
    run = partial(_with_decay if retention < 1 else _of_tokens, partial(scan, **options), A, D)
    with torch.autocast(x.device.type, enabled=False):
        shared = zero_past_end(dt.new_full((*dt.shape[:2], 1), -math.log(retention)), rows)
        g = torch.cat([dt, shared], dim=-1)
        B = B if insertion == 1 else B * insertion
        if rule.window is None:
            y, recurrent = run(C, B, x, g, state.recurrent)
            return y, state._replace(recurrent=recurrent)
        return windowed_scan(rule.window, run, A, C, B, x, g, state, rows)


def _of_tokens(scan: Any, A: Tensor, D: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor) -> Any:
    """The scan of Mamba-2 over tokens q, k (B, T, G, N), v (B, T, H, P) and g (B, T, H + 1) that share no decay."""
    return scan(v, g[..., :-1], A, k, q, D, state)


def _with_decay(scan: Any, A: Tensor, D: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor) -> Any:
    """`_of_tokens` with the shared decay: other steps and rates, which give the same decays and insertions."""
    dt = g[..., :-1]
    steps = g[..., -1:] - dt * A
    inputs = v * (dt / steps.masked_fill(steps == 0, 1))[..., None]
    y, state = scan(inputs, steps, -torch.ones_like(A), k, q, torch.zeros_like(D), state)
    return torch.addcmul(y, v, D[:, None]), state


@contextmanager
def forgetting(model: Any, **settings: Any) -> Iterator[Any]:
    """Switch forgetting on in a loaded model, for the time of a `with` block.

    Inside, the model has a copy of its configuration with these settings, and `save_pretrained` writes a checkpoint
    that forgets by itself. States with another `window` do not fit. With activation checkpointing, call `backward`
    inside as well, since it recomputes layers. Blocks of one model may be nested, and end in reverse order.

    Args:
        model: A model of a family of this package, also with PEFT adapters.
        settings: Fields of `Forgetting`. Other fields are off, so no settings switch all forgetting off.

    Raises:
        ValueError: for a model that cannot forget in this way, and settings out of range.
    """
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "check_forgetting"):
        raise ValueError(
            f"{type(model).__name__} cannot be made to forget: give a model of a family of this package; hybrids and "
            "other models of Transformers are refused."
        )
    changed = copy.copy(config)
    changed.forgetting = dict(settings) or None
    # vars: a wrapper that passes attributes on would keep the one that is set on it; _config is of learned states
    names = ("config", "_config")
    owners = [(module, name) for module in model.modules() for name in names if vars(module).get(name) is config]
    try:
        for module, name in owners:
            setattr(module, name, changed)
        (changed if hasattr(changed, "check_forgetting") else model).check_forgetting()
        yield model
    finally:
        if "learned_states" in vars(changed):  # they are those of the model
            config.learned_states = changed.learned_states
        for module in model.modules():
            for name in names:
                if vars(module).get(name) is changed:
                    setattr(module, name, config)


def in_words(rule: Forgetting) -> str:
    """The settings that differ from no forgetting: "retention 0.9999, insertion 0.75", "window 4,096"; those of
    each layer by their range, "decay scale 0.31 to 1.7 by layer"."""
    words = [
        f"{name.replace('_', ' ')} "
        + (f"{min(value):.3g} to {max(value):.3g} by layer" if isinstance(value, tuple) else f"{value:,}")
        for name, value in rule.changed().items()
    ]
    return ", ".join(words) or "no forgetting"
