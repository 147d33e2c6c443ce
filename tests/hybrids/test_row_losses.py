"""Losses of wrapped models from rows with padding and packed rows: those of the targets inside their sequences."""

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import DataCollatorWithFlattening

from hf_recurrent_lengthgen.hybrids import stateful
from tests.hybrids.measures import parts, random_state, random_tokens
from tests.hybrids.padded_rows import PACKED, PADDED, places_of, positions_and_mask, tokens_of
from tests.hybrids.tiny_models import tiny_composite, tiny_model

TYPES = ["falcon_h1", "lfm2", "minimax", "qwen3_next", "xlstm"]


def mean_by_hand(model: Any, tokens: Tensor, words: list[str], state: Any = None) -> Tensor:
    """The mean over the targets of each sequence alone."""
    losses = []
    for row, word in enumerate(words):
        for index, places in enumerate(places_of(word)):
            first = None if state is None or index else tuple(type(x)(*(p[row : row + 1] for p in x)) for x in state)
            ids = tokens[row : row + 1, places]
            inputs = {} if first is None else {"initial_state": first}
            losses.append(cross_entropy(model(input_ids=ids, **inputs).logits[0, :-1], ids[0, 1:], reduction="none"))
    return torch.cat(losses).mean()


@pytest.mark.thinned(5)
@pytest.mark.parametrize("model_type", TYPES)
@pytest.mark.parametrize("words", [PADDED, PACKED], ids=["padding", "packing"])
def test_losses_are_those_of_the_sequences(model_type: str, words: list[str]) -> None:
    """Whatever stands in the labels of first tokens; padding has none."""
    model = stateful(tiny_model(model_type)).train()
    tokens, (positions, mask) = tokens_of(words), positions_and_mask(words)
    labels = tokens.masked_fill(mask == 0, -100)
    inputs: dict[str, Any] = {"input_ids": tokens, "attention_mask": mask, "position_ids": positions, "labels": labels}
    if words is PADDED:
        inputs.pop("position_ids")
    state = random_state(model, len(words))
    for start in (None,) if model_type == "minimax" else (None, state):
        expected = mean_by_hand(model, tokens, words, start)
        options = {} if start is None else {"initial_state": start}
        loss = model(**inputs, **options).loss
        torch.testing.assert_close(loss, expected)
        wanted, found = (torch.autograd.grad(x, list(model.parameters()), allow_unused=True) for x in (expected, loss))
        for one, other in zip(found, wanted, strict=True):
            if other is not None:
                torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)
        count = int(sum(len(places) - 1 for word in words for places in places_of(word)))
        summed = model(**inputs, **options, num_items_in_batch=2 * count).loss
        torch.testing.assert_close(summed, expected / 2)


@torch.no_grad()
@pytest.mark.parametrize("words", [PADDED, PACKED], ids=["padding", "packing"])
def test_bambas_loss_of_large_logits_counts_real_tokens(words: list[str]) -> None:
    """Without padding it is that of the stock model: the mean of log(Z)^2 over all tokens."""
    model = stateful(tiny_model("bamba", z_loss_coefficient=0.1))
    tokens, (positions, mask) = tokens_of(words), positions_and_mask(words)
    alone = [model(input_ids=tokens[r : r + 1, p]).logits[0] for r, word in enumerate(words) for p in places_of(word)]
    expected = mean_by_hand(model, tokens, words) + 0.1 * torch.cat(alone).logsumexp(-1).pow(2).mean()
    inputs = {"position_ids": positions} if words is PACKED else {}
    labels = tokens.masked_fill(mask == 0, -100)
    torch.testing.assert_close(model(tokens, attention_mask=mask, labels=labels, **inputs).loss, expected)


