"""Long contexts of lm_eval in independent chunks, against the paper's loop with the stock model."""

import copy
from typing import Any

import pytest
import torch
from transformers import Mamba2ForCausalLM

from hf_recurrent_lengthgen import stateful
from hf_recurrent_lengthgen.data import byte_tokenizer
from hf_recurrent_lengthgen.harness import StateLM
from tests.data.test_tokens import putting
from tests.harness.support import made
from tests.harness.test_lm import QUIET, assert_same, draw, requests

SENTENCES = ["the cat is 7. ", "a dog is 12, or 13! ", "ZEBRAS AND OTHERS; ", "nobody knows the third (3rd) one. "]
LONG = ["Read: " + "".join(SENTENCES[:count] * 2) + f"Q{count}: so" for count in (2, 3, 4)]
CHUNK, QUESTION, INSTRUCTION = 21, 6, 6
CHOICES = [" yes", " no"]


def ids_of(text: str) -> list[int]:
    return [byte + 3 for byte in text.encode()]


@torch.no_grad()
def logits_after(model: Any, ids: list[int]) -> torch.Tensor:
    return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].double()


def chosen(model: Any, ids: list[int], before: int = INSTRUCTION) -> list[int]:
    """The prompt of the paper whose next token has the least entropy."""
    start, stop, prompts = before, len(ids) - QUESTION, []
    while start + CHUNK < stop:
        prompts.append(ids[:before] + ids[start : start + CHUNK] + ids[stop:])
        start += CHUNK
    prompts.append(ids[:before] + ids[stop - CHUNK : stop] + ids[stop:])
    bits = [float(torch.distributions.Categorical(logits=logits_after(model, ids)[-1]).entropy()) for ids in prompts]
    least, second, *_ = sorted(bits)
    assert second - least > 1e-4  # rounding does not choose
    return prompts[bits.index(least)]


def continued(model: Any, ids: list[int], most: int) -> str:
    generated: list[int] = []
    while len(generated) < most:
        generated.append(int(logits_after(model, ids + generated)[-1].argmax()))
    return byte_tokenizer().decode(generated, skip_special_tokens=True)


def score(model: Any, ids: list[int], choice: list[int]) -> tuple[float, bool]:
    rows = logits_after(model, ids + choice)[len(ids) - 1 : -1].log_softmax(-1)
    of_choice = sum(float(row[token]) for row, token in zip(rows, choice, strict=True))
    return of_choice, rows.argmax(-1).tolist() == choice


@pytest.fixture
def drawn(stock: Mamba2ForCausalLM) -> Any:
    model = copy.deepcopy(stock)
    draw(model)
    return model


def in_chunks(model: Any, tokenizer: Any = None, **options: Any) -> StateLM:
    sizes = {"independent_chunks": CHUNK, "question_tokens": QUESTION, "instruction_tokens": INSTRUCTION}
    return StateLM(model, tokenizer=tokenizer or byte_tokenizer(), batch_size=3, **sizes | options)


@pytest.mark.parametrize("name", ["mamba2", pytest.param("falcon_h1", marks=pytest.mark.slow)])
def test_answers_are_those_after_the_chunk_of_least_entropy(name: str, drawn: Any) -> None:
    stock = drawn if name == "mamba2" else made(name).eval()
    lm = in_chunks(stateful(copy.deepcopy(stock)))
    short = LONG[0][:20]
    until = {"until": ["\n\n\n"], "max_gen_toks": 5}
    found = lm.generate_until(requests("generate_until", *((text, until) for text in [*LONG, short])), **QUIET)
    prompts = [chosen(stock, ids_of(text)) for text in LONG]
    assert found == [continued(stock, ids, 5) for ids in [*prompts, ids_of(short)]]
    requested = requests("loglikelihood", *((text, choice) for text in LONG for choice in CHOICES))
    expected = [score(stock, ids, ids_of(choice)) for ids in prompts for choice in CHOICES]
    assert_same(lm.loglikelihood(requested, **QUIET), expected)


def test_the_chunks_of_a_context_are_read_once_for_all_choices(drawn: Any) -> None:
    one, two = in_chunks(stateful(drawn)), in_chunks(stateful(drawn))
    one.loglikelihood(requests("loglikelihood", (LONG[2], CHOICES[0])), **QUIET)
    two.loglikelihood(requests("loglikelihood", *((LONG[2], choice) for choice in CHOICES)), **QUIET)
    prompt = INSTRUCTION + CHUNK + QUESTION
    assert one.tokens_read > 8 * prompt
    assert two.tokens_read < one.tokens_read + 2 * prompt  # that of the chosen chunk is too short to be shared


def test_what_the_tokenizer_puts_before_a_text_stands_before_each_chunk(drawn: Any) -> None:
    lm = in_chunks(stateful(copy.deepcopy(drawn)), putting("[gMASK] <sop> $A"), instruction_tokens=0)
    ids = lm.tok_encode(LONG[1])
    before = lm.tok_encode("")
    assert len(before) == 2
    assert lm._surest([ids], True) == [chosen(drawn, ids, before=2)]


def test_what_has_no_question_is_refused(drawn: Any) -> None:
    model = stateful(drawn)
    with pytest.raises(ValueError, match="No question stands after a document"):
        in_chunks(model).loglikelihood_rolling(requests("loglikelihood_rolling", (LONG[0],)), **QUIET)
    wrong: list[dict[str, Any]] = [{"question_tokens": -1}, {"instruction_tokens": -1}, {"question_tokens": 1.5}]
    wrong += [{"independent_chunks": value} for value in (None, 0, -3, "2k", 512.0, True)]  # as lm_eval reads them
    for options in wrong:
        with pytest.raises(ValueError, match="a number of tokens, 1 or more, with question_tokens and"):
            in_chunks(model, **options)
