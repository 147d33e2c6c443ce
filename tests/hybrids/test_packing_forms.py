"""Every form of packed rows: wrapped models give what each sequence gives alone, or refuse."""

import re
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification

from hf_recurrent_lengthgen.hybrids import stateful
from hf_recurrent_lengthgen.hybrids.registry import SUPPORTED
from tests.hybrids.measures import (
    kept,
    parts,
    random_state,
    random_tokens,
    relative_error,
    windowed,
)
from tests.hybrids.padded_rows import real_of, tokens_of
from tests.hybrids.tiny_models import tiny_model
from tests.packing_forms import PADDED, WHOLE, forms_of, places_of, wrong_forms

QUICK = ["falcon_h1", "qwen3_5_text", "qwen3_next"]
TYPES = [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in sorted(SUPPORTED)]


@torch.no_grad()
@pytest.mark.parametrize("model_type", QUICK)
@pytest.mark.parametrize("words", [WHOLE, PADDED], ids=["whole", "padded"])
def test_all_forms_give_the_same(model_type: str, words: list[str]) -> None:
    model, first = stateful(tiny_model(model_type)), list[Tensor]()
    state, real = random_state(model, len(words)), real_of(words)[..., None]
    for form, given in forms_of(words).items():
        output = model(tokens_of(words), initial_state=state, **given)
        found = [output.logits * real, *parts(output.final_state)]
        first = first or found
        assert all(map(torch.equal, found, first)), form


@torch.no_grad()
@pytest.mark.parametrize("model_type", TYPES)
@pytest.mark.parametrize("words", [WHOLE, PADDED], ids=["whole", "padded"])
def test_calls_without_states_and_backbones_read_every_form(model_type: str, words: list[str]) -> None:
    """The stock models would read on from one sequence to the next, and from padding on the left."""
    model, tokens = stateful(tiny_model(model_type)), tokens_of(words)
    for run in (model, model.base_model):
        expected = torch.cat([run(tokens[row : row + 1, p], use_cache=False)[0][0] for row, p in places_of(words)])
        for form, given in forms_of(words).items():
            output = run(tokens, **given)
            assert getattr(output, "final_state", None) is None
            actual = torch.cat([output[0][row, places] for row, places in places_of(words)])
            assert relative_error([actual], [expected]) < 1e-5, form
            with pytest.raises(ValueError, match=r"with a cache|before the prompts|after padding"):
                run(tokens, use_cache=True, **given)
        assert torch.equal(run(tokens, return_dict=False, **given)[0], output[0])


@torch.no_grad()
@pytest.mark.parametrize("model_type", TYPES)
def test_forms_of_one_sequence_change_nothing(model_type: str) -> None:
    model, words = stateful(tiny_model(model_type)), ["a" * 9] * 2
    tokens = tokens_of(words)
    expected = model(tokens, use_cache=False).logits
    for form, given in forms_of(words).items():
        for more in ({}, {"output_final_state": True}):
            torch.testing.assert_close(model(tokens, **given, **more).logits, expected, msg=form)


@pytest.mark.parametrize("form", wrong_forms(WHOLE))
@pytest.mark.parametrize("more", [{}, {"output_final_state": True}], ids=["stock", "states"])
def test_what_no_recurrent_model_can_follow_is_refused(form: str, more: dict[str, Any]) -> None:
    given, message = wrong_forms(WHOLE)[form]
    model = stateful(tiny_model("qwen3_5_text"))
    with pytest.raises(ValueError, match=re.escape(message)):
        model(tokens_of(WHOLE), **given, **more)


@pytest.mark.parametrize("name", ["segment_ids", "tree_cu_seqlens_q", "seq_lengths"])
def test_other_names_that_stock_models_would_ignore_are_refused(name: str) -> None:
    model = stateful(tiny_model("qwen3_next"))
    for more in ({}, {"output_final_state": True}):
        with pytest.raises(ValueError, match=f"{name}.* are not read"):
            model(tokens_of(WHOLE), **{name: torch.zeros(2, 17)}, **more)


@torch.no_grad()
@pytest.mark.parametrize("model_type", ["falcon_h1", "qwen3_5_text"])
def test_generate_takes_one_sequence_in_a_row(model_type: str) -> None:
    model, tokens = stateful(tiny_model(model_type)), tokens_of(WHOLE)
    one: dict[str, Any] = {"max_new_tokens": 2, "do_sample": False, "eos_token_id": None}
    for given in forms_of(WHOLE).values():
        for start in ({}, {"initial_state": random_state(model, 2)}, {"cache_implementation": "static"}):
            with pytest.raises(ValueError, match="one sequence per row"):
                model.generate(tokens, **given, **one, **start)
    counted = torch.arange(17).repeat(4, 2, 1)
    assert torch.equal(model.generate(tokens, position_ids=counted, **one), model.generate(tokens, **one))


@torch.no_grad()
def test_sequence_classification_takes_one_sequence_in_a_row() -> None:
    model = stateful(AutoModelForSequenceClassification.from_config(tiny_model("qwen3_next").config).eval())
    tokens = tokens_of(WHOLE)
    for given in forms_of(WHOLE).values():
        with pytest.raises(ValueError, match="takes one sequence per row"):
            model(tokens, **given)


@torch.no_grad()
def test_packed_rows_that_are_refused_leave_the_cache_as_it_was() -> None:
    model, tokens, given = windowed("bamba")[1], random_tokens(2, 9), dict[str, Any]()
    given["attention_cache"] = model.new_attention_cache()
    given["initial_state"] = model(tokens, **given).final_state
    before, places = [keys.clone() for keys in kept(given["attention_cache"])], torch.arange(9)[None]
    with pytest.raises(ValueError, match="must count the real tokens of each sequence from 0 or 9"):
        model(tokens, position_ids=places % 4, **given)  # the first sequence begins at position 9
    assert all(map(torch.equal, kept(given["attention_cache"]), before))
