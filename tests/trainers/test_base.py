"""InitialStateTrainer as a drop-in for Trainer: evaluation, features of Trainer, refusals."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import (
    ByT5Tokenizer,
    DataCollatorForLanguageModeling,
    EvalPrediction,
    Mamba2Config,
    Mamba2ForCausalLM,
    Trainer,
    TrainingArguments,
)

from hf_recurrent_lengthgen.data import byte_tokenizer
from hf_recurrent_lengthgen.trainers import (
    InitialStateTrainer,
    StatePassingConfig,
    StatePassingTrainer,
    ZeroStateTrainer,
)
from hf_recurrent_lengthgen.trainers.run.dataloaders import train_sampler
from tests.trainers import toys
from tests.versions import SINCE_5_23

MakeConfig = Callable[..., StatePassingConfig]
ORDERED = {"sequential", "group_by_length", "batch_rebalance"} & {
    *TrainingArguments.__dataclass_fields__["train_sampling_strategy"].metadata["choices"]
}


def trained(trainer_class: type[Trainer], config: StatePassingConfig, **options: Any) -> dict[str, Any]:
    model = toys.tiny_model()
    trainer_class(model, config, train_dataset=toys.sequences(16), **options).train()
    return toys.weights(model)


def test_the_zero_state_trainer_trains_as_trainer_does(make_config: MakeConfig) -> None:
    config = make_config(max_steps=3, learning_rate=1e-2)
    ours, theirs = trained(ZeroStateTrainer, config), trained(Trainer, config)
    toys.assert_same_weights(ours, theirs)
    without_pad_token = byte_tokenizer()  # which rows of one length do not need
    without_pad_token.pad_token = None
    toys.assert_same_weights(trained(ZeroStateTrainer, config, processing_class=without_pad_token), theirs)
    with pytest.raises(AssertionError):
        toys.assert_same_weights(trained(Trainer, make_config(max_steps=1, learning_rate=0.0)), theirs)


# --- evaluation ---


def test_evaluation_starts_from_zero_and_leaves_the_carried_states_alone(make_config: MakeConfig) -> None:
    model, data = toys.SumModel(), toys.sequences(8)
    config = make_config(max_steps=3, state_drop_probability=0.0)
    trainer = StatePassingTrainer(model, config, train_dataset=data, eval_dataset=data)
    trainer.train()
    before = trainer.initial_states.state_dict()
    assert before
    model.seen.clear()
    trainer.evaluate()
    assert [recurrent for _, _, recurrent, _ in model.seen] == [[0.0] * 8]
    torch.testing.assert_close(trainer.initial_states.state_dict(), before, rtol=0, atol=0)


@pytest.mark.parametrize("rows", [1, 3, 7, 8])
def test_the_evaluation_loss_is_the_mean_over_targets(make_config: MakeConfig, rows: int) -> None:
    """Trainer's is another for each size of a batch, the last of which has the weight of a full one."""
    model, data = toys.tiny_model(), toys.sequences(7)
    found = StatePassingTrainer(model, make_config(per_device_eval_batch_size=rows), eval_dataset=data).evaluate()
    ids, labels = (torch.stack([item[name] for item in data]) for name in ("input_ids", "labels"))
    with torch.no_grad():
        expected = cross_entropy(model(ids).logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    assert found["eval_loss"] == pytest.approx(expected.item(), rel=1e-6)


@pytest.mark.parametrize("labels", [True, False], ids=["labels", "no labels"])
@pytest.mark.parametrize("ignore_keys", [None, []])
def test_predictions_are_logits_without_states(
    make_config: MakeConfig, labels: bool, ignore_keys: list[str] | None
) -> None:
    model = toys.tiny_model()
    data = [item if labels else {"input_ids": item["input_ids"]} for item in toys.sequences(5)]
    prediction = StatePassingTrainer(model, make_config(per_device_eval_batch_size=2)).predict(data, ignore_keys)
    with torch.no_grad():
        expected = model(torch.stack([item["input_ids"] for item in data])).logits
    assert isinstance(prediction.predictions, np.ndarray)
    np.testing.assert_allclose(prediction.predictions, expected.numpy(), rtol=0, atol=1e-6)


def test_compute_metrics_sees_logits_and_labels(make_config: MakeConfig) -> None:
    def accuracy(prediction: EvalPrediction) -> dict[str, float]:
        scored = prediction.label_ids[:, 1:] != -100
        hits = prediction.predictions[:, :-1].argmax(-1) == prediction.label_ids[:, 1:]
        return {"accuracy": float(hits[scored].mean())}

    model, data = toys.tiny_model(), toys.sequences(6)
    trainer = StatePassingTrainer(model, make_config(), eval_dataset=data, compute_metrics=accuracy)
    hits = []
    for item in data:
        best = model(item["input_ids"][None]).logits[0, :-1].argmax(-1)
        hits += [int(a == b) for a, b in zip(best, item["labels"][1:], strict=True) if b != -100]
    assert trainer.evaluate()["eval_accuracy"] == pytest.approx(sum(hits) / len(hits))


# --- drop-in: with every state dropped, state passing is Trainer, whatever else is used ---


def model_init(trainer: type[Trainer], args: type[TrainingArguments], out: str) -> Trainer:
    return trainer(model_init=lambda: toys.tiny_model(), args=args(out, **SETTINGS), train_dataset=toys.sequences(9))


def own_optimizer(trainer: type[Trainer], args: type[TrainingArguments], out: str) -> Trainer:
    model = toys.tiny_model()
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    data = toys.sequences(9)
    return trainer(model, args(out, **SETTINGS), train_dataset=data, optimizers=(optimizer, scheduler))


def own_loss(trainer: type[Trainer], args: type[TrainingArguments], out: str) -> Trainer:
    def squared(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any) -> torch.Tensor:
        return outputs.logits.square().sum() / num_items_in_batch

    data = toys.sequences(9)
    return trainer(toys.tiny_model(), args(out, **SETTINGS), train_dataset=data, compute_loss_func=squared)


def datasets_data(trainer: type[Trainer], args: type[TrainingArguments], out: str) -> Trainer:
    rows = [{name: value.tolist() for name, value in item.items()} | {"text": "x"} for item in toys.sequences(9)]
    return trainer(toys.tiny_model(), args(out, **SETTINGS), train_dataset=Dataset.from_list(rows))


def padding_collator(trainer: type[Trainer], args: type[TrainingArguments], out: str) -> Trainer:
    tokenizer = ByT5Tokenizer()
    texts = ["state", "a longer text", "passing", "x", "of any length", "ab", "next", "last one", "!!"]
    rows = [{"input_ids": tokenizer(text)["input_ids"]} for text in texts]
    collator = DataCollatorForLanguageModeling(tokenizer, mlm=False)
    model = toys.tiny_model(vocab_size=len(tokenizer))
    data = Dataset.from_list(rows)
    return trainer(
        model, args(out, **SETTINGS), data_collator=collator, train_dataset=data, processing_class=tokenizer
    )


def lora(trainer: type[Trainer], args: type[TrainingArguments], out: str) -> Trainer:
    settings = LoraConfig(r=2, target_modules=["in_proj", "lm_head"], task_type="CAUSAL_LM")
    return trainer(get_peft_model(toys.tiny_model(), settings), args(out, **SETTINGS), train_dataset=toys.sequences(9))


def with_settings(trainer: type[Trainer], args: type[TrainingArguments], out: str, **changes: Any) -> Trainer:
    return trainer(toys.tiny_model(), args(out, **SETTINGS | changes), train_dataset=toys.sequences(9))


SETTINGS: dict[str, Any] = {
    "use_cpu": True,
    "report_to": "none",
    "disable_tqdm": True,
    "save_strategy": "no",
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "learning_rate": 0.01,
    "max_steps": 4,
    "dataloader_drop_last": True,  # as the trainers here do in any case
}
SCRIPTS = [
    model_init,
    own_optimizer,
    own_loss,
    datasets_data,
    padding_collator,
    lora,
    pytest.param(partial(with_settings, bf16=True), id="bf16"),
    pytest.param(partial(with_settings, neftune_noise_alpha=1.0), id="neftune"),
    pytest.param(
        partial(with_settings, activation_checkpointing=True),
        id="activation checkpointing",
        marks=pytest.mark.skipif(not SINCE_5_23, reason="this version has the older name only"),
    ),
]


@pytest.mark.thinned(11)
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_for_trainer_runs_with_two_names_changed(tmp_path: Path, script: Callable[..., Trainer]) -> None:
    stock = script(Trainer, TrainingArguments, str(tmp_path / "stock"))
    stock_start = toys.weights(stock.model)
    stock.train()
    dropping = script(
        StatePassingTrainer, partial(StatePassingConfig, state_drop_probability=1.0), str(tmp_path / "drop")
    )
    dropping.train()
    toys.assert_same_weights(toys.weights(dropping.model), toys.weights(stock.model))

    passing = script(StatePassingTrainer, StatePassingConfig, str(tmp_path / "pass"))
    passing.train()
    passed = toys.weights(passing.model)
    trainable = [name for name, parameter in passing.model.named_parameters() if parameter.requires_grad]
    assert trainable
    assert [name for name in trainable if torch.equal(passed[name], stock_start[name])] == []
    assert any(not torch.equal(passed[name], weight) for name, weight in toys.weights(stock.model).items())


# --- refusals ---


def test_the_base_class_cannot_be_used_on_its_own(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="initial_state_source"):
        InitialStateTrainer(toys.tiny_model(), TrainingArguments(str(tmp_path), **toys.QUIET))  # type: ignore[abstract]


def test_a_model_that_takes_no_state_is_refused(make_config: MakeConfig) -> None:
    sizes = {"vocab_size": 17, "hidden_size": 8, "state_size": 4, "num_hidden_layers": 1}
    stock = Mamba2ForCausalLM(Mamba2Config(num_heads=2, head_dim=8, n_groups=1, **sizes))
    with pytest.raises(ValueError, match=r"Mamba2ForCausalLM does not take .*initial_state.*load_model"):
        StatePassingTrainer(stock, make_config(), train_dataset=toys.sequences(4))


def test_plain_training_arguments_are_refused(tmp_path: Path) -> None:
    args = TrainingArguments(str(tmp_path), **toys.QUIET)
    with pytest.raises(ValueError, match=r"needs args of class StatePassingConfig.*got TrainingArguments"):
        StatePassingTrainer(toys.tiny_model(), args, train_dataset=toys.sequences(4))


def test_a_stream_needs_the_word_that_it_is_shuffled(make_config: MakeConfig) -> None:
    data = toys.Stream(toys.sequences(8))
    with pytest.raises(ValueError, match=r"for a stream .*set assume_shuffled=True"):
        StatePassingTrainer(toys.tiny_model(), make_config(max_steps=2), train_dataset=data)
    config = make_config(max_steps=2, assume_shuffled=True)
    trainer = StatePassingTrainer(toys.tiny_model(), config, train_dataset=data)
    trainer.train()
    assert trainer.state.global_step == 2


CHECKPOINTING = f"{'activation' if SINCE_5_23 else 'gradient'}_checkpointing_kwargs"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        *(({"train_sampling_strategy": strategy}, "must be shuffled") for strategy in sorted(ORDERED)),
        ({"label_smoothing_factor": 0.1}, "label_smoothing_factor is not supported"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size is not supported"),
        ({"ignore_data_skip": True}, "ignore_data_skip is not supported"),
        ({"accelerator_config": {"use_seedable_sampler": False}}, "draws an order of sequences that neither"),
        ({"accelerator_config": {"split_batches": True}}, "makes batches smaller than per_device"),
        ({CHECKPOINTING: {"use_reentrant": True}}, "set use_reentrant=False"),
    ],
)
def test_settings_that_do_not_go_with_states_are_refused(
    make_config: MakeConfig, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        StatePassingTrainer(toys.tiny_model(), make_config(**fields), train_dataset=toys.sequences(4))


def test_several_gpus_in_one_process_are_refused(make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config()
    monkeypatch.setattr(type(config), "n_gpu", 2)
    with pytest.raises(ValueError, match="2 GPUs in one process"):
        StatePassingTrainer(toys.tiny_model(), config, train_dataset=toys.sequences(4))


def test_rows_that_say_their_lengths_are_grouped_without_being_made(make_config: MakeConfig) -> None:
    made: list[int] = []

    class Rows(list[dict[str, Tensor]]):
        def __getitem__(self, index: Any) -> Any:
            made.append(index)
            return super().__getitem__(index)

        def __iter__(self) -> Iterator[Any]:
            return (self[index] for index in range(len(self)))

    rows = Rows({"input_ids": torch.arange(7 + 3 * number % 11)} for number in range(40))
    config = make_config(train_sampling_strategy="group_by_length")
    orders = []
    for lengths in (None, [len(row["input_ids"]) for row in rows]):
        if lengths is not None:
            rows.item_lengths = lengths  # type: ignore[attr-defined]
        made.clear()
        trainer = ZeroStateTrainer(toys.SumModel(), config, train_dataset=rows)
        sampler = train_sampler(trainer)
        sampler.set_epoch(1)
        orders.append([*sampler])
        assert bool(made) == (lengths is None)
    assert orders[0] == orders[1]
    assert sorted(orders[0]) == [*range(40)] != orders[0]
