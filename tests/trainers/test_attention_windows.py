"""A window of attention for each step: training is that of the stock model under masks made by hand."""

import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor
from torch.nn.functional import cross_entropy

from hf_recurrent_lengthgen.hybrids import stateful
from hf_recurrent_lengthgen.trainers import (
    InitialStateConfig,
    ZeroStateTrainer,
)
from hf_recurrent_lengthgen.trainers.attention_windows import drawn_window
from tests.hybrids.measures import with_checkpointing
from tests.hybrids.test_attention_window import flash_by_hand, masked
from tests.hybrids.tiny_models import tiny_model
from tests.llamas import tiny_llama
from tests.trainers import toys

WINDOWS = [1, 2, 4, 8]


def listening(trainer: Any) -> list[tuple[int, bool, int | None, Any]]:
    """A list that gets step, mode, window and ids of each call of the model."""
    calls: list[Any] = []
    base = getattr(trainer.model, "get_base_model", lambda: trainer.model)()

    def note(model: Any, _: Any, inputs: dict[str, Any]) -> None:
        window = getattr(model.config, "attention_window", None)
        calls.append((trainer.state.global_step, model.training, window, inputs["input_ids"].clone()))

    base.register_forward_pre_hook(note, with_kwargs=True)
    return calls


def made(folder: Path, method: str = "state passing", **changes: Any) -> Any:
    settings = {"attention_windows": WINDOWS, "save_strategy": "no"} | changes
    return toys.resumable_trainer(folder, method=method, hybrid=True, **settings)


def windows_of(calls: list[Any]) -> dict[int, int]:
    """The one window of each step."""
    found = {(step, window) for step, training, window, _ in calls if training}
    assert len(dict(found)) == len(found)
    return dict(sorted(found))


def config_without_window(config: Any) -> None:
    assert "attention_window" not in vars(config)
    assert "attention_window" not in config.to_dict()


@pytest.mark.thinned(3)
@pytest.mark.parametrize("checkpointed", [False, True], ids=["", "checkpointed"])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_weights_are_those_of_a_loop_over_the_stock_model_with_masks(
    tmp_path: Path, accumulation: int, checkpointed: bool
) -> None:
    # whose stock layers compute in float64, too
    stock, rows = tiny_model("lfm2").double().train(), toys.sequences(24)
    model = stateful(tiny_model("lfm2").double())
    settings: dict[str, Any] = toys.QUIET | {"save_strategy": "no", "max_steps": 6, "max_grad_norm": 0.0}
    settings |= {"per_device_train_batch_size": 2, "gradient_accumulation_steps": accumulation}
    if checkpointed:
        with_checkpointing(model)
    args = InitialStateConfig(str(tmp_path), attention_windows=WINDOWS, **settings)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)

    def mean(output: Any, labels: Tensor, num_items_in_batch: Any) -> Tensor:  # that of Transformers is in float32
        return cross_entropy(output.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum") / (
            num_items_in_batch
        )

    both: Any = {"optimizers": (optimizer, schedule), "compute_loss_func": mean}
    trainer = ZeroStateTrainer(model, args, train_dataset=rows, **both)
    calls = listening(trainer)
    trainer.train()
    assert len(set(windows_of(calls).values())) > 2
    labels = {tuple(row["input_ids"].tolist()): row["labels"] for row in rows}
    by_hand = torch.optim.SGD(stock.parameters(), 0.1)
    for step in range(6):
        losses, targets = [], 0
        for at, _, window, ids in calls:
            if at == step:
                logits = masked(stock, ids, window, use_cache=False).logits[:, :-1]
                shifted = torch.stack([labels[tuple(row.tolist())] for row in ids])[:, 1:]
                losses.append(cross_entropy(logits.flatten(0, 1), shifted.flatten(), reduction="sum"))
                targets += int((shifted != -100).sum())
        assert len(losses) == accumulation
        by_hand.zero_grad()
        (torch.stack(losses).sum() / targets).backward()
        by_hand.step()
    expected = dict(stock.named_parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter, expected[name], rtol=0, atol=1e-12)
    config_without_window(model.config)


def test_the_recomputation_has_the_window_of_the_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    windows = []

    def flash(*args: Any, sliding_window: int, **named: Any) -> Any:
        windows.append((trainer.state.global_step, sliding_window))
        return flash_by_hand(*args, sliding_window=sliding_window, **named)

    monkeypatch.setattr("transformers.integrations.flash_attention._flash_attention_forward", flash)
    trainer = made(tmp_path)
    with_checkpointing(trainer.model)
    trainer.model.config._attn_implementation = "flash_attention_2"
    calls = listening(trainer)
    trainer.train()
    assert dict(windows) == windows_of(calls)
    assert len(set(windows)) == 8
    assert len(windows) == 2 * len(calls)  # the forward pass and its repetition in the backward pass


