"""Metrics of models beyond their training length, and their results as values, files and tables.

A metric is a folder: `measure` (numbers from a model and tokens), `result` (a typed value), `figure`, and `words`
(what is said of it, and its `Part` of a diagnosis); a small one is a module. `parts` lists those of a diagnosis. What
they share is in `hf_recurrent_lengthgen.evaluation`. The names here are loaded on first use.
"""

from importlib import import_module
from typing import Any

_MODULES = {
    "evaluation.files": "read_result write_result",
    "evaluation.readers": "reading_together",
    "evaluation.results": "DataRecord DataSource",
    "evaluation.settings": "EvaluationSettings",
    "evaluation.streaming": "stream_nll",
    "metrics.accuracy.measure": "accuracy_by_length measure_accuracy string_accuracy",
    "metrics.accuracy.result": "AccuracyComparison AccuracyResult",
    "metrics.attention.measure": "attention_apart",
    "metrics.repeated_token": "constant_prompt",
    "metrics.context_harm.measure": "evaluate_model",
    "metrics.context_harm.result": "Comparison EvaluationResult",
    "metrics.context_harm.windows": "window_nll",
    "metrics.diagnosis.result": "Diagnosis",
    "metrics.maps.measure": "attention_maps",
    "metrics.maps.result": "AttentionMaps read_maps save_maps",
    "metrics.misalignment": "long_short_misalignment",
    "metrics.remembrance.measure": "effective_remembrance",
    "metrics.retrieval.measure": "retrieval_accuracy",
    "metrics.retrieval.result": "RetrievalComparison RetrievalResult",
    "metrics.states.distance": "state_drift",
    "metrics.states.measure": "diagnose_states",
    "metrics.states.patching": "patch_heads",
    "metrics.states.trajectory": "StateObserver",
    "metrics.tables": "read_rows rows_of write_csv",
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names.split()}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    """Import a public name on first use (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"hf_recurrent_lengthgen.{_HOMES[name]}"), name)
