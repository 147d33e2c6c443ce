"""OPRM against the paper's loop: each chunk is read alone with its prompt, by the stock forward of the model."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_recurrent_lengthgen.evaluation import streaming
from hf_recurrent_lengthgen.evaluation.readers import chunk_prompts, entropy
from hf_recurrent_lengthgen.models.state_value import concatenate_rows, map_state
from hf_recurrent_lengthgen.state_files import (
    ask,
    ask_surest,
    load_text_state,
    read_chunks,
    read_text,
    save_text_state,
)
from tests.models.families import GLA, MAMBA2, build
from tests.state_files.test_text_state import GREEDY, assert_same, hybrid, text

BEGINNING, QUESTION = [5, 4], text(4, seed=8)
MODELS = {
    "mamba2": lambda: build(MAMBA2, torch.float64).eval(),
    "gla": lambda: build(GLA, torch.float64).eval(),
    "falcon_h1": lambda: hybrid("falcon_h1").double(),
    "a sliding window": lambda: hybrid("lfm3").double(),
}


def borders(length: int, chunk: int) -> list[tuple[int, int]]:
    """Chunks from left to right, the last one moved to the left so that it is as long as the others."""
    found, start = [], 0
    while start + chunk < length:
        found.append((start, start + chunk))
        start += chunk
    return [*found, (max(0, length - chunk), length)]


@torch.no_grad()
def surest(model: Any, tokens: Tensor, chunk: int) -> tuple[Tensor, int, list[float]]:
    """Section 4.1 of the paper: the answer of the prompt with the least entropy, and all entropies in bits."""
    prompts, bits = [], []
    for start, stop in borders(tokens.shape[1], chunk):
        prompts.append(torch.cat([torch.tensor([BEGINNING]), tokens[:, start:stop], QUESTION], dim=1))
        logits = model(prompts[-1]).logits[0, -1].double().tolist()
        total = sum(math.exp(value) for value in logits)
        bits.append(-sum(math.exp(value) / total * math.log2(math.exp(value) / total) for value in logits))
    row = bits.index(min(bits))
    return model.generate(prompts[row], **GREEDY)[:, prompts[row].shape[1] :], row, bits


@pytest.mark.parametrize(("length", "chunk"), [(53, 10), (50, 10), (50, 49), (12, 12), (7, 12), (9, 1)])
@pytest.mark.parametrize("name", MODELS)
def test_the_answer_is_that_of_the_paper_s_loop(name: str, length: int, chunk: int, tmp_path: Path) -> None:
    model, tokens = MODELS[name](), text(length)
    answer, row, bits = surest(model, tokens, chunk)
    chunks = read_chunks(model, tokens, chunk, before=BEGINNING)
    save_text_state(tmp_path / "chunks", chunks)
    loaded = load_text_state(tmp_path / "chunks", model)
    for _ in range(2):  # a text is read once and questioned often
        found, chosen, entropies = ask_surest(model, loaded, QUESTION, **GREEDY)
        assert torch.equal(found, torch.cat([QUESTION, answer], dim=1))
        assert chosen == row
        torch.testing.assert_close(entropies, torch.tensor(bits, dtype=torch.float64), rtol=1e-9, atol=1e-9)
    assert_same(loaded, chunks, 0.0)


@pytest.mark.parametrize("name", MODELS)
def test_each_row_is_its_chunk_read_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokens = MODELS[name](), text(53)
    monkeypatch.setattr(
        streaming, "STATES_PER_FORWARD", 3 * streaming.carried_elements(streaming.reader_of(model), 12)
    )
    chunks = read_chunks(model, tokens, 10, before=BEGINNING, chunk_length=5)
    rows = [torch.cat([torch.tensor([BEGINNING]), tokens[:, a:b]], dim=1) for a, b in borders(53, 10)]
    assert chunks.rows == len(rows) == 6
    assert_same(chunks, read_text(model, torch.cat(rows)), 1e-12)
    alone = [read_text(model, row) for row in rows]
    torch.testing.assert_close(chunks.state, concatenate_rows([one.state for one in alone]), rtol=1e-12, atol=1e-12)
    for index, layer in chunks.keys.items():
        keys = torch.cat([one.keys[index].keys for one in alone])
        torch.testing.assert_close(layer.keys, keys, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["mamba2", "falcon_h1"])
def test_batches_and_prompts_of_any_length_do_not_matter(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = MODELS[name]()
    chunks = read_chunks(model, text(60), 10)
    for length in (1, 2, 9):
        prompt = text(length, seed=1)
        whole = ask_surest(model, chunks, prompt, **GREEDY)
        with monkeypatch.context() as patch:
            patch.setattr(streaming, "TOKENS_PER_FORWARD_ON_CPU", 2 * (10 + length))
            for other, one in zip(ask_surest(model, chunks, prompt, **GREEDY), whole, strict=True):
                torch.testing.assert_close(other, one, rtol=1e-9, atol=1e-9)
        assert torch.equal(
            whole[0], ask(model, read_text(model, text(60)[:, 10 * whole[1] :][:, :10]), prompt, **GREEDY)
        )


def test_chunks_of_several_texts_are_rows_in_turn() -> None:
    model, texts = MODELS["mamba2"](), torch.cat([text(25), text(25, seed=4)])
    together = read_chunks(model, texts, 10).state
    apart = concatenate_rows([read_chunks(model, one, 10).state for one in texts])
    torch.testing.assert_close(together, apart, rtol=1e-12, atol=1e-12)


def test_of_equal_chunks_the_first_answers() -> None:
    model = MODELS["mamba2"]()
    chunks = read_chunks(model, text(10).repeat(1, 4), 10)
    _, row, bits = ask_surest(model, chunks, QUESTION, **GREEDY)
    assert row == 0
    assert len(bits.unique()) == 1


def test_entropies_are_those_by_hand() -> None:
    masked = -math.inf
    logits = torch.tensor([[0.0, 0.0, 0.0, 0.0], [0.0, 0.0, masked, masked], [0.0, math.log(3), masked, masked]])
    by_hand = [2.0, 1.0, 0.25 * 2 + 0.75 * math.log2(4 / 3)]
    torch.testing.assert_close(entropy(logits), torch.tensor(by_hand, dtype=torch.float64), rtol=1e-7, atol=1e-12)
    assert entropy(torch.tensor([1e4, 0.0])) == 0  # sure beyond what exponents hold


def test_a_prompt_is_cut_between_beginning_and_question() -> None:
    assert chunk_prompts(range(11), 3, after=2, before=1) == [
        [0, 1, 2, 3, 9, 10],
        [0, 4, 5, 6, 9, 10],
        [0, 6, 7, 8, 9, 10],
    ]
    assert chunk_prompts(range(5), 2) == [[0, 1], [2, 3], [3, 4]]
    for whole in ({"length": 8, "after": 2, "before": 1}, {"length": 1, "after": 11}, {"length": 1, "before": 12}):
        assert chunk_prompts(range(11), **whole) == [[*range(11)]]


def test_questions_that_cannot_be_answered_are_refused() -> None:
    model = MODELS["mamba2"]()
    chunks = read_chunks(model, text(20), 10)
    with pytest.raises(ValueError, match=r"1 token or more.*got 0"):
        read_chunks(model, text(20), 0)
    with pytest.raises(TypeError, match="'transitions'"):
        read_chunks(model, text(20), 10, transitions=True)
    with pytest.raises(ValueError, match="one prompt, of all chunks, got 2"):
        ask_surest(model, chunks, QUESTION.repeat(2, 1))
    with pytest.raises(ValueError, match="differs from this model"):
        ask_surest(build(MAMBA2, torch.float64, seed=5).eval(), chunks, QUESTION)
    broken = replace(chunks, state=map_state(lambda part: part * float("nan"), chunks.state))
    with pytest.raises(ValueError, match="NaN"):
        ask_surest(model, broken, QUESTION[:, :1])
