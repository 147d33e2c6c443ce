"""Checkpoints of RWKV-5.2, RWKV-6 and RWKV-7: .pth files of their author, and repositories for Transformers.

A .pth file (of RWKV-LM, generations x052, x060 and x070) has no config: sizes follow from shapes, and the code fixes
all other settings. The authors' repositories (RWKV/rwkv-6-world-*, RWKV/v6-Finch-*, RWKV/rwkv-5-world-*) rename the
same tensors; those of RWKV-7 have the format of fla. Our RWKV-6 and RWKV-7 have the names and layouts of fla, our
RWKV-5 those of the repositories.

Shapes: D hidden size, A width of time mixing, H heads of N channels, R rank of the token shifts, W rank of the decay.
"""

import math
import re
from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedConfig

from hf_recurrent_lengthgen.checkpoints.conversion.formats import (
    GENERIC_SETTINGS,
    SOURCE_CONFIG,
    Format,
    Settings,
    check_settings,
    expected_shapes,
)
from hf_recurrent_lengthgen.checkpoints.conversion.rwkv_maps import (
    RWKV5,
    RWKV6,
    RWKV7,
    pth_renames,
    repository_renames,
)
from hf_recurrent_lengthgen.checkpoints.tensor_files import Meta
from hf_recurrent_lengthgen.models import StatefulRWKV5Config, StatefulRWKV6Config, StatefulRWKV7Config

NORM_EPSILON = 1e-5  # of all layer norms
DIVISOR = 8  # head_size_divisor of their training: an epsilon of 1e-5 * 8**2 in the norm of the heads
WORLD_VOCABULARY = 65536
RWKV7_HEAD_EPSILON = 64e-5  # whatever the size of its heads
UNUSED = tuple(f"blocks.0.att.v{number}" for number in range(3))  # of RWKV-7, which some files hold
FFN_KEY = ("feed_forward.key.weight", "ffn.key.linear.weight")
REPOSITORY_TITLE = "the RWKV authors' repositories for Transformers"
REPOSITORY_DEFAULTS: Settings = {
    "vocab_size": 65536,
    "hidden_size": 768,
    "num_hidden_layers": 24,
    "attention_hidden_size": None,
    "num_attention_heads": None,
    "head_size": 64,
    "head_size_divisor": 8,
    "intermediate_size": None,
    "layer_norm_epsilon": 1e-5,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "rescale_every": 6,
    "tie_word_embeddings": False,
    "use_cache": True,
}
"""Defaults of their configuration classes, with the fields of all versions."""
IGNORED = {"context_length", "model_version"}
ONLY_RWKV5 = {
    *("attention_hidden_size", "head_size", "head_size_divisor", "layer_norm_epsilon", "num_attention_heads"),
    "rescale_every",
}
"""The fields that our RWKV-6 has under other names."""


def _generation(metas: Mapping[str, Meta]) -> str:
    """Our model type for a .pth file."""
    names = {name.removeprefix("blocks.0.") for name in metas if name.startswith("blocks.0.")}
    if {"att.time_maa_x", "att.time_maa_w1"} <= names:
        return RWKV6
    if {"att.r_k", "att.x_r", "att.w1"} <= names and "ffn.s_emb.weight" not in names:
        return RWKV7
    decay = metas.get("blocks.0.att.time_decay", Meta((), torch.float32)).shape
    if {"att.time_mix_g", "att.gate.weight"} & names and (not decay or decay[1:] > (1,)):
        return RWKV5
    raise ValueError(
        f"This .pth file is of another generation (it holds {', '.join(sorted(metas)[:5])}); RWKV-7 (x070), RWKV-6 "
        "(x060) and RWKV-5.2 (x052) can be converted."
    )


def _shape(metas: Mapping[str, Meta], name: str) -> tuple[int, ...]:
    """The shape of a matrix; raises a `ValueError` if it is missing or has another number of dimensions."""
    shape = metas[name].shape if name in metas else ()
    if len(shape) != 2 or 0 in shape:
        raise ValueError(f"The weights must hold a matrix {name}, which has sizes of the model, got {list(shape)}.")
    return shape


