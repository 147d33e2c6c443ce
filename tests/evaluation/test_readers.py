"""Reading with any causal language model: chunks give what one forward pass gives, or are refused with the reason."""

import copy
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertLMHeadModel,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    JambaConfig,
    JambaForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from hf_recurrent_lengthgen.evaluation import streaming
from hf_recurrent_lengthgen.evaluation.readers import CacheReader, Reader, StateReader, reader_of
from hf_recurrent_lengthgen.evaluation.streaming import Chunk, chunk_borders, reading_plan, state_elements, stream_nll
from hf_recurrent_lengthgen.hybrids import stateful
from hf_recurrent_lengthgen.models.configuration_stateful import CACHE_NAME
from tests.evaluation.test_stateful_models import plain_nll
from tests.hybrids.tiny_models import tiny_model
from tests.models.families import MAMBA2, build

SIZES = {"vocab_size": 29, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}


def llama() -> Any:
    return LlamaForCausalLM(LlamaConfig(**SIZES, **HEADS))


class OlderCode(LlamaForCausalLM):
    """As code in checkpoints may be: its cache has the name of before Transformers 5.24."""

    def forward(self, input_ids: Any = None, past_key_values: Any = None, **others: Any) -> Any:
        return super().forward(input_ids, **{CACHE_NAME: past_key_values}, **others)


def test_older_code_carries_its_cache_with_newer_releases() -> None:
    model = OlderCode(LlamaConfig(**SIZES, **HEADS)).eval()
    reader = reader_of(model)
    assert type(reader) is CacheReader
    ids = torch.arange(12)[None] % 29
    with torch.no_grad():
        first, cache = reader.read(ids[:, :5])
        second, _ = reader.read(ids[:, 5:], cache)
        torch.testing.assert_close(torch.cat([first, second], 1), model(ids).logits)


ATTENTION = {
    "llama": llama,
    "gpt_neox": lambda: GPTNeoXForCausalLM(GPTNeoXConfig(**SIZES, num_attention_heads=4)),
    "sliding window": lambda: MistralForCausalLM(MistralConfig(**SIZES, **HEADS, sliding_window=9)),
}


