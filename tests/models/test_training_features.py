"""What users switch on in training: checkpointing, adapters, packed weights, embeddings of another size."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from hf_recurrent_lengthgen.checkpoints.adapters import add_adapter
from hf_recurrent_lengthgen.models.state_value import map_state

from .families import FAMILIES, GLA, VOCABULARY, Family, build, random_state, random_tokens, variant_id

every_family = pytest.mark.parametrize("family", FAMILIES, ids=variant_id)


def loss_and_gradients(model: Any, length: int = 20) -> tuple[Tensor, dict[str, Tensor]]:
    """A step through two chunks with the state carried; the gradients of parameters and initial state."""
    model.zero_grad()
    tokens = random_tokens(2, length)
    state = map_state(Tensor.requires_grad_, random_state(model, 2))
    half = length // 2
    first = model(tokens[:, :half], labels=tokens[:, :half], initial_state=state)
    second = model(tokens[:, half:], labels=tokens[:, half:], initial_state=first.final_state)
    loss = first.loss + second.loss
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    for index, layer in enumerate(state):
        assert layer.recurrent.grad is not None
        gradients[f"recurrent {index}"] = layer.recurrent.grad
        if layer.conv.numel():
            assert layer.conv.grad is not None
            gradients[f"conv {index}"] = layer.conv.grad
    return loss.detach(), gradients


def assert_same_step(model: Any, other: Any) -> None:
    (loss, gradients), (other_loss, other_gradients) = loss_and_gradients(model), loss_and_gradients(other)
    torch.testing.assert_close(loss, other_loss)
    assert gradients.keys() == other_gradients.keys()
    for name, gradient in gradients.items():
        assert gradient.abs().max() > 0, name
        assert (gradient - other_gradients[name]).norm() <= 1e-5 * gradient.norm(), name


def quietly(function: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """The old name of the switch warns in newer versions of Transformers."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*gradient_checkpointing.* is deprecated", FutureWarning)
        function(*args, **kwargs)


def saved_bytes(model: Any) -> int:
    """Bytes that autograd keeps for a backward pass, each storage once, parameters excluded."""
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = model(random_tokens(2, 200))
        output.logits.sum()
    return sum(kept.values())


def enable_by(name: str) -> Callable[[Any, dict[str, Any] | None], None]:
    def enable(model: Any, kwargs: dict[str, Any] | None = None) -> None:
        if not hasattr(model, name):
            pytest.skip(f"this Transformers has no {name}")
        quietly(getattr(model, name), *([] if kwargs is None else [kwargs]))

    return enable


SWITCHES = ["gradient_checkpointing_enable", "activation_checkpointing_enable"]


@pytest.mark.thinned(5)
@every_family
@pytest.mark.parametrize("switch", SWITCHES)
def test_activation_checkpointing_keeps_the_step_and_saves_memory(family: Family, switch: str) -> None:
    model, plain = build(family).train(), build(family).train()
    enable_by(switch)(model)
    assert all(layer.gradient_checkpointing for layer in model.base_model.layers)
    assert_same_step(model, plain)
    assert saved_bytes(model) < 0.5 * saved_bytes(plain)
    quietly(model.gradient_checkpointing_disable)
    assert saved_bytes(model) == saved_bytes(plain)


@pytest.mark.thinned(5)
@every_family
@pytest.mark.parametrize("switch", SWITCHES)
@pytest.mark.parametrize("kwargs", [{"use_reentrant": True}, {"preserve_rng_state": False}], ids=str)
def test_reentrant_checkpointing_is_refused(family: Family, switch: str, kwargs: dict[str, Any]) -> None:
    """Torch takes a missing `use_reentrant` as True."""
    model = build(family).train()
    with pytest.raises(
        ValueError, match=r'loses the gradients .* use gradient_checkpointing_kwargs={"use_reentrant": F'
    ):
        enable_by(switch)(model, kwargs)
    assert not any(layer.gradient_checkpointing for layer in model.base_model.layers)
    enable_by(switch)(model, {"use_reentrant": False})


