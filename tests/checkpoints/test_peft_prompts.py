"""Prompt-learning methods of PEFT: right, against a loop without a cache, or refused in a sentence."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import MultitaskPromptTuningConfig, PeftModel, PrefixTuningConfig, PromptTuningConfig, get_peft_model
from torch import Tensor

from hf_recurrent_lengthgen.hybrids import stateful
from tests.hybrids.tiny_models import SUPPORTED_TYPES, tiny_model
from tests.models.families import FAMILIES, MAMBA2, RWKV7, build

COMMON = {"task_type": "CAUSAL_LM", "num_attention_heads": 1}
METHODS: dict[str, Callable[[], Any]] = {
    "prompt": lambda: PromptTuningConfig(num_virtual_tokens=3, **COMMON),
    "multitask": lambda: MultitaskPromptTuningConfig(num_virtual_tokens=3, num_tasks=2, **COMMON),
}
MODELS: dict[str, Callable[[], Any]] = {
    **{family.name: lambda family=family: build(family) for family in FAMILIES},
    **{f"stock {name}": lambda name=name: stateful(tiny_model(name)) for name in SUPPORTED_TYPES},
}
QUICK = ("mamba2", "stock falcon_h1", "stock minimax")
every_model = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in MODELS]
)
GREEDY = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None}

pytestmark = pytest.mark.filterwarnings("ignore:Position ids are not supported:UserWarning")


def prompted(model: Any, method: Callable[[], Any]) -> PeftModel:
    """A model whose virtual tokens are random."""
    torch.manual_seed(0)
    peft_model = get_peft_model(model, method())
    with torch.no_grad():
        for parameter in peft_model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return peft_model


def by_hand(model: Any, ids: Tensor, mask: Tensor | None = None, **more: Any) -> Tensor:
    """Greedy tokens, each from the whole text."""
    mask = torch.ones_like(ids) if mask is None else mask
    for _ in range(GREEDY["max_new_tokens"]):
        with torch.no_grad():
            logits = model(input_ids=ids, attention_mask=mask, use_cache=False, **more).logits
        ids = torch.cat([ids, logits[:, -1:].argmax(-1)], dim=1)
        mask = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)
    return ids


@every_model
@pytest.mark.parametrize("method", METHODS)
def test_virtual_tokens_train_and_are_generated_from(name: str, method: str, tmp_path: Any) -> None:
    model, ids = prompted(MODELS[name](), METHODS[method]), torch.tensor([[3, 4, 5, 6], [9, 8, 7, 6]])
    more = {"task_ids": torch.tensor([0, 1])} if method == "multitask" else {}
    model.train()(input_ids=ids, labels=ids, **more).loss.backward()
    trained = {name: value.grad for name, value in model.named_parameters() if value.requires_grad}
    assert all(gradient is not None and bool(gradient.any()) for gradient in trained.values())
    model.eval()
    expected = by_hand(model, ids, **more)
    assert torch.equal(model.generate(input_ids=ids, use_cache=False, **GREEDY, **more), expected)
    if name.startswith("stock"):
        with pytest.raises(ValueError, match=r"virtual tokens of PEFT.*before each new token: .*use_cache=False"):
            model.generate(input_ids=ids, **GREEDY, **more)
        return
    assert torch.equal(model.generate(input_ids=ids, **GREEDY, **more), expected)
    if method == "prompt":
        model.save_pretrained(tmp_path)
        loaded = PeftModel.from_pretrained(MODELS[name](), tmp_path)
        assert torch.equal(loaded.generate(input_ids=ids, **GREEDY), expected)


@pytest.mark.parametrize("family", [MAMBA2, RWKV7], ids=lambda family: family.name)
def test_virtual_tokens_with_padding_states_and_beams(family: Any) -> None:
    base = build(family)
    model, ids = prompted(base, METHODS["prompt"]).eval(), torch.tensor([[0, 0, 5, 6], [9, 8, 7, 6]])
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    found = model.generate(input_ids=ids, attention_mask=mask, **GREEDY)
    assert torch.equal(found, by_hand(model, ids, mask))
    with torch.no_grad():
        state = base(input_ids=ids.flip(1) + 1).final_state
    found = model.generate(input_ids=ids, attention_mask=mask, initial_state=state, **GREEDY)
    assert torch.equal(found, by_hand(model, ids, mask, initial_state=state))
    beams = [model.generate(input_ids=ids, num_beams=3, use_cache=cached, **GREEDY) for cached in (True, False)]
    assert torch.equal(*beams)
    cache = model.generate(input_ids=ids, return_dict_in_generate=True, **GREEDY).past_key_values
    with pytest.raises(ValueError, match="reads only the last token after a cache"):
        model.generate(input_ids=ids, past_key_values=cache, **GREEDY)


@every_model
def test_methods_that_train_keys_are_refused(name: str) -> None:
    model = prompted(MODELS[name](), lambda: PrefixTuningConfig(num_virtual_tokens=3, **COMMON))
    for call in (model, model.generate):
        with pytest.raises(
            ValueError, match=r"recurrent layers do not have\. .*add_learned_state.*PromptTuningConfig"
        ):
            call(input_ids=torch.tensor([[3, 4, 5]]))
