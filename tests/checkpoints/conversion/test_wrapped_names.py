"""Weights whose names all stand behind that of a class around the model convert as without it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_recurrent_lengthgen.checkpoints.conversion.convert import convert_checkpoint
from hf_recurrent_lengthgen.checkpoints.conversion.export import export_checkpoint
from hf_recurrent_lengthgen.checkpoints.loading import load_model
from hf_recurrent_lengthgen.checkpoints.tensor_files import TensorFiles
from tests.models.families import DELTA_NET, MAMBA2, build

TOKENS = torch.arange(3, 12)[None]


@pytest.mark.parametrize("prefix", ["_orig_mod."])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("family", "layout"), [(MAMBA2, "transformers"), (DELTA_NET, "fla")])
def test_names_behind_a_wrapper_convert(family: Any, layout: str, tied: bool, prefix: str, tmp_path: Path) -> None:
    model = build(family, tie_word_embeddings=tied)
    model.save_pretrained(tmp_path / "ours")
    export_checkpoint(str(tmp_path / "ours"), tmp_path / "theirs", layout)
    file = tmp_path / "theirs" / "model.safetensors"
    weights = load_file(file)
    save_file({prefix + name: value for name, value in weights.items()}, file, {"format": "pt"})
    assert set(TensorFiles(tmp_path / "theirs").keys()) == set(weights)
    convert_checkpoint(str(tmp_path / "theirs"), tmp_path / "new")
    with torch.no_grad():
        logits = load_model(str(tmp_path / "new"))(input_ids=TOKENS).logits
        torch.testing.assert_close(logits, model(input_ids=TOKENS).logits, rtol=0, atol=1e-6)
