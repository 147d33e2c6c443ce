"""Padding and packed rows in every form: wrapped models give what each sequence gives alone, or refuse."""

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification

from hf_recurrent_lengthgen.hybrids import stateful
from hf_recurrent_lengthgen.hybrids.registry import SUPPORTED
from tests.hybrids.measures import parts, random_state, relative_error
from tests.hybrids.padded_rows import PACKED, positions_and_mask, tokens_of
from tests.hybrids.tiny_models import tiny_model
from tests.row_forms import PADDED, WHOLE, forms_of, places_of, real_of
from tests.versions import SINCE_5_23

QUICK = ["falcon_h1", "minimax", "qwen3_next", "xlstm"]
TYPES = [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in sorted(SUPPORTED)]


@pytest.mark.thinned(7)
@torch.no_grad()
@pytest.mark.parametrize("model_type", TYPES)
@pytest.mark.parametrize("words", [WHOLE, PADDED], ids=["whole", "padded"])
def test_every_form_is_read_as_the_sequences_alone(model_type: str, words: list[str]) -> None:
    """The stock models would read on from one sequence to the next, and from padding on the left."""
    model, tokens, first = stateful(tiny_model(model_type)), tokens_of(words), list[Tensor]()
    state, real = random_state(model, len(words)), real_of(words)[..., None]
    for form, inputs in forms_of(words).items():
        output = model(tokens, initial_state=state, **inputs)
        found = [output.logits * real, *parts(output.final_state)]
        first = first or found
        assert all(map(torch.equal, found, first)), form
    for run in (model, model.base_model):
        expected = torch.cat([run(tokens[row : row + 1, p], use_cache=False)[0][0] for row, p in places_of(words)])
        for form, inputs in forms_of(words).items():
            output = run(tokens, **inputs)
            assert getattr(output, "final_state", None) is None
            actual = torch.cat([output[0][row, places] for row, places in places_of(words)])
            assert relative_error([actual], [expected]) < 1e-5, form
        assert torch.equal(run(tokens, return_dict=False, **inputs)[0], output[0])


@torch.no_grad()
@pytest.mark.parametrize("model_type", TYPES)
def test_forms_of_one_sequence_change_nothing(model_type: str) -> None:
    model, words = stateful(tiny_model(model_type)), ["a" * 9] * 2
    tokens = tokens_of(words)
    expected = model(tokens, use_cache=False).logits
    for form, inputs in forms_of(words).items():
        for more in ({}, {"output_final_state": True}):
            torch.testing.assert_close(model(tokens, **inputs, **more).logits, expected, msg=form)


TOKENS = torch.arange(3, 12)[None].repeat(2, 1)
EXACT = 1e-5
MASK = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 1, 1, 0, 0, 0]])


@torch.no_grad()
def test_the_backbone_stands_its_hidden_states_at_their_tokens() -> None:
    model = stateful(tiny_model("falcon_h1")).model
    tokens, (positions, mask) = tokens_of(PACKED), positions_and_mask(PACKED)
    inputs = {"attention_mask": mask, "position_ids": positions, "output_hidden_states": True}
    for more in ({}, {"output_final_state": True}):
        output = model(input_ids=tokens, **inputs, **more)
        for row, places in places_of(PACKED):
            one = model(input_ids=tokens[row : row + 1, places], use_cache=False, output_hidden_states=True)
            assert relative_error([output.last_hidden_state[row, places]], [one.last_hidden_state[0]]) < EXACT
            for actual, expected in zip(output.hidden_states, one.hidden_states, strict=True):
                assert relative_error([actual[row, places]], [expected[0]]) < EXACT


@torch.no_grad()
@pytest.mark.parametrize("model_type", ["falcon_h1", "xlstm"])
def test_padding_repeats_the_output_of_the_last_real_token(model_type: str) -> None:
    model = stateful(tiny_model(model_type))
    logits = model(input_ids=TOKENS, attention_mask=MASK, output_final_state=True).logits
    assert torch.equal(logits[1, 3], logits[1, 2])
    assert torch.equal(logits[1, 6:], logits[1, 5].expand(3, -1))
    for keep in (1, 4, torch.tensor([3, 8, 0])):
        kept = model(input_ids=TOKENS, attention_mask=MASK, output_final_state=True, logits_to_keep=keep).logits
        expected = logits[:, -keep:] if isinstance(keep, int) else logits[:, keep]
        torch.testing.assert_close(kept, expected)


@pytest.mark.skipif(not SINCE_5_23, reason="older Transformers choose hidden states otherwise")
@torch.no_grad()
def test_chosen_hidden_states_come_back_alone() -> None:
    model = stateful(tiny_model("qwen3_next"))
    chosen = model(input_ids=TOKENS, attention_mask=MASK, output_hidden_states=[0, 2]).hidden_states
    every = model(input_ids=TOKENS, attention_mask=MASK, output_hidden_states=True).hidden_states
    for one, other in zip(chosen, every, strict=False):
        assert one is None or torch.equal(one, other)
    assert sum(one is not None for one in chosen) == 2


@torch.no_grad()
def test_other_heads_get_exact_hidden_states() -> None:
    model = stateful(AutoModelForSequenceClassification.from_config(tiny_model("qwen3_next").config).eval())
    mask = torch.ones_like(TOKENS)
    mask[1, :3] = 0
    output = model(TOKENS, attention_mask=mask)
    assert relative_error([output.logits[1:]], [model(TOKENS[1:, 3:]).logits]) < EXACT
