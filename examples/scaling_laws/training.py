"""The runs behind the laws: a tiny model of some state size, trained on bytes of text or on finding a needle.

A run is a few numbers and a seed (`Run`); its result is kept, so that an interrupted study continues where it
stopped. Mamba-2 starts with mimetic initialization (arXiv:2410.11135), with heads that forget almost nothing, unless
`mimetic_c` is None; DeltaNet, which has no decay, with fla's default initialization.
"""

import hashlib
import json
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
from arm_results import ArmResults, Result
from scaling_laws import state_size
from torch import Tensor, nn

from hf_recurrent_lengthgen.cli.inputs import load_stream
from hf_recurrent_lengthgen.data import byte_tokenizer, evaluation_sequences
from hf_recurrent_lengthgen.data.tasks import EVALUATION_SEED
from hf_recurrent_lengthgen.evaluation.statistics import bin_means, position_edges
from hf_recurrent_lengthgen.evaluation.streaming import stream_nll
from hf_recurrent_lengthgen.models import (
    StatefulDeltaNetConfig,
    StatefulDeltaNetForCausalLM,
    StatefulMamba2Config,
    StatefulMamba2ForCausalLM,
)
from hf_recurrent_lengthgen.models.state_value import detach_state
from hf_recurrent_lengthgen.surgery import mimetic_initialization

VALUES = 16
"""Symbols of the needle task; after them come the mark before the needle and the question."""
MARK, QUESTION = VALUES, VALUES + 1
SHORTEST_NEEDLE_ROW = 8
HOPELESS = 0.7
"""Accuracy below which longer sequences are not tried."""


@dataclass(frozen=True)
class Run:
    """One training run.

    Attributes:
        task: "text" or "needle".
        state_size: N, what differs between the models of a family; in DeltaNet the size of a key.
        length: Training length in tokens; needle sequences have `SHORTEST_NEEDLE_ROW` to `length`.
        mimetic_c: None for no mimetic initialization.
        initialization: Of the other weights, see the configuration of Mamba-2.
        tokens: Tokens of a step, `length` of them a sequence; for needles, sequences of a step.
        chunks: Text: steps in which a sequence continues the text and the state of the step before (TBTT); 1 for
            sequences from the zero state.
        positions: Text: length of the streams on which it is measured. Needle: longest sequence that is tried.
        rows: Text: streams, and `window_tokens` bytes in sequences of `length`. Needle: sequences of each length.
    """

    task: str
    state_size: int
    length: int
    seed: int
    family: str = "mamba2"
    hidden_size: int = 64
    head_dim: int = 32
    layers: int = 2
    mimetic_c: float | None = 5.0
    mimetic_offset: int = 1
    initializer_range: float = 0.02
    initialization: str = "transformers"
    steps: int = 300
    tokens: int = 1024
    chunks: int = 1
    learning_rate: float = 1e-2
    positions: int = 8192
    rows: int = 16
    window_tokens: int = 65536

    @property
    def label(self) -> str:
        return f"{self.task} N={self.state_size} T={self.length} seed={self.seed}"

    @property
    def arm(self) -> str:
        """The name of its result; all settings are in it, the most of them as a hash."""
        settings = hashlib.sha256(json.dumps(asdict(self)).encode()).hexdigest()[:12]
        return f"{self.task} N={self.state_size} T={self.length} {settings}"


def result_of(run: Run, kept: ArmResults) -> Result | None:
    """The result of a run; None if there is none."""
    return kept.get(run.arm, run.seed)


def trained(run: Run, kept: ArmResults, device: str = "cpu") -> Result:
    """Train a run on a device, and keep its result."""
    began = time.perf_counter()
    result = {"run": asdict(run), **train(run, device), "seconds": round(time.perf_counter() - began, 1)}
    kept.put(run.arm, run.seed, result)
    result = kept.get(run.arm, run.seed)  # as JSON has it
    assert result is not None
    return result


