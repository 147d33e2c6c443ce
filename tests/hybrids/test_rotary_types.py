"""Rotary embeddings that scale: exact in chunks, or, where they depend on the length of the text, read at once."""

import copy
from typing import Any

import numpy as np
import pytest

from hf_recurrent_lengthgen.evaluation.readers import reader_of
from hf_recurrent_lengthgen.hybrids import stateful
from hf_recurrent_lengthgen.metrics import stream_nll
from hf_recurrent_lengthgen.state_files import read_text
from hf_recurrent_lengthgen.trainers.chunked_backprop import forward_in_chunks
from tests.evaluation.test_stateful_models import plain_nll
from tests.hybrids.measures import random_tokens
from tests.hybrids.tiny_models import SUPPORTED_TYPES, tiny_model

SHORT, LENGTH = 16, 40
"""Positions that a configuration is made for, tokens that are read."""
ROTARY: dict[str, Any] = {"granitemoehybrid": {"position_embedding_type": "rope"}, "zamba2": {"use_mem_rope": True}}
"""What makes a type use rotary embeddings."""
KINDS: dict[str, dict[str, Any]] = {
    "linear": {"factor": 2.0},
    "yarn": {"factor": 2.0},
    "llama3": {"factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "proportional": {"partial_rotary_factor": 0.5},
    "dynamic": {"factor": 2.0},
    "longrope": {"factor": 2.0},
}
WITH_ROTARY = [name for name in SUPPORTED_TYPES if getattr(tiny_model(name).config, "rope_parameters", None)]


def scaled(model_type: str, kind: str) -> Any:
    """A stock model with rotary embeddings of a kind in all layers."""
    changes = {"max_position_embeddings": SHORT, "head_dim": 16} | ROTARY.get(model_type, {})
    plain = tiny_model(model_type, **changes)
    pairs = {name: len(x) for name, x in plain.named_buffers() if name.endswith("inv_freq")}

    def of(rope: dict[str, Any], layers: str = "") -> dict[str, Any]:
        size = next((size for name, size in pairs.items() if layers in name), 1)  # no such layer here
        if rope["rope_type"] == "proportional":  # whose factor leaves the size of all heads
            rope = {key: x for key, x in rope.items() if key != "partial_rotary_factor"}
        factors = {"short_factor": [1.0] * size, "long_factor": [2.0] * size} if kind == "longrope" else {}
        return rope | {"rope_type": kind, "original_max_position_embeddings": SHORT} | KINDS[kind] | factors

    rope = plain.config.rope_parameters
    rope = of(rope) if "rope_type" in rope else {layers: of(each, layers) for layers, each in rope.items()}
    return tiny_model(model_type, **changes, rope_parameters=rope)


@pytest.mark.thinned(19)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("model_type", WITH_ROTARY)
def test_losses_do_not_depend_on_chunks(model_type: str, kind: str) -> None:
    stock = scaled(model_type, kind)
    model: Any = stateful(copy.deepcopy(stock))
    ids = random_tokens(2, LENGTH)
    expected = plain_nll(stock, ids.numpy())
    for length in (7, SHORT, 64):
        found = stream_nll(model, ids.numpy(), chunk_length=length, progress=False)
        np.testing.assert_allclose(found.nll, expected, atol=5e-5)
    by_length = kind in ("dynamic", "longrope")
    assert reader_of(model).carries == (not by_length)
    for use in (
        lambda: forward_in_chunks(model, 7).__enter__(),
        lambda: read_text(model, ids[:1]),
        lambda: stateful(copy.deepcopy(stock), attention_window=4),
    ):
        if by_length:
            with pytest.raises(ValueError, match="with the length of the text"):
                use()
    if not by_length:
        read_text(model, ids[:1])
