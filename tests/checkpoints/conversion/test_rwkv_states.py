"""Files of RWKV's state tuning: a sequence starts from them as the authors' code does, and they come back the same."""

from pathlib import Path
from typing import Any

import pytest
import torch

from hf_recurrent_lengthgen.checkpoints.conversion.rwkv_states import read_time_state, write_time_state
from hf_recurrent_lengthgen.models.state_value import LayerState
from tests.models.families import FAMILIES
from tests.models.family import Family

NAMES = ("rwkv5", "rwkv6", "rwkv7")
KINDS = [family for family in FAMILIES if family.name in NAMES]


def time_state(model: Any) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {
        f"blocks.{layer}.att.time_state": torch.randn(shape.recurrent, generator=generator)
        for layer, shape in enumerate(model.state_shapes())
    }


@pytest.mark.parametrize("family", KINDS, ids=NAMES)
def test_a_sequence_starts_from_the_state_in_a_file(family: Family, tmp_path: Path) -> None:
    """RWKV-7's code computes `state @ r` with the tensor; that of 5 and 6 `r @ state` with its transpose."""
    model = family.causal_lm_class(family.config()).eval().double()
    for name, value in model.named_parameters():
        if "o_proj" in name or "output" in name:  # zero at the start in RWKV-7
            torch.nn.init.normal_(value)
    tensors = time_state(model)
    torch.save(tensors, tmp_path / "state.pth")
    model.add_learned_state("style", read_time_state(model, tmp_path / "state.pth"))
    ids = torch.arange(1, 8)[None]
    start = tuple(
        LayerState(value.double()[None], zero.conv)
        for value, zero in zip(tensors.values(), model.zero_state(1), strict=True)
    )
    with torch.no_grad():
        expected, _ = family.loop(model, model.get_input_embeddings()(ids), start)
        found = model(ids).logits
        with model.learned_states.disable_adapter():
            from_zero = model(ids).logits
    assert float((found - expected).abs().max()) < 1e-9
    assert float((found - from_zero).abs().max()) > 1e-4
    write_time_state(model, tmp_path / "back.pth")
    back = torch.load(tmp_path / "back.pth", weights_only=True)
    assert back.keys() == tensors.keys()
    assert all(torch.equal(value, tensors[name]) for name, value in back.items())


def test_what_a_file_or_model_cannot_hold_is_refused(tmp_path: Path) -> None:
    seven, gla = ({family.name: family for family in FAMILIES}[name] for name in ("rwkv7", "gla"))
    model, other = (family.causal_lm_class(family.config()) for family in (seven, gla))
    with pytest.raises(ValueError, match="must have an active learned state"):
        write_time_state(model, tmp_path / "state.pth")
    model.add_learned_state("style")
    model.learned_states["style"].conv[0].data.fill_(1.0)
    with pytest.raises(ValueError, match="learn_conv_state=False"):
        write_time_state(model, tmp_path / "state.pth")
    with pytest.raises(ValueError, match="this model is 'stateful_gla'"):
        read_time_state(other, tmp_path / "state.pth")
    tensors = time_state(model)
    torch.save({"blocks.0.att.time_state": tensors["blocks.0.att.time_state"]}, tmp_path / "short.pth")
    torch.save({"emb.weight": torch.zeros(2)}, tmp_path / "weights.pth")
    for name, told in (("short", r"holds .*blocks.0.att.time_state.: \(2, 8, 8\)"), ("weights", "holds .*emb.weight")):
        with pytest.raises(ValueError, match=told):
            read_time_state(model, tmp_path / f"{name}.pth")
