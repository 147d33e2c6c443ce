"""Trained weights of others, where there is a folder of them (see `published_weights.py`)."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hf_recurrent_lengthgen import load_model
from hf_recurrent_lengthgen.checkpoints.conversion.convert import convert_checkpoint

from .published_weights import REVERSAL, TINY, find, of_author, read

EXAMPLE = Path(__file__).parents[3] / "examples/published"
OVERRIDES = {5: {"head_size_divisor": 1}, 6: {}, 7: {}}
"""What the files do not say: rwkv.cpp's own RWKV-5.2 was made with an epsilon of 1e-5 in the norm of its heads."""
PROMPT = torch.tensor([list(b'"in')])


def logits_of(model: Any) -> tuple[Tensor, Tensor]:
    """After the prompt read whole, and token by token with the state carried."""
    state, output = None, None
    with torch.no_grad():
        for token in PROMPT[0]:
            output = model(token[None, None], initial_state=state, output_final_state=True)
            state = output.final_state
        assert output is not None
        return model(PROMPT).logits[0, -1], output.logits[0, -1]


def converted(generation: int, folder: Path) -> Any:
    torch.save(of_author(read(find(TINY[generation]))), folder / "theirs.pth")
    return load_model(
        str(convert_checkpoint(str(folder / "theirs.pth"), folder / "ours", overrides=OVERRIDES[generation]))
    ).eval()


@pytest.mark.parametrize("generation", TINY)
def test_published_rwkv_gives_the_logits_that_rwkv_cpp_expects(generation: int, tmp_path: Path) -> None:
    name = "-".join(TINY[generation].split("-")[2:-1])
    file = find(f"expected-logits-{name}.bin")
    expected = torch.from_numpy(np.fromfile(file, np.float32))
    for logits in logits_of(converted(generation, tmp_path)):
        assert float((logits - expected).abs().max()) < 1e-5


def test_the_layout_of_the_authors_for_transformers_is_the_same_model(tmp_path: Path) -> None:
    there = find("rwkv7-hf-layout-A")
    convert_checkpoint(str(there), tmp_path / "there")
    one, other = logits_of(load_model(str(tmp_path / "there")).eval()), logits_of(converted(7, tmp_path))
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_the_model_that_reverses_digits_fails_on_the_second_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLE))
    reversal = __import__("reversal")
    model = reversal.published(find(*REVERSAL)).eval()
    first, second = reversal.right(model, 2, 30, 20, seed=0)
    assert first == 1.0
    assert second < 0.4
    assert reversal.right(model, 1, 60, 20, seed=0)[0] > 0.99
    convert_checkpoint(str(find("rwkv7-reverse-fla")), tmp_path / "wide")
    wide = load_model(str(tmp_path / "wide")).eval()
    tokens = reversal.streams(2, 2, 30, 0)
    with torch.no_grad():
        assert float((wide(tokens).logits - model(tokens).logits).abs().max()) < 1e-3
    sys.modules.pop("reversal")
