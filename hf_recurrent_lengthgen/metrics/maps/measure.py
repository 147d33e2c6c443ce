"""Attention maps of recurrent layers, and the correlation of their key and query projections.

Trockman et al., 2024 (arXiv:2410.11135), section 2. Channel d of a layer's scan is Y_d = M_d X_d with (Eq. 8, whose
indicator is printed the wrong way round)

    M_d[i, j] = C_i^T (prod_{k = j+1..i} diag(A_dk)) B_dj  for j <= i, else 0,

where B_dj = Delta_dj B_j; D x is not included. In Mamba-2, GLA and similar families each head has one map. In GLA, C
are the scaled queries, B the keys and A the gates. (Delta, B, C) are the values that the model passes to its scan.

In Mamba-3, a token writes twice (trapezoidal rule), so that B_dj = (lambda_j Delta_j + (1 - lambda_{j+1}) Delta_{j+1})
B_j, without the second term where i = j, and keys and queries are turned by the angles up to their tokens.

The delta rule (DeltaNet, Gated DeltaNet, KDA, RWKV-7) is linear in its values, too: with the transition A_k of
`scan_dplr`, a diagonal plus low rank that depends on the keys,

    M[i, j] = C_i^T (A_{j+1} ... A_i)^T B_j,

where B_j = beta_j k_j in `scan_delta`. Its mask is the share of what k_j wrote that k_j still reads at i,
k_j^T (A_{j+1} ... A_i)^T k_j / |k_j|^2, which may be below 0, also where no beta is above 1. RWKV-7's bonus for the
current token, after the norm, is not included.

The maps of softmax attention are its weights, one for each head, in hybrids and in models of Transformers.

Shapes: T tokens, D channels or heads, N states (keys).
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_recurrent_lengthgen.evaluation.provenance import model_record
from hf_recurrent_lengthgen.evaluation.recorded_scans import layers_of, recorded_attention, recorded_scans
from hf_recurrent_lengthgen.metrics.maps.result import AttentionMaps, LayerMaps
from hf_recurrent_lengthgen.models.layers_known import key_and_query_weights, known_mixers
from hf_recurrent_lengthgen.models.modeling_protocols import evaluation_mode
from hf_recurrent_lengthgen.models.scan_backends import repeat_heads
from hf_recurrent_lengthgen.models.scan_forgetting import Forgetting
from hf_recurrent_lengthgen.models.scan_trapezoid import turned

MAP_ELEMENTS = 2**22
"""Maximum number of map entries in memory at once, 32 MiB."""


class Correlation(NamedTuple):
    """How the key and query projections of a layer are correlated.

    Attributes:
        cosine: <W_B, W_C> / (||W_B|| ||W_C||), the cosine of the weights as vectors: 0 for independent ones, about
            0.71 after mimetic initialization (W_C half W_B), 1 for equal ones.
        identity: <W_C^T W_B, I> / (||W_C^T W_B|| sqrt(D)), the cosine of the map between two tokens (section 3, 2.)
            and the identity. The product has rank N, so it is at most sqrt(N / D).
    """

    cosine: float
    identity: float


class _Scan(NamedTuple):
    """The inputs of a layer's scan in one form for all families, in float64.

    For a slice of c of the D `channels`, `maps` returns maps and masks, (c, T, T) each. `linear` (T, T) is the mean
    over channels of C_i . B_j.
    """

    kind: str
    channels: int
    maps: Callable[[slice], tuple[Tensor, Tensor]]
    linear: Tensor


@torch.no_grad()
def attention_maps(
    model: nn.Module,
    input_ids: Tensor,
    tokens: Sequence[str] | None = None,
    layers: Sequence[int] | None = None,
    label: str = "",
) -> AttentionMaps:
    """Channel average and average mask of the layers of a model on one text, from the zero state.

    A layer with a scan and softmax attention side by side (Falcon-H1) has an entry for each.

    Args:
        model: A model of this package, also one loaded with the code of its checkpoint, or one of Transformers with
            softmax attention (Llama, GPT-2).
        input_ids: (T,) or (1, T).
        tokens: T words for the tokens; None for their ids.
        layers: Layer indices, from 0; None for all.
        label: Name of the model.

    Raises:
        ValueError: for more than one text, a layer that does not exist or whose scan has no such map (RWKV-5 and
            RWKV-6 give the current token its own weight), a recurrent model that was not loaded by `load_model` or
            wrapped by `stateful`, and a model whose recurrence is made to forget (`retention`, `insertion` or
            `window`; a `delta_scale` is part of the steps, so of the maps).
    """
    tokens_1T = input_ids[None] if input_ids.ndim == 1 else input_ids
    if tokens_1T.ndim != 2 or len(tokens_1T) != 1 or not tokens_1T.shape[1]:
        raise ValueError(f"input_ids must be one text, (T,) or (1, T), got {tuple(input_ids.shape)}.")
    words = tuple(map(str, tokens_1T[0].tolist())) if tokens is None else tuple(tokens)
    correlations = projection_correlations(model)
    results = []
    for layer, scan in _scans(model, tokens_1T, layers):
        if isinstance(scan, Tensor):
            average, distance, correlation = scan.mean(0), None, None
            mask = torch.ones_like(average).tril()
        else:
            average, mask = _averages(scan)
            linear, correlation = scan.linear.tril(), correlations.get(layer)
            distance = float((average - linear).norm() / linear.norm())
        results.append(
            LayerMaps(
                layer=layer,
                kind="softmax attention" if isinstance(scan, Tensor) else scan.kind,
                linear_distance=distance,
                cosine=None if correlation is None else correlation.cosine,
                identity=None if correlation is None else correlation.identity,
                average=average.float().cpu().numpy(),
                mask=mask.float().cpu().numpy(),
            )
        )
    return AttentionMaps(label or type(model).__name__, model_record(model)["weights"], words, tuple(results))


@torch.no_grad()
def projection_correlations(model: nn.Module) -> dict[int, Correlation]:
    """Correlation of W_B and W_C for each layer with a Mamba-1, Mamba-2 or GLA mixer, mean over groups or heads.

    In GLA these are W_K and W_Q. Works for models of Transformers, too; empty for a model without such mixers.
    """
    try:
        mixers = known_mixers(model)
    except ValueError:
        return {}
    correlations = {}
    for mixer in mixers:
        W_B, W_C = (weight.double() for weight in key_and_query_weights(mixer))
        inner = (W_B * W_C).sum((1, 2))  # also the trace of W_C^T W_B
        # ||W_C^T W_B||^2 is the trace of (W_B W_B^T)(W_C W_C^T), which needs no (D, D) product
        product = ((W_B @ W_B.mT) * (W_C @ W_C.mT)).sum((1, 2)).sqrt()
        cosine = inner / (W_B.flatten(1).norm(dim=1) * W_C.flatten(1).norm(dim=1))
        identity = inner / (product * W_B.shape[2] ** 0.5)
        correlations[mixer.layer] = Correlation(float(cosine.mean()), float(identity.mean()))
    return correlations


def _averages(scan: _Scan) -> tuple[Tensor, Tensor]:
    """Means of the maps and of the masks over all channels, (T, T) each; computed a few channels at a time."""
    length = scan.linear.shape[0]
    average, mask = scan.linear.new_zeros(2, length, length)
    at_once = max(1, MAP_ELEMENTS // length**2)
    for start in range(0, scan.channels, at_once):
        maps, masks = scan.maps(slice(start, start + at_once))
        average += maps.sum(0) / scan.channels
        mask += masks.sum(0) / scan.channels
    return average, mask


def _maps(q_cTN: Tensor, k_cTN: Tensor, s_cTN: Tensor) -> tuple[Tensor, Tensor]:
    """Eq. 8, and its decays averaged over the states, (c, T, T) each; computed one state at a time.

    Queries and keys are (c, T, N), the cumulative log decays (c, T, N), or (c, T, 1) if all states share them.
    """
    length, states = q_cTN.shape[1:]
    future = torch.ones(length, length, dtype=torch.bool, device=q_cTN.device).triu(1)

    def decay(s_cT: Tensor) -> Tensor:
        return (s_cT[:, :, None] - s_cT[:, None]).masked_fill_(future, -torch.inf).exp_()

    if s_cTN.shape[2] == 1:
        mask = decay(s_cTN[..., 0])
        return (q_cTN @ k_cTN.mT) * mask, mask
    maps, mask = q_cTN.new_zeros(2, len(q_cTN), length, length)
    for n in range(states):
        share = decay(s_cTN[..., n])
        mask += share / states
        maps += share * q_cTN[:, :, None, n] * k_cTN[:, None, :, n]
    return maps, mask


def _delta_maps(q: Tensor, k: Tensor, beta: Tensor, g: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Maps and masks of the delta rule, (c, T, T) each: the scan of unit values, one for each token.

    q, k, a and b (c, T, N) and the log decays g (c, T, N or 1) are those of `scan_dplr`; token j writes beta_j k_j.
    """
    maps, masks = q.new_zeros(2, len(q), q.shape[1], q.shape[1])
    squares = k.square().sum(-1).clamp(min=torch.finfo(k.dtype).tiny)
    state = torch.zeros_like(k)  # row j is what is left of the key of token j
    for t in range(q.shape[1]):
        read = (state @ a[:, t, :, None]) * b[:, t, None]
        state = state * g[:, t, None].exp() + read
        state[:, t] = k[:, t]
        maps[:, t] = (state @ q[:, t, :, None])[..., 0] * beta
        masks[:, t] = (state * k).sum(-1) / squares
    return maps, masks


