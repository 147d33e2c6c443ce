"""A learned initial state: trains alone or with the model, and serves generation."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import ByT5Tokenizer

from hf_recurrent_lengthgen.checkpoints.loading import load_model
from hf_recurrent_lengthgen.models.state_on_disk import load_state
from hf_recurrent_lengthgen.models.state_value import LayerState, RecurrentState, detach_state, map_state
from hf_recurrent_lengthgen.trainers import LearnedStateConfig, LearnedStateTrainer
from tests.trainers import toys

MakeLearner = Callable[..., LearnedStateTrainer]


@pytest.fixture
def learner(tmp_path: Path) -> MakeLearner:
    """A trainer of four steps on a model whose outputs depend on its state."""

    def make(model: Any = None, data: Any = None, **fields: Any) -> LearnedStateTrainer:
        settings = {
            "save_strategy": "no",
            "per_device_train_batch_size": 2,
            "max_steps": 4,
            "learning_rate": 0.05,
            "logging_steps": 1,
        }
        extra = {name: fields.pop(name) for name in ("compute_loss_func", "processing_class") if name in fields}
        config = LearnedStateConfig(str(tmp_path / "run"), **toys.QUIET | settings | fields)
        data = toys.sequences(8) if data is None else data
        return LearnedStateTrainer(
            strong() if model is None else model, config, train_dataset=data, eval_dataset=data, **extra
        )

    return make


def strong() -> Any:
    return toys.tiny_model(initializer_range=0.6)


def rows_of(state: RecurrentState, rows: int) -> RecurrentState:
    return map_state(lambda part: part.expand(rows, *part.shape[1:]), state)


def test_one_step_is_gradient_descent_on_the_state(learner: MakeLearner) -> None:
    model = strong()
    twin = copy.deepcopy(model).train()
    item = toys.sequences(1)[0]
    trainer = learner(
        model, [item] * 2, max_steps=1, optim="sgd", learning_rate=0.5, lr_scheduler_type="constant", max_grad_norm=0.0
    )
    trainer.train()
    state = tuple(LayerState(*(part.requires_grad_() for part in layer)) for layer in twin.zero_state(1))
    twin(item["input_ids"][None], labels=item["labels"][None], initial_state=state).loss.backward()
    expected = tuple(LayerState(*(-0.5 * part.grad for part in layer)) for layer in state)  # type: ignore[operator]
    torch.testing.assert_close(trainer.learned_state(), expected, rtol=1e-4, atol=1e-7)
    assert all(bool(part.any()) for layer in expected for part in layer)


@pytest.mark.parametrize("learn_conv", [True, False])
def test_only_the_state_is_trained_and_all_of_it(learner: MakeLearner, learn_conv: bool) -> None:
    trainer = learner(learn_conv_state=learn_conv)
    assert not any(bool(part.any()) for layer in trainer.learned_state() for part in layer)
    trainer.train()
    start = toys.weights(strong())
    now = toys.weights(trainer.model)
    toys.assert_same_weights({name: now[name] for name in start}, start)
    trained = {name for name, value in trainer.model.named_parameters() if value.requires_grad}
    parts = ("recurrent", "conv") if learn_conv else ("recurrent",)
    assert trained == {f"backbone.learned_states.default.{part}.{layer}" for part in parts for layer in range(2)}
    for layer in trainer.learned_state():
        assert bool(layer.recurrent.any())
        assert bool(layer.conv.any()) == learn_conv


def test_the_saved_file_is_the_state_alone_and_generates(learner: MakeLearner, tmp_path: Path) -> None:
    trainer = learner(processing_class=ByT5Tokenizer(), learning_rate=1.0)
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    names = {path.name for path in (tmp_path / "saved").iterdir()}
    assert {"learned_state.safetensors", "learned_state_config.json", "tokenizer_config.json"} <= names
    assert not any(name.startswith(("model", "config", "pytorch")) for name in names)
    state, _ = load_state(tmp_path / "saved" / "learned_state.safetensors")
    torch.testing.assert_close(state, trainer.learned_state(), rtol=0, atol=0)

    model = strong().eval()
    prompt = torch.tensor([[5, 6, 7]])
    given = model.generate(input_ids=prompt, initial_state=state, max_new_tokens=6, do_sample=False, eos_token_id=None)
    expected = prompt
    with torch.no_grad():
        for _ in range(6):
            best = model(expected, initial_state=state).logits[:, -1].argmax(-1)
            expected = torch.cat([expected, best[:, None]], 1)
    assert given.tolist() == expected.tolist()
    plain = model.generate(input_ids=prompt, max_new_tokens=6, do_sample=False, eos_token_id=None)
    assert given.tolist() != plain.tolist()
    model.load_learned_state(tmp_path / "saved")
    loaded = model.generate(input_ids=prompt, max_new_tokens=6, do_sample=False, eos_token_id=None)
    assert loaded.tolist() == given.tolist()


def test_with_the_model_everything_is_trained_and_saved(learner: MakeLearner, tmp_path: Path) -> None:
    trainer = learner(train_model=True)
    before = toys.weights(trainer.model)
    trainer.train()
    assert [name for name, value in toys.weights(trainer.model).items() if torch.equal(value, before[name])] == []
    trainer.save_model(str(tmp_path / "saved"))
    assert not (tmp_path / "saved" / "learned_state_config.json").exists()
    loaded = load_model(str(tmp_path / "saved"))
    toys.assert_same_weights(toys.weights(loaded), toys.weights(trainer.model))
    torch.testing.assert_close(detach_state(loaded.first_state(1)), trainer.learned_state(), rtol=0, atol=0)


def test_evaluation_starts_from_the_learned_state(learner: MakeLearner) -> None:
    trainer = learner(learning_rate=1.0, per_device_eval_batch_size=8)
    data = toys.sequences(8)
    ids, labels = (torch.stack([item[name] for item in data]) for name in ("input_ids", "labels"))
    zero = trainer.evaluate()["eval_loss"]
    trainer.train()
    given = trainer.evaluate()["eval_loss"]
    with torch.no_grad():
        expected = trainer.model(ids, labels=labels, initial_state=rows_of(trainer.learned_state(), 8)).loss.item()
        assert given == pytest.approx(trainer.model(ids, labels=labels).loss.item(), rel=1e-5)
        with trainer.model.learned_states.disable_adapter():
            assert zero == pytest.approx(trainer.model(ids, labels=labels).loss.item(), rel=1e-5)
    assert given == pytest.approx(expected, rel=1e-5)
    assert abs(given - zero) > 1e-2


def test_evaluation_in_bfloat16_starts_from_the_learned_state(learner: MakeLearner, tmp_path: Path) -> None:
    trainer = learner(learning_rate=1.0, per_device_eval_batch_size=8, bf16_full_eval=True)
    trainer.train()
    state, data = trainer.learned_state(), toys.sequences(8)
    ids, labels = (torch.stack([item[name] for item in data]) for name in ("input_ids", "labels"))
    with torch.no_grad():
        expected = trainer.model(ids, labels=labels, initial_state=rows_of(state, 8)).loss.item()
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-2)
    trainer.save_model(str(tmp_path / "saved"))
    saved, _ = load_state(tmp_path / "saved" / "learned_state.safetensors")
    torch.testing.assert_close(saved, state, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("train_model", [False, True])
def test_a_state_is_learned_with_or_instead_of_adapters(
    learner: MakeLearner, tmp_path: Path, train_model: bool
) -> None:
    settings = LoraConfig(r=2, target_modules=["in_proj"], task_type="CAUSAL_LM")
    strong().save_pretrained(tmp_path / "base")
    base = load_model(str(tmp_path / "base"))
    trainer = learner(get_peft_model(base, settings), train_model=train_model)
    before = toys.weights(trainer.model)
    trainer.train()
    moved = {name for name, value in toys.weights(trainer.model).items() if not torch.equal(value, before[name])}
    assert moved == {name for name in before if "learned" in name or (train_model and "lora_" in name)}
    assert len(moved) == 4 + 4 * train_model
    trainer.save_model(str(tmp_path / "saved"))
    names = {path.name for path in (tmp_path / "saved").iterdir()}
    assert "learned_state.safetensors" in names
    assert ("adapter_model.safetensors" in names) == train_model
    state, _ = load_state(tmp_path / "saved" / "learned_state.safetensors")
    torch.testing.assert_close(state, trainer.learned_state(), rtol=0, atol=0)
    if train_model:
        adapter = load_file(tmp_path / "saved" / "adapter_model.safetensors")
        assert not any("learned" in name for name in adapter)
        ids = toys.sequences(1)[0]["input_ids"][None]
        loaded = load_model(str(tmp_path / "saved"))
        torch.testing.assert_close(loaded(ids).logits, trainer.model.eval()(ids).logits, rtol=0, atol=1e-6)


def test_model_init_is_refused(tmp_path: Path) -> None:
    config = LearnedStateConfig(str(tmp_path), **toys.QUIET)
    with pytest.raises(ValueError, match="give model, not model_init"):
        LearnedStateTrainer(model_init=toys.tiny_model, args=config, train_dataset=toys.sequences(4))
