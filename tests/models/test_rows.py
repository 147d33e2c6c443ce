"""Padding and packed rows at the surface of models: losses, outputs, forms, refusals; test_law.py has their law."""

import re
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, pad
from transformers import DataCollatorWithFlattening

from hf_recurrent_lengthgen.models.rows import read_rows
from hf_recurrent_lengthgen.models.rows_moved import MovedRows
from hf_recurrent_lengthgen.models.state_value import take_rows
from tests.row_forms import PADDED, WHOLE, forms_of, places_of, real_of, wrong_forms

from .families import FAMILIES, SHELL_FAMILIES, Family, build, random_state, random_tokens, variant_id

every_family = pytest.mark.parametrize("family", FAMILIES, ids=variant_id)
shell_families = pytest.mark.parametrize("family", SHELL_FAMILIES, ids=variant_id)


@pytest.mark.parametrize(
    ("words", "form"),
    [(words, form) for words in (WHOLE, PADDED) for form in forms_of(words)],
    ids=lambda x: x if isinstance(x, str) else "padded" if x is PADDED else "whole",
)
def test_every_form_is_read_as_the_same_rows(words: list[str], form: str) -> None:
    tokens, real = torch.zeros(len(words), len(words[0]), dtype=torch.long), real_of(words)
    rows = read_rows({"input_ids": tokens} | forms_of(words)[form])
    assert rows.real is None if bool(real.all()) else torch.equal(rows.real, real)  # type: ignore[arg-type]
    expected = [
        [bool(word[:place].strip(".")) and letter not in "." + word[:place] for place, letter in enumerate(word)]
        for word in words
    ]
    assert rows.starts is not None
    assert rows.starts.tolist() == expected


def test_forms_of_one_sequence_say_nothing() -> None:
    for inputs in forms_of(["aaaaa", "aaaaa"]).values():
        rows = read_rows({"input_ids": torch.zeros(2, 5)} | inputs)
        assert rows.real is rows.starts is None


@shell_families
def test_arguments_that_say_nothing_change_nothing(family: Family) -> None:
    model, tokens = build(family), random_tokens(2, 6)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 0, 1, 1, 0]])
    plain, padded = model(tokens).logits, model(tokens, attention_mask=mask).logits
    counted, ones = torch.arange(6)[None], torch.ones_like(tokens)
    for inputs in (
        {"position_ids": counted},
        {"position_ids": counted.expand(2, 6) + 7},
        {"token_type_ids": torch.zeros_like(tokens), "seq_idx": ones, "position_ids": counted},
        *({"attention_mask": ones.to(dtype)} for dtype in (torch.int64, torch.bool, torch.float32)),
    ):
        assert torch.equal(model(tokens, **inputs).logits, plain)
    read = mask.cumsum(1)
    for positions in (counted, read - 1, (read - 1) * mask, (read - 1).masked_fill(mask == 0, 1), read * mask):
        inputs = {"position_ids": positions, "token_type_ids": 1 - mask}
        assert torch.equal(model(tokens, attention_mask=mask, **inputs).logits, padded)
    for dtype in (torch.bool, torch.float32):
        assert torch.equal(model(tokens, attention_mask=mask.to(dtype)).logits, padded)
    first = model(tokens[:, :4], use_cache=True, position_ids=counted[:, :4])
    second = model(tokens[:, 4:], past_key_values=first.past_key_values, position_ids=counted[:, 4:])
    torch.testing.assert_close(second.logits, plain[:, 4:])


REFUSED: dict[str, tuple[dict[str, Any], str]] = wrong_forms(WHOLE) | {
    "positions that go back": (
        {"position_ids": torch.tensor([[*range(14), 1, 2, 3]] * 2)},
        "position_ids goes from 13 to 1 at token 14 of row 0",
    ),
    "positions of another shape": (
        {"position_ids": torch.arange(4)[None]},
        "of the shape of the tokens, (2, 17), got",
    ),
    "positions with three axes": (
        {"position_ids": torch.zeros(2, 1, 17).long()},
        "got torch.int64 of shape (2, 1, 17)",
    ),
    "positions that are no integers": ({"position_ids": torch.zeros(1, 17)}, "must be integers"),
    "unknown numbers": ({"sequence_ids": torch.zeros(2, 17)}, "does not take the arguments ['sequence_ids']"),
    "attentions": (
        {"past_states": torch.arange(5), "output_attentions": True, "head_mask": None},
        "does not take the arguments ['output_attentions', 'past_states']",
    ),
    "a short mask": ({"attention_mask": torch.ones(2, 4)}, "the shape of the tokens, (2, 17), got (2, 4)"),
    "a mask of one axis": ({"attention_mask": torch.ones(17)}, "got (17,)"),
    "an additive mask": ({"attention_mask": torch.ones(2, 17) * -1e4}, "1 at real tokens and 0 at padding"),
    "two inputs": ({"inputs_embeds": torch.zeros(2, 17, 16)}, "exactly one of input_ids and inputs_embeds"),
    "no input": ({"input_ids": None}, "exactly one of input_ids and inputs_embeds"),
    "no tokens": ({"input_ids": torch.zeros(2, 0).long()}, "no tokens (2 rows of 0)"),
    "no rows": ({"input_ids": torch.zeros(0, 3).long()}, "no tokens (0 rows of 3)"),
}
OF_LABELS = {
    "labels of another shape": ({"labels": torch.ones(2, 4).long()}, "labels must have shape (2, 17), got (2, 4)"),
    "targets of another shape": ({"shift_labels": torch.ones(2, 4).long()}, "shift_labels must have shape (2, 17)"),
    "labels of few logits": (
        {"labels": torch.ones(2, 17).long(), "logits_to_keep": 1},
        "labels must have shape (2, 1)",
    ),
}