# --- what the layers scan ---


def _scans(model: Any, tokens_1T: Tensor, layers: Sequence[int] | None) -> list[tuple[int, _Scan | Tensor]]:
    """What each of `layers` has: a scan, the weights (H, T, T) of softmax attention, or both in this order."""
    stateful = hasattr(model, "zero_state")
    if not (stateful or isinstance(model, PreTrainedModel)):
        layers_of(model)  # which says how to load it
    if Forgetting.of(model.config).in_recurrence:
        raise ValueError(
            f"The model is made to forget ({model.config.forgetting}), so its maps are not those that it learned: "
            "give the checkpoint that it was made from, or switch forgetting off."
        )
    count = model.config.num_hidden_layers
    requested = list(range(count) if layers is None else layers)
    if not requested or not set(requested) <= set(range(count)):
        raise ValueError(f"layers must be some of 0 to {count - 1}, got {requested}; None takes all.")
    device = next(model.parameters()).device
    record: list[tuple[int, _Scan | Tensor]] = []

    def keep(read: Callable[..., _Scan | Tensor], layer: int, *args: Tensor) -> None:
        if layer in requested:
            record.append((layer, read(*args)))

    scans = recorded_scans(model, {name: partial(keep, read) for name, read in _READERS.items()})
    attention = recorded_attention(model, partial(keep, lambda weights: weights[0].double()))
    with evaluation_mode(model), scans if stateful else nullcontext(), attention:
        model.base_model(tokens_1T.to(device), **({"output_final_state": True} if stateful else {"use_cache": False}))
    if not record and not stateful:
        layers_of(model)
    if unknown := sorted({*requested} - {layer for layer, _ in record}):
        raise ValueError(
            f"The layers {unknown} of {type(model).__name__} have no attention maps. Layers of Mamba, GLA, HGRN-2, "
            "linear attention and the delta rule have them, and softmax attention, except that which layers share."
        )
    return sorted(record, key=lambda entry: (entry[0], isinstance(entry[1], Tensor)))


