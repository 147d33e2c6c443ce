"""What padding means for outputs, losses and refusals; its exactness is in test_core_law.py."""

import re

import pytest
import torch
from torch.nn.functional import cross_entropy

from hf_recurrent_lengthgen.models.rows import Rows
from hf_recurrent_lengthgen.models.rows_moved import MovedRows
from hf_recurrent_lengthgen.models.state_value import take_rows

from .families import FAMILIES, SHELL_FAMILIES, Family, build, random_state, random_tokens, variant_id

every_family = pytest.mark.parametrize("family", FAMILIES, ids=variant_id)
shell_families = pytest.mark.parametrize("family", SHELL_FAMILIES, ids=variant_id)


def test_real_tokens_move_to_the_front_in_order_and_back() -> None:
    mask = torch.tensor([[0, 1, 0, 1, 1], [1, 1, 0, 0, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1]]).bool()
    padding = MovedRows.of_padded(Rows((4, 5), mask))
    x = torch.arange(1.0, 21).reshape(4, 5, 1)
    (front,) = padding.to_front(x)
    assert front[..., 0].tolist() == [[2, 4, 5, 0, 0], [6, 7, 0, 0, 0], [0] * 5, [16, 17, 18, 19, 20]]
    assert padding.groups[0].lengths.tolist() == [3, 2, 0, 5]  # type: ignore[union-attr]
    # padding repeats the last real token before it, at the left the first real one
    assert padding.back((front,))[..., 0].tolist() == [[2, 2, 2, 4, 5], [6, 7, 7, 7, 7], [0] * 5, [16, 17, 18, 19, 20]]


@every_family
def test_what_stands_at_padding_does_not_matter_at_all(family: Family) -> None:
    model, mask = build(family).train(), torch.tensor([[0, 0, 1, 1, 1], [1, 0, 1, 1, 0]])
    embeds = model.get_input_embeddings()(random_tokens(2, 5)).detach()
    poisoned = embeds.masked_fill(mask[..., None] == 0, float("nan")).requires_grad_()
    clean, output = (
        model(inputs_embeds=embeds, attention_mask=mask),
        model(inputs_embeds=poisoned, attention_mask=mask),
    )
    assert torch.equal(output.logits, clean.logits)
    output.logits.sum().backward()
    assert poisoned.grad is not None
    assert (poisoned.grad[mask == 0] == 0).all()
    assert (poisoned.grad[mask == 1] != 0).any(-1).all()


@every_family
def test_a_row_of_padding_only_leaves_its_state_bit_for_bit(family: Family) -> None:
    model = build(family)
    state = random_state(model, 2)
    mask = torch.tensor([[0, 0, 0, 0], [1, 1, 1, 1]])
    for mode in (model.eval(), model.train()):
        final = mode(random_tokens(2, 4), attention_mask=mask, initial_state=state).final_state
        for after, before in zip(take_rows(final, slice(1)), take_rows(state, slice(1)), strict=True):
            assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))
        assert not torch.equal(final[0].recurrent[1], state[0].recurrent[1])


@shell_families
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float32], ids=str)
def test_masks_of_all_kinds_mean_the_same_and_ones_nothing(family: Family, dtype: torch.dtype) -> None:
    model, tokens, mask = build(family), random_tokens(2, 5), torch.tensor([[0, 1, 1, 0, 1], [1, 1, 1, 0, 0]])
    assert torch.equal(model(tokens, attention_mask=torch.ones(2, 5, dtype=dtype)).logits, model(tokens).logits)
    expected = model(tokens, attention_mask=mask).logits
    assert torch.equal(model(tokens, attention_mask=mask.to(dtype)).logits, expected)


