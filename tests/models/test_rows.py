"""Every form of packed rows gives what each sequence gives alone, or is refused."""

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_recurrent_lengthgen.models.rows import read_rows
from tests.packing_forms import PADDED, WHOLE, begins, forms_of, wrong_forms

from .families import FAMILIES, Family, build, random_tokens, variant_id
from .law import assert_equal_up_to
from .test_packed_rows import alone, leaves_of, results

one_fast = [pytest.param(family, marks=[pytest.mark.slow] * (family is not FAMILIES[0])) for family in FAMILIES]
every_family = pytest.mark.parametrize("family", one_fast, ids=[variant_id(family) for family in FAMILIES])


@pytest.mark.parametrize(
    ("words", "form"),
    [(words, form) for words in (WHOLE, PADDED) for form in forms_of(words)],
    ids=lambda x: x if isinstance(x, str) else "padded" if x is PADDED else "whole",
)
def test_every_form_is_read_as_the_same_rows(words: list[str], form: str) -> None:
    tokens = torch.zeros(len(words), len(words[0]), dtype=torch.long)
    rows = read_rows({"input_ids": tokens} | forms_of(words)[form])
    real = torch.tensor([[letter != "." for letter in word] for word in words])
    assert rows.real is None if bool(real.all()) else torch.equal(rows.real, real)  # type: ignore[arg-type]
    expected = [
        [bool(word[:place].strip(".")) and letter not in "." + word[:place] for place, letter in enumerate(word)]
        for word in words
    ]
    assert rows.starts is not None
    assert rows.starts.tolist() == expected


@pytest.mark.parametrize("form", wrong_forms(WHOLE))
def test_what_no_recurrent_model_can_follow_is_refused(form: str) -> None:
    given, message = wrong_forms(WHOLE)[form]
    model, tokens = build(FAMILIES[0]), random_tokens(2, 17)
    for run in (model, model.base_model):
        with pytest.raises(ValueError, match=re.escape(message)):
            run(tokens, **given)


def test_forms_of_one_sequence_say_nothing() -> None:
    words = ["aaaaa", "aaaaa"]
    for given in forms_of(words).values():
        rows = read_rows({"input_ids": torch.zeros(2, 5)} | given)
        assert rows.real is None
        assert rows.starts is None


@every_family
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
def test_every_form_gives_what_each_sequence_gives_alone(family: Family, padded: bool) -> None:
    """Logits, final states, and gradients with respect to embeddings, initial states and parameters."""
    words = PADDED if padded else WHOLE
    model = build(family, torch.float64)
    embeds, state = leaves_of(model, words)
    expected = with_entries(alone(model, embeds, state, words))
    real = torch.tensor([[letter != "." for letter in word] for word in words])
    for given in forms_of(words).values():
        output = model(inputs_embeds=embeds, initial_state=state, **given)
        actual = results(model, embeds, state, output.logits * real[..., None], output.final_state)
        assert_equal_up_to(1e-9, with_entries(actual), expected)


def with_entries(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Without parts that a layer lacks."""
    return {name: x for name, x in tensors.items() if x.numel()}


@every_family
@torch.no_grad()
def test_the_loss_is_that_of_the_targets_inside_sequences(family: Family) -> None:
    model, tokens = build(family), random_tokens(2, 17)
    inside = torch.tensor([[not begins(word, place) for place in range(17)] for word in WHOLE])
    labels = tokens.where(inside, -100)
    expected = model(tokens, labels=labels, **forms_of(WHOLE)["position_ids"]).loss
    assert torch.equal(model(tokens, labels=tokens, **forms_of(WHOLE)["all of TRL"]).loss, expected)


@torch.no_grad()
def test_generate_goes_on_with_the_last_sequence_or_refuses() -> None:
    model, tokens = build(FAMILIES[0]), random_tokens(1, 17)
    options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None}
    expected = model.generate(tokens[:, 8:], **options)
    for form, given in forms_of(WHOLE[1:]).items():
        if form == "position_ids":
            assert torch.equal(model.generate(tokens, **given, **options)[:, 8:], expected), form
            with pytest.raises(ValueError, match="Sequences begin inside the prompt"):
                model.generate(tokens, **given, **options, prefill_chunk_size=4)
            continue
        with pytest.raises(ValueError, match="generate takes one sequence per row"):
            model.generate(tokens, **given, **options)


def test_a_backbone_takes_rows_or_what_says_them() -> None:
    model, tokens = build(FAMILIES[0]), random_tokens(2, 5)
    mask = torch.ones_like(tokens)
    rows = read_rows({"input_ids": tokens, "attention_mask": mask})
    for given in ({"attention_mask": mask}, {"position_ids": mask.cumsum(1)}, {"seq_idx": mask}):
        with pytest.raises(ValueError, match="leave these out, or rows"):
            model.base_model(tokens, rows=rows, **given)