def _read_selective(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, *_: Tensor) -> _Scan:
    """dt (1, T, D), A (D, N), B and C (1, T, N)."""
    dt_DT, A_DN, B_TN, C_TN = dt[0].double().T, A.double(), B[0].double(), C[0].double()

    def maps(channels: slice) -> tuple[Tensor, Tensor]:
        steps = dt_DT[channels, :, None]
        return _maps(C_TN.expand(len(steps), -1, -1), steps * B_TN, (steps * A_DN[channels, None]).cumsum(1))

    return _Scan("Mamba-1", len(A), maps, C_TN @ B_TN.T)


def _read_ssd(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, *_: Tensor) -> _Scan:
    """dt (1, T, H), A (H,), B and C (1, T, G, N)."""
    dt_HT1, A_H = dt[0].double().T[..., None], A.double()
    B_GTN, C_GTN = (x[0].double().transpose(0, 1) for x in (B, C))
    heads = len(A) // len(B_GTN)

    def maps(channels: slice) -> tuple[Tensor, Tensor]:
        groups = torch.arange(len(A), device=A.device)[channels] // heads
        steps = dt_HT1[channels]
        return _maps(C_GTN[groups], steps * B_GTN[groups], (steps * A_H[channels, None, None]).cumsum(1))

    return _Scan("Mamba-2", len(A), maps, (C_GTN @ B_GTN.mT).mean(0))


