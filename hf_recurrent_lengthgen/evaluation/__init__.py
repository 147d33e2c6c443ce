"""Metrics of models beyond their training length, and their results as values, files and tables."""

from .accuracy_results import AccuracyComparison, AccuracyResult
from .attention_apart import attention_apart
from .attention_maps import attention_maps
from .constant_prompt import constant_prompt
from .context_harm import window_nll
from .diagnosis_results import Diagnosis
from .effective_remembrance import effective_remembrance
from .evaluate import EvaluationSettings, evaluate_model
from .files import read_result, write_result
from .map_results import AttentionMaps, read_maps, save_maps
from .misalignment import long_short_misalignment
from .readers import reading_together
from .results import Comparison, DataRecord, DataSource, EvaluationResult
from .retrieval import retrieval_accuracy
from .retrieval_results import RetrievalComparison, RetrievalResult
from .state_diagnosis import diagnose_states
from .state_distance import state_drift
from .state_patching import patch_heads
from .state_trajectory import StateObserver
from .streaming import stream_nll
from .string_accuracy import accuracy_by_length, measure_accuracy, string_accuracy
from .tables import read_rows, rows_of, write_csv

__all__ = [
    "AccuracyComparison",
    "AccuracyResult",
    "AttentionMaps",
    "Comparison",
    "DataRecord",
    "DataSource",
    "Diagnosis",
    "EvaluationResult",
    "EvaluationSettings",
    "RetrievalComparison",
    "RetrievalResult",
    "StateObserver",
    "accuracy_by_length",
    "attention_apart",
    "attention_maps",
    "constant_prompt",
    "diagnose_states",
    "effective_remembrance",
    "evaluate_model",
    "long_short_misalignment",
    "measure_accuracy",
    "patch_heads",
    "read_maps",
    "read_result",
    "read_rows",
    "reading_together",
    "retrieval_accuracy",
    "rows_of",
    "save_maps",
    "state_drift",
    "stream_nll",
    "string_accuracy",
    "window_nll",
    "write_csv",
    "write_result",
]
