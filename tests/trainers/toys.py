"""Small models, data and runs for the trainer tests.

Also a script that runs training in processes that may die: `python toys.py '[job, ...]'`. Each job is a dictionary of
the arguments of `run_job` and runs in a process of its own, forked after the imports, or in several that are connected
as by torchrun (`processes`): when one of them fails, the others are killed. Under torchrun itself all jobs run in turn
in each of its processes.
"""

import gc
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset
from transformers import TrainerCallback, TrainingArguments, default_data_collator, modeling_utils, trainer_callback
from transformers.utils import logging

import hf_recurrent_lengthgen.trainers.run.resume as checkpoints
from hf_recurrent_lengthgen.data.continued import ContinuedChunks
from hf_recurrent_lengthgen.models import StatefulMamba2Config, StatefulMamba2ForCausalLM
from hf_recurrent_lengthgen.models.state_value import LayerState, RecurrentState
from hf_recurrent_lengthgen.trainers import (
    AlignmentTrainer,
    FittedNoiseTrainer,
    InitialStateConfig,
    InitialStateTrainer,
    LearnedStateTrainer,
    MixedStatesTrainer,
    RandomNoiseTrainer,
    StatePassingTrainer,
    StateXTrainer,
    TbttTrainer,
    ZeroStateTrainer,
)

VOCABULARY = 17
SEPARATOR = 2
QUIET = {"use_cpu": True, "report_to": "none", "disable_tqdm": True}


class Stream(IterableDataset[Any]):
    """Rows in their order, without a length."""

    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[Any]:
        return iter(self.rows)


def recording(batches: list[dict[str, Tensor]]) -> Callable[[list[Any]], dict[str, Tensor]]:
    """A data collator that appends each batch to `batches`."""

    def collate(items: list[Any]) -> dict[str, Tensor]:
        batch = default_data_collator(items)
        batches.append({name: value.clone() for name, value in batch.items()})
        return batch

    return collate


class SumModel(nn.Module):
    """Its recurrent state is the sum of all ids read, its conv state the number of tokens read.

    Attributes:
        seen: for each forward pass (training, rows of ids, recurrent state at the start, conv state at the start).
        poisoned_pass: number of the forward pass whose final state is NaN in row 1.
    """

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.seen: list[tuple[bool, list[list[int]], list[float], list[float]]] = []
        self.poisoned_pass: int | None = None

    def zero_state(self, rows: int) -> RecurrentState:
        return (LayerState(torch.zeros(rows, 1), torch.zeros(rows, 1)),)

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        shift_labels: Tensor | None = None,
        initial_state: RecurrentState | None = None,
        output_final_state: bool = True,
    ) -> dict[str, Any]:
        rows, tokens = input_ids.shape
        start = LayerState(*(self.zero_state(rows) if initial_state is None else initial_state)[0])
        assert not start.recurrent.requires_grad
        self.seen.append(
            (self.training, input_ids.tolist(), start.recurrent[:, 0].tolist(), start.conv[:, 0].tolist())
        )
        total = start.recurrent + self.weight * input_ids.sum(1, keepdim=True)
        if self.poisoned_pass == len(self.seen) - 1:
            total = torch.where(torch.arange(rows)[:, None] == 1, torch.nan, total)
        output: dict[str, Any] = {"loss": self.weight * input_ids.float().mean(), "logits": input_ids.float()}
        if output_final_state:
            output["final_state"] = (LayerState(total, start.conv + tokens),)
        return output


def tiny_model(seed: int = 0, **fields: Any) -> StatefulMamba2ForCausalLM:
    """Mamba-2 with two layers and 2000 parameters."""
    torch.manual_seed(seed)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 8, "state_size": 4, "num_hidden_layers": 2} | fields
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return StatefulMamba2ForCausalLM(StatefulMamba2Config(num_heads=2, head_dim=8, n_groups=1, **sizes, **special))


def tiny_hybrid() -> Any:
    """Bamba with one layer of attention among three."""
    from transformers import BambaConfig, BambaForCausalLM

    from hf_recurrent_lengthgen.hybrids import stateful

    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "mamba_n_heads": 8, "mamba_d_head": 8}
    mamba = {"mamba_d_state": 6, "mamba_n_groups": 2, "attn_layer_indices": [1]}
    return stateful(BambaForCausalLM(BambaConfig(**sizes, **heads, **mamba, initializer_range=0.2)))


def sequences(count: int, length: int = 9, seed: int = 0) -> list[dict[str, Tensor]]:
    """Random ids; about a third of the labels is ignored, so micro-batches differ in their number of labels."""
    generator = torch.Generator().manual_seed(seed)
    items = []
    for _ in range(count):
        ids = torch.randint(0, VOCABULARY, (length,), generator=generator)
        labels = ids.masked_fill(torch.rand(length, generator=generator) < 0.3, -100)
        items.append({"input_ids": ids, "labels": labels})
    return items


