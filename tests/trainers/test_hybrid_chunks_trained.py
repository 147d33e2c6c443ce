"""Trainers read the rows of hybrids in chunks and windows: as rows at once, or as windows are defined.

All is computed in float64, also where code names float32.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.nn.functional import cross_entropy

from hf_recurrent_lengthgen.hybrids import stateful
from hf_recurrent_lengthgen.trainers import (
    InitialStateConfig,
    TbttConfig,
    TbttTrainer,
    ZeroStateTrainer,
)
from tests.hybrids.measures import relative_error
from tests.hybrids.test_law import InFloat64
from tests.hybrids.tiny_models import tiny_composite, tiny_model
from tests.trainers import toys
from tests.trainers.test_hybrid_chunks import LFM, in_float64
from tests.trainers.test_windows import PLAIN, loop, windows_from_the_end
from tests.versions import SINCE_5_23

METHODS = ["zero state", "random noise", "fitted noise", "state passing", "learned state", "learned state and model"]

ROUNDED = 1e-7
"""Where something is in float32: numbers of Trainer, or what is computed again in the backward pass."""


def hybrid(model_type: str) -> Any:
    """A model to train, in float64."""
    with InFloat64():
        return in_float64(stateful(tiny_model(model_type, dtype=torch.float64)))


def run(folder: Path, model: Any, method: str = "zero state", trainer: Any = None, **settings: Any) -> Any:
    """A trainer after two steps of gradient descent, of two micro-batches of three rows each unless said otherwise."""
    chosen = toys.METHODS[method]
    usual = {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 2, "save_strategy": "no", "max_steps": 2}
    usual["train_sampling_strategy"] = "random"
    fields = toys.QUIET | PLAIN | usual | {"learning_rate": 0.05, "logging_steps": 1} | chosen.settings | settings
    scored = fields.pop("eval_dataset", None)
    args, rows = chosen.config(str(folder), **fields), toys.examples(14)
    made = (trainer or chosen.trainer)(model, args, train_dataset=rows, eval_dataset=scored)
    made.train()
    return made


def same_run(folder: Path, make: Callable[[], Any], *args: Any, **settings: Any) -> Any:
    """Train with and without `bptt_...`: the weights and the log must be the same. The trainer with it."""
    without = {name: value for name, value in settings.items() if not name.startswith("bptt_")}
    whole, chunks = run(folder / "whole", make(), *args, **without), run(folder / "chunks", make(), *args, **settings)
    found, expected, before = (toys.weights(model) for model in (chunks.model, whole.model, make()))
    assert relative_error([*found.values()], [*expected.values()]) < 1e-9
    moved = [(weight - before.get(name, 0)).abs().max() for name, weight in expected.items() if weight.numel()]
    assert max(moved) > 1e-4
    for one, other in zip(*(map(comparable, each.state.log_history) for each in (chunks, whole)), strict=True):
        assert one == pytest.approx(other, rel=1e-5)
    return chunks


def comparable(line: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in line.items() if not name.endswith(("_runtime", "_second", "idle_tokens"))}


@pytest.mark.thinned(23)
@pytest.mark.parametrize("model_type", ["falcon_h1", "qwen3_5_text"])
@pytest.mark.parametrize("method", [*METHODS, "mixture"])
@pytest.mark.parametrize(("chunk", "window"), [(4, None), (64, None), (4, 6)])
def test_methods_train_on_chunks_as_on_rows(
    tmp_path: Path, model_type: str, method: str, chunk: int, window: int | None
) -> None:
    """Rows of 1 to 23 tokens; one window over all chunks is the row."""
    if window is None or "learned" not in method:  # which takes no windows
        same_run(tmp_path, lambda: hybrid(model_type), method, bptt_chunk_length=chunk, bptt_window=window)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"attention_windows": [1, 3, 8], "max_steps": 4},
        {"per_device_train_batch_size": 1, "max_steps": 3},
        {"eval_strategy": "steps", "eval_steps": 1, "eval_dataset": toys.examples(5)},
    ],
    ids=["windows of attention", "rows alone", "evaluation"],
)
def test_settings_of_training_go_with_chunks(tmp_path: Path, settings: dict[str, Any]) -> None:
    same_run(tmp_path, lambda: hybrid(LFM), bptt_chunk_length=4, **settings)


@pytest.mark.thinned(5)
@pytest.mark.parametrize("model_type", ["falcon_h1", "qwen3_next", LFM])
@pytest.mark.parametrize("window", [1, 2, 6])
def test_windows_are_those_of_a_loop_that_detaches_states_and_keys(
    tmp_path: Path, model_type: str, window: int
) -> None:
    rows, model, expected = toys.examples(6), hybrid(model_type), hybrid(model_type)
    fields = {"per_device_train_batch_size": 3, "save_strategy": "no", "num_train_epochs": 1} | toys.QUIET | PLAIN
    args = TbttConfig(str(tmp_path), bptt_chunk_length=4, bptt_window=window, **fields)
    TbttTrainer(model, args, train_dataset=rows).train()
    wanted = loop(expected, rows, 3, 4 * window)
    assert relative_error([*toys.weights(model).values()], [*wanted.values()]) < 1e-9


@contextmanager
def detached_before(model: Any, place: int) -> Iterator[None]:
    """Within the block, what layers of LFM2 keep of the tokens before a place has no gradient."""

    def cut(_: Any, __: Any, output: Tensor) -> Tensor:
        return torch.cat([output[:, :place].detach(), output[:, place:]], 1)

    kept = [x for name, x in model.named_modules() if name.endswith(("k_layernorm", "v_proj", "in_proj"))]
    handles = [module.register_forward_hook(cut) for module in kept]
    yield
    for handle in handles:
        handle.remove()


@pytest.mark.thinned(3)
@pytest.mark.parametrize(("model_type", "window"), [("lfm2", 1), ("lfm2", 2), ("lfm2", 6), ("falcon_h1", None)])
def test_windows_are_those_of_the_stock_model_that_detaches_what_came_before(
    tmp_path: Path, model_type: str, window: int | None
) -> None:
    """In LFM2, whose states are columns that its layers get; without windows, rows are read at once."""
    rows, model = toys.examples(5), hybrid(model_type)
    stock = tiny_model(model_type, dtype=torch.float64).train()
    fields = {"per_device_train_batch_size": 5, "save_strategy": "no", "max_steps": 1} | toys.QUIET | PLAIN
    trainer: Any = ZeroStateTrainer if window is None else TbttTrainer
    args = trainer.config_class(str(tmp_path), bptt_chunk_length=4, bptt_window=window, **fields)
    trainer(model, args, train_dataset=rows).train()
    losses, count = [], 0
    with InFloat64():
        for row in rows:
            size = int(row["attention_mask"].sum())
            targets = torch.nn.functional.pad(row["labels"][1:size], (0, 1), value=-100)
            count += int((targets != -100).sum())
            for part in windows_from_the_end(size, window and 4 * window):
                with detached_before(stock, part.start):
                    logits = stock(row["input_ids"][None, :size], use_cache=False).logits[0, part]
                losses.append(cross_entropy(logits, targets[part], reduction="sum"))
        (torch.stack(losses).sum() / count).backward()
    expected = [weight - args.learning_rate * weight.grad for weight in stock.parameters()]
    assert relative_error([*model.parameters()], expected) < ROUNDED


def adapters(**changes: Any) -> Any:
    lora = {"target_modules": "all-linear", "modules_to_save": ["lm_head"], "init_lora_weights": False} | changes
    torch.manual_seed(0)
    with InFloat64():
        return get_peft_model(hybrid("qwen3_5_text"), LoraConfig(task_type="CAUSAL_LM", **lora))


@pytest.mark.slow
@pytest.mark.parametrize("window", [pytest.param(None, marks=pytest.mark.slow), 6])
def test_adapters_train_on_chunks_as_on_rows(tmp_path: Path, window: int | None) -> None:
    chunks = same_run(tmp_path, adapters, "state passing", bptt_chunk_length=4, bptt_window=window)
    before = dict(adapters().named_parameters())
    moved = {name for name, weight in chunks.model.named_parameters() if not torch.equal(weight, before[name])}
    for part in ("q_proj.lora_A", "k_proj.lora_A", "in_proj_qkv.lora_B", "modules_to_save"):
        assert any(part in name for name in moved), part


@pytest.mark.parametrize("window", [pytest.param(None, marks=pytest.mark.slow), 2])
def test_activation_checkpointing_and_a_cache_in_the_config_change_nothing(tmp_path: Path, window: int | None) -> None:
    name = "activation_checkpointing" if SINCE_5_23 else "gradient_checkpointing"
    found = []
    for enabled in (False, True):
        model = stateful(tiny_model("falcon_h1", dtype=torch.float64))
        model.config.use_cache = enabled
        run(tmp_path, model, bptt_chunk_length=4, bptt_window=window, **{name: enabled})
        found.append([*toys.weights(model).values()])
    assert relative_error(*found) < ROUNDED


@pytest.mark.slow
def test_a_composite_of_images_and_text_trains_on_chunks_as_on_rows(tmp_path: Path) -> None:
    same_run(tmp_path, lambda: in_float64(stateful(tiny_composite("qwen3_5").double())), bptt_chunk_length=4)


def test_the_loss_of_an_evaluation_is_that_of_the_stock_model(tmp_path: Path) -> None:
    model, rows = hybrid("falcon_h1"), toys.examples(6)
    args = InitialStateConfig(str(tmp_path), bptt_chunk_length=4, per_device_eval_batch_size=4, **toys.QUIET)
    trainer = ZeroStateTrainer(model, args, train_dataset=rows)
    at_once: list[int] = []
    model.model.register_forward_pre_hook(
        lambda _, __, inputs: at_once.append(inputs["input_ids"].shape[1]), with_kwargs=True
    )
    measured = trainer.evaluate(rows)["eval_loss"]
    assert 0 < max(at_once) <= 4
    stock, losses = tiny_model("falcon_h1", dtype=torch.float64), []
    with InFloat64(), torch.no_grad():
        for row in rows:
            size = int(row["attention_mask"].sum())
            logits = stock(row["input_ids"][None, :size], use_cache=False).logits[0, :-1]
            labels = row["labels"][1:size]
            losses.append(cross_entropy(logits, labels, reduction="none")[labels != -100])
    assert measured == pytest.approx(float(torch.cat(losses).mean()), rel=1e-6)
