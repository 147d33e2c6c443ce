"""Training a small model on a string task, and how well it does at 1, 2 and 4 times the length it was trained on.

A run is a few numbers and a seed (`Run`); its result is a file, so that an interrupted study continues where it
stopped, and several processes may share one folder if they take the runs in different orders.
"""

import hashlib
import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hf_recurrent_lengthgen.data.tasks import TaskStrings, string_task
from hf_recurrent_lengthgen.evaluation.string_accuracy import accuracy_by_length
from hf_recurrent_lengthgen.models import (
    StatefulMamba2Config,
    StatefulMamba2ForCausalLM,
    StatefulMambaConfig,
    StatefulMambaForCausalLM,
)
from hf_recurrent_lengthgen.models.atomic_files import replacing
from hf_recurrent_lengthgen.surgery import initialize_from_teacher_layer, mimetic_initialization
from hf_recurrent_lengthgen.surgery.mimetic import SWITCHES

Result = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """One training run.

    Attributes:
        task: A name of `string_task`.
        family: "mamba" or "mamba2".
        start: "default"; "mimetic" for the paper's switches of the family; "hybrid" for softmax attention in place of
            the last mixer, all others as by default; switches of mimetic initialization joined by "+", the others
            being off; or "teacher 0", "teacher 1", ... for that layer of a model trained from the mimetic start
            in all layers.
        states: "plain" for the loop below, in which each step draws one length; "zero" and "passed" for the trainers
            of `passing.py`, in which each row does.
        shortest: Symbols (pairs for recall) of the shortest training strings.
        length: Those of the longest, the training length.
        vocabulary: Symbols of the task.
        multiples: Lengths at which it is measured, as multiples of the training length.
        evaluations: How often it is measured, in even steps, with `evaluation_rows` and at the end `final_rows`.
    """

    task: str
    family: str
    start: str
    seed: int
    states: str = "plain"
    shortest: int = 6
    length: int = 12
    vocabulary: int = 32
    hidden_size: int = 32
    layers: int = 2
    state_size: int = 32
    head_dim: int = 16
    initializer_range: float = 0.1
    steps: int = 500
    batch_size: int = 64
    learning_rate: float = 1e-2
    multiples: tuple[float, ...] = (1, 2, 4)
    evaluations: int = 5
    evaluation_rows: int = 64
    final_rows: int = 256

    @property
    def label(self) -> str:
        """What differs within the studies."""
        return f"{self.task} {self.family} {self.start} {self.states} N={self.state_size} seed={self.seed}"

    def data(self) -> TaskStrings:
        """Strings of the longest length, which `resized` makes shorter."""
        return string_task(self.task, self.length, self.vocabulary, self.batch_size, self.seed)

    def file(self, folder: Path) -> Path:
        """Of the result; all settings are in its name, the most of them as a hash."""
        settings = hashlib.sha256(json.dumps(asdict(self)).encode()).hexdigest()[:12]
        return folder / f"{self.label.replace(' ', '_')}_{settings}.json"


def found_or_trained(run: Run, folder: Path, train: Callable[[Run], Result]) -> Result:
    """The result of a run, which is trained if it has no file yet."""
    file = run.file(folder)
    if not file.is_file():
        began = time.perf_counter()
        result = {"run": asdict(run), **train(run), "seconds": round(time.perf_counter() - began, 1)}
        with replacing(file) as temporary:
            temporary.write_text(json.dumps(result), encoding="utf-8")
        print(f"{run.label}: {result['curve'][-1]}, {result['seconds']} s", flush=True)
    found: Result = json.loads(file.read_text(encoding="utf-8"))
    return found


def measure(model: nn.Module, run: Run, step: int) -> list[float]:
    """The step, and accuracy by character at the multiples of the training length."""
    lengths = [round(multiple * run.length) for multiple in run.multiples]
    rows = run.final_rows if step == run.steps else run.evaluation_rows
    found = accuracy_by_length(model, run.data(), lengths, samples=rows)
    return [step, *(round(found[length].character, 4) for length in lengths)]


def new_model(run: Run) -> nn.Module:
    """The model at step 0; the seed determines its weights."""
    common: dict[str, Any] = {
        "vocab_size": run.data().vocab_size,
        "hidden_size": run.hidden_size,
        "num_hidden_layers": run.layers,
        "state_size": run.state_size,
        "initializer_range": run.initializer_range,
        "attention_layers": [run.layers - 1] if run.start == "hybrid" else None,
        **{"pad_token_id": 0, "bos_token_id": None, "eos_token_id": 2},
    }
    torch.manual_seed(run.seed)
    model: nn.Module
    if run.family == "mamba":
        model = StatefulMambaForCausalLM(StatefulMambaConfig(**common))
    else:
        heads = 2 * run.hidden_size // run.head_dim
        config = StatefulMamba2Config(num_heads=heads, head_dim=run.head_dim, n_groups=1, **common)
        model = StatefulMamba2ForCausalLM(config)
    if run.start.startswith("teacher "):
        teacher = new_model(replace(run, start="mimetic"))
        fit(teacher, replace(run, evaluations=0))
        initialize_from_teacher_layer(model, teacher, int(run.start.removeprefix("teacher ")))
    elif run.start == "mimetic":
        mimetic_initialization(model)
    elif run.start not in ("default", "hybrid"):
        on = run.start.split("+")
        mimetic_initialization(model, **{switch: switch in on for switch in SWITCHES})
    return model


def train(run: Run) -> Result:
    """Train and measure."""
    model = new_model(run)
    return {"parameters": sum(parameter.numel() for parameter in model.parameters()), "curve": fit(model, run)}


def fit(model: nn.Module, run: Run) -> list[list[float]]:
    """Train, and measure on the way.

    The loss is the cross-entropy of the answer. AdamW(0.9, 0.95), no weight decay, gradients clipped at norm 1, linear
    warm-up over 5 % of the steps, then cosine to a tenth.
    """
    task = run.data()
    optimizer = torch.optim.AdamW(model.parameters(), lr=run.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, run.steps))
    lengths = torch.Generator().manual_seed(run.seed)
    curve = []
    for step in range(1, run.steps + 1):
        length = int(torch.randint(run.shortest, run.length + 1, (), generator=lengths))
        rows = task.resized(length, run.steps * run.batch_size, run.seed)
        batch = rows.batch(range((step - 1) * run.batch_size, step * run.batch_size))
        loss = model(**batch, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step * run.evaluations // run.steps > (step - 1) * run.evaluations // run.steps:
            curve.append(measure(model, run, step))
    return curve


def _rate(step: int, steps: int) -> float:
    warm_up = min(1.0, 20 * (step + 1) / steps)
    return warm_up * (0.55 + 0.45 * math.cos(math.pi * step / steps))
