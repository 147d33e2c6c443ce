"""Settings and values at the edge of what the families take."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import FalconMambaConfig, FalconMambaForCausalLM, MambaConfig

from hf_recurrent_lengthgen.models import STATEFUL_CLASSES, StatefulMambaConfig, StatefulMambaForCausalLM
from hf_recurrent_lengthgen.models.state_on_disk import load_state, read_tensors, save_state, write_tensors
from hf_recurrent_lengthgen.models.state_value import LayerShape, map_state, zero_state

from .families import VARIANTS, build, random_tokens, variant_id
from .family import TINY, Family
from .family_fla import HGRN2, LINEAR_ATTENTION


def test_a_falcon_mamba_file_without_epsilon_has_its_norms(tmp_path: Path) -> None:
    stock = FalconMambaForCausalLM(FalconMambaConfig(**TINY, state_size=4)).eval()
    stock.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    del config["mixer_rms_eps"]
    file.write_text(json.dumps(config))
    model = StatefulMambaForCausalLM.from_pretrained(tmp_path, config=StatefulMambaConfig.from_pretrained(tmp_path))
    tokens = torch.arange(9)[None]
    torch.testing.assert_close(model(tokens).logits, stock(tokens).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", sorted(STATEFUL_CLASSES))
def test_a_config_from_an_upstream_file_has_our_type(name: str) -> None:
    config_class: Any = STATEFUL_CLASSES[name].config_class
    assert config_class.from_dict({"model_type": name}).model_type == config_class.model_type


def test_a_damaged_number_of_layers_is_refused_at_once(tmp_path: Path) -> None:
    file = tmp_path / "state"
    save_state(file, zero_state([LayerShape((2,), (0,))], 1))
    header, tensors, _ = read_tensors(file, "cpu")
    write_tensors(file, tensors, header | {"num_layers": "1000000"})
    with pytest.raises(ValueError, match="1000000") as refusal:
        load_state(file)
    assert len(str(refusal.value)) < 1000


@pytest.mark.parametrize("shape", [(0, 3), (2, 0)])
def test_inputs_without_rows_or_tokens_are_refused(shape: tuple[int, int]) -> None:
    model = HGRN2.causal_lm_class(HGRN2.config())
    with pytest.raises(ValueError, match=rf"no tokens \({shape[0]} rows of {shape[1]}\)"):
        model(torch.zeros(shape, dtype=torch.long))


@pytest.mark.parametrize("layer", [0, 1])
def test_lower_bounds_have_gradients_also_where_they_round_to_0_or_1(layer: int) -> None:
    model = HGRN2.causal_lm_class(HGRN2.config(num_hidden_layers=3))
    with torch.no_grad():
        model.model.lower_bounds[layer] = -200.0
    tokens = torch.arange(18).view(2, 9)
    model(tokens, labels=tokens).loss.backward()
    assert model.model.lower_bounds.grad.isfinite().all()


def test_a_config_from_upstream_fields_has_our_type() -> None:
    config = StatefulMambaConfig(**MambaConfig(**TINY).to_dict())
    assert config.model_type == "stateful_mamba"  # as "mamba", PEFT refuses adapters on out_proj


@pytest.mark.thinned(3)
@pytest.mark.parametrize(("family", "variant"), VARIANTS, ids=variant_id)
def test_float16_is_finite_and_close_to_float32(family: Family, variant: str) -> None:
    check_float16(family, **family.variants[variant])


@pytest.mark.parametrize("feature_map", ["elu", "relu", "identity", "dpfp", "hedgehog", "t2r", "elementwise_product"])
def test_normalized_linear_attention_is_finite_in_float16(feature_map: str) -> None:
    """Also where no feature of the first token is positive: the normalizer is 0, and its epsilon is none."""
    check_float16(LINEAR_ATTENTION, feature_map=feature_map, norm_feature_map=True)


def check_float16(family: Family, **changes: Any) -> None:
    model = build(family, torch.float16, **changes)
    tokens = random_tokens(4, 40)
    with torch.no_grad():
        logits = model(tokens).logits
        expected = model.float()(tokens).logits
    assert (logits.float() - expected).norm() < family.autocast_error * expected.norm()


def test_long_sums_of_linear_attention_do_not_overflow_in_float16() -> None:
    """Without decay outputs grow with the length, beyond the range of float16; the norm after them takes that away."""
    model = build(LINEAR_ATTENTION, torch.float16)
    state = map_state(lambda part: part + 1e6, model.zero_state(1))
    with torch.no_grad():
        assert bool(model(random_tokens(1, 3), initial_state=state).logits.isfinite().all())
