"""The authors' layouts of RWKV-7 for Transformers compute what the author's package does, and lead to its files."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_recurrent_lengthgen import load_model
from hf_recurrent_lengthgen.checkpoints.conversion.convert import convert_checkpoint
from hf_recurrent_lengthgen.checkpoints.conversion.export import export_checkpoint

from .rwkv_reference import RWKV7_SIZES, Weights, even_draw, rwkv7_shapes

LOW_RANK = tuple(f"att.{part}{number}" for part in "wavg" for number in "12")
SHARED: dict[str, Any] = {
    "architectures": ["Rwkv7ForCausalLM"],
    "model_type": "rwkv7",
    "dtype": "float32",
    "vocab_size": RWKV7_SIZES.vocabulary,
    "hidden_size": RWKV7_SIZES.width,
    "num_hidden_layers": RWKV7_SIZES.layers,
    "intermediate_size": RWKV7_SIZES.channels,
    "decay_low_rank_dim": 3,
    "a_low_rank_dim": 2,
    "gate_low_rank_dim": 5,
    "v_low_rank_dim": 4,
    "tie_word_embeddings": False,
    "use_cache": True,
    "wkv_state_dtype": "float32",
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
FIRST = SHARED | {"head_dim": 64, "num_heads": 2, "norm_eps": 1e-5, "norm_bias": True, "max_position_embeddings": 4096}
FIRST |= {"use_deep_embed": False}
SECOND = SHARED | {"head_size": 64, "num_attention_heads": 2, "layer_norm_epsilon": 1e-5, "context_length": 8192}
SECOND |= {"group_norm_epsilon": 64e-5, "embedding_layer_norm_fused": False}


def first(weights: Weights, unused: bool = True) -> Weights:
    """By the names of the class in huggingface/transformers#47780; its first layer has a map that it never reads."""
    named = {name if name == "head.weight" else f"rwkv7.{name}": value for name, value in weights.items()}
    shapes = {"v0": (1, 1, 128), "v1": (128, 4), "v2": (4, 128)}
    return named | {f"rwkv7.blocks.0.att.{name}": torch.zeros(shape) for name, shape in shapes.items() if unused}


def second(weights: Weights) -> Weights:
    named = {}
    for name, value in weights.items():
        turned = name.endswith(LOW_RANK)
        full = {"head.weight": name, "emb.weight": "model.embeddings.weight"}.get(name, f"model.{name}")
        named[full + (".weight" if turned else "")] = value.T.contiguous() if turned else value
    return named


def write(weights: Weights, folder: Path, settings: dict[str, Any]) -> str:
    folder.mkdir()
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(settings))
    return str(folder)


WEIGHTS = even_draw(rwkv7_shapes(RWKV7_SIZES))
LAYOUTS = {
    "first": (first(WEIGHTS), FIRST),
    "first without unused": (first(WEIGHTS, unused=False), FIRST),
    "second": (second(WEIGHTS), SECOND),
}


@pytest.mark.thinned(2)
@pytest.mark.parametrize(("weights", "settings"), LAYOUTS.values(), ids=LAYOUTS)
def test_it_computes_what_the_package_of_its_author_does_and_leads_to_its_file(
    weights: Weights, settings: dict[str, Any], tmp_path: Path
) -> None:
    source = write(weights, tmp_path / "theirs", settings)
    convert_checkpoint(source, tmp_path / "ours")
    model, golden = (
        load_model(str(tmp_path / "ours")).eval(),
        load_file(Path(__file__).parent / "rwkv/x070.safetensors"),
    )
    with torch.no_grad():
        assert float((model(golden["input_ids"][None]).logits[0] - golden["logits"]).abs().max()) < 1e-5
    export_checkpoint(str(tmp_path / "ours"), tmp_path / "back", "rwkv")
    back = torch.load(tmp_path / "back/model.pth", weights_only=True)
    assert back.keys() == WEIGHTS.keys()
    assert all(torch.equal(value, WEIGHTS[name]) for name, value in back.items())


def test_another_epsilon_of_the_heads_is_read(tmp_path: Path) -> None:
    source = write(second(WEIGHTS), tmp_path / "theirs", SECOND | {"group_norm_epsilon": 1e-3})
    convert_checkpoint(source, tmp_path / "ours")
    assert load_model(str(tmp_path / "ours")).model.layers[1].attn.g_norm.eps == 1e-3
