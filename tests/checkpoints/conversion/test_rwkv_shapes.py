"""What is told from the names and shapes of RWKV's files."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_recurrent_lengthgen.checkpoints.conversion.convert import convert_checkpoint
from hf_recurrent_lengthgen.checkpoints.conversion.format_rwkv import RWKV, RWKV_HF
from hf_recurrent_lengthgen.checkpoints.conversion.formats import expected_shapes
from hf_recurrent_lengthgen.checkpoints.conversion.key_maps import expand, to_ours
from hf_recurrent_lengthgen.checkpoints.conversion.registry import FORMATS, detect
from hf_recurrent_lengthgen.checkpoints.conversion.tiny_random_models import write_tiny_random_model
from hf_recurrent_lengthgen.checkpoints.tensor_files import TensorFiles
from tests.checkpoints.conversion.rwkv_files import Shapes

from .rwkv_reference import Sizes, rwkv5_shapes, rwkv6_shapes


def test_rwkv6_of_fla_is_told_from_that_of_the_authors() -> None:
    fla = {"model_type": "rwkv6", "norm_eps": 1e-5, "expand_k": 1, "proj_low_rank_dim": 32}
    theirs = {"model_type": "rwkv6", "head_size": 64, "layer_norm_epsilon": 1e-5}
    assert detect(fla, {}, "").name == "fla"
    assert detect(theirs, {}, "").name == "rwkv-hf"
    assert detect({"model_type": "rwkv5"}, {}, "").name == "rwkv-hf"


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