def _read_trapezoid(
    dt: Tensor, g: Tensor, share: Tensor, w: Tensor, x: Tensor, B: Tensor, C: Tensor, *_: Tensor
) -> _Scan:
    """dt, g and share (1, T, H), w (1, T, A), B (1, 1 + T, H, N) from the token before on, C (1, T, H, N)."""
    dt, g, share, w, B, C = (part.double() for part in (dt, g, share, w, B[:, 1:], C))
    angles = (dt[..., None] * w[:, :, None]).cumsum(1)
    q_HTN, k_HTN = (turned(part, angles.cos(), angles.sin())[0].transpose(0, 1) for part in (C, B))
    now, late = ((dt * part)[0].T[..., None] for part in (share, 1 - share))
    ahead = torch.cat([late[:, 1:], torch.zeros_like(late[:, :1])], dim=1)
    s_HT1 = g[0].T[..., None].cumsum(1)

    def maps(channels: slice) -> tuple[Tensor, Tensor]:
        q, k = q_HTN[channels], k_HTN[channels]
        weights, masks = _maps(q, (now + ahead)[channels] * k, s_HT1[channels])
        weights.diagonal(dim1=1, dim2=2).copy_((q * now[channels] * k).sum(-1))
        return weights, masks

    return _Scan("Mamba-3", len(q_HTN), maps, (C[0].transpose(0, 1) @ B[0].transpose(0, 1).mT).mean(0))


def _read_gla(q: Tensor, k: Tensor, v: Tensor, g: Tensor, *_: Tensor) -> _Scan:
    """q, k and g (1, T, H, N)."""
    q_HTN, k_HTN, g_HTN = (x[0].double().transpose(0, 1) for x in (q, k, g))

    def maps(channels: slice) -> tuple[Tensor, Tensor]:
        return _maps(q_HTN[channels], k_HTN[channels], g_HTN[channels].cumsum(1))

    kind = "gated linear attention" if bool(g.any()) else "linear attention"
    return _Scan(kind, len(q_HTN), maps, (q_HTN @ k_HTN.mT).mean(0))


def _read_delta(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *_: Tensor) -> _Scan:
    """q and k (1, T, H, N), or (1, T, G, N) if heads share them, g (1, T, H, N or 1), beta (1, T, H)."""
    q, k = (repeat_heads(x, beta.shape[2]) for x in (q, k))
    return _delta_scan(q, k, beta, g, g.exp() * k, -beta[..., None] * k)


def _read_dplr(q: Tensor, k: Tensor, v: Tensor, g: Tensor, a: Tensor, b: Tensor, *_: Tensor) -> _Scan:
    """q, k, g, a and b (1, T, H, N)."""
    return _delta_scan(q, k, torch.ones_like(k[..., 0]), g, a, b)


def _delta_scan(*inputs: Tensor) -> _Scan:
    """q, k, beta, g, a and b as in `_delta_maps`, (1, T, H, ...)."""
    over_heads = [x[0].double().transpose(0, 1) for x in inputs]
    linear = (over_heads[0] @ over_heads[1].mT).mean(0)
    return _Scan("delta rule", len(over_heads[0]), lambda heads: _delta_maps(*(x[heads] for x in over_heads)), linear)


def _read_linear(q: Tensor, k: Tensor, v: Tensor, *_: Tensor) -> _Scan:
    """Linear attention among Mamba layers: q and k (1, 1, T, N)."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return _read_gla(q, k, v, torch.zeros_like(k))


def _read_attention(q: Tensor, k: Tensor, *_: Tensor) -> Tensor:
    """Weights of causal softmax attention, (H, T, T), from q and k (1, H, T, N)."""
    scores = q[0].double() @ k[0].double().mT * q.shape[-1] ** -0.5
    return scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf).softmax(-1)


_READERS: dict[str, Callable[..., _Scan | Tensor]] = {
    "scan_selective": _read_selective,
    "scan_ssd": _read_ssd,
    "scan_trapezoid": _read_trapezoid,
    "scan_gla": _read_gla,
    "scan_delta": _read_delta,
    "scan_dplr": _read_dplr,
    "linear_attention": _read_linear,
    "scaled_dot_product_attention": _read_attention,
}
