"""Mimetic initialization: a recurrent model that starts out close to linear attention.

"Mimetic Initialization Helps State Space Models Learn to Recall" (Trockman et al., 2024, arXiv:2410.11135).
With decays and step sizes near 1, a layer computes y_i = sum_{j <= i} (C_i . B_j) x_j (Eq. 8 and 12; the indicator of
Eq. 8 is printed the wrong way round), which forgets nothing. With W_C close to W_B, equal tokens attend to each other.
Such a model fails soon beyond its training length, unless it is trained for longer texts.

The paper treats Mamba-1 and Mamba-2. The counterpart for GLA is ours: its keys and queries are B and C, and its gates
are decay and step size in one.
"""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from hf_recurrent_lengthgen.models.layers_known import Kind, KnownMixer, key_and_query_weights, known_mixers

DELTA_BIAS = math.log(math.expm1(1.0))
"""The inverse of softplus at 1, 0.5413."""

SWITCHES = ("a", "delta", "bc", "conv")
PAPER_SWITCHES: dict[Kind, tuple[str, ...]] = {
    "Mamba-1": ("a", "delta", "bc"),
    "Mamba-2": SWITCHES,
    "GLA": ("a", "bc", "conv"),
}
"""The switches that are on by default: section 3 of the paper, and our choice for GLA."""


@torch.no_grad()
def mimetic_initialization(
    model: nn.Module,
    a: bool | None = None,
    delta: bool | None = None,
    bc: bool | None = None,
    conv: bool | None = None,
    c: float = 8.0,
    offset: int = 0,
    layers: Iterable[int] | None = None,
) -> None:
    """Initialize the Mamba-1, FalconMamba, Mamba-2 or GLA mixers of a model mimetically, in place.

    Mixers are recognized by their parameters (`layers_known.py`), so classes of Transformers and fla, hybrids and
    models whose code came with a checkpoint work, too. The config and all other weights stay. Call it once,
    for a new model: `a` and `bc` change its weights.

    A switch is on, off, or None for the default of the mixer: in Mamba-1 all but `conv`, in Mamba-2 all, in GLA `a`,
    `bc` and, with short convolutions, `conv`.

    Args:
        model: A model with such mixers, usually freshly initialized.
        a: Decays near 1 (section 3: A = -exp(-c A_log)), from those that a Mamba was drawn with:
            `A_log <- -c log(exp(A_log) + offset)`, so A = -u becomes -(u + offset)^-c. In Mamba-1, and in Mamba-2
            as Transformers draws it, u = n for state or head n = 1, 2, ...; mamba-ssm draws u ~ U(1, 16) for the
            heads of Mamba-2. GLA: u = n = 1..N over the keys of every head, and the gates are exp(A_n) for every
            input: the second weight of `gk_proj` is 0, its bias b has log(sigmoid(b)) / gate_logit_normalizer = A_n
            (`clamp_min` still bounds it). u = 1 is a fixed point of the scaling in c and keeps decaying by exp(-1)
            per token, as in the paper, unless offset is above 0. The paper keeps c outside `A_log`, whose steps (of
            Adam) then change log(-A) c times as much as here, where c is inside and checkpoints stay plain Mamba.
        delta: Step sizes of 1 for every input (section 3: W_Delta = 0 and b_Delta = softplus^-1(1) in Eq. 4). Mamba-2:
            the rows of the steps in `in_proj` become 0 and `dt_bias` is set; 1 must lie inside `time_step_limit`.
            Mamba-1: the weight of `dt_proj` becomes 0 and its bias is set (the rows of `x_proj` before it stay, else
            no gradient would reach either). GLA has no step size.
        bc: Correlated tokens (section 3): `W_C <- (W_C + W_B) / 2`, group by group; in GLA `W_Q <- (W_Q + W_K) / 2`,
            head by head.
        conv: Identity convolution: last tap 1, all other taps and the bias 0. GLA: those of q, k and v.
        c: Strength of `a`, above 0; the paper takes it from {2, 4, 8}.
        offset: Of `a`. With 1 no head, state or key is left at the fixed point.
        layers: Layers of the model, counted from 0; None for all with such a mixer.

    Raises:
        ValueError: for a model without such mixers or with another layout, a switch that the mixers do not have, step
            sizes that they would clamp, decays that `a` would make faster, a layer that does not exist or is of
            another kind, mixers with adapters, parametrizations or weights that are quantized or on the meta device,
            c <= 0, and a negative offset. The model is then unchanged.
    """
    if not 0 < c < math.inf or offset < 0:
        raise ValueError(
            f"c must be finite and above 0 (the paper takes 2, 4 or 8), offset at least 0; {c}, {offset}."
        )
    switches = dict(zip(SWITCHES, (a, delta, bc, conv), strict=True))
    # check every mixer before changing any, and change each once: averaging twice would move W_C further
    mixers = _chosen(model, layers)
    _check_plain(mixers)
    chosen = [(mixer, _switched_on(mixer, switches), key_and_query_weights(mixer)) for mixer in mixers]
    slower = [_slower(mixer, c, offset) if "a" in on and mixer.kind != "GLA" else None for mixer, on, _ in chosen]
    for (mixer, on, (W_B, W_C)), a_log in zip(chosen, slower, strict=True):
        if a_log is not None:
            mixer.module.A_log.copy_(a_log)
        elif "a" in on:
            _set_gates(mixer, c, offset)
        if "delta" in on:
            _set_steps(mixer)
        if "bc" in on:
            W_C.copy_((W_C + W_B) / 2)
        if "conv" in on:
            _set_identity(_convolutions(mixer))