@torch.no_grad()
@pytest.mark.parametrize("model_type", ["falcon_h1", "xlstm"])
def test_shifted_labels_replace_labels(model_type: str) -> None:
    model = stateful(tiny_model(model_type))
    tokens, (_, mask) = tokens_of(PADDED), positions_and_mask(PADDED)
    labels = tokens.masked_fill(mask == 0, -100)
    shifted = torch.nn.functional.pad(labels, (0, 1), value=-100)[:, 1:]
    inputs = {"input_ids": tokens, "attention_mask": mask, "output_final_state": True}
    torch.testing.assert_close(model(**inputs, shift_labels=shifted).loss, model(**inputs, labels=labels).loss)


@torch.no_grad()
def test_the_flattening_collator_gives_the_loss_of_its_texts() -> None:
    """test_rows.py has the single forms."""
    model, lengths = stateful(tiny_model("qwen3_next")), [4, 1, 9, 2]
    texts = [tokens_of(["a" * length], seed=length)[0] for length in lengths]
    collate = DataCollatorWithFlattening(return_seq_idx=True, return_flash_attn_kwargs=True)
    batch = collate([{"input_ids": text} for text in texts])
    words = ["".join(letter * length for letter, length in zip("abcd", lengths, strict=True))]
    expected = mean_by_hand(model, torch.cat(texts)[None], words)
    torch.testing.assert_close(model(**batch).loss, expected)
    output = model(**batch, output_final_state=True)
    torch.testing.assert_close(output.loss, expected)
    last = model(input_ids=texts[-1][None], output_final_state=True).final_state
    torch.testing.assert_close(parts(output.final_state), parts(last))


@pytest.mark.parametrize("model_type", ["granitemoehybrid", "jamba", "qwen3_next"])
def test_the_loss_of_experts_counts_real_tokens(model_type: str) -> None:
    words = [word for word in PADDED if word.strip(".")]
    model = stateful(tiny_model(model_type)).train()
    tokens, (_, mask) = tokens_of(words), positions_and_mask(words)
    labels = tokens.masked_fill(mask == 0, -100)
    inputs: dict[str, Any] = {"input_ids": tokens, "attention_mask": mask, "output_router_logits": True}
    alone = [
        model(input_ids=tokens[row : row + 1, places], output_router_logits=True).router_logits
        for row, word in enumerate(words)
        for places in places_of(word)
    ]
    routers = tuple(torch.cat([x.flatten(0, -2) for x in layer]) for layer in zip(*alone, strict=True))
    loss_of_experts = vars(inspect.getmodule(type(model)))["load_balancing_loss_func"]
    expected = loss_of_experts(routers, model.num_experts, model.num_experts_per_tok)
    for more in ({}, {"output_final_state": True}, {"use_cache": True}):
        output = model(**inputs, **more, labels=labels)
        torch.testing.assert_close(output.aux_loss, expected)
        whole = mean_by_hand(model, tokens, words) + model.router_aux_loss_coef * expected
        torch.testing.assert_close(output.loss, whole)
        step = 2 * sum(len(places) - 1 for row in words for places in places_of(row))  # twice the targets of the call
        torch.testing.assert_close(model(**inputs, **more, labels=labels, num_items_in_batch=step).loss, whole / 2)
        for layer, wanted in zip(output.router_logits, routers, strict=True):
            torch.testing.assert_close(layer.view(*tokens.shape, -1)[mask.bool()], wanted, rtol=1e-4, atol=1e-5)


def test_models_of_images_and_text_have_the_share_of_the_loss_of_experts() -> None:
    """Their weight of this loss is in the config only."""
    model = stateful(tiny_composite("qwen3_5_moe")).train()
    inputs: dict[str, Any] = {"input_ids": random_tokens(2, 12), "output_router_logits": True}
    whole = model(**inputs, labels=inputs["input_ids"])
    assert whole.aux_loss > 0
    found = model(**inputs, labels=inputs["input_ids"], num_items_in_batch=torch.tensor(4 * 22)).loss
    torch.testing.assert_close(found, whole.loss / 4)
