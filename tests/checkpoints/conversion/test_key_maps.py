"""Key maps: every name there and back, and errors that list everything."""

from collections.abc import Mapping

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hf_recurrent_lengthgen.checkpoints.conversion.formats import expected_shapes
from hf_recurrent_lengthgen.checkpoints.conversion.key_maps import SAME, Rename, Transform, expand, to_ours, to_theirs
from hf_recurrent_lengthgen.checkpoints.conversion.registry import FORMATS
from hf_recurrent_lengthgen.checkpoints.tensor_files import Meta
from hf_recurrent_lengthgen.models import FAMILIES

TRANSPOSED = Transform(lambda tensor: tensor.T, lambda tensor: tensor.T)
STACKED = Transform(lambda *parts: torch.stack(parts), lambda whole: whole.unbind())
MAP = [
    Rename("emb.weight", "embeddings.weight"),
    Rename("blocks.{layer}.w", "layers.{layer}.weight", TRANSPOSED),
    Rename(("blocks.{layer}.r", "blocks.{layer}.k"), "layers.{layer}.both", STACKED),
    Rename("out.weight", "head.weight", SAME),
]
THEIRS = {
    "emb.weight": torch.randn(5, 3),
    **{f"blocks.{layer}.w": torch.randn(2, 4).double() for layer in range(2)},
    **{f"blocks.{layer}.{name}": torch.randn(3).half() for layer in range(2) for name in "rk"},
    "out.weight": torch.randn(5, 3),
}
SHAPES: dict[str, tuple[int, ...]] = {
    "embeddings.weight": (5, 3),
    "layers.0.weight": (4, 2),
    "layers.0.both": (2, 3),
    "layers.1.weight": (4, 2),
    "layers.1.both": (2, 3),
    "head.weight": (5, 3),
}


class InMemory:
    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors
        self.metas = {name: Meta(tuple(value.shape), value.dtype) for name, value in tensors.items()}

    def tensor(self, name: str) -> Tensor:
        return self.tensors[name]


def test_values_go_there_and_back() -> None:
    ours = {entry.name: entry.read() for entry in to_ours(expand(MAP, 2), InMemory(THEIRS), SHAPES, "it")}
    assert {name: tuple(value.shape) for name, value in ours.items()} == SHAPES
    assert torch.equal(ours["layers.1.weight"], THEIRS["blocks.1.w"].T)
    assert torch.equal(ours["layers.0.both"][1], THEIRS["blocks.0.k"])
    back = to_theirs(expand(MAP, 2), InMemory(ours), SHAPES, "it")
    assert {entry.name for entry in back} == THEIRS.keys()
    for entry in back:
        assert (entry.shape, entry.dtype) == (tuple(THEIRS[entry.name].shape), THEIRS[entry.name].dtype)
        assert torch.equal(entry.read(), THEIRS[entry.name])


def test_all_that_is_wrong_is_reported_at_once() -> None:
    theirs = {name: value for name, value in THEIRS.items() if name not in ("blocks.1.r", "out.weight")}
    theirs |= {
        "blocks.0.w": torch.ones(4, 2),
        "blocks.0.k": torch.ones(3),
        "blocks.2.w": torch.ones(2, 4),
        "more": torch.ones(1),
    }
    with pytest.raises(ValueError, match="weights in it do not fit") as caught:
        to_ours(expand(MAP, 2), InMemory(theirs), SHAPES, "it")
    message = str(caught.value)
    assert "missing: blocks.1.r, out.weight;" in message
    assert "unexpected: blocks.2.w, more;" in message
    assert "blocks.0.w as layers.0.weight has the shape [2, 4] instead of [4, 2]" in message
    assert "blocks.0.r, blocks.0.k have several dtypes" in message


def test_our_weights_are_checked_before_an_export() -> None:
    ours = {name: torch.ones(shape) for name, shape in SHAPES.items() if name != "head.weight"}
    ours |= {"layers.0.weight": torch.ones(7, 2), "lm_head": torch.ones(1)}
    with pytest.raises(ValueError, match="do not fit") as caught:
        to_theirs(expand(MAP, 2), InMemory(ours), SHAPES, "it")
    message = str(caught.value)
    assert "missing: head.weight; unexpected: lm_head;" in message
    assert "layers.0.weight has the shape [7, 2] instead of [4, 2]" in message


@settings(max_examples=40)
@given(
    st.sampled_from([(name, family) for name in ("mamba-ssm", "transformers") for family in FORMATS[name].families]),
    st.integers(1, 3),
    st.booleans(),
    st.integers(0, 2**32 - 1),
)
def test_all_maps_give_back_every_bit(case: tuple[str, str], layers: int, tied: bool, seed: int) -> None:
    """Random weights of ours under the names of another layout, and back, and there again."""
    name, family = case
    config_class = FAMILIES[family].config_class
    sizes = {"vocab_size": 6, "hidden_size": 32, "num_hidden_layers": layers, "tie_word_embeddings": tied}
    if family == "stateful_mamba2":
        sizes |= {"num_heads": 4, "head_dim": 16, "n_groups": 2, "state_size": 4}
    config = config_class(**sizes)
    shapes = expected_shapes(config)
    generator = torch.Generator().manual_seed(seed)
    ours = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    renames = expand(FORMATS[name].renames(config), layers)
    theirs = {entry.name: entry.read() for entry in to_theirs(renames, InMemory(ours), shapes, "it")}
    again = {entry.name: entry.read() for entry in to_ours(renames, InMemory(theirs), shapes, "it")}
    assert again.keys() == ours.keys()
    assert all(torch.equal(again[key], ours[key]) for key in ours)
