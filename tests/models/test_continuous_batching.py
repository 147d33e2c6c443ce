"""Continuous batching of Transformers, which keeps no recurrent states: refused, where it would be silently wrong."""

from typing import Any

import pytest

from hf_recurrent_lengthgen.hybrids import stateful
from tests.hybrids.tiny_models import tiny_model

from .families import MAMBA2, RWKV6, Family, build

PROMPTS = [[5, 6, 7], [8, 9, 10, 11, 12]]


def assert_refused(model: Any) -> None:
    for ask in (lambda: model.generate_batch(inputs=PROMPTS, max_new_tokens=4), model.init_continuous_batching):
        with pytest.raises(ValueError, match=f"{type(model).__name__} cannot be batched continuously.*no recurrent"):
            ask()


@pytest.mark.parametrize("family", [MAMBA2, RWKV6], ids=lambda family: family.name)
def test_models_of_this_package_refuse_it(family: Family) -> None:
    assert_refused(build(family).eval())


@pytest.mark.parametrize("model_type", ["falcon_h1", "xlstm"])
def test_wrapped_models_refuse_it(model_type: str) -> None:
    assert_refused(stateful(tiny_model(model_type)).eval())