@pytest.mark.parametrize("name", REFUSED | OF_LABELS)
def test_what_no_recurrent_model_can_follow_is_refused(name: str) -> None:
    inputs, message = (REFUSED | OF_LABELS)[name]
    model = build(FAMILIES[0])
    for run in (model, model.base_model) if name in REFUSED else (model,):
        with pytest.raises(ValueError, match=re.escape(message)):
            run(**({"input_ids": random_tokens(2, 17)} | inputs))


@every_family
def test_what_stands_at_padding_does_not_matter_at_all(family: Family) -> None:
    model, mask = build(family).train(), torch.tensor([[0, 0, 1, 1, 1], [1, 0, 1, 1, 0]])
    embeds = model.get_input_embeddings()(random_tokens(2, 5)).detach()
    poisoned = embeds.masked_fill(mask[..., None] == 0, float("nan")).requires_grad_()
    clean, output = (model(inputs_embeds=x, attention_mask=mask) for x in (embeds, poisoned))
    assert torch.equal(output.logits, clean.logits)
    output.logits.sum().backward()
    assert poisoned.grad is not None
    assert (poisoned.grad[mask == 0] == 0).all()
    assert (poisoned.grad[mask == 1] != 0).any(-1).all()


@every_family
def test_a_row_of_padding_only_leaves_its_state_bit_for_bit(family: Family) -> None:
    model, mask = build(family), torch.tensor([[0, 0, 0, 0], [1, 1, 1, 1]])
    state = random_state(model, 2)
    for mode in (model.eval(), model.train()):
        final = mode(random_tokens(2, 4), attention_mask=mask, initial_state=state).final_state
        same = take_rows(final, slice(1)), take_rows(state, slice(1))
        torch.testing.assert_close(*same, rtol=0, atol=0)
        assert not torch.equal(final[0].recurrent[1], state[0].recurrent[1])


@shell_families
@pytest.mark.parametrize("form", ["position_ids", "seq_idx"])
def test_losses_and_hidden_states_are_those_of_the_sequences_alone(family: Family, form: str) -> None:
    """Every label is predicted from the real token of its sequence before it, and a first token has none."""
    model, tokens, real = build(family, torch.float64), random_tokens(len(PADDED), 17), real_of(PADDED)
    inputs, labels = forms_of(PADDED)[form], tokens.masked_fill(~real, -100)
    output = model(tokens, labels=labels, output_hidden_states=True, **inputs)
    losses, inside = [], torch.full_like(tokens, -100)
    for row, places in places_of(PADDED):
        alone = model(tokens[row : row + 1, places], output_hidden_states=True)
        losses.append(cross_entropy(alone.logits[0, :-1], tokens[row, places[1:]], reduction="none"))
        inside[row, places[:-1]] = tokens[row, places[1:]]
        for actual, expected in zip(output.hidden_states, alone.hidden_states, strict=True):
            torch.testing.assert_close(actual[row, places], expected[0])
    expected = torch.cat(losses).float()  # as Transformers, losses are in float32
    torch.testing.assert_close(output.loss, expected.mean())
    assert torch.equal(labels, tokens.masked_fill(~real, -100))
    by_items = {"labels": labels, "num_items_in_batch": torch.tensor(100)}
    torch.testing.assert_close(model(tokens, **inputs, **by_items).loss, expected.sum() / 100)
    torch.testing.assert_close(model(tokens, **inputs, labels=tokens, shift_labels=inside).loss, expected.mean())


def test_two_chunks_have_the_loss_of_the_whole() -> None:
    model, tokens = build(FAMILIES[0]), random_tokens(2, 9)
    shifted = pad(tokens[:, 1:], (0, 1), value=-100)
    whole = model(tokens, labels=tokens, num_items_in_batch=16).loss
    first = model(tokens[:, :4], shift_labels=shifted[:, :4], num_items_in_batch=16)
    second = model(tokens[:, 4:], shift_labels=shifted[:, 4:], initial_state=first.final_state, num_items_in_batch=16)
    torch.testing.assert_close(first.loss + second.loss, whole)


