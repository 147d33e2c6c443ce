"""The runs behind the laws: a tiny Mamba-2 of some state size, trained on bytes of text or on finding a needle.

A run is a few numbers and a seed (`Run`); its result is a file, so that an interrupted study continues where it
stopped. All models start with mimetic initialization (arXiv:2410.11135), with heads that forget almost nothing.
"""

import hashlib
import json
import math
import time
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_recurrent_lengthgen.cli.inputs import load_stream
from hf_recurrent_lengthgen.data import byte_tokenizer, evaluation_sequences
from hf_recurrent_lengthgen.data.tasks import EVALUATION_SEED
from hf_recurrent_lengthgen.evaluation.scaling_laws import state_elements
from hf_recurrent_lengthgen.evaluation.statistics import bin_means, position_edges
from hf_recurrent_lengthgen.evaluation.streaming import stream_nll
from hf_recurrent_lengthgen.models import StatefulMamba2Config, StatefulMamba2ForCausalLM
from hf_recurrent_lengthgen.models.atomic_files import replacing
from hf_recurrent_lengthgen.surgery import mimetic_initialization

Result = dict[str, Any]
VALUES = 16
"""Symbols of the needle task; after them come the mark before the needle and the question."""
MARK, QUESTION = VALUES, VALUES + 1
SHORTEST_NEEDLE_ROW = 8
HOPELESS = 0.7
"""Accuracy below which longer rows are not tried."""


@dataclass(frozen=True)
class Run:
    """One training run.

    Attributes:
        task: "text" or "needle".
        state_size: N, what differs between the models of a family.
        length: Training length in tokens; needle rows have `SHORTEST_NEEDLE_ROW` to `length`.
        tokens: Tokens of a step, `length` of them a row; for needles, rows of a step.
        positions: Text: length of the streams on which it is measured. Needle: longest row that is tried.
        rows: Text: streams, and `window_tokens` bytes in rows of `length`. Needle: rows of each length.
    """

    task: str
    state_size: int
    length: int
    seed: int
    hidden_size: int = 64
    head_dim: int = 32
    layers: int = 2
    mimetic_c: float = 5.0
    mimetic_offset: int = 1
    initializer_range: float = 0.02
    steps: int = 300
    tokens: int = 1024
    learning_rate: float = 1e-2
    positions: int = 8192
    rows: int = 16
    window_tokens: int = 65536

    @property
    def label(self) -> str:
        return f"{self.task} N={self.state_size} T={self.length} seed={self.seed}"

    def file(self, folder: Path) -> Path:
        """Of the result; all settings are in its name, the most of them as a hash."""
        settings = hashlib.sha256(json.dumps(asdict(self)).encode()).hexdigest()[:12]
        return folder / f"{self.label.replace(' ', '_')}_{settings}.json"


def found_or_trained(run: Run, folder: Path) -> Result:
    """The result of a run, which is trained if it has no file yet."""
    file = run.file(folder)
    if not file.is_file():
        began = time.perf_counter()
        result = {"run": asdict(run), **train(run), "seconds": round(time.perf_counter() - began, 1)}
        with replacing(file) as temporary:
            temporary.write_text(json.dumps(result), encoding="utf-8")
    found: Result = json.loads(file.read_text(encoding="utf-8"))
    return found


