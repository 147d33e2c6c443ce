"""A learned initial state: trains alone or with the model, and serves generation."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import ByT5Tokenizer, DataCollatorWithFlattening

from hf_recurrent_lengthgen.checkpoints.loading import load_model
from hf_recurrent_lengthgen.models.state_on_disk import load_state
from hf_recurrent_lengthgen.models.state_value import LayerState, RecurrentState, detach_state, map_state
from hf_recurrent_lengthgen.trainers import LearnedStateConfig, LearnedStateTrainer
from tests.trainers import toys
from tests.versions import SINCE_5_23

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
    ids = model.generate(input_ids=prompt, initial_state=state, max_new_tokens=6, do_sample=False, eos_token_id=None)
    expected = prompt
    with torch.no_grad():
        for _ in range(6):
            best = model(expected, initial_state=state).logits[:, -1].argmax(-1)
            expected = torch.cat([expected, best[:, None]], 1)
    assert ids.tolist() == expected.tolist()
    plain = model.generate(input_ids=prompt, max_new_tokens=6, do_sample=False, eos_token_id=None)
    assert ids.tolist() != plain.tolist()
    model.load_learned_state(tmp_path / "saved")
    loaded = model.generate(input_ids=prompt, max_new_tokens=6, do_sample=False, eos_token_id=None)
    assert loaded.tolist() == ids.tolist()


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
    learned = trainer.evaluate()["eval_loss"]
    with torch.no_grad():
        expected = trainer.model(ids, labels=labels, initial_state=rows_of(trainer.learned_state(), 8)).loss.item()
        assert learned == pytest.approx(trainer.model(ids, labels=labels).loss.item(), rel=1e-5)
        with trainer.model.learned_states.disable_adapter():
            assert zero == pytest.approx(trainer.model(ids, labels=labels).loss.item(), rel=1e-5)
    assert learned == pytest.approx(expected, rel=1e-5)
    assert abs(learned - zero) > 1e-2


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


def parameters_of(trainer: LearnedStateTrainer) -> list[torch.Tensor]:
    """The trained parameters, recurrent ones first."""
    return [part.detach() for part in trainer.model.learned_states["default"].parameters() if part.requires_grad]


def by_hand(
    model: Any,
    items: list[Any],
    steps: int,
    loss_of: Callable[..., torch.Tensor],
    optimizer: Any,
    clip: float,
    l2: float,
) -> tuple[list[torch.Tensor], list[float], list[float]]:
    """Section 3.1 of arXiv:2604.01168 as a loop: parameters, and the loss and its penalty at each step.

    Args:
        loss_of: From the cross-entropies of all scored tokens of each row to the loss of a step.
        optimizer: Makes an optimizer of parameters.
        clip: Norm at which gradients are clipped.
    """
    zero = model.zero_state(1)
    parts = [part.requires_grad_() for parts in zip(*zero, strict=True) for part in parts]
    chosen, losses, penalties = optimizer(parts), [], []
    for _ in range(steps):
        state = tuple(map(LayerState, parts[: len(zero)], parts[len(zero) :]))
        rows = []
        for item in items:
            logits = model(item["input_ids"][None], initial_state=state).logits[0, :-1]
            rows.append(torch.nn.functional.cross_entropy(logits, item["labels"][1:], reduction="none"))
            rows[-1] = rows[-1][item["labels"][1:] != -100]
        penalty = l2 * torch.cat([part.flatten() ** 2 for part in parts]).sum()
        loss = loss_of(rows) + penalty
        chosen.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parts, clip)
        chosen.step()
        losses.append(loss.item())
        penalties.append(penalty.item())
    return [part.detach() for part in parts], losses, penalties


def mean_of_tokens(rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat(rows).mean()


def mean_of_means(rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack([row.mean() for row in rows]).mean()


def own_loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    logits, targets = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    return torch.nn.functional.cross_entropy(logits, targets, reduction="sum") / num_items_in_batch


CONSTANT: dict[str, Any] = {
    "lr_scheduler_type": "constant",
    "gradient_accumulation_steps": 3,
    "per_device_train_batch_size": 1,
    "max_steps": 3,
}


@pytest.mark.parametrize("reduction", ["mean of tokens", "mean of means", "own loss"])
def test_the_penalty_counts_once_in_a_step_and_is_clipped_with_the_rest(learner: MakeLearner, reduction: str) -> None:
    model, items = strong().double(), toys.sequences(3)
    twin = copy.deepcopy(model)
    fields = {"compute_loss_func": own_loss} if reduction == "own loss" else {}
    trainer = learner(
        model, items, **CONSTANT, **fields, optim="sgd", learning_rate=0.5, max_grad_norm=0.3, state_l2=0.7
    )
    if reduction == "mean of means":
        trainer.model_accepts_loss_kwargs = False  # Trainer divides the loss of a micro-batch by their number
    trainer.train()
    loss_of = mean_of_means if reduction == "mean of means" else mean_of_tokens
    parts, losses, penalties = by_hand(
        twin, items, 3, loss_of, lambda parts: torch.optim.SGD(parts, lr=0.5), clip=0.3, l2=0.7
    )
    # Transformers' own loss is computed in float32
    rtol, atol = (1e-9, 1e-12) if reduction == "own loss" else (1e-5, 1e-7)
    torch.testing.assert_close(parameters_of(trainer), parts, rtol=rtol, atol=atol)
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry["loss"] for entry in logged] == pytest.approx(losses, abs=2e-4)  # Trainer rounds
    assert [entry["state_penalty"] for entry in logged] == pytest.approx(penalties, rel=1e-6)
    assert penalties[-1] > 0.04
    plain = learner(copy.deepcopy(twin), items, **CONSTANT | fields, optim="sgd", learning_rate=0.5, max_grad_norm=0.3)
    plain.train()
    assert not torch.allclose(parameters_of(plain)[0], parts[0])
    assert not any("state_penalty" in entry for entry in plain.state.log_history)


def test_evaluation_has_no_penalty(learner: MakeLearner) -> None:
    trainer = learner(learning_rate=1.0, state_l2=10.0, per_device_eval_batch_size=8)
    trainer.train()
    data = toys.sequences(8)
    ids, labels = (torch.stack([item[name] for item in data]) for name in ("input_ids", "labels"))
    with torch.no_grad():
        expected = trainer.model(ids, labels=labels, initial_state=rows_of(trainer.learned_state(), 8)).loss.item()
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-5)


def test_algorithm_1_is_the_same_training_with_other_numbers(learner: MakeLearner) -> None:
    """Training through alpha, as the paper has it: its loop from alpha S is a run with what the docstring says."""
    alpha, rate, l2, clip, epsilon = 0.25, 0.05, 0.3, 0.4, 1e-3
    model, items = strong().double(), toys.sequences(3)
    twin = copy.deepcopy(model)
    trainer = learner(
        model,
        items,
        **CONSTANT,
        learning_rate=alpha * rate,
        state_l2=l2 / alpha**2,
        max_grad_norm=clip / alpha,
        adam_epsilon=epsilon / alpha,
        compute_loss_func=own_loss,  # in float64
    )
    trainer.train()

    def through_alpha(ids: torch.Tensor, initial_state: RecurrentState) -> Any:
        return twin(ids, initial_state=map_state(lambda part: alpha * part, initial_state))

    through_alpha.zero_state = twin.zero_state  # type: ignore[attr-defined]
    parts, _, _ = by_hand(
        through_alpha,
        items,
        3,
        mean_of_tokens,
        lambda parts: torch.optim.Adam(parts, lr=rate, eps=epsilon),
        clip=clip,
        l2=l2,
    )
    # torch adds 1e-6 to the norm by which it clips
    torch.testing.assert_close(parameters_of(trainer), [alpha * part for part in parts], rtol=1e-6, atol=1e-7)


CHECKPOINTING = "activation_checkpointing" if SINCE_5_23 else "gradient_checkpointing"


@pytest.mark.parametrize("fields", [{}, {CHECKPOINTING: True}, {"bptt_chunk_length": 4}], ids=str)
def test_training_starts_from_the_parameters_and_evaluation_from_the_scale_times_them(
    learner: MakeLearner, fields: dict[str, Any]
) -> None:
    """Also where sequences begin inside rows, and where the backward pass runs layers again."""
    trained = []
    for scale in (None, 0.25):
        data = toys.sequences(8)
        trainer = learner(data=data, learning_rate=1.0, state_scale=scale, **fields)
        trainer.data_collator = DataCollatorWithFlattening()
        trainer.train()
        trained.append(parameters_of(trainer))
        zero = trainer.model.zero_state(1)
        alpha = 1.0 if scale is None else scale
        parts = [alpha * part for part in trained[-1]]
        expected = tuple(map(LayerState, parts[: len(zero)], parts[len(zero) :]))
        torch.testing.assert_close(trainer.learned_state(), expected, rtol=0, atol=0)
        torch.testing.assert_close(detach_state(trainer.model.first_state(1)), expected, rtol=0, atol=0)
        losses = []
        for item in data:
            with torch.no_grad():
                logits = trainer.model.eval()(item["input_ids"][None], initial_state=expected).logits[0, :-1]
            losses.append(torch.nn.functional.cross_entropy(logits, item["labels"][1:], reduction="none"))
            losses[-1] = losses[-1][item["labels"][1:] != -100]
        assert trainer.evaluate()["eval_loss"] == pytest.approx(float(torch.cat(losses).mean()), rel=1e-5)
    torch.testing.assert_close(*trained, rtol=0, atol=0)
    assert bool(trained[0][0].any())


def test_what_is_saved_starts_from_the_scale_times_the_parameters(learner: MakeLearner, tmp_path: Path) -> None:
    strong().save_pretrained(tmp_path / "base")
    ids = toys.sequences(1)[0]["input_ids"][None]
    trainer = learner(load_model(str(tmp_path / "base")), learning_rate=1.0, state_scale=0.3)
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    parameters, _ = load_state(tmp_path / "saved" / "learned_state.safetensors")
    state = map_state(lambda part: 0.3 * part, parameters)
    torch.testing.assert_close(trainer.learned_state(), state, rtol=0, atol=0)
    loaded = load_model(str(tmp_path / "saved"))
    torch.testing.assert_close(loaded.first_state(1), state, rtol=0, atol=0)
    torch.testing.assert_close(loaded(ids).logits, trainer.model.eval()(ids).logits, rtol=0, atol=0)

    again = learner(loaded, learning_rate=1.0)  # the scale stays, unless another is set
    torch.testing.assert_close(again.learned_state(), state, rtol=0, atol=0)
    loaded.learned_states.requires_grad_(False)
    other = learner(loaded, state_scale=2.0)
    torch.testing.assert_close(other.learned_state(), map_state(lambda part: 2 * part, parameters), rtol=0, atol=0)


def test_a_run_is_resumed_with_the_scale_of_its_checkpoint(learner: MakeLearner, tmp_path: Path) -> None:
    strong().save_pretrained(tmp_path / "base")
    model = load_model(str(tmp_path / "base"))
    model.add_learned_state("default").set_scale("default", 0.3)
    saving = {"save_strategy": "steps", "save_steps": 2}
    whole = learner(model, **saving)
    whole.train()
    resumed = learner(load_model(str(tmp_path / "base")), **saving)
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    torch.testing.assert_close(resumed.learned_state(), whole.learned_state(), rtol=0, atol=0)
    assert resumed.model.config.learned_states["scales"] == {"default": 0.3}


@pytest.mark.parametrize("with_adapter", [False, True])
def test_the_scale_is_kept_beside_a_trained_model(learner: MakeLearner, tmp_path: Path, with_adapter: bool) -> None:
    strong().save_pretrained(tmp_path / "base")
    model = load_model(str(tmp_path / "base"))
    if with_adapter:
        model = get_peft_model(model, LoraConfig(r=2, target_modules=["in_proj"], task_type="CAUSAL_LM"))
    trainer = learner(model, train_model=True, state_scale=0.3, state_l2=0.1)
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    loaded, ids = load_model(str(tmp_path / "saved")), toys.sequences(1)[0]["input_ids"][None]
    torch.testing.assert_close(loaded(ids).logits, trainer.model.eval()(ids).logits, rtol=0, atol=1e-6)
    base = loaded.get_base_model() if with_adapter else loaded
    assert base.learned_states["default"].scale == 0.3
    torch.testing.assert_close(detach_state(base.first_state(1)), trainer.learned_state(), rtol=0, atol=0)


def test_the_penalty_is_refused_where_it_would_be_left_out(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="alignment_alpha has a loss of its own, without the term of state_l2"):
        LearnedStateConfig(str(tmp_path), **toys.QUIET, state_l2=0.1, alignment_alpha=0.1)
    for name in ("state_l2", "state_scale"):
        with pytest.raises(ValueError, match=rf"{name} must be a finite number of at least 0, got inf"):
            LearnedStateConfig(str(tmp_path), **toys.QUIET, **{name: float("inf")})


def test_model_init_is_refused(tmp_path: Path) -> None:
    config = LearnedStateConfig(str(tmp_path), **toys.QUIET)
    with pytest.raises(ValueError, match="give model, not model_init"):
        LearnedStateTrainer(model_init=toys.tiny_model, args=config, train_dataset=toys.sequences(4))
