"""The numbers of lm_eval's own class, with shared prefixes read once: recurrent models and hybrids."""

import pytest
from lm_eval.models.huggingface import HFLM

from hf_recurrent_lengthgen import stateful
from hf_recurrent_lengthgen.data import byte_tokenizer
from hf_recurrent_lengthgen.evaluation import shared_prefixes
from hf_recurrent_lengthgen.harness import StateLM
from tests.harness import support
from tests.harness.test_lm import CHOICES, CONTEXTS, HEADER, MULTIPLE_CHOICE, QUIET, assert_same, requests

# one hybrid of each kind of cache and mixer: Mamba-2 beside attention, delta rule, short convolutions, Mamba-2 with
# shared attention, Mamba-1, and one without attention
NAMES = ["falcon_h1", "qwen3_next", "lfm2", "zamba2", "jamba", "falcon_mamba", "mamba2"]


def ours(name: str, batch_size: int = 3) -> StateLM:
    return support.ours(stateful(support.made(name)), batch_size)


def theirs(name: str) -> HFLM:
    return support.theirs(support.made(name))


@pytest.mark.thinned(5)
@pytest.mark.parametrize("name", NAMES)
def test_the_numbers_are_those_of_lm_eval(name: str) -> None:
    found, expected = ours(name), theirs(name)
    requested = MULTIPLE_CHOICE + requests("loglikelihood", ("", "alone"), ("x", " y"), ("x ", "y"))
    assert_same(found.loglikelihood(requested, **QUIET), expected.loglikelihood(requested, **QUIET))
    # each context once, and of the choices what the next one does not share
    assert found.tokens_read < 1.2 * len(HEADER) + sum(len(context) for context in CONTEXTS)
    documents = requests("loglikelihood_rolling", ("abc",), ("",), ("A text that goes on. " * 20,))
    rolling = found.loglikelihood_rolling(documents, **QUIET)
    assert rolling == pytest.approx(expected.loglikelihood_rolling(documents, **QUIET), abs=2e-3)
    texts = [*CONTEXTS, "ab", CONTEXTS[0], "c"]
    generate = requests("generate_until", *((text, {"until": ["\n\n"], "max_gen_toks": 10}) for text in texts))
    answers = found.generate_until(generate, **QUIET)
    assert answers == expected.generate_until(generate, **QUIET)
    assert len(set(answers)) > 2


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_sharing_and_batches_change_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [*CONTEXTS, CONTEXTS[1], "short", "as long", "of seven"]
    generate = requests("generate_until", *((text, {"until": ["\n"], "max_gen_toks": 8}) for text in texts))
    alone = ours(name, batch_size=1)
    scores = [alone.loglikelihood([one], **QUIET)[0] for one in MULTIPLE_CHOICE]
    read = alone.tokens_read
    answers = [alone.generate_until([one], **QUIET)[0] for one in generate]
    together = ours(name, batch_size=4)
    assert_same(together.loglikelihood(MULTIPLE_CHOICE, **QUIET), scores)
    assert together.tokens_read < read / len(CHOICES)
    assert together.generate_until(generate, **QUIET) == answers
    monkeypatch.setattr(shared_prefixes, "TOKENS_PER_FORWARD", 7)  # in chunks
    assert_same(together.loglikelihood(MULTIPLE_CHOICE, **QUIET), scores)
    assert together.generate_until(generate, **QUIET) == answers


@pytest.mark.thinned(2)
@pytest.mark.parametrize("name", NAMES)
def test_beams_continue_shared_prefixes(name: str) -> None:
    arguments = {"until": [], "max_gen_toks": 8, "num_beams": 3}
    requested = requests("generate_until", *((text, arguments) for text in [*CONTEXTS, CONTEXTS[0]]))
    assert ours(name).generate_until(requested, **QUIET) == theirs(name).generate_until(requested, **QUIET)


def test_a_stock_hybrid_is_reported_to_need_a_wrapper() -> None:
    with pytest.raises(ValueError, match=r"its cache changes as it reads.*Wrap a hybrid with stateful"):
        StateLM(support.made("falcon_h1"), tokenizer=byte_tokenizer())
