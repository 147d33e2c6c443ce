"""Checkpoints in the layouts of RWKV's authors, written by the tests."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from hf_recurrent_lengthgen import load_model
from hf_recurrent_lengthgen.checkpoints.tensor_files import Meta
from tests.checkpoints.conversion.rwkv_reference import Sizes, Weights, run, rwkv5_shapes, rwkv6_shapes

SIZES = {
    "small ranks": Sizes(24, 3, 8, 3, 5, 7, 32, 31),
    "official ranks": Sizes(64, 2, 32, 2, 32, 64, 224, 40),
    "ranks of the 7B": Sizes(32, 1, 32, 1, 64, 128, 112, 29),
    "wider time mixing": Sizes(16, 3, 8, 2, 2, 3, 20, 37),
}


SHAPES = {"rwkv6": rwkv6_shapes, "rwkv5": rwkv5_shapes}


every_size = pytest.mark.parametrize("sizes", SIZES.values(), ids=[name.replace(" ", "-") for name in SIZES])


both_generations = pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)


SMALL, OFFICIAL = SIZES["small ranks"], SIZES["official ranks"]


def write_pth(weights: Weights, path: Path) -> Path:
    torch.save(weights, path)
    return path


def repository_name(name: str) -> str:
    """By the rules of the authors' conversion script."""
    if name == "head.weight":
        return name
    for old, new in (
        ("emb.", "embeddings."),
        (".ln0.", ".pre_ln."),
        (".att.", ".attention."),
        (".ffn.", ".feed_forward."),
    ):
        name = name.replace(old, new)
    for short, long in (("k", "key"), ("v", "value"), ("r", "receptance"), ("g", "gate")):
        if name.endswith(f"time_mix_{short}"):
            name = name.removesuffix(short) + long
    return f"rwkv.{name}"


def write_repository(weights: Weights, folder: Path, generation: int, sizes: Sizes, **changes: Any) -> Path:
    """With the entries that official config.json files have."""
    folder.mkdir()
    save_file(
        {repository_name(name): value.contiguous() for name, value in weights.items()}, folder / "model.safetensors"
    )
    settings = {
        "architectures": [f"Rwkv{generation}ForCausalLM"],
        "auto_map": {"AutoConfig": f"configuration_rwkv{generation}.Rwkv{generation}Config"},
        "attention_hidden_size": sizes.width,
        "bos_token_id": 0,
        "context_length": 4096,
        "eos_token_id": 0,
        "head_size": sizes.head_size,
        "hidden_size": sizes.width,
        "intermediate_size": None,
        "layer_norm_epsilon": 1e-05,
        "model_type": f"rwkv{generation}",
        "num_hidden_layers": sizes.layers,
        "rescale_every": 6,
        "tie_word_embeddings": False,
        "transformers_version": "4.33.1",
        "use_cache": True,
        "vocab_size": sizes.vocabulary,
    }
    (folder / "config.json").write_text(json.dumps(settings | changes))
    return folder


def assert_computes(folder: Path, weights: Weights, head_norm_epsilon: float = 64e-5) -> None:
    """Logits and final states are those of the loop, to 1e-5 of the largest entry, in float32."""
    model = load_model(str(folder)).eval()
    ids = torch.randint(model.config.vocab_size, (2, 17), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        output = model(ids)
    for row in range(2):
        logits, states = run(weights, ids[row], head_norm_epsilon)
        assert_close(output.logits[row], logits)
        for ours, theirs in zip(output.final_state, states, strict=True):
            assert_close(ours.recurrent[row], theirs.memory.mT)
            assert_close(ours.conv[row, :, 0], torch.cat([theirs.time, theirs.channel]))


def assert_close(actual: Tensor, expected: Tensor) -> None:
    assert actual.shape == expected.shape
    assert float((actual - expected).abs().max()) <= 1e-5 * max(1.0, float(expected.abs().max()))


def assert_same(one: Weights, other: Weights) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert (value.dtype, value.shape) == (other[name].dtype, other[name].shape), name
        assert torch.equal(value, other[name]), name


class Shapes:
    """Tensors without values."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        self.metas = {name: Meta(shape, torch.bfloat16) for name, shape in shapes.items()}

    def tensor(self, name: str) -> Tensor:
        raise AssertionError(name)