@shell_families
@pytest.mark.parametrize("keys", ["position_ids", "seq_idx", "all"])
def test_the_flattening_collator_gives_the_loss_of_its_texts(family: Family, keys: str) -> None:
    """The mean over the targets inside the texts; none is across a border, whatever stands in the labels there."""
    model, lengths = build(family, torch.float64), [4, 1, 9, 2]
    texts = [random_tokens(1, length, seed=length)[0] for length in lengths]
    options = {f"return_{name}": keys in (name, "all") for name in ("position_ids", "seq_idx")}
    batch = DataCollatorWithFlattening(**options)([{"input_ids": text} for text in texts])
    scored = [cross_entropy(model(x[None]).logits[0, :-1], x[1:], reduction="sum") for x in texts if len(x) > 1]
    expected = (sum(scored) / (sum(lengths) - len(lengths))).float()
    torch.testing.assert_close(model(**batch).loss, expected)
    torch.testing.assert_close(model(**batch | {"labels": batch["input_ids"]}).loss, expected)
    torch.testing.assert_close(model(**batch).final_state, model(texts[-1][None]).final_state)


@shell_families
def test_outputs_can_be_left_out_selected_or_a_tuple(family: Family) -> None:
    model, tokens = build(family), random_tokens(2, 5)
    full = model(tokens, labels=tokens, output_hidden_states=True)
    assert model(tokens, output_final_state=False).final_state is None
    torch.testing.assert_close(model(tokens, logits_to_keep=torch.tensor([0, 3])).logits, full.logits[:, [0, 3]])
    torch.testing.assert_close(model(tokens, logits_to_keep=2).logits, full.logits[:, -2:])
    loss, logits, state = model(tokens, labels=tokens, return_dict=False, use_cache=False)
    assert torch.equal(loss, full.loss)
    assert torch.equal(logits, full.logits)
    assert len(state) == model.config.num_hidden_layers
    hidden = full.hidden_states
    assert len(hidden) == model.config.num_hidden_layers + 1
    assert torch.equal(hidden[0], model.get_input_embeddings()(tokens))
    assert torch.equal(model.get_output_embeddings()(hidden[-1]), full.logits)
    first, _ = model.base_model.layers[0](hidden[0], model.zero_state(2)[0])
    assert torch.equal(hidden[1], first)
    # an output at padding is that of the last real token
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    kept = model(tokens, attention_mask=mask, logits_to_keep=1).logits
    torch.testing.assert_close(kept[0, 0], model(tokens[:1, :3]).logits[0, -1])
    torch.testing.assert_close(kept[1], full.logits[1, -1:])


@torch.no_grad()
def test_generate_goes_on_with_the_last_sequence_or_refuses() -> None:
    model, tokens = build(FAMILIES[0]), random_tokens(1, 17)
    options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None}
    expected = model.generate(tokens[:, 8:], **options)
    for form, inputs in forms_of(WHOLE[1:]).items():
        if form == "position_ids":
            assert torch.equal(model.generate(tokens, **inputs, **options)[:, 8:], expected), form
            continue
        with pytest.raises(ValueError, match="generate takes one sequence per row"):
            model.generate(tokens, **inputs, **options)


def test_padding_stays_below_the_number_of_tokens() -> None:
    """However unequal sequences are: one of 1000 tokens and a thousand of one to three."""
    lengths = [1, 2, 3] * 333 + [1000]
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    numbers = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))[None]
    packing = MovedRows.of_sequences(read_rows({"input_ids": numbers, "seq_idx": numbers}))
    assert sum(order.numel() for order in packing.orders) < 2 * bounds[-1]
    assert len(packing.orders) == 4
    text = torch.arange(1.0, 1 + int(bounds[-1]))[None, :, None]
    front: tuple[Tensor, ...] = packing.to_front(text)
    assert torch.equal(packing.back(front), text)
    rows = {tuple(row[row > 0].tolist()) for group in front for row in group[..., 0]}
    assert rows == {tuple(text[0, a:b, 0].tolist()) for a, b in pairwise(bounds.tolist())}


# torch itself, where the graph breaks
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning:torch")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_a_compiled_model_takes_packed_rows() -> None:
    model, tokens = build(FAMILIES[0], torch.float64), random_tokens(1, 9)
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 0, 1, 2]])
    compiled = torch.compile(model, backend="eager")
    torch.testing.assert_close(
        compiled(tokens, position_ids=positions).logits, model(tokens, position_ids=positions).logits
    )
