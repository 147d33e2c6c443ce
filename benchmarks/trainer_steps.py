"""A step of each trainer against a step of `Trainer`: same model, batch and length."""

import statistics
import tempfile
import time
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


def _seconds_of_step(
    method: str, sizes: dict[str, Any], stream: torch.Tensor, batch: int, length: int, steps: int, folder: str
) -> float:
    torch.manual_seed(0)
    model = StatefulMamba2ForCausalLM(StatefulMamba2Config(**sizes))
    trainer_class = Trainer if method == "plain" else INTERVENTIONS[method]
    config_class = TrainingArguments if method == "plain" else INTERVENTIONS[method].config_class
    data: Dataset[Any] = PackedBlocks(stream, length)
    if method == "tbtt":  # as many tokens in a row
        data = ContinuedChunks(stream, length + 1, chunks_before_reset=2)
    arguments = config_class(
        folder,
        max_steps=steps + 1,
        per_device_train_batch_size=batch,
        save_strategy="no",
        report_to="none",
        logging_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        **SETTINGS.get(method, {}),
    )
    timer = StepTimer()
    trainer_class(model, arguments, train_dataset=data, callbacks=[timer]).train()
    return statistics.median(timer.seconds[1:])
