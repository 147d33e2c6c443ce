"""The checkpoints of model_cards/ are verified, pushed, and give the same results where this package is not."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from hf_recurrent_lengthgen.checkpoints.loading import load_language_model
from hf_recurrent_lengthgen.cli.main import main
from tests.checkpoints.cards.test_model_cards import FAR, MODEL_CARDS

from .client import run_stranger
from .endpoint import Endpoint

PASSED = ["bamba-state-passing", FAR]
"""A hybrid of bytes, and words; `test_remote_code` has all families."""
TEXT = "The sky is blue"
CODE = """
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
found = {}
for name in NAMES:
    model = AutoModelForCausalLM.from_pretrained("user/" + name, trust_remote_code=True)
    tokens = AutoTokenizer.from_pretrained("user/" + name)(TEXT, return_tensors="pt").input_ids
    found[name] = model(tokens).logits.detach()
torch.save(found, "out.pt")
"""


@pytest.mark.slow
def test_post_trained_checkpoints_run_where_the_package_is_not(hub: Endpoint, tmp_path: Path) -> None:
    for name in PASSED:
        folder = shutil.copytree(MODEL_CARDS / name, tmp_path / name)
        assert main(["verify", str(folder)]) == 0
        assert main(["card", str(folder)]) == 0
        assert main(["push", str(folder), f"user/{name}"]) == 0
    run_stranger(hub, tmp_path, f"NAMES, TEXT = {PASSED!r}, {TEXT!r}\n{CODE}")
    found = torch.load(tmp_path / "out.pt")
    assert list(found) == PASSED
    vocabulary = json.loads((MODEL_CARDS / FAR / "tokenizer.json").read_text())["model"]["vocab"]
    words = [vocabulary[word] for word in TEXT.split()]
    for name, logits in found.items():
        model = load_language_model(str(MODEL_CARDS / name))
        tokens = torch.tensor([words if name == FAR else [*(byte + 3 for byte in TEXT.encode()), 1]])
        with torch.no_grad():
            torch.testing.assert_close(logits, model(tokens).logits, atol=1e-4, rtol=1e-4)
