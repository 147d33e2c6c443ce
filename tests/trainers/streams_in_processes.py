"""What 1, 2 and 3 processes (gloo) find in an evaluation: `python streams_in_processes.py FILE JOBS`, with `scored` as
the function of all jobs; see rows_in_processes.py."""

import tempfile
from collections.abc import Iterator
from typing import Any

import datasets
import rows_in_processes
import torch
import toys
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info
from transformers import DataCollatorWithFlattening, EvalPrediction

from hf_recurrent_lengthgen.trainers import InitialStateConfig, StatePassingTrainer, ZeroStateTrainer, combine

EACH_READS: dict[str, Any] = {"accelerator_config": {"dispatch_batches": False}}
KINDS: dict[str, dict[str, Any]] = {
    "torch": {},
    "torch, each reads": EACH_READS,
    "torch, workers": {"dataloader_num_workers": 2},
    "1 shard": {},
    "4 shards, each reads": EACH_READS,
    "4 shards, workers": {"dataloader_num_workers": 2},
    "shared": {},
    "objects": {"eval_use_gather_object": True},
    "list, objects": {"eval_use_gather_object": True},
    "flattened": {},
    "SFT, 2 shards": {},
    "SFT, list, flattened": {"padding_free": True, "max_length": None},
    "SFT, list, packed": {"packing": True, "max_length": 16},
}
"""Settings of the trainer by kind of data. SFTTrainer trains on a stream, so that it has each process read; except
where it packs."""


class Numbered(IterableDataset[Any]):
    """Rows with a length, which workers divide."""

    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        return iter(self.rows if worker is None else self.rows[worker.id :: worker.num_workers])


def rows_of(kind: str, count: int) -> list[dict[str, Tensor]]:
    """Rows of 3 to 9 tokens, which differ in their number of targets; for SFTTrainer all tokens are."""
    rows = [{name: x[: 3 + 5 * i % 7] for name, x in row.items()} for i, row in enumerate(toys.sequences(count))]
    return [{"input_ids": row["input_ids"]} for row in rows] if "SFT" in kind else rows


def data_of(kind: str, rows: list[dict[str, Tensor]]) -> Any:
    plain = [{name: values.tolist() for name, values in row.items()} for row in rows]
    if "list" in kind:
        return datasets.Dataset.from_list(plain)
    if "shard" not in kind:
        return Numbered(rows) if "workers" in kind else toys.Stream(rows)
    shards = min(next(int(word) for word in kind.split() if word.isdigit()), len(rows))
    return datasets.Dataset.from_list(plain).to_iterable_dataset(num_shards=shards)


def trainer_of(kind: str, folder: str, data: Any) -> Any:
    usual = {"per_device_eval_batch_size": 2, **toys.QUIET, **KINDS[kind]}
    if "SFT" not in kind:
        usual["context_parallel_size"] = rows_in_processes.processes() if kind == "shared" else 1
        args = InitialStateConfig(folder, **usual)
        trainer = ZeroStateTrainer(toys.tiny_model(), args, train_dataset=toys.sequences(6), eval_dataset=data)
        trainer.data_collator = DataCollatorWithFlattening() if kind == "flattened" else trainer.data_collator
        return trainer
    from test_combining import tokenizer, trl

    trainer_class, config_class = combine(StatePassingTrainer, trl.SFTTrainer)
    args = config_class(folder, max_steps=1, bf16=False, assume_shuffled=True, **usual)
    train = data_of("list" if "list" in kind else "2 shards", rows_of(kind, 6))
    return trainer_class(toys.tiny_model(), args, train_dataset=train, eval_dataset=data, processing_class=tokenizer())


def scored(kind: str, count: int) -> dict[str, Any]:
    """The losses of an evaluation and of a prediction, the sums of the labels of each row, as `compute_metrics` and
    the prediction have them, and the number of rows of them and of Trainer."""

    def counted(found: EvalPrediction) -> dict[str, Any]:
        assert len(found.predictions) == len(found.label_ids)
        return {"sums": torch.as_tensor(found.label_ids).clamp(0).sum(1).tolist()}

    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_of(kind, folder, data_of(kind, rows_of(kind, count)))
        trainer.compute_metrics = counted
        found = trainer.evaluate()
        predicted = trainer.predict(trainer.eval_dataset)
        sums = [found["eval_sums"], counted(predicted)["sums"]]
        trainer.compute_metrics = None
        losses = [found["eval_loss"], predicted.metrics["test_loss"], trainer.evaluate()["eval_loss"]]
        return {"losses": losses, "sums": sums, "second": found["eval_samples_per_second"] * found["eval_runtime"]}


if __name__ == "__main__":
    vars(rows_in_processes)["scored"] = scored
    rows_in_processes.main()