@shell_families
@pytest.mark.parametrize("mask_dtype", [torch.int64, torch.bool], ids=str)
def test_the_loss_of_padded_rows_is_that_of_the_rows_alone(family: Family, mask_dtype: torch.dtype) -> None:
    """Every label is predicted from the real token before it; a first token has none."""
    model = build(family, torch.float64)
    words = ["..xxxx", "xx...x", "x.xx..", "xxxxxx", ".....x", "......"]
    mask = torch.tensor([[letter == "x" for letter in word] for word in words])
    tokens = random_tokens(len(words), 6)
    labels = tokens.masked_fill(~mask, -100)
    losses = []
    for row, real in zip(tokens, mask, strict=True):
        text = row[real][None]
        if text.shape[1] > 1:
            logits = model(text).logits[0, :-1]
            losses.append(cross_entropy(logits, text[0, 1:], reduction="none"))
    expected = torch.cat(losses).float()  # as Transformers, losses are in float32
    output = model(tokens, attention_mask=mask.to(mask_dtype), labels=labels)
    torch.testing.assert_close(output.loss, expected.mean())
    by_items = model(tokens, attention_mask=mask.to(mask_dtype), labels=labels, num_items_in_batch=torch.tensor(100))
    torch.testing.assert_close(by_items.loss, expected.sum() / 100)
    assert torch.equal(labels, tokens.masked_fill(~mask, -100))


@shell_families
def test_the_last_logit_of_a_right_padded_row_is_that_of_its_last_token(family: Family) -> None:
    model, tokens = build(family, torch.float64), random_tokens(2, 5)
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    kept = model(tokens, attention_mask=mask, logits_to_keep=1).logits
    torch.testing.assert_close(kept[0, 0], model(tokens[:1, :3]).logits[0, -1])
    torch.testing.assert_close(kept[1, 0], model(tokens[1:]).logits[0, -1])


@shell_families
@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (torch.ones(2, 4), "attention_mask must have the shape of the tokens, (2, 5), got (2, 4)"),
        (torch.ones(5), "got (5,)"),
        (torch.tensor([[1, 1, 1, 3, 3], [1, 1, 1, 1, 1]]), "1 at real tokens and 0 at padding only"),
        (torch.tensor([[0, 0, 0, -1e4, 0], [0, 0, 0, 0, 0]]), "1 at real tokens and 0 at padding"),
    ],
)
def test_a_mask_of_another_kind_is_refused(family: Family, mask: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        build(family)(random_tokens(2, 5), attention_mask=mask)


@shell_families
def test_arguments_that_do_not_fit_together_are_refused(family: Family) -> None:
    model, tokens = build(family), random_tokens(2, 5)
    embeds = model.get_input_embeddings()(tokens)
    for run in (model, model.base_model):
        with pytest.raises(ValueError, match="exactly one of input_ids and inputs_embeds"):
            run(tokens, inputs_embeds=embeds)
        with pytest.raises(ValueError, match="exactly one of input_ids and inputs_embeds"):
            run()
        with pytest.raises(ValueError, match="no tokens"):
            run(tokens[:, :0])
        with pytest.raises(ValueError, match=r"does not take the arguments \['output_attentions', 'past_states'\]"):
            run(tokens, past_states=torch.arange(5)[None], output_attentions=True, head_mask=None)
    with pytest.raises(ValueError, match="labels need all logits"):
        model(tokens, labels=tokens, logits_to_keep=1)
    with pytest.raises(ValueError, match=r"labels must have shape \(2, 5\), got \(2, 4\)"):
        model(tokens, labels=tokens[:, :4])


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


@shell_families
def test_hidden_states_of_padded_rows_stand_at_their_tokens(family: Family) -> None:
    model, tokens = build(family, torch.float64), random_tokens(1, 5)
    mask = torch.tensor([[0, 1, 0, 1, 1]])
    padded = model(tokens, attention_mask=mask, output_hidden_states=True).hidden_states
    alone = model(tokens[:, mask[0].bool()], output_hidden_states=True).hidden_states
    for with_padding, without in zip(padded, alone, strict=True):
        torch.testing.assert_close(with_padding[:, mask[0].bool()], without)
