"""The loss without logits, in chunks of tokens, against the loss of all logits: values and every gradient."""

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.nn.functional import pad

from hf_recurrent_lengthgen.models import modeling_heads, modeling_loss
from hf_recurrent_lengthgen.models.state_value import map_state

from .families import FAMILIES, GLA, MAMBA2, RWKV7, VOCABULARY, Family, build, random_state, random_tokens, variant_id

every_family = pytest.mark.parametrize("family", FAMILIES, ids=variant_id)
B, T = 3, 11
SIZES = {"1": 1, "7": 7, "T": T, "all but one": B * T - 1}
FORMS = ("labels", "shift_labels", "both", "padded left", "padded right", "packed", "kept", "num_items", "few targets")


@pytest.fixture(params=SIZES.values(), ids=SIZES.keys())
def chunk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Tokens of a chunk."""
    return chunks_of(request.param, monkeypatch)


@pytest.fixture
def sevens(monkeypatch: pytest.MonkeyPatch) -> int:
    return chunks_of(7, monkeypatch)


def chunks_of(size: int, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(modeling_loss, "LOGITS_PER_CHUNK", size * VOCABULARY)
    return size


def batch(form: str) -> dict[str, Any]:
    ids = random_tokens(B, T)
    if form == "shift_labels":
        return {"input_ids": ids, "shift_labels": random_tokens(B, T)}
    if form == "both":
        return {"input_ids": ids, "labels": ids, "shift_labels": pad(ids[:, 1:], (0, 1), value=3)}
    inputs: dict[str, Any] = {"input_ids": ids, "labels": ids}
    if form.startswith("padded"):
        mask = torch.arange(T) >= torch.tensor([0, 3, T - 1])[:, None]
        inputs["attention_mask"] = (mask if form == "padded left" else mask.flip(1)).long()
    elif form == "packed":
        inputs["position_ids"] = torch.tensor([*range(4), *range(T - 4)]).expand(B, T)
    elif form == "kept":
        inputs |= {"labels": ids[:, 2:], "logits_to_keep": T - 2}
    elif form == "num_items":
        inputs["num_items_in_batch"] = torch.tensor(57)
    elif form == "few targets":
        inputs["labels"] = ids.where(torch.arange(T) > torch.tensor([2, T, 8])[:, None], -100)
    return inputs


def step(model: Any, inputs: dict[str, Any], **further: Any) -> tuple[Any, dict[str, Tensor]]:
    """The output of a call from a state, and the gradients of its weights and of that state."""
    model.zero_grad()
    state = map_state(Tensor.requires_grad_, random_state(model, B))
    output = model(**inputs, **further, initial_state=state)
    (3 * output.loss).backward()
    found = {name: x.grad.clone() for name, x in model.named_parameters() if x.grad is not None}
    return output, found | {f"state {i}": x.grad for i, (x, _) in enumerate(state) if x.grad is not None}


def assert_same(model: Any, inputs: dict[str, Any], most: int, error: float = 2e-6) -> None:
    """The same loss and gradients without logits, of which at most those of so many tokens are computed at once."""
    whole, expected = step(model, inputs)
    tokens: list[int] = []

    class Watched(type(model)):  # type: ignore[misc]
        def logits_of(self, hidden_states: Tensor) -> Tensor:
            tokens.append(hidden_states.shape[:2].numel())
            return super().logits_of(hidden_states)

    model.__class__, before = Watched, type(model)
    try:
        output, found = step(model, inputs, skip_logits=True)
    finally:
        model.__class__ = before
    assert output.logits is None
    assert 0 < max(tokens) <= most
    torch.testing.assert_close(output.loss, whole.loss, rtol=error, atol=0)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert gradient.abs().max() > 0, name
        assert (gradient - found[name]).norm() <= 5 * error * gradient.norm(), name


def exact(family: Family, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> Any:
    """A model in float64 whose loss is in float64, too: that of Transformers is always in float32."""

    def loss_function(logits: Tensor, labels: Any, shift_labels: Any = None, num_items_in_batch: Any = None, **_: Any):  # type: ignore[no-untyped-def]
        targets = pad(labels, (0, 1), value=-100)[:, 1:] if shift_labels is None else shift_labels
        losses = torch.nn.functional.cross_entropy(logits.mT, targets, reduction="none")
        return losses.sum() / ((targets != -100).sum() if num_items_in_batch is None else num_items_in_batch)

    model = build(family, torch.float64, **changes)
    model.loss_function = loss_function
    monkeypatch.setattr(modeling_heads, "ForCausalLMLoss", loss_function)
    return model


@pytest.mark.thinned(4)
@every_family
def test_loss_and_all_gradients_are_those_of_all_logits(
    family: Family, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_same(exact(family, monkeypatch), batch("labels"), chunk, error=1e-12)


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_targets_is_scored_as_with_logits(
    form: str, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_same(exact(MAMBA2, monkeypatch), batch(form), chunk, error=1e-12)


def test_few_logits_are_computed_at_once_and_are_the_same_to_the_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    chunks_of(B * T, monkeypatch)
    assert_same(build(MAMBA2), batch("padded left"), B * T, error=0)


def test_tokens_without_a_target_get_no_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    chunks_of(B * T - 1, monkeypatch)
    assert_same(build(MAMBA2), batch("few targets"), T - 3 + T - 9)


def test_a_tied_head_gets_both_gradients(sevens: int) -> None:
    assert_same(build(MAMBA2, tie_word_embeddings=True), batch("labels"), sevens)


def test_a_frozen_head_and_a_frozen_backbone_get_none(sevens: int) -> None:
    model = build(MAMBA2)
    model.lm_head.requires_grad_(False)
    assert_same(model, batch("labels"), sevens)
    model.requires_grad_(False)
    model.lm_head.requires_grad_()
    assert_same(model, batch("labels"), sevens)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_other_dtypes(dtype: torch.dtype, sevens: int) -> None:
    """Transformers computes the loss in float32 even of float64; bfloat16 rounds each gradient of a weight."""
    assert_same(build(MAMBA2, dtype), batch("labels"), sevens, error=2e-6 if dtype == torch.float64 else 4e-3)


def test_gradients_of_a_bfloat16_weight_are_summed_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """One chunk per token: sums in bfloat16 would be wrong by more than one rounding."""
    chunks_of(1, monkeypatch)
    torch.manual_seed(0)
    head = torch.nn.Linear(8, VOCABULARY, bias=False)
    hidden, targets = torch.randn(1, 1024, 8), torch.randint(0, VOCABULARY, (1, 1024))

    def gradient(dtype: torch.dtype) -> Tensor:
        layer = torch.nn.Linear(8, VOCABULARY, bias=False, dtype=dtype)
        layer.load_state_dict(head.bfloat16().state_dict())

        def score(hidden: Tensor, targets: Tensor) -> Tensor:
            logits = layer(hidden).to(torch.promote_types(dtype, torch.float32))
            return torch.nn.functional.cross_entropy(logits[0], targets[0], reduction="sum")

        modeling_loss.chunked_loss(score, layer, hidden.bfloat16().to(dtype), targets).backward()
        assert layer.weight.grad is not None
        return layer.weight.grad.double()

    exact, found = gradient(torch.float64), gradient(torch.bfloat16)
    assert (found - exact).norm() <= 3e-3 * exact.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_under_autocast_the_weight_gets_a_gradient_in_float32(dtype: torch.dtype, sevens: int) -> None:
    """float16 has all logits at once, since a GradScaler gives the scale of its gradients."""
    model = build(MAMBA2)
    with torch.autocast("cpu", dtype):
        assert_same(model, batch("labels"), sevens if dtype == torch.bfloat16 else B * T, error=1e-2)
    assert model.lm_head.weight.grad.dtype == torch.float32


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_only_the_loss_is_computed(mode: Any, sevens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = build(MAMBA2), batch("padded left")
    monkeypatch.setattr(torch.autograd, "grad", None)
    with mode():
        loss = model(**inputs, skip_logits=True).loss
    assert not loss.requires_grad
    torch.testing.assert_close(loss, model(**inputs).loss.detach(), rtol=2e-6, atol=0)


def test_no_targets_are_nan_as_with_logits_and_change_nothing(sevens: int) -> None:
    model = build(MAMBA2)
    inputs = {"input_ids": random_tokens(B, T), "labels": torch.full((B, T), -100)}
    for further in ({}, {"num_items_in_batch": torch.tensor(5)}):
        whole, expected = step(model, inputs | further)
        output, found = step(model, inputs | further, skip_logits=True)
        torch.testing.assert_close(output.loss, whole.loss, equal_nan=True)
        assert found.keys() == expected.keys()
        assert all(bool((x == 0).all()) for x in (*found.values(), *expected.values()))


def test_accumulated_micro_batches_are_one_batch(sevens: int) -> None:
    model, inputs = build(MAMBA2), batch("labels")
    _, expected = step(model, inputs)
    found: dict[str, Tensor] = {}
    for row in range(B):
        model.zero_grad()
        state = tuple(type(x)(*(part[row : row + 1] for part in x)) for x in random_state(model, B))
        one = {name: x[row : row + 1] for name, x in inputs.items()}
        output = model(**one, initial_state=state, num_items_in_batch=B * (T - 1), skip_logits=True)
        (3 * output.loss).backward()
        for name, x in model.named_parameters():
            found[name] = found.get(name, torch.zeros(())) + x.grad
    for name, gradient in found.items():
        assert (gradient - expected[name]).norm() <= 1e-5 * expected[name].norm(), name


def test_a_step_may_run_backward_twice_but_not_be_differentiated_twice(sevens: int) -> None:
    model, inputs = build(MAMBA2), batch("labels")
    weight = model.lm_head.weight
    loss = model(**inputs, skip_logits=True).loss
    (first,) = torch.autograd.grad(loss, weight, retain_graph=True)
    (second,) = torch.autograd.grad(loss, weight, retain_graph=True)
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    (once,) = torch.autograd.grad(loss, weight, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        once.sum().backward()


@pytest.mark.parametrize("kind", ["adapter", "hook", "hook of the weight", "head of its own"])
def test_heads_that_are_more_than_weights_compute_all_logits_at_once(kind: str, sevens: int) -> None:
    model = build(MAMBA2)
    if kind == "adapter":
        lora = LoraConfig(r=2, target_modules=["lm_head", "in_proj"], init_lora_weights=False)
        model = get_peft_model(model, lora).get_base_model()
    elif kind == "hook":
        model.lm_head.register_forward_hook(lambda module, args, output: 2 * output)
    elif kind == "hook of the weight":
        model.lm_head.weight.register_hook(lambda gradient: 2 * gradient)
    else:
        model.lm_head = torch.nn.Sequential(model.lm_head)
        model.lm_head.weight = model.lm_head[0].weight
    assert_same(model, batch("padded left"), B * T, error=0)


def test_a_head_whose_weights_are_no_parameters_learns(sevens: int) -> None:
    """As those of a replica of DataParallel."""
    model, rows = build(MAMBA2), batch("labels")
    weight = model.lm_head.weight
    model.lm_head = model.lm_head._replicate_for_data_parallel()
    model.lm_head.weight, model.lm_head.bias = weight.view_as(weight), None
    found, expected = (torch.autograd.grad(model(**rows, skip_logits=skip).loss, weight)[0] for skip in (True, False))
    assert (found - expected).norm() <= 1e-5 * expected.norm()


def test_adapters_in_the_backbone_learn_from_chunks(sevens: int) -> None:
    lora = LoraConfig(r=2, target_modules=["in_proj", "out_proj"], init_lora_weights=False)
    assert_same(get_peft_model(build(MAMBA2), lora).get_base_model(), batch("labels"), sevens)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning:torch")  # of torch.compile
def test_a_compiled_model_gives_the_same_loss(sevens: int) -> None:
    model, inputs = build(MAMBA2), batch("labels")
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    output = compiled(**inputs, skip_logits=True)
    assert output.logits is None
    torch.testing.assert_close(output.loss, model(**inputs).loss, rtol=2e-6, atol=0)


def test_what_has_no_such_loss_is_refused() -> None:
    model, inputs = build(MAMBA2), batch("labels")
    with pytest.raises(ValueError, match="give labels or shift_labels"):
        model(inputs["input_ids"], skip_logits=True)
    model.loss_function = lambda logits, labels, **_: logits.square().mean()
    assert not model.can_skip_logits
    with pytest.raises(ValueError, match="a loss_function of your own"):
        model(**inputs, skip_logits=True)
    with_l2warp = build(RWKV7, use_l2warp=True)
    assert build(RWKV7).can_skip_logits
    assert not with_l2warp.can_skip_logits
    with pytest.raises(ValueError, match="a term of all logits"):
        with_l2warp(**inputs, skip_logits=True)


def test_labels_of_another_shape_are_refused(sevens: int) -> None:
    for name in ("labels", "shift_labels"):
        with pytest.raises(ValueError, match="must have shape"):
            build(GLA)(random_tokens(B, T), **{name: random_tokens(B, T - 1)}, skip_logits=True)
