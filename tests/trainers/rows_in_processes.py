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
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import toys
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from transformers import DataCollatorWithFlattening
from transformers.utils import logging

from hf_recurrent_lengthgen.trainers import InitialStateConfig, InitialStateTrainer, MetricCallback, ZeroStateTrainer

BATCH = 6
in_float32 = toys.tiny_model


def processes() -> int:
    return int(os.environ.get("WORLD_SIZE", 1))


def numbers(count: int) -> list[dict[str, Tensor]]:
    """Row i is i everywhere."""
    return [{"input_ids": torch.full((5,), i), "labels": torch.full((5,), i)} for i in range(count)]


def rows_seen(rows: int, accumulation: int, streamed: bool) -> list[list[list[int]]]:
    """The rows of this process in each micro-batch of each step of two epochs, as training fetches them."""
    steps: list[list[list[int]]] = []

    class Listens(ZeroStateTrainer):
        def get_batch_samples(self, *arguments: Any) -> Any:
            batches, items = super().get_batch_samples(*arguments)
            if batches:
                steps.append([batch["input_ids"][:, 0].tolist() for batch in batches])
            return batches, items

    data: Any = toys.Stream(numbers(rows)) if streamed else numbers(rows)
    settings = {"per_device_train_batch_size": BATCH // processes(), "gradient_accumulation_steps": accumulation}
    whole = -(-(rows // BATCH) // accumulation)
    length = {"max_steps": 2 * (rows // BATCH // accumulation)} if streamed else {"max_steps": 2 * whole}
    with tempfile.TemporaryDirectory() as folder:
        args = InitialStateConfig(folder, save_strategy="no", **toys.QUIET, **settings, **length)
        Listens(toys.SumModel(), args, train_dataset=data).train()
    return steps


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


def evaluated(rows: int, streamed: bool, shared: bool = False) -> tuple[float, Tensor]:
    """The loss of an evaluation and the predictions of all rows, with labels of different number in each; rows may be
    shared by all processes."""
    data: Any = toys.sequences(rows)
    if streamed:
        data = toys.Stream(data)
    with tempfile.TemporaryDirectory() as folder:
        settings = {"per_device_eval_batch_size": BATCH if shared else BATCH // processes()}
        settings |= {"context_parallel_size": processes() if shared else 1}
        args = InitialStateConfig(folder, **settings, **toys.QUIET)
        trainer = ZeroStateTrainer(toys.tiny_model(), args, train_dataset=toys.sequences(BATCH))
        loss = trainer.evaluate(data)["eval_loss"]
        return loss, torch.as_tensor(trainer.predict(data).predictions)


def refused(own: str) -> list[str]:
    """What training and evaluation say where each of the processes that share rows has its `own` number of a row."""
    own_rows = numbers(BATCH)
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


def left_padded(rows: int) -> list[dict[str, Tensor]]:
    """Rows of 9 tokens, of which 0 to 4 are padding on the left."""
    texts = toys.sequences(rows)
    for i, text in enumerate(texts):
        text["attention_mask"] = (torch.arange(9) >= i % 5).long()
        text["labels"] = text["input_ids"].masked_fill(torch.arange(9) < i % 5, -100)
    return texts


def with_padding(rows: int, accumulation: int) -> tuple[dict[str, Tensor], float]:
    """The weights after an epoch of rows with padding on the left, and the loss of an evaluation on them."""
    settings = {"per_device_train_batch_size": BATCH // processes(), "gradient_accumulation_steps": accumulation}
    settings |= {"per_device_eval_batch_size": BATCH // processes(), "num_train_epochs": 1, "learning_rate": 0.05}
    with tempfile.TemporaryDirectory() as folder:
        args = InitialStateConfig(folder, save_strategy="no", **toys.QUIET, **settings)
        data = left_padded(rows)
        trainer = ZeroStateTrainer(toys.tiny_model(), args, train_dataset=data, eval_dataset=data)
        trainer.train()
        return toys.weights(trainer.model), trainer.evaluate()["eval_loss"]


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
    given = [{name: row[name][: row["attention_mask"].sum()] for name in ("input_ids", "labels")} for row in rows]
    with tempfile.TemporaryDirectory() as folder:
        changes = {"gradient_accumulation_steps": BATCH // processes(), "num_train_epochs": 1, "save_strategy": "no"}
        trainer = toys.resumable_trainer(folder, 1, "tbtt on examples", **changes)
        trainer.train_dataset = given
        trainer.data_collator = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)
        trainer.train()
        return toys.weights(trainer.model)


def asked_first() -> dict[str, Tensor]:
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
