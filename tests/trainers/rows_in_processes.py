"""What 1, 2 and 3 processes (gloo) see and train in batches of 6 rows of all: `python rows_in_processes.py FILE JOBS`.

JOBS is a JSON list of [function of this file, its arguments]. FILE gets, by number of processes, what the functions
returned in each of them, [process][job].
"""

import gc
import json
import os
import socket
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import torch
import torch.distributed as dist
import toys
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.utils.data import IterableDataset, get_worker_info
from transformers import DataCollatorWithFlattening, EvalPrediction
from transformers.utils import logging

from hf_recurrent_lengthgen.trainers import (
    InitialStateConfig,
    InitialStateTrainer,
    MetricCallback,
    StatePassingTrainer,
    ZeroStateTrainer,
    combine,
)

BATCH = 6
in_float32 = toys.tiny_model


def processes() -> int:
    return int(os.environ.get("WORLD_SIZE", 1))


def trained(method: str, rows: int, accumulation: int, stream: bool = False) -> dict[str, Tensor]:
    """The weights after two epochs."""
    with tempfile.TemporaryDirectory() as folder:
        changes: dict[str, Any] = {"gradient_accumulation_steps": accumulation, "save_strategy": "no"}
        batch = BATCH // processes()
        if stream:
            changes |= {"max_steps": 2 * (rows // BATCH // accumulation), "assume_shuffled": True}
        trainer: InitialStateTrainer = toys.resumable_trainer(folder, batch, method, rows=rows, **changes)
        if stream:
            trainer.train_dataset = toys.Stream(toys.sequences(rows))
        trainer.train()
        return toys.weights(trainer.model)


def refused(own: str) -> list[str]:
    """What training and evaluation say where each of the processes that share rows has its `own` number of a row."""
    own_rows = [{"input_ids": torch.full((5,), i), "labels": torch.full((5,), i)} for i in range(BATCH)]
    own_rows[1][own][3] = 1 + int(os.environ.get("RANK", 0))
    said = []
    with tempfile.TemporaryDirectory() as folder:
        settings = {"per_device_train_batch_size": BATCH, "per_device_eval_batch_size": BATCH, "max_steps": 1}
        settings |= {"context_parallel_size": processes(), "save_strategy": "no"}
        trainer = ZeroStateTrainer(
            toys.tiny_model(), InitialStateConfig(folder, **settings, **toys.QUIET), train_dataset=own_rows
        )
        for run in (trainer.train, lambda: trainer.evaluate(own_rows)):
            try:
                run()
            except ValueError as error:
                said.append(str(error))
    return said


def flattened(rows: int, accumulation: int, shared: bool = False) -> tuple[dict[str, Tensor], float]:
    """The weights after an epoch of batches whose sequences are one row, and the loss of an evaluation on them; rows
    may be shared by all processes."""
    batch = BATCH if shared else BATCH // processes()
    with tempfile.TemporaryDirectory() as folder:
        trainer = toys.resumable_trainer(
            folder,
            batch,
            rows=rows,
            gradient_accumulation_steps=accumulation,
            per_device_eval_batch_size=batch,
            context_parallel_size=processes() if shared else 1,
            num_train_epochs=1,
            save_strategy="no",
        )
        trainer.data_collator = DataCollatorWithFlattening()
        trainer.train()
        return toys.weights(trainer.model), trainer.evaluate(toys.sequences(rows))["eval_loss"]


def one_in_each() -> dict[str, Tensor]:
    """The weights after an epoch in windows of examples, of which each process has one as a packed row at a time."""
    rows = toys.examples(36)
    unpadded = [{name: row[name][: row["attention_mask"].sum()] for name in ("input_ids", "labels")} for row in rows]
    with tempfile.TemporaryDirectory() as folder:
        changes = {"gradient_accumulation_steps": BATCH // processes(), "num_train_epochs": 1, "save_strategy": "no"}
        trainer = toys.resumable_trainer(folder, 1, "tbtt on examples", **changes)
        trainer.train_dataset = unpadded
        trainer.data_collator = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)
        trainer.train()
        return toys.weights(trainer.model)


def labels_first() -> dict[str, Tensor]:
    """The weights after steps in windows, of whose two micro-batches only the first has targets."""
    rows = toys.sequences(4 * BATCH, length=23)
    for number, row in enumerate(rows):
        row["labels"][4 if number // BATCH % 2 == 0 else 0 :] = -100
    with tempfile.TemporaryDirectory() as folder:
        changes: dict[str, Any] = {"gradient_accumulation_steps": 2, "max_steps": 2, "save_strategy": "no"}
        trainer = toys.resumable_trainer(folder, BATCH // processes(), "tbtt on examples", **changes)
        trainer.train_dataset = toys.Stream(rows)
        trainer.train()
        return toys.weights(trainer.model)


def with_windows() -> dict[str, Tensor]:
    """The weights of a hybrid that is trained with drawn windows."""
    with tempfile.TemporaryDirectory() as folder:
        settings: dict[str, Any] = {"attention_windows": [1, 2, 4, 8], "save_strategy": "no", "rows": 48}
        settings |= {"optim": "sgd"}  # Adam makes steps of rounding noise, where a gradient is next to nothing
        trainer = toys.resumable_trainer(folder, BATCH // processes(), hybrid=True, double=True, **settings)
        trainer.train()
        return toys.weights(trainer.model)


def in_chunks(window: int | None) -> dict[str, Tensor]:
    """The weights of a hybrid that reads rows in chunks or windows; processes add gradients up once a step."""
    synchronized = []

    def add_up(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        synchronized.append(trainer.state.global_step)
        return allreduce_hook(state, bucket)

    with tempfile.TemporaryDirectory() as folder:
        settings: dict[str, Any] = {
            "bptt_chunk_length": 4,
            "bptt_window": window,
            "save_strategy": "no",
            "optim": "sgd",
        }
        trainer = toys.resumable_trainer(
            folder, BATCH // processes(), "zero state", hybrid=True, double=True, **settings
        )
        trainer.train_dataset = toys.examples(30)
        if processes() > 1:
            trainer.add_callback(toys.OnStep(0, lambda: trainer.model_wrapped.register_comm_hook(None, add_up)))
        trainer.train()
        assert synchronized == [*range(trainer.state.global_step)] * (processes() > 1)
        return toys.weights(trainer.model)


def chosen() -> tuple[dict[int, tuple[float, float]], int, float]:
    """Shares of keys by step, the best step and the steps of the weights that are loaded in the end."""
    from test_retrieval_metric import finding, shares

    trainer = finding(Path(f"{sys.argv[1]}.chosen.{processes()}"))
    trainer.train()
    return shares(trainer), trainer.state.best_global_step, trainer.model.steps.item()


def counted(fails: bool) -> list[float] | str:
    """What the main process measures every other step, or what each process says where that fails at step 4."""

    def count(model: Any) -> int:
        assert (os.environ.get("RANK", "0"), type(model).__name__) == ("0", "StatefulMamba2ForCausalLM")
        if fails and trainer.state.global_step == 4:
            raise KeyError("gone")
        return trainer.state.global_step

    with tempfile.TemporaryDirectory() as folder:
        trainer = toys.resumable_trainer(folder, BATCH // processes(), rows=48, save_strategy="no")
        MetricCallback({"count": count}, every_steps=2).attach(trainer)
        try:
            trainer.train()
        except RuntimeError as error:
            return str(error)
        return [entry["eval_count"] for entry in trainer.state.log_history if "eval_count" in entry]


EACH_READS: dict[str, Any] = {"accelerator_config": {"dispatch_batches": False}}
KINDS: dict[str, dict[str, Any]] = {
    "torch": {},
    "torch, each reads": EACH_READS,
    "torch, workers": {"dataloader_num_workers": 2},
    "1 shard": {},
    "4 shards, each reads": EACH_READS,
    "4 shards, workers": {"dataloader_num_workers": 2},
    "shared": {},
    "list": {},
    "list, shared": {},
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
        usual["context_parallel_size"] = processes() if "shared" in kind else 1
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


def in_float64(**fields: Any) -> Any:
    """In float32, Adam makes 2e-4 of sums in another order."""
    return in_float32(**fields).double()


def run(jobs: list[list[Any]]) -> list[Any]:
    return [globals()[name](*arguments) for name, *arguments in jobs]


def main() -> None:
    file, jobs = sys.argv[1], json.loads(sys.argv[2])
    logging.set_verbosity_error()
    gc.freeze()  # as in tests/conftest.py
    toys.tiny_model = in_float64
    results = {}
    for count in (1, 2, 3):
        with socket.socket() as free:
            free.bind(("localhost", 0))
            address = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": str(count)}
        children = []
        for rank in range(count):
            if (child := os.fork()) == 0:
                torch.set_num_threads(1)
                if count > 1:
                    os.environ.update(address, RANK=str(rank), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(count))
                torch.save(run(jobs), f"{file}.{count}.{rank}")
                sys.stdout.flush()
                os._exit(0)
            children.append(child)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        assert not any(codes), codes
        parts = [Path(f"{file}.{count}.{rank}") for rank in range(count)]
        results[count] = [torch.load(part) for part in parts]
    torch.save(results, file)


if __name__ == "__main__":
    main()