def train(run: Run) -> Result:
    """Train and measure; AdamW(0.9, 0.95), gradients clipped at norm 1, warm-up over 5 % of the steps, then cosine."""
    model = new_model(run)
    draw, measure = {"text": (_text_loss, _text_curve), "needle": (_needle_loss, _needle_accuracy)}[run.task]
    optimizer = torch.optim.AdamW(model.parameters(), lr=run.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, run.steps))
    generator = torch.Generator().manual_seed(run.seed)
    losses = []
    for _ in range(run.steps):
        loss = draw(model, run, generator)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    last = losses[-max(1, run.steps // 10) :]
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "state_elements": state_elements(model),
        "training_loss": round(sum(last) / len(last), 4),
        **measure(model.eval(), run),
    }


def new_model(run: Run) -> StatefulMamba2ForCausalLM:
    """The model at step 0; the seed determines its weights."""
    torch.manual_seed(run.seed)
    config = StatefulMamba2Config(
        vocab_size=len(byte_tokenizer()) if run.task == "text" else VALUES + 2,
        hidden_size=run.hidden_size,
        num_heads=2 * run.hidden_size // run.head_dim,
        head_dim=run.head_dim,
        n_groups=1,
        num_hidden_layers=run.layers,
        state_size=run.state_size,
        initializer_range=run.initializer_range,
        tie_word_embeddings=True,
        **{"pad_token_id": 0, "bos_token_id": None, "eos_token_id": None},
    )
    model = StatefulMamba2ForCausalLM(config)
    mimetic_initialization(model, c=run.mimetic_c, offset=run.mimetic_offset)
    return model


def _rate(step: int, steps: int) -> float:
    warm_up = min(1.0, 20 * (step + 1) / steps)
    return warm_up * (0.55 + 0.45 * math.cos(math.pi * step / steps))


@cache
def _text(split: str) -> Tensor:
    return load_stream("stdlib", split, byte_tokenizer()).tokens


def _text_loss(model: nn.Module, run: Run, generator: torch.Generator) -> Tensor:
    """Mean loss of `tokens` bytes in rows of `length`, from places drawn at random."""
    text = _text("train")
    starts = torch.randint(len(text) - run.length, (max(1, run.tokens // run.length),), generator=generator).tolist()
    rows = torch.stack([text[start : start + run.length + 1] for start in starts]).long()
    logits = model(input_ids=rows[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())


def _text_curve(model: nn.Module, run: Run) -> Result:
    """Mean loss by position, in bins of half an octave.

    Inside the training length it is that of many short rows, beyond it that of the streams: a stream has too few
    positions there to tell the greatest loss from noise.
    """
    held_out = _text("validation")
    short = evaluation_sequences(held_out, max(1, run.window_tokens // run.length), run.length + 1)
    streams = evaluation_sequences(held_out, run.rows, run.positions + 1)
    inside = stream_nll(model, short, progress=False).nll
    beyond = stream_nll(model, streams, progress=False).nll
    edges = position_edges(run.positions, run.length, 0, 2)
    limit = edges.index(run.length)
    means = [*bin_means(inside, edges[: limit + 1]).mean(0), *bin_means(beyond, edges[limit:]).mean(0)]
    return {"edges": edges, "mean": [round(float(mean), 4) for mean in means]}


def needle_rows(length: int, places: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Rows "7 3 MARK 9 2 11 ... QUESTION" (B, length) and the values after their marks (B,), here 9.

    Args:
        length: Tokens of a row, at least 4.
        places: (B,), where the mark stands, in [0, length - 3].
        generator: Of the values.
    """
    count = len(places)
    rows = torch.randint(VALUES, (count, length), generator=generator)
    rows[torch.arange(count), places] = MARK
    rows[:, -1] = QUESTION
    return rows, rows[torch.arange(count), places + 1]


def _needle_loss(model: nn.Module, run: Run, generator: torch.Generator) -> Tensor:
    """Mean loss of the answers of rows of one length."""
    length = int(torch.randint(min(SHORTEST_NEEDLE_ROW, run.length), run.length + 1, (), generator=generator))
    rows, values = needle_rows(length, torch.randint(length - 2, (run.tokens,), generator=generator), generator)
    return F.cross_entropy(model(input_ids=rows, logits_to_keep=1).logits[:, -1], values)


@torch.inference_mode()
def _needle_accuracy(model: nn.Module, run: Run) -> Result:
    """Share of right answers at lengths of half an octave, depths evenly spaced, up to where it is `HOPELESS`."""
    generator = torch.Generator().manual_seed(EVALUATION_SEED)
    accuracy: dict[int, float] = {}
    for half_octaves in range(6, 1000):
        length = round(2 ** (half_octaves / 2))
        if length > run.positions or (accuracy and min(accuracy.values()) < HOPELESS):
            break
        places = torch.linspace(0, length - 3, run.rows).round().long()
        rows, values = needle_rows(length, places, generator)
        right = 0
        for batch, answers in zip(rows.split(32), values.split(32), strict=True):
            right += int((model(input_ids=batch, logits_to_keep=1).logits[:, -1].argmax(-1) == answers).sum())
        accuracy[length] = round(right / run.rows, 4)
    return {"accuracy": accuracy}
