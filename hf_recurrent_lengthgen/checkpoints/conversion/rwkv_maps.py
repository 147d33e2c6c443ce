"""Maps of RWKV tensors to ours: from .pth files, and of RWKV-6 and RWKV-5.2 from repositories for Transformers.

Shapes: D hidden size, A width of time mixing, R rank of the token shifts.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hf_recurrent_lengthgen.checkpoints.conversion.formats import same_names
from hf_recurrent_lengthgen.checkpoints.conversion.key_maps import SAME, Rename, Transform
from hf_recurrent_lengthgen.models import StatefulRWKV5Config, StatefulRWKV6Config, StatefulRWKV7Config

RWKV5, RWKV6, RWKV7 = (c.model_type for c in (StatefulRWKV5Config, StatefulRWKV6Config, StatefulRWKV7Config))
LAYER = "blocks.{layer}."

# Their order of the five token shifts is w, k, v, r, g, and that of fla r, w, k, v, g.
TO_OURS, TO_THEIRS = [3, 0, 1, 2, 4], [1, 2, 3, 0, 4]


def _flat(vector: Tensor) -> Tensor:
    """(1, 1, n) or (n,) to (n,)."""
    return vector.reshape(-1)


def _wide(vector: Tensor) -> Tensor:
    """(n,) or (1, 1, n) to (1, 1, n)."""
    return vector.reshape(1, 1, -1)


def _shift_up_to_ours(blocks: Tensor) -> Tensor:
    w, k, v, r, g = blocks  # indexing would miss a sixth one and, on the meta device, a missing one
    return torch.cat([r, w, k, v, g]).t()


VECTOR = Transform(_flat, _wide)
WIDE_VECTOR = Transform(_wide, SAME.to_theirs)
FIVE_VECTORS = Transform(lambda *vectors: torch.stack([*map(_flat, vectors)]), lambda rows: [*map(_wide, rows)])
TRANSPOSED = Transform(torch.t, torch.t)
SHIFT_DOWN = Transform(
    lambda matrix: matrix.t().unflatten(0, (5, -1))[TO_OURS].flatten(0, 1),
    lambda matrix: matrix.unflatten(0, (5, -1))[TO_THEIRS].flatten(0, 1).t(),
)
SHIFT_UP = Transform(_shift_up_to_ours, lambda matrix: matrix.t().unflatten(0, (5, -1))[TO_THEIRS])

RWKV6_LAYER: tuple[tuple[str | tuple[str, ...], str, Transform], ...] = (
    ("ln1.weight", "attn_norm.weight", SAME),
    ("ln1.bias", "attn_norm.bias", SAME),
    ("ln2.weight", "ffn_norm.weight", SAME),
    ("ln2.bias", "ffn_norm.bias", SAME),
    ("att.time_maa_x", "attn.x_proj.0.mu", VECTOR),
    (tuple(f"att.time_maa_{part}" for part in "rwkvg"), "attn.x_bias", FIVE_VECTORS),
    ("att.time_maa_w1", "attn.x_proj.0.linear.weight", SHIFT_DOWN),
    ("att.time_maa_w2", "attn.x_proj.2.weight", SHIFT_UP),
    ("att.time_decay", "attn.w_proj.linear.lora.2.bias", VECTOR),
    ("att.time_decay_w1", "attn.w_proj.linear.lora.0.weight", TRANSPOSED),
    ("att.time_decay_w2", "attn.w_proj.linear.lora.2.weight", TRANSPOSED),
    ("att.time_faaaa", "attn.bonus", SAME),
    ("att.receptance.weight", "attn.r_proj.linear.weight", SAME),
    ("att.key.weight", "attn.k_proj.linear.weight", SAME),
    ("att.value.weight", "attn.v_proj.linear.weight", SAME),
    ("att.output.weight", "attn.o_proj.weight", SAME),
    ("att.gate.weight", "attn.g_proj.linear.weight", SAME),
    ("att.ln_x.weight", "attn.g_norm.weight", SAME),
    ("att.ln_x.bias", "attn.g_norm.bias", SAME),
    ("ffn.time_maa_k", "ffn.key.mu", VECTOR),
    ("ffn.time_maa_r", "ffn.receptance.mu", VECTOR),
    ("ffn.key.weight", "ffn.key.linear.weight", SAME),
    ("ffn.receptance.weight", "ffn.receptance.linear.weight", SAME),
    ("ffn.value.weight", "ffn.value.weight", SAME),
)
LOW_RANK = (("0", "2.bias", VECTOR), ("1", "0.weight", TRANSPOSED), ("2", "2.weight", TRANSPOSED))
RWKV7_LAYER: tuple[tuple[str, str, Transform], ...] = (
    *RWKV6_LAYER[:4],  # type: ignore[arg-type]
    *((f"att.x_{part}", f"attn.x_{part}", WIDE_VECTOR) for part in "rwkvag"),
    *((f"att.{kind}{part}", f"attn.{kind}_lora.lora.{ours}", how) for kind in "wa" for part, ours, how in LOW_RANK),
    *((f"att.g{part}", f"attn.g_lora.lora.{ours}", how) for part, ours, how in LOW_RANK[1:]),
    ("att.k_k", "attn.k_k", VECTOR),
    ("att.k_a", "attn.k_a", VECTOR),
    ("att.r_k", "attn.r_k", SAME),
    *(
        (f"att.{theirs}.weight", f"attn.{ours}_proj.weight", SAME)
        for theirs, ours in (("receptance", "r"), ("key", "k"), ("value", "v"), ("output", "o"))
    ),
    ("att.ln_x.weight", "attn.g_norm.weight", SAME),
    ("att.ln_x.bias", "attn.g_norm.bias", SAME),
    ("ffn.x_k", "ffn.x_k", VECTOR),
    ("ffn.key.weight", "ffn.key.weight", SAME),
    ("ffn.value.weight", "ffn.value.weight", SAME),
)
"""Without the low-rank map v of the layers after the first."""
RWKV6_TOP = {
    "emb.weight": "model.embeddings.weight",
    "blocks.0.ln0.weight": "model.layers.0.pre_norm.weight",
    "blocks.0.ln0.bias": "model.layers.0.pre_norm.bias",
    "ln_out.weight": "model.norm.weight",
    "ln_out.bias": "model.norm.bias",
    "head.weight": "lm_head.weight",
}
RWKV5_LAYER = (
    *(f"ln{number}.{part}" for number in (1, 2) for part in ("weight", "bias")),
    *(f"att.time_mix_{part}" for part in "kvrg"),
    *("att.time_decay", "att.time_faaaa"),
    *(f"att.{part}.weight" for part in ("receptance", "key", "value", "output", "gate", "ln_x")),
    *("att.ln_x.bias", "ffn.time_mix_k", "ffn.time_mix_r"),
    *(f"ffn.{part}.weight" for part in ("key", "receptance", "value")),
)
"""Our names are those of the repositories."""
IN_REPOSITORY = {"ln0": "pre_ln", "att": "attention", "ffn": "feed_forward"} | {
    f"time_mix_{short}": f"time_mix_{long}"
    for short, long in (("k", "key"), ("v", "value"), ("r", "receptance"), ("g", "gate"))
}
"""From parts of names in .pth files to those in the repositories for Transformers."""
REPOSITORY_TOP = {"emb.weight": "rwkv.embeddings.weight", "head.weight": "head.weight"}


def in_repository(name: str) -> str:
    """The name of a tensor of a .pth file in a repository for Transformers."""
    parts = ".".join(IN_REPOSITORY.get(part, part) for part in name.split("."))
    return REPOSITORY_TOP.get(name, f"rwkv.{parts}")


def rwkv6_map(parts: Sequence[tuple[str | tuple[str, ...], str, Transform]] = RWKV6_LAYER) -> list[Rename]:
    """From .pth files to our RWKV-6, or with other `parts` of a layer."""
    layer = [
        Rename(
            f"{LAYER}{theirs}" if isinstance(theirs, str) else tuple(LAYER + name for name in theirs),
            f"model.layers.{{layer}}.{ours}",
            transform,
        )
        for theirs, ours, transform in parts
    ]
    top = [Rename(theirs, ours) for theirs, ours in RWKV6_TOP.items()]
    return top[:3] + layer + top[3:]


def rwkv7_map(config: Any) -> list[Rename]:
    """From .pth files to our RWKV-7."""
    values = [
        Rename(f"blocks.{layer}.att.v{part}", f"model.layers.{layer}.attn.v_lora.lora.{ours}", how)
        for layer in range(1, config.num_hidden_layers)
        for part, ours, how in LOW_RANK
    ]
    lacking = () if config.norm_first else ("model.layers.0.pre_norm.weight", "model.layers.0.pre_norm.bias")
    return [rename for rename in rwkv6_map(RWKV7_LAYER) + values if rename.ours not in lacking]


def pth_renames(config: Any) -> list[Rename]:
    """From .pth files to ours."""
    if config.model_type != RWKV5:
        return rwkv7_map(config) if config.model_type == RWKV7 else rwkv6_map()
    top = list(RWKV6_TOP)
    names = [*top[:3], *(LAYER + name for name in RWKV5_LAYER), *top[3:]]
    return [Rename(name, in_repository(name), WIDE_VECTOR if "time_mix" in name else SAME) for name in names]


def repository_renames(config: Any) -> list[Rename]:
    if config.model_type == RWKV5:
        return same_names(config)
    renames = [rename for rename in rwkv6_map() if not (config.tie_word_embeddings and rename.theirs == "head.weight")]
    return [replace(rename, theirs=tuple(map(in_repository, rename.their_names))) for rename in renames]
