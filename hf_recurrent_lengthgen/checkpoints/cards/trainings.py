"""The trainings of a lineage as a table: data, size, settings."""

import json
from collections.abc import Callable, Mapping
from itertools import pairwise

from hf_recurrent_lengthgen.checkpoints.cards.facts import data_text
from hf_recurrent_lengthgen.checkpoints.cards.markdown import escape, table
from hf_recurrent_lengthgen.checkpoints.records import Settings, TrainingRun
from hf_recurrent_lengthgen.evaluation.json_schema import Value
from hf_recurrent_lengthgen.evaluation.words import number_text

Words = Callable[[TrainingRun], str]
_EPSILON = 1e-8  # the usual value for Adam, not worth a mention


def trainings_table(runs: Mapping[int, TrainingRun]) -> str:
    """One column per training, by the number of its step, and one row per fact that any of them records."""
    rows: dict[str, Words] = {
        "Steps": lambda run: f"{run.steps:,}",
        "Tokens": lambda run: f"{run.tokens:,}",
        "Time": lambda run: f"{run.seconds:,.0f} s on {_hardware(run)}",
        "Mean loss, nats per token": lambda run: number_text(run.loss, ".3f"),
        "Batch": _batch,
        "Adapter": _adapter,
        "Learning rate": _each(lambda part: f"{part.learning_rate:g}"),
        "Schedule": _each(_schedule),
        "Scheduled steps": _scheduled_steps,
        "Optimizer": _each(_optimizer),
        "Gradient norm": _each(lambda part: f"at most {part.max_grad_norm:g}" if part.max_grad_norm else "any"),
        "Precision": _each(
            lambda part: part.precision if part.precision == "float32" else f"{part.precision} autocast"
        ),
        "Seed": _each(lambda part: str(part.seed)),
        "Noise on embeddings": _each(
            lambda part: f"NEFTune {part.neftune_noise_alpha:g}" if part.neftune_noise_alpha else ""
        ),
        "Weights": _weights,
        "Initial weights": _initial_weights,
    }
    parts = [part for run in runs.values() for part in run.settings]
    for name in dict.fromkeys(name for part in parts for name in (*part.method, *part.others)):
        rows[name[:1].upper() + name[1:].replace("_", " ")] = _option(name)
    data = [data_text(run.data) for run in runs.values()]
    cells = [["Data", data[0], *("the same" if text == data[0] else text for text in data[1:])]]
    cells += [row for name, words in rows.items() if any((row := [name, *map(words, runs.values())])[1:])]
    head = ["", *(f"step {number}" for number in runs)]
    return table([head, *([escape(cell) for cell in row] for row in cells)], numbers=False)


def _each(words: Callable[[Settings], str]) -> Words:
    """The values of all parts of a run: "0.001 to step 100, then 0.0005"."""

    def in_words(run: TrainingRun) -> str:
        changes = [(part.from_step, words(part)) for part in run.settings]
        changes = [pair for i, pair in enumerate(changes) if i == 0 or pair[1] != changes[i - 1][1]]
        texts = [f"{old or 'none'} to step {start:,}" for (_, old), (start, _) in pairwise(changes)]
        return ", then ".join([*texts, changes[-1][1] or ("none" if texts else "")])

    return in_words


def _option(name: str) -> Words:
    return _each(lambda part: _value({**part.method, **part.others}.get(name)))


def _value(value: Value) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    return json.dumps(value)


def _hardware(run: TrainingRun) -> str:
    hardware = run.hardware
    if hardware.threads is None:
        return f"{hardware.number} x {hardware.device}"
    threads = f"{hardware.threads} thread{'s' if hardware.threads > 1 else ''}"
    return f"CPU ({threads})" if hardware.number == 1 else f"CPU ({hardware.number} processes, {threads} each)"


def _batch(run: TrainingRun) -> str:
    if run.row_tokens is None:
        return f"{run.rows_per_step:,} rows of {run.training_length:,} tokens"
    return f"{run.rows_per_step:,} rows of {run.row_tokens:,.0f} tokens on average"


def _adapter(run: TrainingRun) -> str:
    adapter = run.adapter
    if adapter is None or adapter.rank is None:
        return "" if adapter is None else adapter.kind
    return f"LoRA of rank {adapter.rank}, alpha {adapter.alpha:g}, on {', '.join(adapter.targets)}"


def _schedule(part: Settings) -> str:
    options = f" {json.dumps(part.lr_scheduler_kwargs)}" if part.lr_scheduler_kwargs else ""
    schedule = part.lr_scheduler_type + options
    if not part.warmup_steps:
        return schedule
    share = part.warmup_steps < 1
    return (
        f"{schedule}, warm-up {f'{part.warmup_steps:.0%} of the steps' if share else f'{part.warmup_steps:g} steps'}"
    )


def _scheduled_steps(run: TrainingRun) -> str:
    known = [part.max_steps for part in run.settings if part.max_steps is not None]
    if not known or {*known} == {run.steps}:
        return ""
    return _each(lambda part: f"{part.max_steps or known[-1]:,}")(run)


def _optimizer(part: Settings) -> str:
    optimizer = [part.optim]
    if part.betas is not None:
        optimizer.append(f"betas {' and '.join(f'{beta:g}' for beta in part.betas)}")
    if part.momentum is not None:
        optimizer.append(f"momentum {part.momentum:g}")
    if part.epsilon not in (None, _EPSILON):
        optimizer.append(f"epsilon {part.epsilon:g}")
    return ", ".join([*optimizer, f"weight decay {part.weight_decay:g}"])


def _weights(run: TrainingRun) -> str:
    return "" if run.best_step is None else f"of step {run.best_step:,}, best in {run.best_metric}"


def _initial_weights(run: TrainingRun) -> str:
    weights = run.initial_weights
    if weights is None:
        return ""
    options = [f"{name} {_bare(value)}" for name, value in (weights.mimetic or {}).items()]
    start = "random" if weights.mimetic is None else "mimetic initialization"
    return ", ".join([start, *options, *([weights.changed] if weights.changed else [])])


def _bare(value: Value) -> str:
    if isinstance(value, tuple):
        return " ".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)