class Bigram(nn.Module):
    """Predicts from the last token alone and carries nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(29, 29))
        self.config = SimpleNamespace(vocab_size=29)

    def forward(self, input_ids: Tensor) -> SimpleNamespace:
        return SimpleNamespace(logits=self.table[input_ids])


class Remembering(Bigram):
    """Keeps a count from call to call."""

    calls = 0

    def forward(self, input_ids: Tensor) -> SimpleNamespace:
        self.calls += 1
        return SimpleNamespace(logits=self.table[(input_ids + self.calls) % 29])


@pytest.fixture
def tokens() -> np.ndarray:
    return np.random.default_rng(3).integers(0, 29, (3, 91))


@pytest.mark.thinned(3)
@pytest.mark.parametrize("name", ATTENTION)
@pytest.mark.parametrize("chunk_length", [1, 7, 32, None])
def test_attention_models_stream_by_their_cache(name: str, chunk_length: int | None, tokens: np.ndarray) -> None:
    torch.manual_seed(0)
    model = ATTENTION[name]()
    reader = reader_of(model)
    assert isinstance(reader, CacheReader)
    assert (reader.carries, reader.carried_by_row) == (True, False)
    found = stream_nll(model, tokens, chunk_length=chunk_length, batch_size=2, progress=False)
    np.testing.assert_allclose(found.nll, plain_nll(model.eval(), tokens), atol=2e-5)
    assert found.final_state == ()


@pytest.mark.parametrize("model_type", ["bamba", "lfm3"])
def test_a_fork_of_a_hybrids_cache_leaves_it_as_it_is(model_type: str, tokens: np.ndarray) -> None:
    """Without a copy of the keys; LFM3 has a sliding window, too."""
    reader = reader_of(stateful(tiny_model(model_type)))
    ids = torch.from_numpy(tokens)
    with torch.no_grad():
        _, carry = reader.read(ids[:, :20])
        before = copy.deepcopy(carry)
        fork = reader.fork(carry)
        shared = [
            (one.keys, other.keys)
            for one, other in zip(fork[1].layers, carry[1].layers, strict=True)
            if hasattr(one, "keys")
        ]
        assert shared
        assert all(one is other for one, other in shared)
        first, _ = reader.read(ids[:, 20:40], fork)
        assert carry[1].get_seq_length() == 20
        again, _ = reader.read(ids[:, 20:40], carry)
        expected, _ = reader.read(ids[:, 20:40], before)
    torch.testing.assert_close(first, expected)
    torch.testing.assert_close(again, expected)


def test_rows_of_a_hybrid_are_as_many_as_can_carry_their_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    reader = reader_of(stateful(tiny_model("bamba")))
    assert reader.elements_per_token == 2 * 2 * 8  # keys and values of 2 heads in one layer
    state = state_elements(reader.model)
    monkeypatch.setattr(streaming, "STATES_PER_FORWARD", 3 * (state + 1000 * 32) + 5)
    assert reading_plan(reader, 8, 1000, None, None)[0] == 3
    assert reading_plan(reader, 8, 4000, None, None)[0] == 1
    assert reading_plan(reader, 8, 4000, 2, None)[0] == 2


def test_states_are_values_that_reading_on_does_not_change(tokens: np.ndarray) -> None:
    reader = reader_of(build(MAMBA2).eval())
    assert isinstance(reader, StateReader)
    assert reader.carried_by_row
    ids = torch.from_numpy(tokens)
    with torch.no_grad():
        _, carry = reader.read(ids[:, :20])
        joined = reader.join_rows(
            [reader.take_rows(carry, slice(0, 1)), reader.take_rows(carry, torch.tensor([2, 1]))]
        )
        one, _ = reader.read(ids[[0, 2, 1], 20:40], joined, logits_to_keep=2)
        other, _ = reader.read(ids[:, 20:40], carry, logits_to_keep=2)
        whole, _ = reader.read(ids[:, :40])
    torch.testing.assert_close(one, other[[0, 2, 1]])
    torch.testing.assert_close(other, whole[:, -2:], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (Bigram, "takes neither initial_state nor a cache"),
        (lambda: MambaForCausalLM(MambaConfig(**SIZES)), "neither initial_state nor a cache|with a cache differ"),
        (
            lambda: JambaForCausalLM(
                JambaConfig(
                    **SIZES, **HEADS, num_experts=2, num_experts_per_tok=1, attn_layer_period=2, attn_layer_offset=1
                )
            ),
            "its predictions with a cache differ from those without|its cache does not work in chunks",
        ),
    ],
    ids=["bigram", "stock mamba", "stock jamba"],
)
def test_models_that_drop_what_they_read_are_read_at_once(model: Any, why: str, tokens: np.ndarray) -> None:
    torch.manual_seed(0)
    model = model()
    for module in model.modules():  # the state of fresh weights hardly shows
        if hasattr(module, "dt_proj"):
            nn.init.constant_(module.dt_proj.bias, 1.0)
            nn.init.normal_(module.x_proj.weight)
    reader = reader_of(model)
    assert type(reader) is Reader
    assert not reader.carries
    found = stream_nll(model, tokens, chunk_length=7, progress=False)
    np.testing.assert_allclose(found.nll, plain_nll(model.eval(), tokens), atol=2e-5)
    with pytest.raises(ValueError, match=why):
        reader.read(torch.zeros(1, 3, dtype=torch.long), cache=object())
    with pytest.raises(ValueError, match="an initial state needs"):
        reader.begin(())


def test_a_text_too_long_to_read_at_once_is_refused(monkeypatch: pytest.MonkeyPatch, tokens: np.ndarray) -> None:
    monkeypatch.setattr("hf_recurrent_lengthgen.evaluation.streaming.LOGITS_AT_ONCE", 29 * 89)
    with pytest.raises(ValueError, match=r"a text of 90 tokens needs .*At once it can read at most 89 tokens"):
        stream_nll(Bigram(), tokens, progress=False)


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (Remembering, "Remembering cannot be evaluated: its predictions for the same text change"),
        (
            lambda: BertLMHeadModel(
                BertConfig(vocab_size=29, hidden_size=32, num_hidden_layers=1, num_attention_heads=2)
            ),
            "BertLMHeadModel attends to later tokens",
        ),
        (
            lambda: T5ForConditionalGeneration(T5Config(vocab_size=29, d_model=16, num_layers=1, num_heads=2)),
            "is an encoder-decoder",
        ),
        (
            lambda: get_peft_model(llama(), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)),
            "puts virtual tokens before each text",
        ),
        (lambda: nn.Linear(2, 2), "Linear has no config"),
    ],
)
def test_what_is_no_causal_language_model_is_refused(make: Any, complaint: str) -> None:
    torch.manual_seed(0)
    with pytest.raises(ValueError, match=complaint):
        reader_of(make())


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "yarn"])
def test_positions_that_turn_with_the_length_are_read_at_once(kind: str, tokens: np.ndarray) -> None:
    torch.manual_seed(0)
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0}
    rope |= {"original_max_position_embeddings": 32}
    if kind == "longrope":
        rope |= {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    model = LlamaForCausalLM(LlamaConfig(**SIZES, **HEADS, max_position_embeddings=32, rope_parameters=rope))
    assert reader_of(model).carries == (kind == "yarn")
    found = stream_nll(model, tokens, chunk_length=16, progress=False)
    np.testing.assert_allclose(found.nll, plain_nll(model.eval(), tokens), atol=2e-5)


def test_positions_that_a_model_does_not_have_are_named(tokens: np.ndarray) -> None:
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=29, n_embd=32, n_layer=1, n_head=2, n_positions=8))
    assert isinstance(reader_of(model), CacheReader)
    found = stream_nll(model, tokens[:, :9], chunk_length=3, progress=False)
    np.testing.assert_allclose(found.nll, plain_nll(model.eval(), tokens[:, :9]), atol=2e-5)
    with pytest.raises(ValueError, match=r"GPT2LMHeadModel cannot read a text of this length .* has 8 positions"):
        stream_nll(model, tokens, chunk_length=16, progress=False)


def test_adapters_are_read_through(tokens: np.ndarray) -> None:
    torch.manual_seed(0)
    adapted = get_peft_model(build(MAMBA2), LoraConfig(target_modules=["in_proj"], init_lora_weights=False))
    assert isinstance(reader_of(adapted), StateReader)
    found = stream_nll(adapted, tokens, chunk_length=16, progress=False)
    np.testing.assert_allclose(found.nll, plain_nll(adapted.eval(), tokens), atol=2e-5)


def test_chunks_end_at_stops() -> None:
    assert list(chunk_borders(10, 4)) == [(0, 4), (4, 8), (8, 10)]
    assert list(chunk_borders(10, 4, [9, 5, 5, 0, 10, 77])) == [(0, 4), (4, 5), (5, 9), (9, 10)]
    assert list(chunk_borders(3, 100, [1])) == [(0, 1), (1, 3)]


class Watcher:
    """Keeps where each chunk ended, and the state there."""

    def __init__(self, *positions: int) -> None:
        self.positions = positions
        self.seen: list[tuple[int, int, Any]] = []

    def see(self, first_sequence: int, chunk: Chunk) -> None:
        self.seen.append((first_sequence, chunk.start + chunk.nll.shape[1], chunk.state))


def test_an_observer_sees_every_chunk_with_its_state(tokens: np.ndarray) -> None:
    model, watcher = build(MAMBA2).eval(), Watcher(13)
    stream_nll(model, tokens, batch_size=2, chunk_length=40, observer=watcher, progress=False)
    assert [seen[:2] for seen in watcher.seen] == [(0, 13), (0, 53), (0, 90), (2, 13), (2, 53), (2, 90)]
    with torch.no_grad():
        expected = model(input_ids=torch.from_numpy(tokens[2:, :53])).final_state
    torch.testing.assert_close(watcher.seen[4][2][0].recurrent, expected[0].recurrent, atol=2e-5, rtol=1e-4)