def examples(count: int, length: int = 23) -> list[dict[str, Tensor]]:
    """Random ids of 1 to `length` tokens, padded at their end. Targets are at the end of an example only, or, in each
    third one, anywhere; some have none."""
    generator, items = torch.Generator().manual_seed(7), []
    for number in range(count):
        size = int(torch.randint(1, length + 1, (), generator=generator))
        ids = torch.randint(3, VOCABULARY, (length,), generator=generator)
        places = torch.arange(length)
        labelled = (places >= size - 2) if number % 3 else torch.rand(length, generator=generator) < 0.3
        mask = (places < size).long()
        labels = ids.masked_fill((mask == 0) | ~labelled | (places == 0), -100)
        items.append({"input_ids": ids * mask, "attention_mask": mask, "labels": labels})
    return items


def is_dropped(seed: int, step: int, micro_batch: int, row: int, probability: float) -> bool:
    """Whether state passing starts a row from zero: the first number of a generator keyed by the row's place."""
    return keyed_uniform("drop", seed, step, micro_batch, row) < probability


def keyed_generator(purpose: str, *place: int) -> torch.Generator:
    """A generator keyed by a purpose and a place: seed, step, micro-batch and, of a row, its number."""
    digest = hashlib.blake2b("/".join(map(str, (*place, purpose))).encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little"))


def keyed_uniform(purpose: str, *row: int) -> float:
    """The first number of a generator keyed by a row's place and a purpose."""
    return float(torch.rand((), generator=keyed_generator(purpose, *row)))


def keyed_normal(count: int, *row: int) -> Tensor:
    """The standard normal numbers of a row's noise, from a generator keyed by the row's place."""
    return torch.randn(count, generator=keyed_generator("noise", *row))


def weights(model: nn.Module) -> dict[str, Tensor]:
    """A copy of the parameters."""
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def assert_same_weights(actual: dict[str, Tensor], expected: dict[str, Tensor], atol: float = 0.0) -> None:
    """Compare parameters, bit for bit unless there is a tolerance."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=atol)


class OnStep(TrainerCallback):
    """Call `action` when optimizer step `step` (from 0) begins."""

    def __init__(self, step: int, action: Callable[[], Any]) -> None:
        self.step, self.action = step, action

    def on_step_begin(self, args: TrainingArguments, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            self.action()


def chunks(count: int, length: int = 9, **layout: Any) -> ContinuedChunks:
    """Chunks of one random stream, four of which belong together."""
    ids = token_stream(count * length + 1 + layout.get("lookahead", 0))
    return ContinuedChunks(ids, length, **{"chunks_before_reset": 4} | layout)


def token_stream(count: int, seed: int = 0) -> Tensor:
    """Random ids in documents of about ten."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCABULARY, (count,), generator=generator)
    return ids.masked_fill(torch.rand(count, generator=generator) < 0.1, SEPARATOR)


class Method(NamedTuple):
    """A training method: its trainer, what it needs beside the defaults, and data of a number of rows or chunks."""

    trainer: type[InitialStateTrainer]
    settings: dict[str, Any] = {}  # noqa: RUF012
    data: Callable[[int], Any] = sequences

    @property
    def config(self) -> type[InitialStateConfig]:
        return self.trainer.config_class


def by_document(count: int) -> ContinuedChunks:
    return chunks(count, reset_at_document=True, separator_id=SEPARATOR)


def looking_ahead(count: int) -> ContinuedChunks:
    return chunks(count, lookahead=4)


MIXTURE = {"zero": 0.2, "state_passing": 0.4, "fitted_noise": 0.4}
INHERITING = {"expand_initialization": "inherit", "expand_factor": 2.0}
METHODS = {
    "zero state": Method(ZeroStateTrainer),
    "random noise": Method(RandomNoiseTrainer, {"noise_sigma": 0.3}),
    "fitted noise": Method(FittedNoiseTrainer),
    "state passing": Method(StatePassingTrainer, {"state_drop_probability": 0.3}),
    "tbtt": Method(TbttTrainer, data=chunks),
    "tbtt by document": Method(TbttTrainer, data=by_document),
    "learned state": Method(LearnedStateTrainer, {"state_l2": 0.1, "state_scale": 0.5}),
    "learned state and model": Method(LearnedStateTrainer, {"train_model": True}),
    "mixture": Method(MixedStatesTrainer, {"mixture": MIXTURE}),
    "alignment": Method(AlignmentTrainer),
    "state passing, alignment": Method(StatePassingTrainer, {"alignment_alpha": 0.2}),
    "tbtt on examples": Method(TbttTrainer, {"bptt_chunk_length": 4}, examples),
    "tbtt, alignment": Method(TbttTrainer, {"alignment_alpha": 0.2, "alignment_length": 9}, looking_ahead),
    "state passing in chunks": Method(StatePassingTrainer, {"bptt_chunk_length": 4, "bptt_window": 2}),
    "statex": Method(StateXTrainer, {"new_weights_lr_multiplier": 2.0}),
    "statex, state passing": Method(StateXTrainer, {"mixture": {"zero": 0.3, "state_passing": 0.7}, **INHERITING}),
}


def resumable_trainer(
    output_dir: str | Path, batch_size: int = 2, method: str = "state passing", double: bool = False, **changes: Any
) -> InitialStateTrainer:
    """Two epochs of 4 steps with accumulation, with a checkpoint each; the last step has one micro-batch, and a row of
    15 is left out of each epoch. With `double` in float64."""
    settings: dict[str, Any] = {
        "num_train_epochs": 2,
        "per_device_train_batch_size": batch_size,
        "gradient_accumulation_steps": 2,
        "learning_rate": 0.05,
        "lr_scheduler_type": "cosine",
        "save_steps": 1,
        "logging_steps": 1,
        "seed": 3,
    }
    rows = changes.pop("rows", 15)
    chosen = METHODS[method]
    model: Any = tiny_hybrid() if changes.pop("hybrid", False) else tiny_model()
    args = chosen.config(str(output_dir), **QUIET | settings | chosen.settings | changes)
    return chosen.trainer(model.double() if double else model, args, train_dataset=chosen.data(rows))


def die_while_writing(what: str) -> None:
    """Cut the file in half that the next call writes, and kill this process."""
    writers: dict[str, tuple[Any, str]] = {
        "weights": (modeling_utils, "safe_save_file"),
        "initial_states": (checkpoints, "save_file"),
        "trainer_state.json": (trainer_callback.TrainerState, "save_to_json"),
    }
    owner, name = writers.get(what, (torch, "save"))  # all take the path second
    original, part = getattr(owner, name), "model.safetensors" if what == "weights" else what

    def write(*args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        if part in str(args[1]):
            os.truncate(args[1], os.path.getsize(args[1]) // 2)
            os.kill(os.getpid(), signal.SIGKILL)

    setattr(owner, name, write)


def run_job(
    output_dir: str,
    resume: str | bool = False,
    die_at_step: int | None = None,
    die_in: str | None = None,
    die_in_process: int = 0,
    interrupt_at_step: int | None = None,
    number: int = signal.SIGINT,
    **changes: Any,
) -> None:
    """Train; with `die_at_step` die there at once, with `die_in` while writing that part of the next checkpoint, and
    with `interrupt_at_step` send signal `number` there; in process `die_in_process` only."""
    trainer = resumable_trainer(output_dir, **changes)
    if trainer.args.process_index == die_in_process:
        if die_at_step is not None:
            trainer.add_callback(
                OnStep(
                    die_at_step, lambda: die_while_writing(die_in) if die_in else os.kill(os.getpid(), signal.SIGKILL)
                )
            )
        if interrupt_at_step is not None:
            trainer.add_callback(OnStep(interrupt_at_step, lambda: os.kill(os.getpid(), number)))
    trainer.train(resume_from_checkpoint=resume)


def run_apart(job: dict[str, Any]) -> list[int]:
    """Run a job in new processes; their exit codes, or minus the number of the signal that ended them."""
    processes = job.pop("processes", 1)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    ranks: dict[int, int] = {}
    for rank in range(processes):
        if (child := os.fork()) == 0:
            torch.set_num_threads(1)
            if processes > 1:
                address = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "WORLD_SIZE": str(processes)}
                os.environ.update(address, RANK=str(rank), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(processes))
            try:
                run_job(**job)
            except BaseException as error:
                if not isinstance(error, SystemExit | KeyboardInterrupt):
                    sys.excepthook(type(error), error, error.__traceback__)
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(error.code if isinstance(error, SystemExit) else 130 - 129 * isinstance(error, Exception))
            os._exit(0)
        ranks[child] = rank
    codes = [0] * processes
    running = set(ranks)
    while running:
        child, status = os.wait()
        running.discard(child)
        codes[ranks[child]] = os.waitstatus_to_exitcode(status)
        if (status and os.WIFSIGNALED(status)) or os.waitstatus_to_exitcode(status) == 1:
            for other in running:
                os.kill(other, signal.SIGKILL)
    return codes


def run_jobs(jobs: list[dict[str, Any]], timeout: int = 300) -> list[list[int]]:
    """Run jobs one after the other in processes of their own; the exit codes of each."""
    command = [sys.executable, __file__, json.dumps(jobs)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=timeout)
    codes = [json.loads(line.removeprefix("codes ")) for line in done.stdout.splitlines() if line.startswith("codes ")]
    assert len(codes) == len(jobs), done.stderr[-3000:]
    failed = [job for job, each in zip(jobs, codes, strict=True) if 1 in each and -signal.SIGKILL not in each]
    assert not failed, f"{failed}: {done.stderr[-3000:]}"
    return codes


def main() -> None:
    logging.set_verbosity_error()
    gc.freeze()  # as in tests/conftest.py
    try:
        for job in json.loads(sys.argv[1]):
            if "WORLD_SIZE" in os.environ:
                run_job(**job)
            else:
                print("codes", json.dumps(run_apart(job)), flush=True)  # else the next child prints the buffer, too
    finally:
        if torch.distributed.is_initialized():  # as trainer.accelerator.end_training() does
            torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
