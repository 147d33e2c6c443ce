"""A step of each trainer against a step of `Trainer`: same model, batch and length."""

import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments

from hf_recurrent_lengthgen.data import ContinuedChunks, PackedBlocks
from hf_recurrent_lengthgen.models import StatefulMamba2Config, StatefulMamba2ForCausalLM
from hf_recurrent_lengthgen.trainers import INTERVENTIONS

LENGTH = 2048
WIDE: dict[str, Any] = {  # the dimensions of Mamba-2 130m in two layers, with a vocabulary too small to matter
    "hidden_size": 768,
    "num_heads": 24,
    "head_dim": 64,
    "state_size": 128,
    "n_groups": 1,
    "num_hidden_layers": 2,
    "vocab_size": 256,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
SMALL = WIDE | {"hidden_size": 96, "num_heads": 6, "head_dim": 32, "state_size": 32}
SETTINGS: dict[str, dict[str, Any]] = {
    "none": {},
    "random_noise": {"noise_sigma": 0.1},
    "fitted_noise": {},
    "state_passing": {},
    "tbtt": {},
    "mixed": {"mixture": {"zero": 0.1, "state_passing": 0.45, "fitted_noise": 0.45}},
}


class StepTimer(TrainerCallback):
    """Seconds of each optimizer step, without what Trainer does between steps."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.began = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.began = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.seconds.append(time.perf_counter() - self.began)


def bench_trainer(rounds: int) -> dict[str, float]:
    """A step with each source of initial states against a Trainer step: same model, batch and length."""
    result: dict[str, float] = {}
    for name, sizes, batch, length in (
        ("wide", WIDE, 1, LENGTH),
        ("small", SMALL, 16, 128),
    ):
        steps = 3 if name == "wide" else 20
        stream = torch.arange(2 * steps * batch * (length + 1)) % 251
        medians: dict[str, list[float]] = {"plain": [], **{method: [] for method in SETTINGS}}
        with tempfile.TemporaryDirectory() as folder:
            for _ in range(rounds):
                for method, seconds in medians.items():
                    seconds.append(_seconds_of_step(method, sizes, stream, batch, length, steps, folder))
        result |= {f"{name}_{method}_step_ms": statistics.median(values) * 1000 for method, values in medians.items()}
        result |= {
            f"{name}_{method}_ratio": statistics.median(
                own / plain for own, plain in zip(medians[method], medians["plain"], strict=True)
            )
            for method in SETTINGS
        }
    return result


def bench_checkpoints(rounds: int) -> dict[str, float]:
    """Checkpoints of 16 rows with a vocabulary of 8,192: MiB, processor seconds to write one, and to resume a step."""
    data = WIDE | {"num_hidden_layers": 4, "vocab_size": 8192}, torch.arange(20_000) % 8000, 16, 256
    result: dict[str, float] = {}
    for method in ("plain", "none", "fitted_noise", "state_passing"):
        seconds: dict[str, list[float]] = {"write": [], "resume": []}
        for _ in range(rounds):
            with tempfile.TemporaryDirectory() as folder:
                for name, call, steps, resumed in (
                    ("write", "_save_checkpoint", 1, None),
                    ("resume", "train", 2, True),
                ):
                    trainer = _trainer(method, *data, steps, folder, save_strategy="steps", save_steps=2)
                    setattr(trainer, call, partial(_timed, getattr(trainer, call), seconds[name]))
                    trainer.train(resume_from_checkpoint=resumed)
                    files = [path for path in Path(folder, "checkpoint-2").rglob("*") if path.is_file()]
                    result[f"{method}_mib"] = sum(path.stat().st_size for path in files) / 2**20
        result |= {f"{method}_{name}_seconds": statistics.median(values) for name, values in seconds.items()}
    return result


def _timed(function: Callable[..., Any], seconds: list[float], *args: Any, **options: Any) -> Any:
    began = time.process_time()
    try:
        return function(*args, **options)
    finally:
        seconds.append(time.process_time() - began)


def _seconds_of_step(
    method: str, sizes: dict[str, Any], stream: torch.Tensor, batch: int, length: int, steps: int, folder: str
) -> float:
    timer = StepTimer()
    _trainer(method, sizes, stream, batch, length, steps, folder, timer).train()
    return statistics.median(timer.seconds[1:])


def _trainer(
    method: str,
    sizes: dict[str, Any],
    stream: torch.Tensor,
    batch: int,
    length: int,
    steps: int,
    folder: str,
    *callbacks: TrainerCallback,
    **options: Any,
) -> Trainer:
    """For a step more than `steps`, with a new model."""
    torch.manual_seed(0)
    model = StatefulMamba2ForCausalLM(StatefulMamba2Config(**sizes))
    trainer_class = Trainer if method == "plain" else INTERVENTIONS[method]
    config_class = TrainingArguments if method == "plain" else INTERVENTIONS[method].config_class
    data: Dataset[Any] = PackedBlocks(stream, length)
    if method == "tbtt":  # as many tokens in a row
        data = ContinuedChunks(stream, length + 1, chunks_before_reset=2)
    quiet = {"report_to": "none", "logging_strategy": "no", "disable_tqdm": True, "dataloader_pin_memory": False}
    arguments = config_class(
        folder,
        max_steps=steps + 1,
        per_device_train_batch_size=batch,
        **{"save_strategy": "no"} | quiet | SETTINGS.get(method, {}) | options,
    )
    return trainer_class(model, arguments, train_dataset=data, callbacks=[*callbacks])