@pytest.mark.slow
@pytest.mark.parametrize("method", ["state passing", "tbtt", "tbtt on examples", "learned state", "alignment"])
def test_each_method_has_one_window_per_step_and_evaluates_with_its_own(tmp_path: Path, method: str) -> None:
    trainer = made(tmp_path, method, rows=16)
    for step in (2, 5):
        trainer.add_callback(toys.OnStep(step, lambda: trainer.evaluate(toys.sequences(2))))
    calls = listening(trainer)
    trainer.train()
    seen = windows_of(calls)
    draws = {}
    for step in seen:
        trainer.state.global_step = step
        with drawn_window(trainer):
            draws[step] = trainer.model.config.attention_window
    assert seen == draws
    assert len(set(seen.values())) > 1
    assert {window for _, training, window, _ in calls if not training} == {None}
    config_without_window(trainer.model.config)


def test_windows_are_drawn_uniformly_from_seed_and_step() -> None:
    model = toy = SimpleNamespace(config=tiny_model("bamba").config)

    def draws(seed: int) -> list[int]:
        found = []
        for step in range(600):
            args = SimpleNamespace(attention_windows=[3, 5, 5, 9], seed=seed)
            with drawn_window(SimpleNamespace(args=args, model=model, state=SimpleNamespace(global_step=step))):
                found.append(toy.config.attention_window)
        return found

    first, again, other = draws(1), draws(1), draws(2)
    assert first == again != other
    counts = Counter(first)
    assert chisquare([counts[3], counts[5], counts[9]], [150, 300, 150]).pvalue > 0.01
    assert len({*zip(first, other, strict=True)}) == 9


@pytest.mark.thinned(2)
@pytest.mark.parametrize("own", [None, 3])
def test_a_resumed_run_is_the_whole_one_and_checkpoints_have_the_own_window(tmp_path: Path, own: int | None) -> None:
    whole, resumed = (made(tmp_path, save_strategy="steps") for _ in range(2))
    for trainer in (whole, resumed):
        stateful(trainer.model, attention_window=own)
    calls, again = listening(whole), listening(resumed)
    whole.train()
    saved = [json.loads(file.read_text()) for file in tmp_path.glob("checkpoint-*/config.json")]
    assert len(saved) == 8
    assert {one.get("attention_window") for one in saved} == {own}
    resumed.train(str(tmp_path / "checkpoint-3"))
    toys.assert_same_weights(toys.weights(resumed.model), toys.weights(whole.model))
    assert windows_of(again) == {step: window for step, window in windows_of(calls).items() if step >= 3}
    for windows in ([1, 2, 4], None):
        other = made(tmp_path, attention_windows=windows)
        stateful(other.model, attention_window=own)
        with pytest.raises(ValueError, match=r"attention_windows was \[1, 2, 4, 8\] and is"):
            other.train(str(tmp_path / "checkpoint-3"))


@pytest.mark.parametrize("own", [None, 5])
@pytest.mark.parametrize("ends", [KeyboardInterrupt, RuntimeError])
def test_a_run_that_breaks_off_leaves_the_own_window(
    tmp_path: Path, own: int | None, ends: type[BaseException]
) -> None:
    trainer = made(tmp_path)
    stateful(trainer.model, attention_window=own)
    before = trainer.model.config.to_dict()

    def fail(model: Any, *_: Any) -> None:
        assert model.config.attention_window in WINDOWS
        raise ends("here")

    trainer.model.register_forward_hook(fail)
    with pytest.raises(ends, match="here"):
        trainer.train()
    assert trainer.model.config.to_dict() == before


@pytest.mark.parametrize("windows", [[0], [4, -1], [2.0], "4"], ids=str)
def test_windows_that_are_none_are_refused(windows: Any, tmp_path: Path) -> None:
    args = InitialStateConfig(str(tmp_path), attention_windows=windows, **toys.QUIET)
    with pytest.raises(ValueError, match="attention_window must be a number of tokens of at least 1"):
        ZeroStateTrainer(toys.tiny_hybrid(), args, train_dataset=toys.sequences(4))


def test_models_without_a_window_are_refused(tmp_path: Path) -> None:
    llama = tiny_llama(vocab_size=toys.VOCABULARY)
    args = InitialStateConfig(str(tmp_path), attention_windows=[4], **toys.QUIET)
    for model in (toys.tiny_model(), stateful(tiny_model("mamba2")), toys.SumModel(), llama):
        with pytest.raises(ValueError, match=f"{type(model).__name__} .* limits the attention of hybrids"):
            ZeroStateTrainer(model, args, train_dataset=toys.sequences(4))
    scaled = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    with pytest.raises(ValueError, match="rotary embeddings that change with the length"):
        ZeroStateTrainer(stateful(tiny_model("bamba", rope_parameters=scaled)), args, train_dataset=toys.sequences(4))
