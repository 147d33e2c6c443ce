"""The trainings of a lineage as a table: data, size, settings."""

import json
from collections.abc import Mapping
from dataclasses import fields

from hf_recurrent_lengthgen.checkpoints.cards.facts import data_text
from hf_recurrent_lengthgen.checkpoints.cards.markdown import escape, table
from hf_recurrent_lengthgen.checkpoints.records import Settings, TrainingRun
from hf_recurrent_lengthgen.evaluation.formatting import number_text
from hf_recurrent_lengthgen.evaluation.json_schema import Value


def trainings_table(runs: Mapping[int, TrainingRun]) -> str:
    """A column for each training, by the number of its step, and for each resume with other settings.

    Settings have the names of `TrainingArguments` and of the method.
    """
    columns: dict[str, dict[str, str]] = {}
    for number, run in runs.items():
        for settings in run.settings:
            later = f" from {settings.from_step:,}" if settings.from_step else ""
            columns[f"step {number}{later}"] = ({} if later else _facts(run)) | _settings(settings)
    names = dict.fromkeys(name for column in columns.values() for name, value in column.items() if value)
    rows = [
        [escape(cell) for cell in (name, *(column.get(name, "") for column in columns.values()))] for name in names
    ]
    return table([["", *columns], *rows], numbers=False)


def _facts(run: TrainingRun) -> dict[str, str]:
    hardware, adapter, weights = run.hardware, run.adapter, run.initial_weights
    threads = "" if hardware.threads is None else f", threads: {hardware.threads}"
    length = f"{run.training_length:,}" if run.row_tokens is None else f"on average {run.row_tokens:,.0f}"
    start = [] if weights is None else ["random" if weights.mimetic is None else "mimetic initialization"]
    if weights is not None:
        start += [f"{name} {_value(value)}" for name, value in (weights.mimetic or {}).items()]
        start += [weights.changed] if weights.changed else []
    lora = "" if adapter is None else adapter.kind
    if adapter is not None and adapter.rank is not None:
        lora = f"LoRA of rank {adapter.rank}, alpha {adapter.alpha:g}, on {', '.join(adapter.targets)}"
    return {
        "Data": data_text(run.data),
        "Steps": f"{run.steps:,}",
        "Tokens": f"{run.tokens:,}",
        "Time": f"{run.seconds:,.0f} s on {hardware.number} x {hardware.device}{threads}",
        "Mean loss, nats per token": "" if run.loss is None else number_text(run.loss, ".3f"),
        "Batch": f"{run.rows_per_step:,} sequences of {length} tokens",
        "Adapter": lora,
        "Saved weights": "" if run.best_step is None else f"step {run.best_step:,}, best in {run.best_metric}",
        "Initial weights": ", ".join(start),
    }


def _settings(settings: Settings) -> dict[str, str]:
    options = {field.name: getattr(settings, field.name) for field in fields(settings) if field.name != "from_step"}
    method, others = options.pop("method"), options.pop("others")
    return {name: _value(value) for name, value in {**options, **method, **others}.items() if value not in (None, {})}


def _value(value: Value) -> str:
    if isinstance(value, tuple | list):
        return " ".join(map(_value, value))
    return value if isinstance(value, str) else f"{value:g}" if isinstance(value, float) else json.dumps(value)
