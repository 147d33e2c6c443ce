"""Examples that are read in windows train the weights of a loop over single examples, written from the definition."""

from collections.abc import Iterator
from itertools import islice, pairwise
from logging import Logger
from typing import Any

import pytest
import torch
from peft import PromptTuningConfig, get_peft_model
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import DataCollatorWithFlattening, DataCollatorWithPadding

from hf_recurrent_lengthgen.data import PaddingCollator, byte_tokenizer
from hf_recurrent_lengthgen.models.state_value import RecurrentState, detach_state
from hf_recurrent_lengthgen.trainers import (
    InitialStateConfig,
    LearnedStateTrainer,
    MixedStatesConfig,
    MixedStatesTrainer,
    StatePassingConfig,
    StatePassingTrainer,
    TbttConfig,
    TbttTrainer,
    ZeroStateTrainer,
)
from tests.trainers.toys import QUIET, assert_same_weights, chunks, examples, sequences, tiny_model, weights

RATE = 0.3
ONES = torch.ones(1, 4).long()
PLAIN: dict[str, Any] = {
    **{"optim": "sgd", "lr_scheduler_type": "constant", "learning_rate": RATE, "max_grad_norm": 0.0},
    "train_sampling_strategy": "sequential",
}


def windows_from_the_end(size: int, length: int | None) -> Iterator[slice]:
    borders = [0, *range(size % length or length, size + 1, length)] if length else [0, size]
    return (slice(*pair) for pair in pairwise(borders))


def read(model: Any, example: dict[str, Tensor], window: int | None) -> tuple[list[Tensor], int]:
    """The summed losses of the windows of one example without its padding, and the number of its targets."""
    size = int(example["attention_mask"].sum())
    ids, targets = example["input_ids"][:size], example["labels"][1:size]
    state: RecurrentState | None = None
    keys = model.new_attention_cache() if getattr(model, "attends", False) else None
    losses = []
    for part in windows_from_the_end(size, window):
        before = {} if keys is None else {"attention_cache": keys}
        output = model(input_ids=ids[part][None], initial_state=state, output_final_state=True, **before)
        state, keys = detach_state(output.final_state), None if keys is None else keys.detached()
        labels = targets[part]
        losses.append(cross_entropy(output.logits[0, : len(labels)], labels, reduction="sum", ignore_index=-100))
    return losses, int((targets != -100).sum())


def loop(model: Any, rows: list[dict[str, Tensor]], per_step: int, window: int | None) -> dict[str, Tensor]:
    """Plain gradient descent on the mean over the targets of each step."""
    model.train()
    ordered = iter(rows)
    while step := list(islice(ordered, per_step)):
        losses, targets = zip(*(read(model, example, window) for example in step), strict=True)
        model.zero_grad()
        if sum(targets):
            (
                torch.stack([each for one in losses for each in one if each.requires_grad]).sum() / sum(targets)
            ).backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= RATE * parameter.grad
    return weights(model)


def trained(folder: Any, model: Any, data: Any, collator: Any = None, **settings: Any) -> TbttTrainer:
    few = {"save_strategy": "no", "num_train_epochs": 1, "per_device_train_batch_size": 3}
    args = TbttConfig(str(folder), **QUIET | PLAIN | few | settings)
    trainer = TbttTrainer(model, args, train_dataset=data, data_collator=collator)
    trainer.train()
    return trainer