@pytest.mark.thinned(5)
@every_family
@pytest.mark.parametrize("checkpointed", [False, True])
def test_generation_and_caches_work_with_checkpointing_on(family: Family, checkpointed: bool) -> None:
    """A stock cache is dropped under checkpointing, with a warning at most; a state is not."""
    model = build(family).train()
    if checkpointed:
        enable_by("gradient_checkpointing_enable")(model)
    tokens = random_tokens(2, 6)
    first = model(tokens[:, :3], use_cache=True)
    second = model(tokens[:, 3:], past_key_values=first.past_key_values)
    torch.testing.assert_close(second.logits, model(tokens).logits[:, 3:], rtol=1e-4, atol=1e-4)
    second.logits.sum().backward()
    options = {"max_new_tokens": 3, "do_sample": False, "eos_token_id": None}
    assert torch.equal(model.generate(tokens, **options), build(family).generate(tokens, **options))


@pytest.mark.thinned(5)
@every_family
def test_every_lora_parameter_moves_and_merging_keeps_the_logits(family: Family) -> None:
    base = build(family)
    model = get_peft_model(
        copy.deepcopy(base),
        LoraConfig(
            task_type="CAUSAL_LM", r=2, target_modules=sorted(family.linear_modules | {"embeddings", base.head_name})
        ),
    ).train()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    linear = sum(isinstance(module, torch.nn.Linear) for module in base.base_model.layers.modules())
    assert len(trained) == 2 * (linear + 2)
    before = {name: p.detach().clone() for name, p in trained.items()}
    optimizer = torch.optim.SGD(trained.values(), lr=0.1)
    tokens = random_tokens(2, 12)
    for _ in range(2):  # the A factors move from the second step on, since B starts at zero
        optimizer.zero_grad()
        output = model(input_ids=tokens[:, :6], initial_state=random_state(base, 2))
        model(input_ids=tokens[:, 6:], labels=tokens[:, 6:], initial_state=output.final_state).loss.backward()
        optimizer.step()
    assert [name for name, p in trained.items() if torch.equal(p, before[name])] == []
    model.eval()
    logits = model(input_ids=tokens).logits
    assert (logits - base(tokens).logits).abs().max() > 1e-3
    merged = model.merge_and_unload()
    assert type(merged) is family.causal_lm_class
    torch.testing.assert_close(merged(tokens).logits, logits, rtol=1e-4, atol=1e-4)


@every_family
def test_the_layers_that_adapters_go_on_by_default_are_there_and_train(family: Family) -> None:
    model = add_adapter(build(family), 2, 4).train()
    targets = model.peft_config["default"].target_modules
    assert targets <= family.linear_modules | set(model.config.lora_target_modules)
    covered = {name.split(".lora_")[0] for name, _ in model.named_parameters() if "lora_B" in name}
    assert len(covered) == len(targets) * model.config.num_hidden_layers
    tokens = random_tokens(2, 12)
    model(input_ids=tokens, labels=tokens, initial_state=random_state(model.get_base_model(), 2)).loss.backward()
    ups = {name: parameter.grad for name, parameter in model.named_parameters() if "lora_B" in name}
    assert [name for name, gradient in ups.items() if gradient is None or not gradient.any()] == []


with_convolution = pytest.mark.parametrize("family", [f for f in FAMILIES if f.conv_module], ids=variant_id)


@with_convolution
def test_whole_modules_can_be_trained_next_to_adapters(family: Family) -> None:
    """`modules_to_save` replaces the module; the convolution's weight must come from the copy that trains."""
    model = build(family)
    last_norm = [name for name, _ in model.base_model.named_children()][-1]
    saved_modules = [family.conv_module, last_norm]
    targets = sorted(family.linear_modules)[:1]
    model = get_peft_model(
        model, LoraConfig(task_type="CAUSAL_LM", target_modules=targets, modules_to_save=saved_modules)
    ).train()
    tokens = random_tokens(2, 8)
    model(input_ids=tokens, labels=tokens).loss.backward()
    saved = {name: p for name, p in model.named_parameters() if "modules_to_save" in name}
    assert len(saved) == 2 * 2 + 1
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in saved.values())


