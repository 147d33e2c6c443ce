"""What functions ask of a model that has states is what our models and wrapped hybrids have."""

from typing import Any

import pytest

from hf_recurrent_lengthgen.hybrids import stateful
from hf_recurrent_lengthgen.models.modeling_protocols import HybridModel, StatefulModel
from tests.hybrids.tiny_models import tiny_model

from .families import FAMILIES, Family, build, random_tokens, variant_id


def check(model: Any, protocol: Any) -> None:
    names = {name for kind in protocol.__mro__ for name in (*vars(kind), *vars(kind).get("__annotations__", {}))}
    assert {"config", "device", "state_shapes", "zero_state", "named_parameters"} <= names
    assert [name for name in names if not name.startswith("_") and not hasattr(model, name)] == []
    zero, shapes = model.zero_state(2), model.state_shapes()
    assert [part.shape[1:] for layer in zero for part in layer] == [size for shape in shapes for size in shape]
    assert model(random_tokens(2, 3), initial_state=zero, output_final_state=True).final_state is not None


@pytest.mark.parametrize("family", FAMILIES, ids=variant_id)
def test_our_models_are_stateful_models(family: Family) -> None:
    check(build(family), StatefulModel)


def test_wrapped_models_are_hybrid_models() -> None:
    check(stateful(tiny_model("falcon_h1")), HybridModel)
