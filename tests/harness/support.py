"""Each type of model in lm_eval: scores with shared prefixes against those of whole texts by the stock model.

    python -m tests.harness.support

The largest difference of log-likelihoods in nats; whether greedy texts are those of lm_eval's own class; or the reason
of a refusal.
"""

from typing import Any

from lm_eval.models.huggingface import HFLM

from hf_recurrent_lengthgen import stateful
from hf_recurrent_lengthgen.data import byte_tokenizer
from hf_recurrent_lengthgen.harness import StateLM
from tests.harness.test_lm import CONTEXTS, MULTIPLE_CHOICE, QUIET, requests
from tests.hybrids.tiny_models import TINY, tiny_model

GENERATE = requests("generate_until", *((text, {"until": ["\n\n"], "max_gen_toks": 6}) for text in [*CONTEXTS, "ab"]))


def made(model_type: str) -> Any:
    """A tiny model that reads bytes."""
    return tiny_model(model_type, vocab_size=384, pad_token_id=0, bos_token_id=1, eos_token_id=1)


def ours(model: Any, batch_size: int = 3) -> StateLM:
    return StateLM(model, tokenizer=byte_tokenizer(), batch_size=batch_size)


def theirs(model: Any) -> HFLM:
    """lm_eval's class, one row at a time: stock recurrent layers are wrong with padding."""
    return HFLM(pretrained=model, tokenizer=byte_tokenizer(), max_length=4096, add_bos_token=False, batch_size=1)


def measured(model_type: str) -> tuple[str, str]:
    """The error of scores and the state of generation of a type, or the reason of a refusal."""
    try:
        found = ours(stateful(made(model_type)))
    except ValueError as error:
        return f"no: {error}", ""
    expected = theirs(made(model_type))
    scores = zip(
        found.loglikelihood(MULTIPLE_CHOICE, **QUIET), expected.loglikelihood(MULTIPLE_CHOICE, **QUIET), strict=True
    )
    error = max(abs(one[0] - other[0]) for one, other in scores)
    try:
        same = found.generate_until(GENERATE, **QUIET) == expected.generate_until(GENERATE, **QUIET)
    except ValueError as refusal:
        return f"{error:.0e}", f"no: {refusal}"
    return f"{error:.0e}", "same" if same else "differs"


if __name__ == "__main__":
    print("| `model_type` | log-likelihoods | greedy texts |\n|---|---|---|")
    for name in TINY:
        print(f"| `{name}` | {' | '.join(measured(name))} |", flush=True)