@pytest.mark.parametrize("family", [f for f in FAMILIES if f.conv_module] + [GLA], ids=variant_id)
@pytest.mark.filterwarnings("ignore:LoRA adapter added to ConvNd layer with groups > 1")
def test_an_adapter_on_a_convolution_is_refused_since_it_would_not_train(family: Family) -> None:
    """Also on one of several."""
    model = build(family, **({"use_short_conv": True} if family is GLA else {}))
    name = "k_conv1d" if family is GLA else "conv1d"
    (channels, *_) = (m.in_channels for n, m in model.named_modules() if n.endswith(name))
    targets = [name, *([] if family is GLA else sorted(family.linear_modules))]
    model = get_peft_model(model, LoraConfig(r=channels, target_modules=targets))
    with pytest.raises(ValueError, match=rf"adapter on {name} has no effect.*modules_to_save"):
        model(random_tokens(1, 3))


@pytest.mark.thinned(5)
@every_family
@pytest.mark.parametrize("tied", [False, True])
def test_the_vocabulary_can_grow_and_shrink(family: Family, tied: bool) -> None:
    model = build(family, tie_word_embeddings=tied)
    tokens, expected = random_tokens(2, 6), build(family, tie_word_embeddings=tied)(random_tokens(2, 6)).logits
    model.resize_token_embeddings(VOCABULARY + 5, mean_resizing=False)
    logits = model(tokens).logits
    assert logits.shape[-1] == model.config.vocab_size == VOCABULARY + 5
    assert torch.equal(logits[..., :VOCABULARY], expected)
    assert (model.get_input_embeddings().weight is model.get_output_embeddings().weight) is tied
    model.resize_token_embeddings(VOCABULARY)
    assert torch.equal(model(tokens).logits, expected)
    assert torch.isfinite(model(tokens, labels=tokens).loss)


@every_family
def test_input_embeddings_can_be_passed_and_replaced(family: Family) -> None:
    model, tokens = build(family), random_tokens(2, 6)
    embeds = model.get_input_embeddings()(tokens)
    assert torch.equal(model(inputs_embeds=embeds).logits, model(tokens).logits)
    replacement = nn.Embedding(VOCABULARY, model.config.hidden_size)
    model.set_input_embeddings(replacement)
    assert model.base_model.embeddings is replacement
    torch.testing.assert_close(model(tokens).logits, model(inputs_embeds=replacement(tokens)).logits)


class PackedLinear(nn.Module):
    """A linear layer with 8-bit weights in one flat tensor, like the 4-bit ones of bitsandbytes."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.shape = linear.weight.shape
        self.scale = linear.weight.detach().abs().max() / 127
        packed = (linear.weight.detach() / self.scale).round().to(torch.int8)
        self.weight = nn.Parameter(packed.view(torch.uint8).reshape(-1, 1), requires_grad=False)
        self.bias = linear.bias

    def unpacked(self) -> Tensor:
        return self.weight.view(torch.int8).view(self.shape).float() * self.scale

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.unpacked(), self.bias)


@every_family
def test_layers_run_on_packed_weights(family: Family) -> None:
    """As QLoRA's are: the layers call them and never read their weights."""
    packed = build(family)
    head = packed.get_output_embeddings()
    names = [name for name, module in packed.named_modules() if isinstance(module, nn.Linear) and module is not head]
    assert names
    rounded = copy.deepcopy(packed)
    for name in names:
        parent, _, last = name.rpartition(".")
        layer = PackedLinear(packed.get_submodule(name))  # type: ignore[arg-type]
        setattr(packed.get_submodule(parent), last, layer)
        rounded.get_submodule(name).weight.data = layer.unpacked()
    tokens = random_tokens(2, 9)
    actual, expected = packed(tokens, labels=tokens), rounded(tokens, labels=tokens)
    torch.testing.assert_close(actual.logits, expected.logits)
    actual.loss.backward()  # into what is not packed
