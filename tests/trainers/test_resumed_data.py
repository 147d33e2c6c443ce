"""A resumed run reads the rows that the run would have read, in every order and from every kind of stream."""

from collections.abc import Callable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from torch.utils.data import IterableDataset, get_worker_info
from transformers import Trainer, TrainingArguments

from hf_recurrent_lengthgen.trainers import InitialStateConfig, ZeroStateTrainer
from tests.trainers import toys

datasets.disable_progress_bars()
ROWS, STEPS = 22, 13  # in batches of 4: 5 batches and 2 rows that are left out


def item(row: int) -> dict[str, list[int]]:
    return {"input_ids": [row, row], "labels": [row, row]}


class Drawn(IterableDataset[Any]):
    """Rows in an order that is drawn anew in each pass."""

    def __init__(self, draw: Callable[[], list[int]]) -> None:
        self._draw = draw

    def __iter__(self) -> Iterator[Any]:
        for row in self._draw():
            yield {name: torch.tensor(ids) for name, ids in item(row).items()}


def shards(first: list[int]) -> Iterator[Any]:
    for begin in first:
        yield from (item(row) for row in range(begin, begin + 6))


def hub(shuffle: dict[str, Any], begins: tuple[int, ...] = (1, 7, 13, 19)) -> Any:
    data = datasets.IterableDataset.from_generator(shards, gen_kwargs={"first": list(begins)})
    return data.shuffle(buffer_size=7, **shuffle)


STREAMS: dict[str, Callable[[], Any]] = {
    "in order": lambda: Drawn(lambda: list(range(1, ROWS + 1))),
    "hub": lambda: hub({"seed": 3}),
}


def rows_of(
    data: Any, folder: Path, checkpoint: Path | None = None, trainer: Any = ZeroStateTrainer, **other: Any
) -> list[list[int]]:
    """The rows of each batch that is trained on, by their first id."""
    settings = {"per_device_train_batch_size": 4, "max_steps": STEPS, "save_steps": 1, "seed": 3}
    config = TrainingArguments if trainer is Trainer else InitialStateConfig
    collator = other.pop("data_collator", None)
    arguments = config(str(folder), **toys.QUIET | settings | other)
    made = trainer(toys.SumModel(), arguments, train_dataset=data, data_collator=collator)
    made.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    return [[row[0] for row in rows] for _, rows, _, _ in made.model.seen]


@pytest.mark.thinned(3)
@pytest.mark.parametrize("name", list(STREAMS))
@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_finite_stream_goes_on_in_every_pass(tmp_path: Path, name: str, accumulation: int) -> None:
    settings = {"gradient_accumulation_steps": accumulation, "max_steps": STEPS // accumulation}
    whole = rows_of(STREAMS[name](), tmp_path / "whole", **settings)
    read = [row for batch in whole for row in batch]
    per_pass = len(set(read))
    assert (read[:per_pass] == read[per_pass : 2 * per_pass]) == (name == "in order")
    assert sorted(read[:per_pass]) == sorted(read[per_pass : 2 * per_pass])
    for step in (3, 5, 6, 8, 11) if accumulation == 1 else (1, 2, 3):
        checkpoint = tmp_path / "whole" / f"checkpoint-{step}"
        rest = rows_of(STREAMS[name](), tmp_path / str(step), checkpoint, **settings)
        assert rest == whole[step * accumulation :]


def test_each_pass_over_a_shuffled_stream_has_the_order_of_its_epoch(tmp_path: Path) -> None:
    expected: list[int] = []
    for epoch in range(3):
        data = hub({"seed": 3})
        data.set_epoch(epoch)
        expected += [row["input_ids"][0] for row in data]
    assert list(chain(*rows_of(hub({"seed": 3}), tmp_path))) == expected[: 4 * STEPS]


def test_a_stream_without_rows_is_refused(tmp_path: Path) -> None:
    rows_of(STREAMS["in order"](), tmp_path, max_steps=2)
    for checkpoint in (None, tmp_path / "checkpoint-1"):
        with pytest.raises(ValueError, match="The training data have no sequences for a step"):
            rows_of(Drawn(list), tmp_path / "empty", checkpoint)


class Counted(Drawn):
    """With a length; each data worker reads a share of the rows."""

    def __len__(self) -> int:
        return len(self._draw())

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        yield from islice(super().__iter__(), worker.id, None, worker.num_workers) if worker else super().__iter__()


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", ["hub", "counted"])
def test_data_workers_read_each_row_once_in_a_pass(tmp_path: Path, workers: int, kind: str) -> None:
    """However their shares end; shards of 6 and 18 rows."""
    counted = Counted(lambda: list(range(1, 25)))
    data = hub({"seed": 3}, begins=(1,)) if kind == "hub" else counted
    if kind == "hub":
        data = datasets.concatenate_datasets([data, hub({"seed": 3}, begins=(7, 13, 19))])
    read = list(chain(*rows_of(data, tmp_path, dataloader_num_workers=workers, max_steps=12)))
    for of_pass in (read[:24], read[24:]):
        assert sorted(of_pass) == list(range(1, 25))


@pytest.mark.slow
def test_data_workers_read_on(tmp_path: Path) -> None:
    settings = {"dataloader_num_workers": 2, "dataloader_persistent_workers": True}
    whole = rows_of(hub({"seed": 3}), tmp_path / "whole", **settings)
    checkpoint = tmp_path / "whole" / "checkpoint-7"  # in the second pass
    assert rows_of(hub({"seed": 3}), tmp_path / "rest", checkpoint, **settings) == whole[7:]


def padded(rows: list[Any]) -> dict[str, Any]:
    longest = max(len(row["input_ids"]) for row in rows)
    ids = torch.tensor([row["input_ids"] + [0] * (longest - len(row["input_ids"])) for row in rows])
    return {"input_ids": ids, "labels": ids}


@pytest.mark.thinned(3)
@pytest.mark.parametrize("strategy", ["random", "sequential", "group_by_length"])
def test_rows_come_in_the_order_of_trainer(tmp_path: Path, strategy: str) -> None:
    lengths = [1 + row % 4 for row in range(24)]
    data = [{"input_ids": [row] * length, "labels": [row] * length} for row, length in enumerate(lengths, 1)]
    settings = {"train_sampling_strategy": strategy, "data_collator": padded}
    stock = rows_of(data, tmp_path / "stock", trainer=Trainer, **settings)
    whole = rows_of(data, tmp_path / "ours", **settings)
    grouped = strategy == "group_by_length"  # in an order of ours, which a resumed run repeats
    assert whole == stock or (grouped and sorted(chain(*whole[:6])) == sorted(chain(*stock[:6])))
    assert rows_of(data, tmp_path / "on", tmp_path / "ours" / "checkpoint-8", **settings) == whole[8:]
    assert rows_of(data, tmp_path / "twice", tmp_path / "ours" / "checkpoint-6", **settings) == whole[6:]  # an epoch
    assert rows_of(data, tmp_path / "again", tmp_path / "twice" / "checkpoint-8", **settings) == whole[8:]
