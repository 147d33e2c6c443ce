"""Where the mixers of Mamba-1, Mamba-2 and GLA keep their key and query projections.

A layer with decays and steps near 1 is linear attention (Trockman et al. 2024, arXiv:2410.11135, Eq. 12): B are the
keys, C the queries. Mixers are recognized by their parameters, not by their class: those of Transformers, of fla and
of the code of a checkpoint have the same names and layouts as ours.

Shapes: G groups (in GLA heads), N state (key) dim, D width of what the projections read.
"""

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

Kind = Literal["Mamba-1", "Mamba-2", "GLA"]


class KnownMixer(NamedTuple):
    """A mixer, its kind, and its layer in the model."""

    layer: int
    kind: Kind
    module: Any


def known_mixers(model: nn.Module) -> list[KnownMixer]:
    """The mixers of Mamba-1, Mamba-2 and GLA, also FalconMamba's and those in hybrids, in the order of the model.

    A layer's number is the first number in the name of its module ("backbone.layers.3.mixer": 3), so layers of
    another kind count as well; a mixer outside a list of layers is numbered by its place among the mixers.
    """
    found: list[KnownMixer] = []
    for name, module in model.named_modules():
        if (kind := kind_of(module)) is not None:
            numbers = [int(part) for part in name.split(".") if part.isdecimal()]
            found.append(KnownMixer(numbers[0] if numbers else len(found), kind, module))
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no mixer of Mamba-1 (in_proj, conv1d, x_proj, dt_proj, out_proj, A_log), "
            "Mamba-2 (in_proj, conv1d, out_proj, and A_log and dt_bias of shape (heads,)) or GLA (q_proj, k_proj, "
            "v_proj, o_proj and gk_proj of two layers)."
        )
    return found


def key_and_query_weights(mixer: KnownMixer) -> tuple[Tensor, Tensor]:
    """W_B and W_C, (G, N, D) each: rows of `x_proj` [dt, B, C] in Mamba-1, of `in_proj` [z, x, B, C, dt] in Mamba-2,
    `k_proj` and `q_proj` in GLA.

    W_C is a view that may be written to. So is W_B, except in GLA with fewer key heads than query heads, where each
    key head serves several.
    """
    module = mixer.module
    if mixer.kind == "GLA":
        heads = query_heads(module)
        (queries, width), keys = module.q_proj.weight.shape, module.k_proj.weight.shape[0]
        if queries % heads or keys % (queries // heads) or heads % (keys * heads // queries):
            raise ValueError(f"{heads} heads cannot share the {queries} rows of q_proj and the {keys} of k_proj.")
        W_C = module.q_proj.weight.view(heads, -1, width)
        W_B = module.k_proj.weight.view(-1, queries // heads, width)
        return W_B if len(W_B) == heads else W_B.repeat_interleave(heads // len(W_B), dim=0), W_C
    if mixer.kind == "Mamba-1":
        weight, rank, state = module.x_proj.weight, module.dt_proj.weight.shape[1], module.A_log.shape[1]
        if len(weight) != rank + 2 * state:
            raise ValueError(
                f"x_proj has {len(weight)} rows, but with a step rank of {rank} and {state} states the rows "
                f"[dt, B, C] would be {rank + 2 * state}."
            )
        return weight[None, rank : rank + state], weight[None, rank + state :]
    weight, inner, heads = module.in_proj.weight, module.out_proj.weight.shape[1], module.A_log.numel()
    channels = module.conv1d.weight.shape[0]
    bc, odd = divmod(channels - inner, 2)
    if odd or bc < 1 or len(weight) != 2 * inner + 2 * bc + heads:
        raise ValueError(
            f"in_proj has {len(weight)} rows, but with {inner} inner channels, {channels} convolution channels and "
            f"{heads} heads the rows [z, x, B, C, dt] would be another number."
        )
    groups = getattr(module, "n_groups", None) or getattr(module, "ngroups", 1)  # the second in mamba-ssm
    W_B, W_C = weight[2 * inner : 2 * inner + 2 * bc].chunk(2)
    return W_B.unflatten(0, (groups, -1)), W_C.unflatten(0, (groups, -1))


def query_heads(gla: Any) -> int:
    """Heads of a GLA mixer, ours or fla's."""
    return int(gla.heads if hasattr(gla, "heads") else gla.num_heads)


def kind_of(module: Any) -> Kind | None:
    """The kind of a mixer by its parameters; None for other modules."""

    def weights(*names: str) -> bool:
        return all(isinstance(getattr(getattr(module, name, None), "weight", None), Tensor) for name in names)

    decay, step, gate = (getattr(module, name, None) for name in ("A_log", "dt_bias", "gk_proj"))
    if isinstance(decay, Tensor) and weights("in_proj", "conv1d", "out_proj"):
        if decay.ndim == 2 and weights("x_proj", "dt_proj"):
            return "Mamba-1"
        if decay.ndim == 1 and isinstance(step, torch.Tensor) and step.ndim == 1:
            return "Mamba-2"
    if weights("q_proj", "k_proj", "v_proj", "o_proj") and isinstance(gate, nn.Sequential) and len(gate) == 2:
        return "GLA"
    return None
