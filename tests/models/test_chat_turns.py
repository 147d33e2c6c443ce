"""Batched chats of three turns whose rows end early: each row gives what it gives alone, read anew at each token.

All families and hybrids, with biases and limits of step sizes where they have them; the rows are padded on the left,
and in the first turn decoded in several ways.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from hf_recurrent_lengthgen.hybrids import stateful
from hf_recurrent_lengthgen.hybrids.caches import HybridCache
from hf_recurrent_lengthgen.hybrids.calls import cache_argument
from tests.hybrids.measures import random_tokens
from tests.hybrids.test_law import CHANGED
from tests.hybrids.tiny_models import SUPPORTED_TYPES, tiny_model
from tests.models.families import FAMILIES, build

QUICK = {"mamba2", "gla", "rwkv7", "falcon_h1", "qwen3_next", "xlstm", "zaya"}
BY_NAME = {family.name: family for family in FAMILIES}
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "samples": {"do_sample": True, "num_return_sequences": 2},
}


def cases() -> list[Any]:
    """Kind, name and changes of the configuration; quick are some greedy ones, as they are."""
    each = [
        ("family", name, variant, x) for name, f in BY_NAME.items() for variant, x in ({"": {}} | f.variants).items()
    ]
    each += [("hybrid", name, "", {}) for name in SUPPORTED_TYPES]
    each += [("hybrid", name, "changed", CHANGED[name]) for name in CHANGED if name in SUPPORTED_TYPES]
    return [
        pytest.param(
            kind,
            name,
            changes,
            way,
            marks=[] if name in QUICK and way == "greedy" and not variant else [pytest.mark.slow],
            id=f"{kind}-{name}-{variant}-{way}",
        )
        for kind, name, variant, changes in each
        for way in WAYS
    ]


def after_end(new: Tensor, ends: list[int]) -> Tensor:
    """(B, T), true after the first end of a row."""
    is_end = torch.isin(new, torch.tensor(ends)).long()
    return is_end.cumsum(1) > is_end


@torch.no_grad()
@pytest.mark.parametrize(("kind", "name", "changes", "way"), cases())
def test_rows_that_end_early_go_on_as_alone(kind: str, name: str, changes: dict[str, Any], way: str) -> None:
    stock: Any = None if kind == "family" else tiny_model(name, **changes)
    model: Any = build(BY_NAME[name], **changes).eval() if stock is None else stateful(tiny_model(name, **changes))
    argument = "cache" if kind == "family" else cache_argument(model)
    talk = random_tokens(3, 6, seed=4)
    mask = torch.tensor([[0, 0, 0, 1, 1, 1], [1] * 6, [0] + [1] * 5])
    alone = [row[real.bool()][None] for row, real in zip(talk, mask, strict=True)]
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    torch.manual_seed(0)
    free = model.generate(talk, attention_mask=mask, **options | WAYS[way])[:, 6:]
    ends = [int(free[0, 2]), int(free[1, 5]), *(range(15) if way == "beams" else ())]
    options["eos_token_id"], given = ends, WAYS[way]
    for turn in range(3):
        torch.manual_seed(0)
        output = model.generate(talk, attention_mask=mask, return_dict_in_generate=True, **options | given)
        held = [output.cache] if kind == "family" else [x for x in output.values() if isinstance(x, HybridCache)]
        if not held:
            pytest.skip("this version of Transformers returns no cache under the name that this type has for it")
        if repeated := len(output.sequences) // len(alone) - 1:  # several answers: conversations of their own
            alone = [row for row in alone for _ in range(repeated + 1)]
            mask = mask.repeat_interleave(repeated + 1, dim=0)
        new, more = output.sequences[:, talk.shape[1] :], random_tokens(len(alone), 3, seed=9 + turn)
        for row, text in enumerate(alone):
            own = new[row, None, ~after_end(new, ends)[row]]
            if turn or way == "greedy":
                ones = torch.ones_like(text)
                anew = (stock or model).generate(text, attention_mask=ones, use_cache=False, **options)
                assert torch.equal(own, anew[:, text.shape[1] :]), (turn, row)
            alone[row] = torch.cat([text, own, more[row, None]], 1)
        assert turn or after_end(new, ends).any()
        talk = torch.cat([output.sequences, more], 1)
        mask = torch.cat([mask, (~after_end(new, ends)).long(), torch.ones_like(more)], 1)
        given = {argument: held[0]}


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
