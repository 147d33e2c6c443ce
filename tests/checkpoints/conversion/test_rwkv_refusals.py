"""What is told from the shapes of RWKV's files, and which files are refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_recurrent_lengthgen.checkpoints.conversion.convert import convert_checkpoint
from hf_recurrent_lengthgen.checkpoints.conversion.export import export_checkpoint
from hf_recurrent_lengthgen.checkpoints.conversion.format_rwkv import RWKV, RWKV_HF
from hf_recurrent_lengthgen.checkpoints.conversion.formats import expected_shapes
from hf_recurrent_lengthgen.checkpoints.conversion.key_maps import expand, to_ours
from hf_recurrent_lengthgen.checkpoints.conversion.registry import FORMATS, detect
from hf_recurrent_lengthgen.checkpoints.conversion.tiny_random_models import write_tiny_random_model
from hf_recurrent_lengthgen.checkpoints.tensor_files import Meta, TensorFiles
from tests.checkpoints.conversion.rwkv_files import OFFICIAL, SMALL, Shapes, write_pth, write_repository

from .rwkv_reference import Sizes, draw, rwkv5_shapes, rwkv6_shapes


def test_rwkv6_of_fla_is_told_from_that_of_the_authors() -> None:
    fla = {"model_type": "rwkv6", "norm_eps": 1e-5, "expand_k": 1, "proj_low_rank_dim": 32}
    theirs = {"model_type": "rwkv6", "head_size": 64, "layer_norm_epsilon": 1e-5}
    assert detect(fla, {}, "").name == "fla"
    assert detect(theirs, {}, "").name == "rwkv-hf"
    assert detect({"model_type": "rwkv5"}, {}, "").name == "rwkv-hf"


def test_a_pth_with_names_of_its_own_is_told_by_them() -> None:
    with pytest.raises(ValueError, match=r"^mine\.pth is in none of the layouts .* names such as 'e\.weight'"):
        detect(None, {"e.weight": Meta((12, 32), torch.float32)}, "mine.pth")


@pytest.mark.parametrize("mark", ["ffn.s_emb.weight", "att.time_mix_k", "att.ln_x.weight", "att.c_attn.weight"])
def test_other_generations_are_refused(mark: str, tmp_path: Path) -> None:
    weights = {"emb.weight": torch.zeros(29, 8), f"blocks.0.{mark}": torch.zeros(1, 1, 8)}
    with pytest.raises(ValueError, match="is of another generation"):
        convert_checkpoint(str(write_pth(weights, tmp_path / "theirs.pth")), tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


def test_all_wrong_tensors_are_listed(tmp_path: Path) -> None:
    weights = draw(rwkv6_shapes(SMALL))
    del weights["blocks.2.att.ln_x.bias"], weights["blocks.1.att.time_maa_g"]
    weights["blocks.0.att.time_maa_q"] = torch.zeros(1, 1, 24)
    weights["blocks.1.att.time_maa_w2"] = torch.zeros(4, 5, 24)
    weights["head.weight"] = torch.zeros(30, 24)
    with pytest.raises(ValueError, match="do not fit its config") as error:
        convert_checkpoint(str(write_pth(weights, tmp_path / "theirs.pth")), tmp_path / "ours")
    missing, unexpected, misshapen = str(error.value).split("; ")
    assert all(name in missing for name in ("blocks.2.att.ln_x.bias", "blocks.1.att.time_maa_g"))
    assert unexpected == "unexpected: blocks.0.att.time_maa_q"
    assert all(name in misshapen for name in ("blocks.1.att.time_maa_w2", "head.weight has the shape [30, 24]"))


@pytest.mark.parametrize(
    ("edit", "told"),
    [
        (lambda w: w.pop("blocks.0.att.time_faaaa"), "lack blocks.0.att.time_faaaa"),
        (lambda w: w.update({"emb.weight": torch.zeros(3)}), r"emb.weight has the shape \[3\]"),
        (lambda w: [w.pop(name) for name in list(w) if name.startswith("blocks.1.")], r"missing: blocks\.1\."),
    ],
    ids=["size", "rank", "layer"],
)
def test_files_whose_sizes_cannot_be_told_are_refused(
    edit: Callable[[dict[str, Any]], Any], told: str, tmp_path: Path
) -> None:
    weights: dict[str, Any] = draw(rwkv6_shapes(SMALL))
    edit(weights)
    torch.save(weights, tmp_path / "theirs.pth")
    with pytest.raises(ValueError, match=told):
        convert_checkpoint(str(tmp_path / "theirs.pth"), tmp_path / "ours")


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"layer_norm_epsilon": 1e-6}, "layer_norm_epsilon 1e-06"),
        ({"head_size": 24}, r"must be a multiple of head_size \(24\)"),
        ({"num_attention_heads": 5}, r"num_attention_heads \(5\)"),
        (
            {"hidden_size": 32, "attention_hidden_size": 32},
            r"rwkv.embeddings.weight.*\[40, 64\] instead of \[40, 32\]",
        ),
        ({"use_glu": True}, r"use_glu \(True\)"),
    ],
)
def test_repositories_whose_config_does_not_fit_are_refused(
    changes: dict[str, Any], told: str, tmp_path: Path
) -> None:
    folder = write_repository(draw(rwkv6_shapes(OFFICIAL)), tmp_path / "theirs", 6, OFFICIAL, **changes)
    with pytest.raises(ValueError, match=told):
        convert_checkpoint(str(folder), tmp_path / "ours")


@pytest.mark.parametrize(
    ("format", "changes", "told"),
    [
        ("fla", {}, "group_norm_eps 0.00064"),
        ("rwkv", {"group_norm_eps": 1e-3}, "group_norm_eps 0.001"),
        ("rwkv", {"norm_eps": 1e-6}, "norm_eps 1e-06"),
        ("rwkv", {"tie_word_embeddings": True}, r"head is its embeddings \(tie_word_embeddings True\)"),
        ("rwkv-hf", {}, r"proj_low_rank_dim 5 \(there 32\), gate_low_rank_dim 7 \(there 64\)"),
    ],
)
def test_what_a_layout_cannot_hold_is_not_exported(
    format: str, changes: dict[str, Any], told: str, tmp_path: Path
) -> None:
    convert_checkpoint(str(write_pth(draw(rwkv6_shapes(SMALL)), tmp_path / "theirs.pth")), tmp_path / "ours")
    path = tmp_path / "ours/config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(ValueError, match=told):
        export_checkpoint(str(tmp_path / "ours"), tmp_path / "back", format)
    assert not (tmp_path / "back").exists()


OFFICIAL_SIZES = {
    # The World models; the first is the count of the official file (582 tensors), the others follow by hand: with F
    # channels, L * (6 D**2 + 2 D F + 10 R D + 2 W D + 16 D) + 2 V D + 4 D, for RWKV-5 without R and W and with 14 D.
    "rwkv6 1.6B": (rwkv6_shapes, Sizes(2048, 32, 64, 24, 32, 64, 7168, 65536), 1_599_873_024),
    "rwkv6 3B": (rwkv6_shapes, Sizes(2560, 40, 64, 32, 32, 64, 8960, 65536), 3_099_863_040),
    "rwkv6 7B": (rwkv6_shapes, Sizes(4096, 64, 64, 32, 64, 128, 14336, 65536), 7_635_746_816),
    "rwkv5 1.5B": (rwkv5_shapes, Sizes(2048, 32, 64, 24, 0, 0, 7168, 65536), 1_577_754_624),
    "rwkv5 7B": (rwkv5_shapes, Sizes(4096, 64, 64, 32, 0, 0, 14336, 65536), 7_518_044_160),
}


@pytest.mark.parametrize(("shapes", "sizes", "parameters"), OFFICIAL_SIZES.values(), ids=OFFICIAL_SIZES)
def test_official_sizes_are_told_from_shapes(
    shapes: Callable[[Sizes], dict[str, Any]], sizes: Sizes, parameters: int
) -> None:
    theirs = Shapes(shapes(sizes))
    config: Any = RWKV.to_config(None, theirs.metas)
    entries = to_ours(expand(RWKV.renames(config), sizes.layers), theirs, expected_shapes(config), "")
    assert sum(torch.Size(entry.shape).numel() for entry in entries) == parameters
    assert config.heads_of(0)[0] == sizes.heads
    assert (config.bos_token_id, config.eos_token_id) == (0, 0)
    repository = RWKV_HF.from_config(config)
    assert repository is not None
    assert (repository["head_size"], repository["attention_hidden_size"]) == (64, sizes.width)


@pytest.mark.parametrize(
    ("format", "family"),
    [
        *(("rwkv", f"rwkv{generation}") for generation in (5, 6, 7)),
        *(("rwkv-hf", f"rwkv{generation}") for generation in (5, 6)),
        *(("fla", f"rwkv{generation}") for generation in (6, 7)),
    ],
)
def test_stand_ins_have_the_layout_of_their_format(format: str, family: str, tmp_path: Path) -> None:
    folder = write_tiny_random_model(format, family, tmp_path / "theirs")
    settings = json.loads((folder / "config.json").read_text()) if (folder / "config.json").is_file() else None
    assert detect(settings, TensorFiles(folder).metas, "") is FORMATS[format]
    convert_checkpoint(str(folder), tmp_path / "ours")