def _pth_config(settings: Settings | None, metas: Mapping[str, Meta]) -> PreTrainedConfig:
    kind = _generation(metas)
    vocab_size, hidden_size = _shape(metas, "emb.weight")
    fields: Settings = {
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "num_hidden_layers": 1 + max(int(m[1]) for name in metas if (m := re.match(r"blocks\.(\d{1,6})\.", name))),
        "intermediate_size": _shape(metas, "blocks.0.ffn.key.weight")[0],
        "tie_word_embeddings": False,
        # 0 is <|endoftext|> of the World vocabulary
        **dict.fromkeys(("bos_token_id", "eos_token_id"), 0 if vocab_size == WORLD_VOCABULARY else None),
        "pad_token_id": None,
    }
    inner = _shape(metas, "blocks.0.att.receptance.weight")[0]
    heads, head_size = _shape(metas, f"blocks.0.att.{'r_k' if kind == RWKV7 else 'time_faaaa'}")
    config: PreTrainedConfig
    if kind == RWKV7:
        config = StatefulRWKV7Config(**fields, **rwkv7_sizes(metas, head_size))
    elif kind == RWKV5:
        fields |= {"attention_hidden_size": inner, "head_size": head_size, "head_size_divisor": DIVISOR}
        config = StatefulRWKV5Config(**fields)
    else:
        config = StatefulRWKV6Config(**fields, **_rwkv6_sizes(metas, "blocks.0.att.", inner / hidden_size, heads))
    setattr(config, SOURCE_CONFIG, {"format": "rwkv"})
    return config


def _assumed(config: Any) -> Settings:
    if config.model_type == RWKV5:
        return {"head_size_divisor": config.head_size_divisor}
    if config.model_type == RWKV6:
        return {"group_norm_eps": config.group_norm_eps}
    settings = {"group_norm_eps": config.group_norm_eps or RWKV7_HEAD_EPSILON}
    return settings if config.norm_first else settings | {"norm_first": False}


def _rwkv6_sizes(metas: Mapping[str, Meta], attention: str, expand: float, heads: int) -> Settings:
    return {
        **dict.fromkeys(("expand_k", "expand_v"), int(expand) if expand == int(expand) else expand),
        "num_heads": heads,
        "proj_low_rank_dim": _shape(metas, f"{attention}time_maa_w1")[1] // 5,
        "gate_low_rank_dim": _shape(metas, f"{attention}time_decay_w1")[1],
        "norm_eps": NORM_EPSILON,
        "group_norm_eps": 1e-5 * DIVISOR**2,
    }


def rwkv7_sizes(metas: Mapping[str, Meta], head_size: int) -> Settings:
    """The sizes that follow from the shapes in a .pth file of RWKV-7, in addition to the widths."""
    ranks = {"decay": "0.att.w1", "a": "0.att.a1", "gate": "0.att.g1", "v": "1.att.v1"}
    return {
        **{
            f"{part}_low_rank_dim": _shape(metas, f"blocks.{name}")[1]
            for part, name in ranks.items()
            if part != "v" or f"blocks.{name}" in metas
        },
        "head_dim": head_size,
        "norm_eps": NORM_EPSILON,
        "group_norm_eps": None if head_size * NORM_EPSILON == RWKV7_HEAD_EPSILON else RWKV7_HEAD_EPSILON,
        "norm_first": "blocks.0.ln0.weight" in metas,
        "fuse_norm": False,
    }


def _recognizes_repository(settings: Settings | None, metas: Mapping[str, Meta]) -> bool:
    kind = (settings or {}).get("model_type")
    return kind == "rwkv5" or (kind == "rwkv6" and (settings or {}).keys() >= {"head_size", "layer_norm_epsilon"})