def _check_plain(mixers: Iterable[KnownMixer]) -> None:
    """Raise a `ValueError` for weights that cannot be set, or that do not alone decide what their layer computes."""
    for layer, kind, mixer in mixers:
        parts = list(mixer.modules())
        if any(hasattr(part, "base_layer") or hasattr(part, "original_module") for part in parts):  # of PEFT
            wrong = "adapters, which would change what it starts from: add them afterwards"
        elif any("weight" not in part._parameters for part in parts if isinstance(part, nn.Linear | nn.Conv1d)):
            wrong = "weights that are computed from others: remove the parametrization first"
        elif any(value.is_meta or not value.is_floating_point() for value in mixer.parameters()):
            wrong = "weights without values (on the meta device) or quantized ones: give a model with its weights"
        else:
            continue
        raise ValueError(f"Layer {layer} ({kind}) cannot start mimetically, because it has {wrong}.")


def _set_identity(convolutions: Iterable[Any]) -> None:
    for convolution in convolutions:
        convolution.weight.zero_()
        convolution.weight[..., -1] = 1.0
        if convolution.bias is not None:
            convolution.bias.zero_()


def _set_steps(mixer: KnownMixer) -> None:
    if mixer.kind == "Mamba-1":
        mixer.module.dt_proj.weight.zero_()
        mixer.module.dt_proj.bias.fill_(DELTA_BIAS)
        return
    mixer.module.dt_bias.fill_(DELTA_BIAS)
    projection, heads = mixer.module.in_proj, mixer.module.dt_bias.numel()
    projection.weight[-heads:].zero_()  # rows [z, x, B, C, dt]
    if projection.bias is not None:
        projection.bias[-heads:].zero_()


def _chosen(model: nn.Module, layers: Iterable[int] | None) -> list[KnownMixer]:
    mixers = known_mixers(model)
    if layers is None:
        return mixers
    chosen, existing = list(layers), sorted({mixer.layer for mixer in mixers})
    if not chosen or not set(chosen) <= set(existing):
        raise ValueError(f"layers must be some of {existing}, got {chosen}; None takes all.")
    return [mixer for mixer in mixers if mixer.layer in chosen]


def _switched_on(mixer: KnownMixer, switches: dict[str, bool | None]) -> set[str]:
    """The switches that are on for a mixer, by argument or by default."""
    lacking = {}
    if mixer.kind == "GLA":
        lacking["delta"] = "GLA has no step size: its gates are decay and step in one, which is the switch a"
    if not _convolutions(mixer):
        lacking["conv"] = "it has no short convolution"
    for name, reason in lacking.items():
        if switches[name]:
            raise ValueError(f"{name} does not exist in layer {mixer.layer} ({mixer.kind}): {reason}. Leave it out.")
    default = set(PAPER_SWITCHES[mixer.kind]) - lacking.keys()
    chosen = {name for name, on in switches.items() if (name in default if on is None else on)}
    # in the config for our classes, in the mixer for those of Transformers
    holders = (mixer.module, getattr(mixer.module, "config", None))
    limits = [limit for of in holders if (limit := getattr(of, "time_step_limit", None))]
    least, most = limits[0] if limits else (0.0, math.inf)
    if "delta" in chosen and not least <= 1 <= most:
        raise ValueError(
            f"delta sets step sizes to 1, but layer {mixer.layer} clamps them to {least} to {most} (time_step_limit "
            "of the config): give a time_step_limit with 1 inside, such as (0.0, float('inf')), or delta=False."
        )
    return chosen


def _convolutions(mixer: KnownMixer) -> list[Any]:
    if mixer.kind != "GLA":
        return [mixer.module.conv1d]
    names = ("q_conv1d", "k_conv1d", "v_conv1d")
    return [getattr(mixer.module, name) for name in names if hasattr(mixer.module, name)]


def _slower(mixer: KnownMixer, c: float, offset: int) -> Tensor:
    """-c log(exp(A_log) + offset) of a Mamba, in float64."""
    before: Tensor = mixer.module.A_log.cpu().double()
    after = -c * torch.logaddexp(before, torch.tensor(offset).double().log())
    if not (after <= before).all():
        raise ValueError(
            f"a would not make all decays of layer {mixer.layer} ({mixer.kind}) slower: its least A_log is "
            f"{before.min():.3g}, as after training or after a first call. Give a new model, once, or a=False."
        )
    return after


def _set_gates(mixer: KnownMixer, c: float, offset: int) -> None:
    """A_n = -(n + offset)^-c in GLA."""
    module = mixer.module
    normalizer = float(getattr(module, "gate_logit_normalizer", None) or module.config.gate_logit_normalizer)
    second = module.gk_proj[1]
    key_dim = key_and_query_weights(mixer)[1].shape[1]
    logits = normalizer * (torch.arange(1, key_dim + 1).double() + offset) ** -c
    second.weight.zero_()
    # the inverse of -logsigmoid, also where exp would overflow
    second.bias.copy_((-logits - torch.log(-torch.expm1(-logits))).repeat(len(second.bias) // key_dim))
