"""Wrapped models under torch.compile: whole texts are compiled, calls with states run as they are."""

import pytest
import torch

from hf_recurrent_lengthgen import stateful

from .measures import random_tokens
from .test_core_law import QUICK
from .tiny_models import SUPPORTED_TYPES, tiny_model


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the compiler, about its own internals
@pytest.mark.parametrize("name", sorted(QUICK & {*SUPPORTED_TYPES}))
def test_a_compiled_model_gives_what_the_uncompiled_one_gives(name: str) -> None:
    torch._dynamo.reset()
    model = stateful(tiny_model(name))
    compiled = torch.compile(model, backend="eager")
    ids = random_tokens(2, 20)
    with torch.no_grad():
        for run in (model, compiled):
            whole = run(ids, use_cache=False)
            first = run(ids[:, :12], output_final_state=True)
            second = run(ids[:, 12:], initial_state=first.final_state)
            if run is model:
                expected, expected_whole = second, whole
    torch.testing.assert_close(whole.logits, expected_whole.logits, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(second.logits, expected.logits)
    torch.testing.assert_close(second.final_state, expected.final_state)
