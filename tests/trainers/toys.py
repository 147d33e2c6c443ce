"""Small models, data and runs for the trainer tests.

Also a script that runs training in processes that may die: `python toys.py '[job, ...]'`. Each job is a dictionary of
the arguments of `run_job` and runs in a process of its own, forked after the imports; under torchrun all jobs run in
turn in each of its processes.
"""

import hashlib
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback, TrainingArguments, trainer_callback
from transformers.utils import logging

import hf_recurrent_lengthgen.trainers.checkpoints as checkpoints
from hf_recurrent_lengthgen import StatefulMamba2Config, StatefulMamba2ForCausalLM
from hf_recurrent_lengthgen.models.recurrent_state import LayerState, RecurrentState
from hf_recurrent_lengthgen.trainers import StatePassingConfig, StatePassingTrainer

VOCABULARY = 17
QUIET = {"use_cpu": True, "report_to": "none", "disable_tqdm": True}


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

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        initial_state: RecurrentState | None = None,
        output_final_state: bool = True,
    ) -> dict[str, Any]:
        rows, tokens = input_ids.shape
        start = LayerState(torch.zeros(rows, 1), torch.zeros(rows, 1)) if initial_state is None else initial_state[0]
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


def sequences(count: int, length: int = 9, seed: int = 0) -> list[dict[str, Tensor]]:
    """Random ids; about a third of the labels is ignored, so micro-batches differ in their number of labels."""
    generator = torch.Generator().manual_seed(seed)
    items = []
    for _ in range(count):
        ids = torch.randint(0, VOCABULARY, (length,), generator=generator)
        labels = ids.masked_fill(torch.rand(length, generator=generator) < 0.3, -100)
        labels[0] = -100  # Some versions of Trainer count the label that is shifted away.
        items.append({"input_ids": ids, "labels": labels})
    return items


def is_dropped(seed: int, step: int, slot: int, row: int, probability: float) -> bool:
    """Whether state passing starts a row from zero: the first number of a generator keyed by the row's place."""
    digest = hashlib.blake2b(f"{seed}/{step}/{slot}/{row}/drop".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
    return float(torch.rand((), generator=generator)) < probability


def weights(model: nn.Module) -> dict[str, Tensor]:
    """A copy of the parameters."""
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def assert_same_weights(given: dict[str, Tensor], expected: dict[str, Tensor], atol: float = 0.0) -> None:
    """Compare parameters, bit for bit unless a tolerance is given."""
    torch.testing.assert_close(given, expected, rtol=0, atol=atol)


class OnStep(TrainerCallback):
    """Call `action` when optimizer step `step` (from 0) begins."""

    def __init__(self, step: int, action: Callable[[], Any]) -> None:
        self.step, self.action = step, action

    def on_step_begin(self, args: TrainingArguments, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            self.action()


def resumable_trainer(output_dir: str | Path, batch_size: int = 2, **changes: Any) -> StatePassingTrainer:
    """Two epochs of 4 steps with accumulation, with a checkpoint each; the last batch and last group are smaller."""
    settings: dict[str, Any] = {
        "num_train_epochs": 2,
        "per_device_train_batch_size": batch_size,
        "gradient_accumulation_steps": 2,
        "learning_rate": 0.05,
        "lr_scheduler_type": "cosine",
        "save_steps": 1,
        "logging_steps": 1,
        "state_drop_probability": 0.3,
        "seed": 3,
    }
    rows = changes.pop("rows", 13)
    args = StatePassingConfig(str(output_dir), **QUIET | settings | changes)
    return StatePassingTrainer(tiny_model(), args, train_dataset=sequences(rows))


def die_while_writing(what: str) -> None:
    """Cut the file in half that the next call writes, and kill this process."""

    def cut_and_die(path: str | Path) -> None:
        os.truncate(path, os.path.getsize(path) // 2)
        os.kill(os.getpid(), signal.SIGKILL)

    def replace_writer(module: Any, name: str, position: int, file_name: str) -> None:
        original = getattr(module, name)

        def write(*args: Any, **kwargs: Any) -> None:
            original(*args, **kwargs)
            if file_name in str(args[position]):
                cut_and_die(args[position])

        setattr(module, name, write)

    if what == "weights":
        import transformers.modeling_utils

        replace_writer(transformers.modeling_utils, "safe_save_file", 1, "model.safetensors")
    elif what in ("optimizer.pt", "scheduler.pt", "rng_state"):
        replace_writer(torch, "save", 1, what)
    elif what == "initial_states":
        replace_writer(checkpoints, "save_file", 1, "initial_states")
    elif what == "trainer_state.json":
        replace_writer(trainer_callback.TrainerState, "save_to_json", 1, what)
    elif what == "rotation":

        def delete_one_and_die(path: str | Path, *args: Any, **kwargs: Any) -> None:
            sorted(Path(path).iterdir())[-1].unlink()
            os.kill(os.getpid(), signal.SIGKILL)

        shutil.rmtree = delete_one_and_die  # type: ignore[assignment]
    else:
        raise ValueError(what)


def run_job(
    output_dir: str,
    resume: str | bool = False,
    die_at_step: int | None = None,
    die_in: str | None = None,
    die_in_process: int = 0,
    **changes: Any,
) -> None:
    """Train; with `die_at_step` die there at once, with `die_in` while writing that part of the next checkpoint."""
    trainer = resumable_trainer(output_dir, **changes)
    if die_at_step is not None and trainer.args.process_index == die_in_process:
        trainer.add_callback(
            OnStep(die_at_step, lambda: die_while_writing(die_in) if die_in else os.kill(os.getpid(), signal.SIGKILL))
        )
    trainer.train(resume_from_checkpoint=resume)


def main() -> None:
    logging.set_verbosity_error()
    for job in json.loads(sys.argv[1]):
        if "WORLD_SIZE" in os.environ:
            run_job(**job)
        elif os.fork() == 0:
            torch.set_num_threads(1)
            run_job(**job)
            os._exit(0)
        else:
            print("status", os.wait()[1], flush=True)  # else the next child inherits the buffer and prints it, too


if __name__ == "__main__":
    main()
