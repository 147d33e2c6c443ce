"""New models start from the distributions that the authors' packages draw from (make_initial_weights.py)."""

import json
import math
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BambaConfig, BambaForCausalLM

from hf_recurrent_lengthgen.checkpoints.conversion.registry import FORMATS
from hf_recurrent_lengthgen.surgery import expand_state

from .families import DELTA_FAMILIES, GLA, HGRN2, MAMBA, MAMBA2, RWKV6, Family, build, variant_id

DRAWN = json.loads((Path(__file__).parent / "upstream/initial_weights.json").read_text(encoding="utf-8"))


def config_of(family: Family) -> Any:
    fields = DRAWN[family.name]["config"]
    if family in (MAMBA, MAMBA2):
        return FORMATS["mamba-ssm"].config_of(fields, {})
    return family.config_class(**fields)


def share_up_to(values: torch.Tensor, point: float) -> float:
    return float((values <= point + 1e-4 * abs(point)).double().mean())


@pytest.mark.thinned(4)
@pytest.mark.parametrize("family", [MAMBA, MAMBA2, GLA, RWKV6, HGRN2, *DELTA_FAMILIES], ids=variant_id)
def test_each_parameter_has_the_distribution_of_the_authors(family: Family) -> None:
    torch.manual_seed(1)
    model = family.causal_lm_class(config_of(family))
    drawn = defaultdict(list)
    for name, parameter in model.named_parameters():
        drawn[re.sub(r"layers\.\d+", "layers.*", name)].append(parameter.detach().flatten())
    expected = {
        name.replace("backbone.embedding.", "backbone.embeddings."): points
        for name, points in DRAWN[family.name]["parameters"].items()
    }
    assert drawn.keys() == expected.keys()
    for name, points in expected.items():
        values = torch.cat(drawn[name]).double()
        for point, share in points:
            spread = math.sqrt(2 * share * (1 - share) / len(values))  # of the difference of two samples
            assert share_up_to(values, point) == pytest.approx(share, abs=5 * spread + 20 / len(values) + 1e-4), (
                name,
                point,
            )


@pytest.mark.parametrize("family", [MAMBA, MAMBA2], ids=variant_id)
def test_transformers_initialization_stays_the_default(family: Family) -> None:
    config = family.config()
    assert (config.initialization, config.initializer_range) == ("transformers", 0.1)
    own = family.config(initialization="mamba-ssm", initializer_range=0.3)
    assert own.initializer_range == 0.3


def rows_of_b(mixer: Any) -> torch.Tensor:
    inner, conv = mixer.out_proj.in_features, mixer.conv1d.out_channels
    return mixer.in_proj.weight[2 * inner : inner + conv].detach()  # type: ignore[no-any-return]


@pytest.mark.parametrize("start", ["transformers", "mamba-ssm"])
def test_expanded_mamba_layers_are_drawn_as_by_mamba_ssm(start: str) -> None:
    """Whatever the start of the model."""
    changes = {"hidden_size": 64, "num_heads": 16, "head_dim": 8, "expand": 2, "num_hidden_layers": 2}
    model = build(MAMBA2, **changes, initialization=start)
    expanded = expand_state(model, layers=[1], factor=8)
    assert expanded.config.initialization == start
    assert expanded.config.initializer_range == model.config.initializer_range
    mixer = expanded.backbone.layers[1].mixer
    std, a = rows_of_b(mixer).std(), mixer.A_log.exp()
    assert std == pytest.approx(1 / math.sqrt(3 * 64), rel=0.05)
    assert a.min() >= 1
    assert a.max() <= 16
    assert len(set((a % 1).tolist())) > 8


def test_expanded_layers_of_hybrids_do_not_forget_everything() -> None:
    config = BambaConfig(
        vocab_size=32,
        hidden_size=64,
        intermediate_size=32,
        num_hidden_layers=2,
        attn_layer_indices=[1],
        num_attention_heads=4,
        num_key_value_heads=4,
        mamba_n_heads=16,
        mamba_d_head=8,
        mamba_d_state=8,
        mamba_expand=2,
    )
    torch.manual_seed(0)
    model = BambaForCausalLM(config)
    mixer = expand_state(model, layers="all", factor=4).model.layers[0].mamba
    dt = torch.nn.functional.softplus(mixer.dt_bias)
    assert dt.min() >= 0.99e-4
    assert dt.max() <= 1.01 * 0.1
