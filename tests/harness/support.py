"""Models of each type in lm_eval: scores with shared prefixes against those of whole texts by the stock model."""

from typing import Any

from lm_eval.models.huggingface import HFLM

from hf_recurrent_lengthgen import stateful
from hf_recurrent_lengthgen.data import byte_tokenizer
from hf_recurrent_lengthgen.harness import StateLM
from tests.harness.test_lm import CONTEXTS, MULTIPLE_CHOICE, QUIET, requests
from tests.hybrids.tiny_models import tiny_model

GENERATE = requests("generate_until", *((text, {"until": ["\n\n"], "max_gen_toks": 6}) for text in [*CONTEXTS, "ab"]))


def made(model_type: str) -> Any:
    """A tiny model that reads bytes."""
    return tiny_model(model_type, vocab_size=384, pad_token_id=0, bos_token_id=1, eos_token_id=1)


def ours(model: Any, batch_size: int = 3) -> StateLM:
    return StateLM(model, tokenizer=byte_tokenizer(), batch_size=batch_size)


def theirs(model: Any) -> HFLM:
    """lm_eval's class, one row at a time: stock recurrent layers are wrong with padding."""
    return HFLM(pretrained=model, tokenizer=byte_tokenizer(), max_length=4096, add_bos_token=False, batch_size=1)


def error_of(model_type: str) -> float:
    """The largest difference of log-likelihoods, in nats.

    Raises:
        ValueError: if the type or its generation is refused, and for greedy texts that differ.
    """
    found, expected = ours(stateful(made(model_type))), theirs(made(model_type))
    pairs = zip(
        found.loglikelihood(MULTIPLE_CHOICE, **QUIET), expected.loglikelihood(MULTIPLE_CHOICE, **QUIET), strict=True
    )
    error = max(abs(one[0] - other[0]) for one, other in pairs)
    if found.generate_until(GENERATE, **QUIET) != expected.generate_until(GENERATE, **QUIET):
        raise ValueError("Its greedy texts differ")
    return error