def _repository_config(settings: Settings | None, metas: Mapping[str, Meta]) -> PreTrainedConfig:
    where = "This RWKV repository"
    six = (settings or {}).get("model_type") == "rwkv6"
    # the code of RWKV-6 has an epsilon for some norms only: it must be that of the last norm
    needed = {"layer_norm_epsilon": (NORM_EPSILON,)} if six else {}
    theirs = check_settings(settings, GENERIC_SETTINGS | REPOSITORY_DEFAULTS.keys() | IGNORED, where, needed)
    unused = (*IGNORED, "architectures", "auto_map")
    fields = REPOSITORY_DEFAULTS | {name: value for name, value in theirs.items() if name not in unused}
    ffn = "rwkv.blocks.0.feed_forward.key.weight"
    if fields["intermediate_size"] is None and ffn in metas:
        fields["intermediate_size"] = _shape(metas, ffn)[0]
    fields["training_length"] = theirs.get("context_length")
    five: Any = StatefulRWKV5Config.from_dict(fields | {"model_type": "rwkv5"})  # which checks what both have
    if not six:
        return five
    fields = {name: value for name, value in fields.items() if name not in ONLY_RWKV5}
    expand, heads = five.inner_size / five.hidden_size, five.inner_size // five.head_size
    fields |= _rwkv6_sizes(metas, "rwkv.blocks.0.attention.", expand, heads)
    fields |= {"group_norm_eps": 1e-5 * five.head_size_divisor**2, "model_type": RWKV6}
    return StatefulRWKV6Config.from_dict(fields)


def _repository_settings(config: Any) -> Settings:
    """The settings of a repository; raises a `ValueError` for sizes that its code does not allow."""
    five = config.model_type == RWKV5
    inner = config.inner_size if five else int(config.expand_k * config.hidden_size)
    width = next(shape[0] for name, shape in expected_shapes(config).items() if name.endswith(FFN_KEY))
    fixed = {
        "width of time mixing": (inner, config.hidden_size),
        "intermediate_size": (width, int(config.hidden_size * 3.5) // 32 * 32),
    }
    divisor = 0
    if not five:
        large = config.hidden_size == 4096
        fixed["proj_low_rank_dim"] = config.proj_low_rank_dim, 64 if large else 32
        fixed["gate_low_rank_dim"] = config.gate_low_rank_dim, 128 if large else 64
        eps = config.norm_eps if config.group_norm_eps is None else config.group_norm_eps
        divisor = max(1, round(math.sqrt(eps / 1e-5)))
    if wrong := [f"{name} {ours} (there {theirs})" for name, (ours, theirs) in fixed.items() if ours != theirs]:
        raise ValueError(
            f"The code of {REPOSITORY_TITLE} fixes sizes by hidden_size, and this model has {', '.join(wrong)}: "
            "export it to another format."
        )
    return {
        "architectures": ["Rwkv5ForCausalLM" if five else "Rwkv6ForCausalLM"],
        "model_type": "rwkv5" if five else "rwkv6",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_hidden_layers,
        "attention_hidden_size": inner,
        "head_size": config.head_size if five else inner // config.num_heads,
        "head_size_divisor": config.head_size_divisor if five else divisor,
        "intermediate_size": None,
        "layer_norm_epsilon": config.layer_norm_epsilon if five else NORM_EPSILON,
        "rescale_every": 6,
        "use_cache": config.use_cache,
        "tie_word_embeddings": config.tie_word_embeddings,
        **{name: getattr(config, name, None) for name in ("bos_token_id", "eos_token_id")},
    }


SHAPED_FIELDS = (
    *("attention_hidden_size", "hidden_ratio", "intermediate_size", "num_attention_heads"),
    *("num_heads", "v_low_rank_dim", "value_dim"),
)
FIXED = (("group_norm_eps", 1e-5 * DIVISOR**2),)

RWKV = Format(
    name="rwkv",
    title="the .pth files of RWKV's author",
    container="torch",
    recognizes=lambda _, metas: "emb.weight" in metas and any(name.startswith("blocks.0.") for name in metas),
    to_config=_pth_config,
    from_config=lambda config: None,
    renames=pth_renames,
    tied_head="head.weight",
    unused=UNUSED,
    keeps_config=False,
    weights_file="model.pth",
    tokenizer="RWKV/rwkv-6-world-1b6",
    tokenizer_ids=WORLD_VOCABULARY,
    assumed=_assumed,
    from_shapes=SHAPED_FIELDS,
    fixed=FIXED,
)
RWKV_HF = Format(
    name="rwkv-hf",
    title=REPOSITORY_TITLE,
    container="safetensors",
    recognizes=_recognizes_repository,
    to_config=_repository_config,
    from_config=_repository_settings,
    renames=repository_renames,
    tied_head="head.weight",
    from_shapes=SHAPED_FIELDS,
    fixed=FIXED,
)
