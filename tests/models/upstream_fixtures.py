"""Golden files in tests/models/upstream: what flash-linear-attention's own models give on tiny random weights.

`make_upstream_fixtures.py` wrote them. A model of fla with the fixture's configuration and weights has these results.
Those of RWKV5_NAMES are of the official RWKV-5 code (test_against_fla.py), in the layout of fla's RWKV-6.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from .tensor_groups import groups_of, read_group, read_notes

FILES = {name: path for path in (Path(__file__).parent / "upstream").glob("*.safetensors") for name in groups_of(path)}
"""The file of each fixture: one for each model type."""
RWKV5_NAMES = sorted(name for name, path in FILES.items() if path.stem == "rwkv5")
NAMES = sorted({*FILES} - {*RWKV5_NAMES})


@dataclass(frozen=True)
class Fixture:
    """One model of fla: its configuration and weights under fla's names, and what it computed, in float32.

    `run` has `input_ids` (B, T), `logits` (B, T, vocabulary), `continued_logits` (the same in two calls, the cache of
    the first `split` tokens carried) and `loss`, the mean cross entropy of the next token, whose gradients are `grad`.
    `state` and `state_at_split` are fla's caches after all tokens and after `split` tokens, named "LAYER.PART":

    - recurrent_state: (B, H, P, N) for GLA, HGRN-2, Gated DeltaNet and KDA; (B, H, N, P), keys first, for RWKV-6,
      RWKV-7, DeltaNet and linear attention, where norm_feature_map makes it two parts: .0 as above and .1
      (B, 1, H, N), the sum of the keys.
    - conv_state.0, .1, .2: (B, channels, K), the last K inputs (not K - 1) of q, k and v (HGRN-2: q, f and i).
    - conv_state and ffn_state of RWKV-6 and RWKV-7: (B, D), the last normed input of attention and of channel mixing.
    """

    config: dict[str, Any]
    weights: dict[str, Tensor]
    grad: dict[str, Tensor]
    run: dict[str, Tensor]
    state: dict[str, Tensor]
    state_at_split: dict[str, Tensor]
    split: int
    versions: dict[str, str]


def load_fixture(name: str) -> Fixture:
    """One of NAMES. Tied weights stand under both of their names, their gradient under the first."""
    groups: dict[str, dict[str, Tensor]] = {}
    notes = read_notes(FILES[name], name)
    for key, tensor in read_group(FILES[name], name).items():
        group, part = key.split("/")
        groups.setdefault(group, {})[part] = tensor
    return Fixture(
        config=json.loads(notes.pop("config")),
        split=int(notes.pop("split")),
        weights=groups.pop("weight"),
        versions=notes,
        **groups,
    )
