"""Batched chats of three turns whose rows end early: each row gives what it gives alone."""

from typing import Any

import pytest
import torch
from torch import Tensor

from hf_recurrent_lengthgen.hybrids import stateful
from hf_recurrent_lengthgen.hybrids.caches import HybridCache
from hf_recurrent_lengthgen.hybrids.calls import cache_argument
from tests.hybrids.measures import random_tokens
from tests.hybrids.tiny_models import SUPPORTED_TYPES, tiny_model
from tests.models.families import FAMILIES, build

QUICK = {"mamba2", "gla", "rwkv7", "falcon_h1", "qwen3_next", "xlstm", "zaya"}
BY_NAME = {family.name: family for family in FAMILIES}
CASES = [
    pytest.param(kind, name, marks=[] if name in QUICK else [pytest.mark.slow], id=f"{kind}-{name}")
    for kind, names in (("family", BY_NAME), ("hybrid", SUPPORTED_TYPES))
    for name in names
]
NEW = 8


def after_end(new: Tensor, ends: list[int]) -> Tensor:
    """(B, T), true after the first end of a row."""
    is_end = torch.isin(new, torch.tensor(ends)).long()
    return is_end.cumsum(1) > is_end


@torch.no_grad()
@pytest.mark.parametrize(("kind", "name"), CASES)
def test_rows_that_end_early_go_on_as_alone(kind: str, name: str) -> None:
    model: Any = build(BY_NAME[name]).eval() if kind == "family" else stateful(tiny_model(name))
    argument = "cache" if kind == "family" else cache_argument(model)
    talk = random_tokens(3, 6, seed=4)
    mask = torch.tensor([[0, 0, 0, 1, 1, 1], [1] * 6, [0] + [1] * 5])
    alone = [row[real.bool()][None] for row, real in zip(talk, mask, strict=True)]
    free = model.generate(talk, attention_mask=mask, max_new_tokens=NEW, do_sample=False, eos_token_id=None)[:, 6:]
    ends = [int(free[0, 2]), int(free[1, 5])]
    options = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": ends, "pad_token_id": 0}
    cache: dict[str, Any] = {}
    for turn in range(3):
        output = model.generate(talk, attention_mask=mask, return_dict_in_generate=True, **cache, **options)
        held = [output.cache] if kind == "family" else [x for x in output.values() if isinstance(x, HybridCache)]
        if not held:
            pytest.skip("this version of Transformers returns no cache under the name that this type has for it")
        cache = {argument: held[0]}
        new, more = output.sequences[:, talk.shape[1] :], random_tokens(3, 3, seed=9 + turn)
        for row in range(3):
            ones = torch.ones_like(alone[row])
            expected = model.generate(alone[row], attention_mask=ones, **options)
            own = expected[:, alone[row].shape[1] :]
            assert torch.equal(new[row : row + 1, : own.shape[1]], own), (turn, row)
            alone[row] = torch.cat([expected, more[row : row + 1]], 1)
        talk = torch.cat([output.sequences, more], 1)
        mask = torch.cat([mask, (~after_end(new, ends)).long(), torch.ones_like(more)], 1)


@torch.no_grad()
def test_a_conversation_that_is_padded_again_is_refused() -> None:
    model, talk = stateful(tiny_model("falcon_h1")), random_tokens(2, 6)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6])
    options = {"max_new_tokens": 3, "do_sample": False, "eos_token_id": None}
    output = model.generate(talk, attention_mask=mask, return_dict_in_generate=True, **options)
    name = cache_argument(model)
    again = torch.cat([torch.ones(2, 3).long(), output.sequences], 1)
    wrong = torch.cat([torch.zeros(2, 3).long(), mask, torch.ones(2, 3).long()], 1)
    with pytest.raises(ValueError, match=r"attention_mask counts \[3, 5\] tokens before .* has read \[6, 8\]: append"):
        model.generate(again, attention_mask=wrong, **{name: output[name]}, **options)
