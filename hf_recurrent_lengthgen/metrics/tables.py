"""Results as rows for pandas, a spreadsheet or a plot: `pandas.DataFrame(read_rows("evaluation/result.json"))`."""

import csv
import io
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hf_recurrent_lengthgen.evaluation.files import read_result
from hf_recurrent_lengthgen.metrics.accuracy.result import AccuracyComparison, AccuracyResult
from hf_recurrent_lengthgen.metrics.context_harm.result import ComparedModel, Comparison, EvaluationResult
from hf_recurrent_lengthgen.metrics.diagnosis.result import DiagnosedModel, Diagnosis
from hf_recurrent_lengthgen.metrics.retrieval.result import RetrievalComparison, RetrievalResult, Share
from hf_recurrent_lengthgen.models.state_on_disk import write_text

Row = dict[str, Any]

WITH_ROWS: Any = (
    *(AccuracyComparison, AccuracyResult, Comparison, Diagnosis),
    *(EvaluationResult, RetrievalComparison, RetrievalResult),
)


def read_rows(path: str | os.PathLike[str]) -> list[Row]:
    """The rows of a result file, see `rows_of`.

    Raises:
        ValueError: for a file that is damaged or has no table, with its name.
    """
    return rows_of(read_result(path, WITH_ROWS))


def rows_of(result: Any) -> list[Row]:
    """A result as rows with the same columns: plain values, None for missing ones.

    Evaluations and diagnoses have one row per model, metric and bin of positions [start, stop): `nll` (nats per
    token), `harm` (nats), `in_window_nll`, `mean_perplexity` (mean over texts of exp(NLL)), and in diagnoses
    `remembrance`, the total variation of predictions without the tokens before `start`, and `remembrance_` with the
    names of other distances. Retrieval has one row per model, depth or bAbI task, and length (tokens), with Wilson's
    interval and the number of wrong answers of each kind; accuracy one per model and length, with the interval of
    whole answers.

    Raises:
        ValueError: for other types.
    """
    if isinstance(result, AccuracyComparison | Comparison | Diagnosis | EvaluationResult | RetrievalComparison):
        return [row for model in result.models for row in rows_of(model)]
    if isinstance(result, ComparedModel):
        return list(_evaluation_rows(result.role, result.evaluation))
    if isinstance(result, DiagnosedModel):
        return [*_evaluation_rows(result.role, result.evaluation), *_part_rows(result)]
    if isinstance(result, RetrievalResult):
        return list(_retrieval_rows(result))
    if isinstance(result, AccuracyResult):
        return [
            {"model": result.model, "training_length": result.training_length, "task": result.task}
            | {"length": each.length, "symbol_accuracy": each.symbols.accuracy, "accuracy": each.answers.accuracy}
            | dict(zip(("low", "high"), each.answers.interval(), strict=True))
            for each in result.lengths
        ]
    names = ", ".join(kind.__name__ for kind in WITH_ROWS)
    raise ValueError(f"A {type(result).__name__} has no table: give one of {names}.")


def write_csv(path: str | os.PathLike[str], rows: Sequence[Row]) -> None:
    """Write rows as a CSV file with a header; None becomes an empty cell. An existing file is replaced as a whole."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_text(path, text.getvalue())


def update_csv(path: Path, result: Any, create: bool) -> None:
    """Write the rows of a result over those of an earlier one, which would contradict it, or `create` the file."""
    if create or path.is_file():
        write_csv(path, rows_of(result))


def _bin(role: str, evaluation: EvaluationResult, metric: str, start: int, stop: int, *values: Any) -> Row:
    place = {"model": evaluation.model, "role": role, "training_length": evaluation.training_length, "metric": metric}
    return place | {"start": start, "stop": stop} | dict(zip(("mean", "low", "high"), values, strict=True))


def _evaluation_rows(role: str, evaluation: EvaluationResult) -> Iterator[Row]:
    curves = {
        "nll": evaluation.position_wise.fine,
        "harm": evaluation.harm.curves.fine,
        "in_window_nll": evaluation.in_window.curve,
    }
    if evaluation.mean_perplexity is not None:
        curves["mean_perplexity"] = evaluation.mean_perplexity.fine
    for metric, curve in curves.items():
        absent = (None,) * len(curve.mean)
        columns = curve.edges[:-1], curve.edges[1:], curve.mean, curve.low or absent, curve.high or absent
        for values in zip(*columns, strict=True):
            yield _bin(role, evaluation, metric, *values)


def _part_rows(model: DiagnosedModel) -> Iterator[Row]:
    for part in model.parts.values():
        for metric, start, stop, value in part.bins():
            yield _bin(model.role, model.evaluation, metric, start, stop, value.mean, value.low, value.high)


def _retrieval_rows(result: RetrievalResult) -> Iterator[Row]:
    kinds = [kind for kind in result.mistakes_by_length if kind != "other"]
    for i, (name, cells) in enumerate(zip(result.rows, result.cells, strict=True)):
        for length, cell in zip(result.lengths, cells, strict=True):
            share = Share(cell.right, cell.samples)
            low, high = share.interval(result.confidence) if share.samples else (None, None)
            yield {
                "model": result.model,
                "training_length": result.training_length,
                "task": result.task,
                "row": name,
                "depth": None if result.depths is None else result.depths[i],
                "length": length,
                "distance": cell.distance,
                "right": share.right,
                "samples": share.samples,
                "accuracy": share.accuracy,
                "low": low,
                "high": high,
                **{kind: cell.mistakes.get(kind, 0) for kind in kinds},
            }