def train(run: Run, device: str = "cpu") -> Result:
    """Train and measure; AdamW(0.9, 0.95), gradients clipped at norm 1, warm-up over 5 % of the steps, then cosine."""
    model = new_model(run).to(device)  # type: ignore[arg-type]
    draw, measure = {"text": (_text_losses, _text_curve), "needle": (_needle_losses, _needle_accuracy)}[run.task]
    optimizer = torch.optim.AdamW(model.parameters(), lr=run.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, run.steps))
    generator = torch.Generator().manual_seed(run.seed)
    losses = []
    for loss in islice(draw(model, run, generator), run.steps):
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    last = losses[-max(1, run.steps // 10) :]
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "state_elements": state_size(model),
        "training_loss": round(sum(last) / len(last), 4),
        **measure(model.eval(), run),
    }


def new_model(run: Run) -> StatefulMamba2ForCausalLM | StatefulDeltaNetForCausalLM:
    """The model at step 0; the seed determines its weights."""
    torch.manual_seed(run.seed)
    shared: dict[str, Any] = {
        "vocab_size": len(byte_tokenizer()) if run.task == "text" else VALUES + 2,
        "hidden_size": run.hidden_size,
        "num_hidden_layers": run.layers,
        "tie_word_embeddings": True,
        **{"pad_token_id": 0, "bos_token_id": None, "eos_token_id": None},
    }
    if run.family == "delta_net":
        heads = run.hidden_size // run.state_size
        return StatefulDeltaNetForCausalLM(StatefulDeltaNetConfig(**shared, num_heads=heads, allow_neg_eigval=True))
    config = StatefulMamba2Config(
        **shared,
        num_heads=2 * run.hidden_size // run.head_dim,
        head_dim=run.head_dim,
        n_groups=1,
        state_size=run.state_size,
        initializer_range=run.initializer_range,
        initialization=run.initialization,
    )
    model = StatefulMamba2ForCausalLM(config)
    if run.mimetic_c is not None:
        mimetic_initialization(model, c=run.mimetic_c, offset=run.mimetic_offset)
    return model


def _rate(step: int, steps: int) -> float:
    warm_up = min(1.0, 20 * (step + 1) / steps)
    return warm_up * (0.55 + 0.45 * math.cos(math.pi * step / steps))


@cache
def _text(split: str) -> Tensor:
    return load_stream("stdlib", split, byte_tokenizer()).tokens


def _text_losses(model: nn.Module, run: Run, generator: torch.Generator) -> Iterator[Tensor]:
    """Mean losses of `tokens` bytes in sequences of `length`, at random places after each `chunks` steps."""
    text, device = _text("train"), next(model.parameters()).device
    while True:
        places = len(text) - run.length * run.chunks
        starts = torch.randint(places, (max(1, run.tokens // run.length),), generator=generator)
        state = None
        for chunk in range(run.chunks):
            begins = (starts + chunk * run.length).tolist()
            rows = torch.stack([text[begin : begin + run.length + 1] for begin in begins]).long().to(device)
            carried = {"initial_state": state, "output_final_state": True} if run.chunks > 1 else {}
            output = model(input_ids=rows[:, :-1], use_cache=False, **carried)
            state = detach_state(output.final_state) if run.chunks > 1 else None
            yield F.cross_entropy(output.logits.flatten(0, 1), rows[:, 1:].flatten())


def _text_curve(model: nn.Module, run: Run) -> Result:
    """Mean loss by position, in bins that are a factor of sqrt 2 wide.

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


def _needle_losses(model: nn.Module, run: Run, generator: torch.Generator) -> Iterator[Tensor]:
    """Mean losses of the answers of rows, of one length each."""
    while True:
        length = int(torch.randint(min(SHORTEST_NEEDLE_ROW, run.length), run.length + 1, (), generator=generator))
        rows, values = needle_rows(length, torch.randint(length - 2, (run.tokens,), generator=generator), generator)
        yield F.cross_entropy(model(input_ids=rows, logits_to_keep=1).logits[:, -1], values)


@torch.inference_mode()
def _needle_accuracy(model: nn.Module, run: Run) -> Result:
    """Share of right answers at lengths a factor of sqrt 2 apart, depths evenly spaced, up to where it is "
    "`HOPELESS`."""
    generator = torch.Generator().manual_seed(EVALUATION_SEED)
    accuracy: dict[int, float] = {}
    for half_powers in range(6, 1000):
        length = round(2 ** (half_powers / 2))
        if length > run.positions or (accuracy and min(accuracy.values()) < HOPELESS):
            break
        places = torch.linspace(0, length - 3, run.rows).round().long()
        rows, values = needle_rows(length, places, generator)
        right = 0
        for batch, answers in zip(rows.split(32), values.split(32), strict=True):
            right += int((model(input_ids=batch, logits_to_keep=1).logits[:, -1].argmax(-1) == answers).sum())
        accuracy[length] = round(right / run.rows, 4)
    return {"accuracy": accuracy}
