"""What Transformers' models have in common and ours keep: caches, masks, hidden states, options of `generate`."""

import pytest
import torch

from hf_recurrent_lengthgen.models.modeling_generation import RecurrentCache
from hf_recurrent_lengthgen.models.state_value import RecurrentState

from .families import FAMILIES, SHELL_FAMILIES, Family, build, random_tokens, variant_id

every_family = pytest.mark.parametrize("family", FAMILIES, ids=variant_id)
shell_families = pytest.mark.parametrize("family", SHELL_FAMILIES, ids=variant_id)
GREEDY = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None}
# left, inner and right padding
MASK = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1], [1, 1, 0, 0, 1, 1, 0, 1], [1, 1, 1, 1, 1, 1, 0, 0]])


def same_state(state: RecurrentState, other: RecurrentState) -> bool:
    return all(torch.equal(a, b) for x, y in zip(state, other, strict=True) for a, b in zip(x, y, strict=True))


@pytest.mark.thinned(5)
@every_family
def test_a_cache_is_returned_as_the_configuration_says(family: Family) -> None:
    model, tokens = build(family), random_tokens(2, 4)
    assert model.config.use_cache
    for run in (model, model.base_model):
        output = run(tokens)
        assert isinstance(output.past_key_values, RecurrentCache)
        assert same_state(output.past_key_values.state, output.final_state)
        assert run(tokens, use_cache=False).past_key_values is None
        assert run(tokens, output_final_state=False).past_key_values is None
        assert run(tokens, output_final_state=False, use_cache=True).past_key_values.tokens_seen == 4
    model.train()
    assert model(tokens).past_key_values is None
    assert model(tokens, use_cache=True).past_key_values.tokens_seen == 4
    model.eval()
    model.config.use_cache = False
    assert model(tokens).past_key_values is None


@shell_families
def test_the_cache_has_the_names_of_old_and_new_releases(family: Family) -> None:
    model, tokens = build(family), random_tokens(2, 6)
    whole, first = model(tokens), model(tokens[:, :4], use_cache=True)
    assert first.cache is first.past_key_values is first["cache"] is first["past_key_values"]
    assert "past_key_values" in first
    for name in ("cache", "past_key_values", "cache_params"):
        cache = model(tokens[:, :4]).cache
        torch.testing.assert_close(model(tokens[:, 4:], **{name: cache}).logits, whole.logits[:, 4:])
        cache = model(tokens[:, :4]).cache
        output = model.generate(tokens, **{name: cache}, return_dict_in_generate=True, **GREEDY)
        assert output.cache is cache
        assert torch.equal(output.sequences, model.generate(tokens, **GREEDY))
    with pytest.raises(ValueError, match="under one name"):
        model(tokens, cache=cache, past_key_values=cache)


@shell_families
def test_a_mask_may_have_the_past_too(family: Family) -> None:
    model, tokens = build(family, torch.float64), random_tokens(3, 8)
    whole = model(tokens, attention_mask=MASK)
    for cut in (1, 4, 7):
        cache = model(tokens[:, :cut], attention_mask=MASK[:, :cut]).past_key_values
        options = {"past_key_values": cache, "labels": tokens[:, cut:]}
        state = cache.state
        long = model(tokens[:, cut:], attention_mask=MASK, **options)
        cache.state, cache.tokens_seen = state, cut
        short = model(tokens[:, cut:], attention_mask=MASK[:, cut:], **options)
        assert torch.equal(long.logits, short.logits)
        assert cut == 7 or torch.equal(long.loss, short.loss)
        real = MASK[:, cut:].bool()
        torch.testing.assert_close(long.logits[real], whole.logits[:, cut:][real])
    with pytest.raises(ValueError, match=r"\(3, 1\), or with the tokens .* \(3, 9\), got \(3, 8\)"):
        model(tokens[:, :1], attention_mask=MASK, past_key_values=cache)


@pytest.mark.thinned(5)
@every_family
@pytest.mark.parametrize("padding", [False, True])
def test_hidden_states_are_on_the_way_of_gradients(family: Family, padding: bool) -> None:
    model, tokens = build(family, torch.float64), random_tokens(3, 8)
    mask = MASK if padding else torch.ones_like(MASK)
    output = model(tokens, attention_mask=mask, labels=tokens * mask - 100 * (1 - mask), output_hidden_states=True)
    hidden = output.hidden_states
    assert len(hidden) == model.config.num_hidden_layers + 1
    torch.testing.assert_close(model.get_output_embeddings()(hidden[-1]), output.logits)
    embedded = model.get_input_embeddings()(tokens)
    torch.testing.assert_close(hidden[0][mask.bool()], embedded[mask.bool()])
    for states in hidden:
        states.retain_grad()
    output.loss.backward()
    for states in hidden:
        assert (states.grad[:, :-3] != 0).any(-1).sum() > 5
    # what the embeddings' gradient is made of
    gradient = torch.zeros_like(model.get_input_embeddings().weight).index_add(
        0, tokens.flatten(), hidden[0].grad.flatten(0, 1)
    )
    if model.get_input_embeddings().weight is not model.get_output_embeddings().weight:
        torch.testing.assert_close(model.get_input_embeddings().weight.grad, gradient)


@every_family
def test_generation_returns_the_hidden_states_of_each_step(family: Family) -> None:
    model, prompt = build(family, torch.float64), random_tokens(2, 4)
    output = model.generate(prompt, output_hidden_states=True, return_dict_in_generate=True, **GREEDY)
    whole = model(output.sequences[:, :-1], output_hidden_states=True).hidden_states
    assert [step[0].shape[1] for step in output.hidden_states] == [4, 1, 1, 1, 1]
    for layer, expected in enumerate(whole):
        torch.testing.assert_close(torch.cat([step[layer] for step in output.hidden_states], 1), expected)


@shell_families
@pytest.mark.parametrize("read", [1, 6])
def test_embeddings_go_on_from_a_cache(family: Family, read: int) -> None:
    """As for token ids, the whole text is passed, and the cache has the number of tokens read."""
    model, prompt = build(family, torch.float64), random_tokens(2, 7)
    embeds = model.get_input_embeddings()(prompt).detach()
    expected = model.generate(prompt, **GREEDY)[:, 7:]
    cache = model(prompt[:, :read]).past_key_values
    output = model.generate(inputs_embeds=embeds, past_key_values=cache, **GREEDY)
    assert torch.equal(output, expected)
    cache = model(prompt).past_key_values
    with pytest.raises(ValueError, match="read 7 tokens and inputs_embeds has 7: give the whole text so far"):
        model.generate(inputs_embeds=embeds, past_key_values=cache, **GREEDY)


@shell_families
def test_what_generation_has_no_meaning_for_is_refused(family: Family) -> None:
    model, prompt = build(family), random_tokens(2, 6)
    for kind in ("static", "offloaded", "quantized"):
        with pytest.raises(ValueError, match=f"cache_implementation must be left out, got '{kind}'"):
            model.generate(prompt, cache_implementation=kind, **GREEDY)
    assert model.generate(prompt, cache_implementation="dynamic", **GREEDY).shape == (2, 11)
    with pytest.raises(ValueError, match="prefill_chunk_size must be left out, got 2: read the beginning of a prompt"):
        model.generate(prompt, prefill_chunk_size=2, **GREEDY)
    with pytest.raises(ValueError, match="output_attentions"):
        model.generate(prompt, output_attentions=True, return_dict_in_generate=True, **GREEDY)
