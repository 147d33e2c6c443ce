"""The models of the study: how they start, are expanded, trained and measured.

A base is trained from nothing. An arm expands its first layer, or none, and trains on. All arms of a
base and a seed read the same rows in the same order; those of few steps read the first of them.
"""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from hf_recurrent_lengthgen.data.packing import IGNORED_LABEL
from hf_recurrent_lengthgen.data.tasks import EVALUATION_SEED, AssociativeRecall
from hf_recurrent_lengthgen.evaluation.settings import EvaluationSettings
from hf_recurrent_lengthgen.metrics.accuracy.measure import measure_accuracy
from hf_recurrent_lengthgen.models import (
    StatefulGLAConfig,
    StatefulGLAForCausalLM,
    StatefulMamba2Config,
    StatefulMamba2ForCausalLM,
)
from hf_recurrent_lengthgen.models.layers_known import known_mixers
from hf_recurrent_lengthgen.surgery import expand_state, mimetic_initialization

Result = dict[str, Any]


@dataclass(frozen=True)
class Settings:
    """Sizes of the study.

    Attributes:
        layers: Recurrent layers.
        heads: Heads of Mamba-2.
        state_size: N of Mamba-2, `factor` times that in an expanded layer.
        gla_heads: Heads of GLA, one in an expanded layer.
        head_counts: Heads of the models of GLA that are trained from nothing, for `heads_steps`.
        pairs: The least and the most in a training row.
        steps: Those of the arms; each number is an arm of its own.
    """

    hidden_size: int = 16
    layers: int = 4
    heads: int = 2
    state_size: int = 2
    factor: int = 8
    gla_heads: int = 4
    head_counts: tuple[int, ...] = (1, 2, 4, 8)
    heads_steps: int = 2000
    pairs: tuple[int, int] = (1, 8)
    vocabulary: int = 24
    base_steps: int = 1000
    steps: tuple[int, ...] = (300, 2000)
    batch_size: int = 64
    learning_rate: float = 1e-2
    evaluated_pairs: tuple[int, ...] = (2, 4, 8, 10)
    evaluation_rows: int = 512


TINY = Settings(
    hidden_size=8,
    head_counts=(1, 2),
    heads_steps=2,
    pairs=(2, 3),
    vocabulary=12,
    base_steps=2,
    steps=(1, 2),
    batch_size=2,
    evaluated_pairs=(2, 3),
    evaluation_rows=4,
)


def shared(settings: Settings) -> dict[str, Any]:
    """What the configurations of all families have."""
    ids = {"vocab_size": 3 + settings.vocabulary, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 2}
    return {**ids, "hidden_size": settings.hidden_size, "num_hidden_layers": settings.layers}


def new_mamba2(settings: Settings) -> Any:
    """Mamba-2 with the authors' start."""
    heads: dict[str, Any] = {
        "num_heads": settings.heads,
        "head_dim": 2 * settings.hidden_size // settings.heads,
        "n_groups": 1,
    }
    start: dict[str, Any] = {"state_size": settings.state_size, "initialization": "mamba-ssm"}
    return StatefulMamba2ForCausalLM(StatefulMamba2Config(**shared(settings), **heads, **start))


def new_gla(settings: Settings, heads: int | None = None) -> Any:
    """GLA with the authors' start; without short convolutions, models of this size do not learn to recall at all."""
    sizes: dict[str, Any] = {"num_heads": heads or settings.gla_heads, "intermediate_size": 2 * settings.hidden_size}
    return StatefulGLAForCausalLM(StatefulGLAConfig(**shared(settings), **sizes, use_short_conv=True))


@dataclass(frozen=True)
class Arm:
    """What happens to a base before it is trained on.

    Attributes:
        initialization: That of `expand_state`; None for no expansion.
        mimetic: Whether what "reinit" drew anew then gets a mimetic start.
        large: Whether the base is the one whose first layer was large before its first step.
    """

    label: str
    color: str
    initialization: Any = None
    mimetic: bool = False
    large: bool = False


ARMS = {
    "vanilla": Arm("vanilla training", "#a8780f"),
    "inherit": Arm("inherit", "#0072b2", "inherit"),
    "inherit_zero": Arm("inherit, new weights zero (the paper's)", "#56b4e9", "inherit-zero"),
    "reinit": Arm("reinit, authors' start", "#d55e00", "reinit"),
    "reinit_mimetic": Arm("reinit, mimetic start", "#aa4499", "reinit", mimetic=True),
    "large": Arm("large from the start", "#5b636d", large=True),
}


@dataclass(frozen=True)
class Base:
    """A family and its start; `growth` is the argument of `expand_state` that makes a layer large.

    Attributes:
        matched: The arm whose expanded layer starts as the layers of the base did.
        heads: Of Mamba-2, in place of those of the settings; 0 for those.
    """

    label: str
    new: Callable[[Settings], Any]
    growth: Callable[[Settings], dict[str, Any]]
    arms: tuple[str, ...]
    matched: str = "reinit"
    mimetic: bool = False
    heads: int = 0

    def settings(self, settings: Settings) -> Settings:
        """Those of the study as this base has them."""
        return replace(settings, heads=self.heads or settings.heads)


