"""Every form of packed rows: wrapped models give what each sequence gives alone, or refuse."""

import re
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from hf_recurrent_lengthgen.hybrids import stateful
from hf_recurrent_lengthgen.hybrids.registry import SUPPORTED
from hf_recurrent_lengthgen.models.recurrent_state import map_state, take_rows
from tests.hybrids.measures import gradients, parts, random_state, relative_error, weighted_sum
from tests.hybrids.padded_rows import joined, tokens_of
from tests.hybrids.tiny_models import tiny_model
from tests.packing_forms import PADDED, WHOLE, forms_of, places_of, wrong_forms

EXACT = 1e-4  # of float32 in the stock scans, whose gradients of A are off by up to 4e-5
QUICK = {"falcon_h1", "qwen3_5_text", "qwen3_next"}
TYPES = [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in sorted(SUPPORTED)]


def alone(model: Any, embeds: Any, state: Any, words: list[str]) -> list[Any]:
    """Logits of each sequence, and the final states of the rows; the first of a row starts from the row's state."""
    logits, final = [], {row: take_rows(state, slice(row, row + 1)) for row in range(len(words))}
    begun = set()
    for row, places in places_of(words):
        start = final[row] if row not in begun else map_state(torch.zeros_like, final[row])
        begun.add(row)
        one = model(inputs_embeds=embeds[row : row + 1, places], initial_state=start, output_final_state=True)
        logits.append(one.logits[0])
        final[row] = one.final_state
    return [torch.cat(logits), *parts(joined([final[row] for row in range(len(words))]))]


@pytest.mark.parametrize("model_type", TYPES)
@pytest.mark.parametrize("words", [WHOLE, PADDED], ids=["whole", "padded"])
def test_sequences_give_what_they_give_alone(model_type: str, words: list[str]) -> None:
    """Logits, final states, and gradients with respect to embeddings, initial states and parameters."""
    model = stateful(tiny_model(model_type)).train()
    embeds = model.get_input_embeddings()(tokens_of(words)).detach().requires_grad_()
    state = random_state(model, len(words))
    leaves = [embeds, *parts(state), *model.parameters()]

    def with_gradients(results: list[Any]) -> list[Any]:
        return [*results, *gradients(weighted_sum(results), leaves)]

    expected = with_gradients(alone(model, embeds, state, words))
    for form, given in forms_of(words).items():
        output = model(inputs_embeds=embeds, initial_state=state, output_final_state=True, **given)
        logits = torch.cat([output.logits[row, places] for row, places in places_of(words)])
        actual = with_gradients([logits, *parts(output.final_state)])
        assert relative_error(actual, expected) < EXACT, form


@torch.no_grad()
@pytest.mark.parametrize("model_type", TYPES)
def test_calls_without_states_and_backbones_read_every_form(model_type: str) -> None:
    """The stock models would read on from one sequence to the next."""
    model, tokens = stateful(tiny_model(model_type)), tokens_of(WHOLE)
    for run in (model, model.base_model):
        expected = torch.cat([run(tokens[row : row + 1, p], use_cache=False)[0][0] for row, p in places_of(WHOLE)])
        for form, given in forms_of(WHOLE).items():
            output = run(tokens, **given)[0]
            actual = torch.cat([output[row, places] for row, places in places_of(WHOLE)])
            assert relative_error([actual], [expected]) < EXACT, form
            with pytest.raises(ValueError, match="cannot be read with a cache"):
                run(tokens, use_cache=True, **given)


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
