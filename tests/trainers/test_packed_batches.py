"""Batches that pack sequences into rows train as batches of the same sequences as rows do: each has its own state."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from transformers import DataCollatorWithFlattening

from hf_recurrent_lengthgen.hybrids import stateful
from hf_recurrent_lengthgen.trainers import (
    InitialStateConfig,
    MixedStatesConfig,
    MixedStatesTrainer,
    StatePassingConfig,
    StatePassingTrainer,
    TbttConfig,
    TbttTrainer,
    ZeroStateTrainer,
)
from hf_recurrent_lengthgen.trainers.row_layout import lay_out
from tests.hybrids.tiny_models import tiny_model as tiny_hybrid
from tests.trainers import toys

UNEQUAL = ["random noise", "fitted noise", "state passing", "learned state and model", "mixture", "zero state"]
IN_CHUNKS, OF_ONE_LENGTH = ["state passing in chunks"], ["state passing, alignment", "alignment"]
Batch = dict[str, Any]


def padded(rows: list[Batch]) -> Batch:
    """A row for each sequence."""
    ids, labels = ([row[name] for row in rows] for name in ("input_ids", "labels"))
    lengths = torch.tensor([len(row) for row in ids])
    return {
        "input_ids": pad_sequence(ids, batch_first=True),
        "labels": pad_sequence(labels, batch_first=True, padding_value=-100),
        "attention_mask": (torch.arange(int(lengths.max())) < lengths[:, None]).long(),
    }


def in_two_rows(rows: list[Batch]) -> Batch:
    """The first and the second half of the sequences in a row each, with restarting positions and padding."""
    half = len(rows) // 2
    packed = [DataCollatorWithFlattening()(part) for part in (rows[:half], rows[half:])]
    parts = [{"input_ids": p["input_ids"][0], "labels": p["labels"][0]} for p in packed]
    positions = pad_sequence([p["position_ids"][0] for p in packed], batch_first=True)
    return padded(parts) | {"position_ids": positions}


FORMS: dict[str, Callable[[list[Batch]], Batch]] = {
    "seq_idx": DataCollatorWithFlattening(return_position_ids=False, return_seq_idx=True),
    "borders": DataCollatorWithFlattening(return_position_ids=False, return_flash_attn_kwargs=True),
    "all": DataCollatorWithFlattening(return_seq_idx=True, return_flash_attn_kwargs=True),
    "two rows": in_two_rows,
}


def unequal(count: int) -> list[dict[str, Tensor]]:
    rows = toys.sequences(count)
    return [{name: x[: 3 + 5 * i % 7] for name, x in row.items()} for i, row in enumerate(rows)]


def trained(path: Path, method: str, collator: Any, data: Any, **changes: Any) -> tuple[dict[str, Tensor], list[Any]]:
    """The weights after 3 steps of two micro-batches, and the shares of zero states in the log."""
    settings = {"max_steps": 3, "save_strategy": "no", "rows": 16} | changes
    trainer = toys.resumable_trainer(path, 4, method, double=True, **settings)
    trainer.train_dataset, trainer.data_collator = data, collator
    trainer.train()
    return toys.weights(trainer.model), [entry.get("zero_states") for entry in trainer.state.log_history[:-1]]


@pytest.mark.thinned(4)
@pytest.mark.parametrize("method", UNEQUAL + IN_CHUNKS + OF_ONE_LENGTH)
def test_every_source_gives_each_sequence_its_state(tmp_path: Path, method: str) -> None:
    data = toys.sequences(16) if method in OF_ONE_LENGTH else unequal(16)
    expected, shares = trained(tmp_path, method, padded, data)
    weights, logged = trained(tmp_path, method, DataCollatorWithFlattening(), data)
    toys.assert_same_weights(weights, expected, atol=1e-9)
    assert logged == shares
    assert method in ("zero state", "alignment") or logged[-1] < 1


@pytest.mark.thinned(3)
@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_packed_rows_is_unpacked(tmp_path: Path, form: str) -> None:
    data, without = unequal(16), {"state_drop_probability": 0.0}  # other drops, from other row numbers
    expected, shares = trained(tmp_path, "state passing", padded, data, **without)
    weights, logged = trained(tmp_path, "state passing", FORMS[form], data, **without)
    toys.assert_same_weights(weights, expected, atol=1e-9)
    assert logged == shares == [1.0, 0.0, 0.0]


@pytest.mark.thinned(5)
@pytest.mark.parametrize("hybrid", [False, True], ids=["family", "hybrid"])
@pytest.mark.parametrize(
    "collator", [DataCollatorWithFlattening(), FORMS["all"], None], ids=["positions", "all", "rows"]
)
def test_a_row_of_one_sequence_is_read_in_chunks_whatever_says_so(tmp_path: Path, collator: Any, hybrid: bool) -> None:
    """Batches of one example; or rows that are packed already, each third of them with one sequence."""
    data = toys.sequences(6)
    if collator is None:
        for number, row in enumerate(data):
            row["position_ids"] = torch.arange(9) % (9 if number % 3 == 2 else 4)
    without = {"gradient_accumulation_steps": 1, "max_steps": 6, "optim": "sgd", "hybrid": hybrid}
    ways = [{}, {"bptt_chunk_length": 4}, {"bptt_chunk_length": 4, "bptt_window": 3}]
    whole, *others = (
        toys.resumable_trainer(tmp_path, 1, "zero state", double=True, save_strategy="no", **without, **way)
        for way in ways
    )
    for trainer in (whole, *others):
        trainer.train_dataset, trainer.data_collator = data, collator or trainer.data_collator
        trainer.train()
    for trainer in others:
        toys.assert_same_weights(toys.weights(trainer.model), toys.weights(whole.model), atol=1e-9)


def test_alignment_takes_a_batch_of_one_example_in_a_packed_row(tmp_path: Path) -> None:
    expected, _ = trained(tmp_path, "alignment", padded, toys.sequences(6), per_device_train_batch_size=1)
    for form in (DataCollatorWithFlattening(), FORMS["all"]):
        weights, _ = trained(tmp_path, "alignment", form, toys.sequences(6), per_device_train_batch_size=1)
        toys.assert_same_weights(weights, expected, atol=1e-9)


@pytest.mark.parametrize("hybrid", [False, True], ids=["family", "hybrid"])
def test_the_log_counts_sequences(tmp_path: Path, hybrid: bool) -> None:
    """A first batch of one sequence leaves one state, from which one of the next 8 sequences starts."""
    model = stateful(tiny_hybrid("falcon_h1")) if hybrid else toys.tiny_model()
    arguments = StatePassingConfig(
        str(tmp_path),
        **toys.QUIET,
        max_steps=2,
        logging_steps=1,
        save_strategy="no",
        state_drop_probability=0.0,
        per_device_train_batch_size=1,
        assume_shuffled=True,
        train_sampling_strategy="sequential",
    )
    positions = [[*range(16)], [0, 1] * 8]
    ids = toys.token_stream(32).view(2, 16)
    rows = [
        {"input_ids": x, "labels": x, "position_ids": torch.tensor(p)} for x, p in zip(ids, positions, strict=True)
    ]
    trainer = StatePassingTrainer(model, arguments, train_dataset=rows)
    trainer.train()
    assert [entry["zero_states"] for entry in trainer.state.log_history[:-1]] == [1.0, 0.875]


def test_rows_that_continue_are_not_packed(tmp_path: Path) -> None:
    few = {"max_steps": 2, "save_strategy": "no", "per_device_train_batch_size": 2}
    for trainer in (
        TbttTrainer(toys.tiny_model(), TbttConfig(str(tmp_path), **toys.QUIET, **few), train_dataset=toys.chunks(8)),
        MixedStatesTrainer(
            toys.tiny_model(),
            MixedStatesConfig(str(tmp_path), mixture={"zero": 0.5, "tbtt": 0.5}, **toys.QUIET, **few),
            train_dataset=toys.chunks(8),
        ),
    ):
        trainer.data_collator = DataCollatorWithFlattening()
        with pytest.raises(ValueError, match=r"no state_resets, which say .* data_collator"):
            trainer.train()
        assert trainer.evaluate(toys.sequences(4))["eval_loss"] > 0


def test_packed_rows_of_a_stream_are_not_dealt_to_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = toys.resumable_trainer(tmp_path, 4, assume_shuffled=True, max_steps=1)
    monkeypatch.setattr(InitialStateConfig, "row_processes", 2)
    monkeypatch.setattr(InitialStateConfig, "world_size", 2)
    trainer.train_dataset = toys.Stream(unequal(8))
    for collator in (DataCollatorWithFlattening(), SimpleNamespace(padding_free=True)):
        trainer.data_collator = collator
        with pytest.raises(ValueError, match="packs all examples of a batch into one row"):
            trainer.get_train_dataloader()


@pytest.mark.slow
def test_packed_evaluation_starts_where_the_source_says(tmp_path: Path) -> None:
    data = unequal(8)
    for method in ("learned state and model", "state passing"):
        losses = []
        for collator in (padded, DataCollatorWithFlattening()):
            trainer = toys.resumable_trainer(
                tmp_path, 4, method, double=True, max_steps=2, save_strategy="no", per_device_eval_batch_size=8
            )
            trainer.train()
            trainer.data_collator = collator
            losses.append(trainer.evaluate(data)["eval_loss"])
        assert losses == pytest.approx(losses[:1] * 2, rel=1e-6)


def test_from_zero_rows_stay_packed(tmp_path: Path) -> None:
    trainer = toys.resumable_trainer(tmp_path, 4, "zero state", max_steps=1, save_strategy="no")
    assert isinstance(trainer, ZeroStateTrainer)
    batch = DataCollatorWithFlattening()(unequal(4))
    assert lay_out(trainer, batch, 0)["input_ids"].shape[0] == 1


@pytest.mark.parametrize(
    ("column", "make"),
    [
        ("seq_idx", toys.tiny_model),
        ("position_ids", lambda: stateful(tiny_hybrid("mamba"))),
    ],
    ids=["ours", "stock mamba"],
)
def test_columns_that_separate_sequences_are_kept(tmp_path: Path, column: str, make: Callable[[], Any]) -> None:
    """Trainer drops the columns that `forward` does not name, and each row would be one sequence."""
    ids = torch.randint(3, 17, (8, 10), generator=torch.Generator().manual_seed(0))
    says = {"seq_idx": [0] * 4 + [1] * 6, "position_ids": [*range(4), *range(6)]}[column]
    data = Dataset.from_list([{"input_ids": row, "labels": row, column: says} for row in ids.tolist()])
    settings = InitialStateConfig(str(tmp_path), **toys.QUIET, save_strategy="no", max_steps=1, logging_steps=1)
    trainer = ZeroStateTrainer(make(), settings, train_dataset=data, eval_dataset=data)
    with torch.no_grad():
        alone = [
            cross_entropy(make()(part).logits[:, :-1].flatten(0, 1), part[:, 1:].flatten(), reduction="sum")
            for part in (ids[:, :4], ids[:, 4:])
        ]
    expected = pytest.approx(sum(alone).item() / 64, rel=1e-4)
    assert trainer.evaluate()["eval_loss"] == expected
    assert trainer.train().training_loss == expected
