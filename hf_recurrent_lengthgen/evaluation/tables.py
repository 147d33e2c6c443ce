"""Results as rows for pandas, a spreadsheet or a plot: `pandas.DataFrame(read_rows("evaluation/result.json"))`."""

import csv
import io
import os
from collections.abc import Iterator, Sequence
from typing import Any

from hf_recurrent_lengthgen.evaluation.diagnosis_results import DiagnosedModel, Diagnosis
from hf_recurrent_lengthgen.evaluation.files import read_result
from hf_recurrent_lengthgen.evaluation.results import Comparison, Curve, Estimate, EvaluationResult, ForgettingSearch
from hf_recurrent_lengthgen.evaluation.retrieval_results import RetrievalComparison, RetrievalResult, Share
from hf_recurrent_lengthgen.models.atomic_files import replacing

Row = dict[str, Any]

WITH_ROWS: Any = (
    *(Comparison, Diagnosis, EvaluationResult, ForgettingSearch),
    *(RetrievalComparison, RetrievalResult),
)


def read_rows(path: str | os.PathLike[str]) -> list[Row]:
    """The rows of a result file, see `rows_of`.

    Raises:
        ValueError: naming the file, for one that is damaged or has no table.
    """
    try:
        return rows_of(read_result(path, WITH_ROWS))
    except RecursionError as error:
        raise ValueError(f"{os.fspath(path)}: {error}") from error


def rows_of(result: Any) -> list[Row]:
    """A result as rows, all with the same columns: plain values, None where there is none.

    Evaluations and diagnoses have a row for each model, metric and bin of positions [start, stop): `nll` (nats per
    token), `harm` (nats), `in_window_nll`, and in diagnoses `remembrance`, the total variation of predictions without
    the tokens before `start`. Retrieval has a row for each model, depth or bAbI task, and length (tokens), with
    Wilson's interval; a search of forgetting one for each setting.

    Raises:
        ValueError: for anything else.
    """
    if isinstance(result, EvaluationResult):
        return list(_evaluation_rows("other", result))
    if isinstance(result, Comparison):
        return [row for model in result.models for row in _evaluation_rows(model.role, model.evaluation)]
    if isinstance(result, Diagnosis):
        return [row for model in result.models for row in _diagnosis_rows(model)]
    if isinstance(result, RetrievalResult):
        return list(_retrieval_rows(result))
    if isinstance(result, RetrievalComparison):
        return [row for model in result.models for row in _retrieval_rows(model)]
    if isinstance(result, ForgettingSearch):
        return [
            {
                "model": result.model,
                **{name: getattr(trial, name) for name in ("retention", "insertion", "window", "delta_scale")},
                **_estimate(trial.loss, "loss"),
                **_estimate(trial.gain, "gain"),
            }
            for trial in result.trials
        ]
    names = ", ".join(kind.__name__ for kind in WITH_ROWS)
    raise ValueError(f"A {type(result).__name__} has no table: give one of {names}.")


def write_csv(path: str | os.PathLike[str], rows: Sequence[Row]) -> None:
    """Write rows as a CSV file with a header; None is an empty cell. An old file is replaced as a whole."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    with replacing(path) as temporary:
        temporary.write_text(text.getvalue(), encoding="utf-8")


def _estimate(estimate: Estimate, name: str) -> Row:
    return {name: estimate.mean, f"{name}_low": estimate.low, f"{name}_high": estimate.high}


def _bin(model: str, role: str, training_length: int, metric: str, start: int, stop: int, *values: Any) -> Row:
    place = {"model": model, "role": role, "training_length": training_length, "metric": metric}
    return place | {"start": start, "stop": stop} | dict(zip(("mean", "low", "high"), values, strict=True))


def _evaluation_rows(role: str, found: EvaluationResult) -> Iterator[Row]:
    curves: dict[str, Curve] = {
        "nll": found.position_wise.fine,
        "harm": found.harm.curves.fine,
        "in_window_nll": found.in_window.curve,
    }
    for metric, curve in curves.items():
        for i, mean in enumerate(curve.mean):
            bounds = (None, None) if curve.low is None or curve.high is None else (curve.low[i], curve.high[i])
            edges = curve.edges[i], curve.edges[i + 1]
            yield _bin(found.model, role, found.training_length, metric, *edges, mean, *bounds)


def _diagnosis_rows(model: DiagnosedModel) -> Iterator[Row]:
    found = model.evaluation
    yield from _evaluation_rows(model.role, found)
    for name, part in model.parts.items():
        for start, stop, value in part.bins():
            place = (found.model, model.role, found.training_length, name)
            yield _bin(*place, start, stop, value.mean, value.low, value.high)


def _retrieval_rows(found: RetrievalResult) -> Iterator[Row]:
    for i, (name, cells) in enumerate(zip(found.rows, found.cells, strict=True)):
        for length, cell in zip(found.lengths, cells, strict=True):
            share = Share(cell.right, cell.samples)
            low, high = share.interval(found.confidence) if share.samples else (None, None)
            yield {
                "model": found.model,
                "training_length": found.training_length,
                "task": found.task,
                "row": name,
                "depth": None if found.depths is None else found.depths[i],
                "length": length,
                "distance": cell.distance,
                "right": share.right,
                "samples": share.samples,
                "accuracy": share.accuracy,
                "low": low,
                "high": high,
            }
