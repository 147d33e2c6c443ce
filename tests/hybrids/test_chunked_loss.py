"""The loss of wrapped models without logits, in chunks of tokens, against that of all logits."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_recurrent_lengthgen.hybrids import stateful
from hf_recurrent_lengthgen.models import modeling_loss
from tests.hybrids.measures import random_state, random_tokens
from tests.hybrids.padded_rows import PACKED, PADDED, positions_and_mask, tokens_of
from tests.hybrids.tiny_models import SUPPORTED_TYPES, VOCABULARY, tiny_composite, tiny_model

CHUNK = 5


@pytest.fixture(autouse=True)
def _fives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modeling_loss, "LOGITS_PER_CHUNK", CHUNK * VOCABULARY)


def batch(form: str, model: Any) -> dict[str, Any]:
    if form in ("padded", "packed"):
        words = PADDED[:-1] if form == "padded" else PACKED
        ids, (positions, mask) = tokens_of(words), positions_and_mask(words)
        inputs = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
        return inputs | ({"position_ids": positions} if form == "packed" else {})
    ids = random_tokens(2, 13)
    if form == "without a state":
        return {"input_ids": ids, "labels": ids}
    if form == "shifted":
        targets = ids.roll(-1, 1)
        return {"input_ids": ids, "labels": targets, "shift_labels": targets, "num_items_in_batch": torch.tensor(40)}
    return {"input_ids": ids, "labels": ids, "initial_state": random_state(model, 2)}


def sizes_of_heads(model: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens each product with the weight of the head has, from now on."""
    weight, sizes, linear = model.get_output_embeddings().weight, list[int](), nn.functional.linear

    def counted(x: Tensor, other: Tensor, *bias: Any) -> Tensor:
        if other is weight:
            sizes.append(x[..., 0].numel())
        return linear(x, other, *bias)

    monkeypatch.setattr(nn.functional, "linear", counted)
    return sizes


def assert_same(model: Any, inputs: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The same without logits, of which few tokens are computed at once: of a chunk, or one of each sequence."""
    weights = [x for x in model.parameters() if x.requires_grad]
    whole = model(**inputs)
    expected = torch.autograd.grad(3 * whole.loss, weights, allow_unused=True)
    with monkeypatch.context() as patch:
        sizes = sizes_of_heads(model, patch)
        output = model(**inputs, skip_logits=True)
    assert output.logits is None
    assert 0 < max(sizes) <= inputs["input_ids"].numel() // 4
    assert sizes.count(CHUNK) > 1
    assert output.keys() <= whole.keys() | {"final_state"}
    torch.testing.assert_close(output.loss, whole.loss, rtol=1e-5, atol=0)
    found = torch.autograd.grad(3 * output.loss, weights, allow_unused=True)
    for one, other in zip(found, expected, strict=True):
        if other is None:
            assert one is None
        else:
            # in float32, in which stock mixers run whatever the model's dtype, their delta rule is off by 1e-4 itself
            assert (one - other).norm() <= 3e-4 * other.norm() + 1e-7
    if inputs.get("initial_state") is not None:
        for ours, theirs in zip(output.final_state, whole.final_state, strict=True):
            torch.testing.assert_close(ours.recurrent, theirs.recurrent)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("form", ["from a state", "without a state", "padded", "packed", "shifted"])
@pytest.mark.parametrize("model_type", SUPPORTED_TYPES)
def test_loss_and_gradients_are_those_of_all_logits(
    model_type: str, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {"z_loss_coefficient": 0.0} if model_type == "bamba" else {}
    model = stateful(tiny_model(model_type, dtype=torch.float64, **changes)).train()
    assert_same(model, batch(form, model), monkeypatch)


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("falcon_h1", {"lm_head_multiplier": 0.3}),
        ("granitemoehybrid", {"logits_scaling": 7.0}),
        ("xlstm", {"output_logit_soft_cap": 2.0}),
    ],
)
def test_what_changes_logits_behind_the_head_counts(
    model_type: str, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = stateful(tiny_model(model_type, **changes)).train()
    inputs = batch("from a state", model)
    assert_same(model, inputs, monkeypatch)
    plain = stateful(tiny_model(model_type)).train()
    assert abs(model(**inputs, skip_logits=True).loss - plain(**inputs, skip_logits=True).loss) > 1e-3


@pytest.mark.parametrize("items", [None, torch.tensor(40)], ids=["mean", "a share"])
@pytest.mark.parametrize("form", ["from a state", "padded"])
def test_the_loss_of_experts_is_added(form: str, items: Tensor | None, monkeypatch: pytest.MonkeyPatch) -> None:
    model = stateful(tiny_model("qwen3_next", output_router_logits=True, router_aux_loss_coef=0.5)).train()
    inputs = batch(form, model) | ({} if items is None else {"num_items_in_batch": items})
    assert_same(model, inputs, monkeypatch)


def test_models_of_images_and_text_skip_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    model = stateful(tiny_composite("qwen3_5")).train()
    assert_same(model, batch("from a state", model), monkeypatch)


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning")
def test_activation_checkpointing_recomputes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    model = stateful(tiny_model("falcon_h1")).train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert_same(model, batch("from a state", model), monkeypatch)


def test_the_loss_is_the_first_of_the_output(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modeling_loss, "LOGITS_PER_CHUNK", 7 * VOCABULARY)
    model = stateful(tiny_model("falcon_h1"))
    output = model(**batch("from a state", model), skip_logits=True)
    assert output[0] is output.loss


def test_few_logits_are_computed_by_the_stock_class(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modeling_loss, "LOGITS_PER_CHUNK", 1000 * VOCABULARY)
    model = stateful(tiny_model("falcon_h1")).train()
    for form in ("from a state", "padded"):
        inputs = batch(form, model)
        torch.testing.assert_close(model(**inputs, skip_logits=True).loss, model(**inputs).loss, rtol=0, atol=0)


def test_what_has_no_such_loss_is_refused() -> None:
    bamba = stateful(tiny_model("bamba", z_loss_coefficient=0.1))
    assert not bamba.can_skip_logits
    with pytest.raises(ValueError, match="a term of all logits"):
        bamba(**batch("from a state", bamba), skip_logits=True)
    model = stateful(tiny_model("falcon_h1"))
    assert model.can_skip_logits
    with pytest.raises(ValueError, match="give labels or shift_labels"):
        model(input_ids=random_tokens(2, 13), skip_logits=True)
    with pytest.raises(ValueError, match="logits_to_keep with labels"):
        model(**batch("from a state", model), skip_logits=True, logits_to_keep=3)
    assert not model.base_model.can_skip_logits