@pytest.mark.thinned(11)
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize(("chunk", "window"), [(1, 1), (4, 1), (4, 2), (23, 1), (5, None), (64, 1), (3, 8)])
def test_weights_are_those_of_a_loop_over_single_examples(
    tmp_path: Any, chunk: int, window: int | None, accumulation: int
) -> None:
    rows = examples(18)
    settings = {"bptt_chunk_length": chunk, "bptt_window": window, "gradient_accumulation_steps": accumulation}
    settings |= {"logging_steps": 6 // accumulation}
    model, expected = tiny_model().double(), tiny_model().double()
    trainer = trained(tmp_path, model, rows, **settings)
    assert trainer.bptt_window == (window or 1)
    idle = [entry["idle_tokens"] for entry in trainer.state.log_history if "idle_tokens" in entry]
    sizes = [int(row["attention_mask"].sum()) for row in rows]
    assert trainer.run_record.nonzero_starts == sum(
        -(-size // (chunk * (window or 1))) - 1 for size in sizes
    )  # for the lineage
    assert trainer.run_record.tokens == sum(sizes)
    assert idle[0] == pytest.approx(1 - torch.stack([row["attention_mask"] for row in rows]).float().mean().item())
    wanted = loop(expected, rows, 3 * accumulation, chunk * (window or 1))
    assert_same_weights(weights(model), wanted, atol=1e-6)  # the loss of Transformers is computed in float32
    assert (
        max(float((wanted[name] - value).abs().max()) for name, value in weights(tiny_model().double()).items()) > 0.01
    )


def test_windows_without_targets_are_read_without_gradient_and_logits(tmp_path: Any) -> None:
    rows = [{name: value for name, value in row.items() if name != "attention_mask"} for row in examples(6)]
    for row in rows:
        row["labels"] = row["input_ids"].masked_fill(torch.arange(23) < 21, -100)
    model = tiny_model()
    calls: list[tuple[int, bool, int]] = []

    def look(module: Any, args: Any, inputs: dict[str, Any], output: Any) -> None:
        logits = 0 if output.logits is None else output.logits.shape[1]  # none where there is a loss
        calls.append((inputs["input_ids"].shape[1], torch.is_grad_enabled(), logits))

    model.register_forward_hook(look, with_kwargs=True)
    trained(tmp_path, model, rows, bptt_chunk_length=5)
    assert calls == [(3, False, 1), *[(5, False, 1)] * 3, (5, True, 0)] * 2


def test_a_step_without_targets_is_reported_once_and_changes_no_weight_also_with_momentum_and_decay(
    tmp_path: Any, caplog: pytest.LogCaptureFixture
) -> None:
    Logger.warning_once.cache_clear()  # type: ignore[attr-defined]
    rows = examples(9)
    for row in rows[3:6]:
        row["labels"] = torch.full_like(row["labels"], -100)
    seen: list[dict[str, Tensor]] = []

    class Watched(TbttTrainer):
        def training_step(self, *arguments: Any, **keyword: Any) -> Tensor:
            seen.append(weights(self.model))
            return super().training_step(*arguments, **keyword)

    settings = {**PLAIN, "optim": "adamw_torch", "weight_decay": 0.5, "learning_rate": 0.01}
    args = TbttConfig(str(tmp_path), save_strategy="no", num_train_epochs=1, bptt_chunk_length=4, **QUIET, **settings)
    args.per_device_train_batch_size = 3
    model = tiny_model()
    Watched(model, args, train_dataset=rows).train()
    assert [message for message in caplog.messages if "has no token that is a target" in message] == caplog.messages
    assert len(caplog.messages) == 1
    assert_same_weights(seen[2], seen[1])
    with pytest.raises(AssertionError):
        assert_same_weights(seen[1], seen[0])
    with pytest.raises(AssertionError):
        assert_same_weights(weights(model), seen[2])


def test_first_windows_start_from_passed_states_and_later_ones_from_the_row(tmp_path: Any) -> None:
    """Windows go with every source: the first of a row starts from the source's state, which sees the last one's."""
    model = tiny_model().double()
    args = StatePassingConfig(
        str(tmp_path),
        save_strategy="no",
        max_steps=2,
        bptt_chunk_length=4,
        bptt_window=1,
        **QUIET,
        **PLAIN | {"train_sampling_strategy": "random"},
    )
    args.per_device_train_batch_size = 1
    data, states = sequences(2), []
    trainer = StatePassingTrainer(model, args, train_dataset=[data[0], data[0]])
    model.register_forward_hook(
        lambda _, __, inputs, output: states.append((inputs["initial_state"], output.final_state)), with_kwargs=True
    )
    trainer.train()
    assert len(states) == 6
    assert states[0][0] is None
    for index, (initial, _) in enumerate(states[1:], 1):
        dropped = index == 3 and torch.equal(initial[0].recurrent, torch.zeros_like(initial[0].recurrent))
        assert dropped or torch.equal(initial[0].recurrent, states[index - 1][1][0].recurrent)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_packed_rows_are_read_from_the_end_of_each(tmp_path: Any, accumulation: int) -> None:
    rows = examples(6)
    unpadded = [{name: row[name][: row["attention_mask"].sum()] for name in ("input_ids", "labels")} for row in rows]
    found, expected = tiny_model().double(), tiny_model().double()
    settings: dict[str, Any] = {"bptt_chunk_length": 4, "gradient_accumulation_steps": accumulation}
    trained(tmp_path, found, unpadded, collator=DataCollatorWithFlattening(), **settings)
    assert_same_weights(weights(found), loop(expected, rows, 3 * accumulation, 4), atol=1e-6)


def test_batches_without_padding_count_among_idle_tokens(tmp_path: Any) -> None:
    sizes = [6, 6, 6, 6, 3, 3]
    rows = [{"input_ids": torch.full((size,), 3), "labels": torch.full((size,), 4)} for size in sizes]
    settings: dict[str, Any] = {"bptt_chunk_length": 4, "gradient_accumulation_steps": 2, "logging_steps": 1}
    trainer = trained(tmp_path, tiny_model(), rows, collator=PaddingCollator(), **settings)
    assert trainer.state.log_history[0]["idle_tokens"] == pytest.approx(1 - sum(sizes) / 36)
    assert trainer.run_record.nonzero_starts == 4


@pytest.mark.parametrize("tokenizer", [None, byte_tokenizer()])
def test_rows_of_several_lengths_need_no_collator(tmp_path: Any, tokenizer: Any) -> None:
    rows = examples(6)
    unpadded = [{name: row[name][: row["attention_mask"].sum()] for name in ("input_ids", "labels")} for row in rows]
    found = []
    for collator in (None, PaddingCollator()):
        model = tiny_model().double()
        args = TbttConfig(str(tmp_path), bptt_chunk_length=4, max_steps=2, save_strategy="no", **QUIET, **PLAIN)
        args.per_device_train_batch_size = 3
        trainer = TbttTrainer(model, args, train_dataset=unpadded, data_collator=collator, processing_class=tokenizer)
        trainer.train()
        found.append((weights(model), trainer.evaluate(unpadded)["eval_loss"]))
    assert_same_weights(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]


def test_the_tokenizer_of_a_collator_is_saved_with_the_model(tmp_path: Any) -> None:
    collator = DataCollatorWithPadding(byte_tokenizer())
    TbttTrainer(tiny_model(), TbttConfig(str(tmp_path), bptt_chunk_length=4, **QUIET), collator).save_model()
    assert (tmp_path / "tokenizer_config.json").is_file()


class LogitsToo(TbttTrainer):
    def compute_loss(self, *args: Any, **keyword: Any) -> Any:
        result = super().compute_loss(*args, **keyword)
        assert not keyword.get("return_outputs") or result[1].logits is not None
        return result


@pytest.mark.parametrize(
    ("trainer_class", "metrics", "longest"),
    [(TbttTrainer, None, 4), (TbttTrainer, lambda _: {}, 23), (LogitsToo, None, 23)],
    ids=["loss alone", "metrics", "a loss of the user"],
)
def test_evaluation_reads_no_more_at_once_than_training_where_only_the_loss_is_requested(
    tmp_path: Any, trainer_class: Any, metrics: Any, longest: int
) -> None:
    model, rows = tiny_model().double().eval(), examples(6)
    args = TbttConfig(str(tmp_path), bptt_chunk_length=4, per_device_eval_batch_size=6, **QUIET)
    options = {"train_dataset": rows, "eval_dataset": rows, "compute_metrics": metrics}
    trainer = trainer_class(model, args, data_collator=PaddingCollator(), **options)
    read_at_once = []
    model.backbone.register_forward_pre_hook(lambda _, inputs: read_at_once.append(inputs[0].shape[1]))
    measured = trainer.evaluate()["eval_loss"]
    assert max(read_at_once) == longest
    losses, targets = zip(*(read(model, row, None) for row in rows), strict=True)
    expected = sum(each.detach() for one in losses for each in one) / sum(targets)
    assert measured == pytest.approx(float(expected), rel=1e-6)


def test_rows_with_padding_inside_are_evaluated_whole(tmp_path: Any) -> None:
    """The output for the token after it may be in the chunk before."""
    ids = sequences(1)[0]["input_ids"]
    args = TbttConfig(str(tmp_path), bptt_chunk_length=4, **QUIET)
    trainer = TbttTrainer(tiny_model(), args, train_dataset=examples(3))
    row = {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}
    padded = {name: torch.cat([value[:4], value.new_zeros(1), value[4:]]) for name, value in row.items()}
    padded["labels"][4] = -100
    assert trainer.evaluate([padded])["eval_loss"] == pytest.approx(trainer.evaluate([row])["eval_loss"])


def test_predictions_are_in_the_order_of_the_data_where_training_groups_rows_by_length(tmp_path: Any) -> None:
    sizes = [5, 9, 3, 12, 7, 4]
    rows = [{"input_ids": torch.full((size,), 3), "labels": torch.full((size,), size)} for size in sizes]
    settings: dict[str, Any] = {"bptt_chunk_length": 4, "train_sampling_strategy": "group_by_length", **QUIET}
    args = TbttConfig(str(tmp_path), per_device_eval_batch_size=2, **settings)
    trainer = TbttTrainer(tiny_model(), args, train_dataset=rows, data_collator=PaddingCollator())
    labels: Any = trainer.predict(rows).label_ids
    assert labels[:, 1].tolist() == sizes
    assert trainer.args.train_sampling_strategy == "group_by_length"


@pytest.mark.thinned(3)
@pytest.mark.parametrize(("chunk", "window"), [(3, 1), (4, 1), (2, 2), (3, 6)])
def test_what_windows_carry_ends_where_a_sequence_begins(tmp_path: Any, chunk: int, window: int) -> None:
    """Documents inside chunks of a stream, at borders of windows and between them, against a loop over their parts."""
    data = chunks(8, 16, reset_at_document=True, separator_id=2)
    model, expected = tiny_model().double(), tiny_model().double().train()
    rows, length, border = [data[i] for i in range(8)], chunk * window, 0
    settings: dict[str, Any] = {"bptt_chunk_length": chunk, "bptt_window": window, "num_train_epochs": 1}
    trained(tmp_path, model, rows, **settings, per_device_train_batch_size=2)
    for pair in zip(rows[::2], rows[1::2], strict=True):
        expected.zero_grad()
        count = sum(int((row["shift_labels"] != -100).sum()) for row in pair)
        for row in pair:
            state: RecurrentState | None = None
            begins = row["state_resets"].nonzero()[:, 0].tolist()
            borders = [part.start for part in windows_from_the_end(16, length)]
            border += len({*begins} & {*borders[1:]})
            for start, stop in pairwise(sorted({*begins, *borders, 16})):
                state = None if state is None or start in begins else state
                state = detach_state(state) if state is not None and start in borders else state
                output = expected(row["input_ids"][None, start:stop], initial_state=state, output_final_state=True)
                state, targets = output.final_state, row["shift_labels"][start:stop]
                loss = cross_entropy(output.logits[0], targets, reduction="sum", ignore_index=-100) / count
                loss.backward(retain_graph=True)
        with torch.no_grad():
            for parameter in expected.parameters():
                parameter -= RATE * parameter.grad
    assert (border > 0) == (length < 16)
    assert_same_weights(weights(model), weights(expected), atol=1e-6)


def test_a_mixture_on_examples_may_pass_states_and_truncate(tmp_path: Any) -> None:
    mixture = {"zero": 0.3, "tbtt": 0.3, "state_passing": 0.4}
    with pytest.raises(ValueError, match="or set bptt_chunk_length"):
        MixedStatesConfig(str(tmp_path), mixture=mixture, **QUIET)
    args = MixedStatesConfig(
        str(tmp_path), mixture=mixture, bptt_chunk_length=4, max_steps=3, save_strategy="no", **QUIET
    )
    trainer = MixedStatesTrainer(tiny_model(), args, train_dataset=examples(24))
    trainer.train()
    assert trainer.bptt_window == 1


class WithoutCount(TbttTrainer):
    """Each window would count as much as the whole step."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        return super().compute_loss(model, inputs, return_outputs)


def of_virtual_tokens() -> Any:
    return get_peft_model(tiny_model(), PromptTuningConfig("CAUSAL_LM", num_virtual_tokens=2))


IN_FOURS, IN_WINDOWS = {"bptt_chunk_length": 4}, {"bptt_chunk_length": 4, "bptt_window": 1}
IN_EACH_PASS = "changes the weights in each backward pass"
REFUSED: dict[str, tuple[Any, dict[str, Any], dict[str, Any], str]] = {
    "chunks": (TbttTrainer, {}, {}, "set bptt_chunk_length: each is read in chunks"),
    "a loss": (ZeroStateTrainer, IN_WINDOWS, {"compute_loss_func": lambda: 0}, "compute_loss_func gets the logits"),
    "adalomo": (ZeroStateTrainer, IN_WINDOWS | {"optim": "adalomo"}, {}, IN_EACH_PASS),
    "galore": (ZeroStateTrainer, IN_WINDOWS | {"optim": "galore_adamw_layerwise"}, {}, IN_EACH_PASS),
    "virtual": (ZeroStateTrainer, IN_WINDOWS, {"model": of_virtual_tokens()}, "virtual tokens before each input"),
    "learned": (LearnedStateTrainer, IN_FOURS | {"bptt_window": 2}, {}, "learn from the first window"),
    "count": (WithoutCount, IN_FOURS, {}, "compute_loss of WithoutCount does not pass num_items_in_batch on"),
    "labels": (ZeroStateTrainer, IN_WINDOWS, {"train_dataset": [{"input_ids": ONES[0]}] * 8}, "need labels"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_windows_cannot_do_is_refused(tmp_path: Any, name: str) -> None:
    kind, settings, changes, message = REFUSED[name]
    args = kind.config_class(str(tmp_path), save_strategy="no", max_steps=1, **QUIET, **settings)
    with pytest.raises(ValueError, match=message):
        kind(**{"model": tiny_model(), "args": args, "train_dataset": examples(8)} | changes).train()


def test_training_requests_a_loss_in_windows(tmp_path: Any) -> None:
    trainer = ZeroStateTrainer(tiny_model(), InitialStateConfig(str(tmp_path), **QUIET, **IN_WINDOWS))
    with pytest.raises(ValueError, match="call train"):
        trainer.compute_loss(trainer.model.train(), {"input_ids": ONES})