def _wider(settings: Settings) -> dict[str, Any]:
    return {"factor": settings.factor}


def _one_head(_: Settings) -> dict[str, Any]:
    return {"num_heads": 1}


BASES = {
    "mamba2_mimetic": Base("Mamba-2, mimetic start", new_mamba2, _wider, tuple(ARMS), "reinit_mimetic", mimetic=True),
    "mamba2_heads": Base(
        "Mamba-2 of four heads, mimetic start",
        new_mamba2,
        _wider,
        ("vanilla", "inherit", "inherit_zero", "reinit_mimetic", "large"),
        "reinit_mimetic",
        mimetic=True,
        heads=4,
    ),
    "gla": Base("GLA, authors' start", new_gla, _one_head, ("vanilla", "inherit", "reinit", "large")),
}


def new_model(base: Base, settings: Settings, seed: int, large: bool) -> Any:
    """A base before its first step; the large one has the same weights but for the recurrence of its first layer."""
    torch.manual_seed(seed)
    model = base.new(settings)
    if large:
        model = expand_state(model, [0], **base.growth(settings), initialization="reinit", seed=seed)
    if base.mimetic:
        mimetic_initialization(model)
    return model


def expanded(model: Any, base: Base, arm: Arm, settings: Settings, seed: int) -> Any:
    """The model as an arm trains it."""
    if arm.initialization is not None:
        growth = base.growth(settings)
        model = expand_state(model, [0], **growth, initialization=arm.initialization, seed=seed)
    if arm.mimetic:
        start_mimetically(model)
    return model


@torch.no_grad()
def start_mimetically(model: Any, layers: Sequence[int] = (0,)) -> None:
    """Mimetic start of what "reinit" draws anew in Mamba-2; the convolution of x, trained before, is kept."""
    mixers = [known_mixers(model)[layer].module for layer in layers]
    kept = [(weight, weight[: m.out_proj.in_features].clone()) for m in mixers for weight in m.conv1d.parameters()]
    mimetic_initialization(model, layers=list(layers))
    for weight, of_x in kept:
        weight[: len(of_x)] = of_x


def fit(model: Any, settings: Settings, steps: int, seed: int, parts: int = 8) -> Result:
    """Train on rows of a seed, and measure; all rows of a step have equally many pairs.

    The loss is the cross-entropy of the values. AdamW(0.9, 0.95), no weight decay, gradients clipped at norm 1, linear
    warm-up over 10 % of the steps, then cosine to 0.

    Returns:
        Seconds of the processor, losses in nats as means over `parts` of the run, and what `measured` returns.
    """
    began, rows, task = time.process_time(), settings.batch_size, recall(settings, seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, steps))
    pairs = torch.Generator().manual_seed(seed)
    losses = []
    for step in range(steps):
        number = int(torch.randint(settings.pairs[0], settings.pairs[1] + 1, (), generator=pairs))
        batch = task.resized(number, rows * steps, seed).batch(range(step * rows, (step + 1) * rows))
        loss = model(**batch, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(float(loss.detach()))
    seconds = round(time.process_time() - began, 1)
    means = [float(part.mean()) for part in torch.tensor(losses).chunk(parts)]
    return {"seconds": seconds, "loss": [round(mean, 4) for mean in means], **measured(model, settings)}


def _rate(step: int, steps: int) -> float:
    return min(1.0, 10 * (step + 1) / steps) * (0.5 + 0.5 * math.cos(math.pi * step / steps))


def recall(settings: Settings, seed: int) -> AssociativeRecall:
    """The task of all models; `resized` gives rows."""
    return AssociativeRecall(settings.pairs, settings.vocabulary, 1, seed)


def without_recall(settings: Settings, pairs: int) -> float:
    """Share of right values by always naming the most frequent of those that the row still owes, whatever the key.

    Models learn this first, so only a larger share shows recall.
    """
    rows = settings.evaluation_rows
    labels = recall(settings, 0).resized(pairs, rows, EVALUATION_SEED).batch(range(rows))["labels"]
    values = [row[row != IGNORED_LABEL].tolist() for row in labels]
    owed = [row[place:] for row in values for place in range(pairs)]
    return statistics.fmean(max(map(left.count, left)) / len(left) for left in owed)


def measured(model: Any, settings: Settings) -> Result:
    """Share of right values by the number of pairs, from the zero state; parameters; elements of the state."""
    lengths = list(settings.evaluated_pairs)
    rows = EvaluationSettings(batch_size=64)
    found = measure_accuracy(model, recall(settings, 0), lengths, settings=rows, samples=settings.evaluation_rows)
    return {
        "accuracy": {str(each.length): round(each.symbols.accuracy or 0.0, 4) for each in found.lengths},
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "state": sum(torch.Size(shape.recurrent).numel() for shape in model.state_shapes()),
    }
