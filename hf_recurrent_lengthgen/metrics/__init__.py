"""Metrics of models beyond their training length, and their results as values, files and tables.

A metric is a folder: `measure` (numbers from a model and tokens), `result` (a typed value), `figure`, and `summary`
(sentences about it, and its `Part` of a diagnosis); a small one is a module. `parts` lists the metrics of a diagnosis.
What they share is in `hf_recurrent_lengthgen.evaluation`.
"""

from hf_recurrent_lengthgen.evaluation.files import read_result, write_result
from hf_recurrent_lengthgen.evaluation.results import DataRecord, DataSource
from hf_recurrent_lengthgen.evaluation.settings import EvaluationSettings
from hf_recurrent_lengthgen.evaluation.streaming import stream_nll
from hf_recurrent_lengthgen.metrics.accuracy.measure import measure_accuracy
from hf_recurrent_lengthgen.metrics.accuracy.result import AccuracyComparison, AccuracyResult
from hf_recurrent_lengthgen.metrics.context_harm.measure import compare, evaluate_model
from hf_recurrent_lengthgen.metrics.context_harm.result import Comparison, EvaluationResult
from hf_recurrent_lengthgen.metrics.context_harm.windows import window_nll
from hf_recurrent_lengthgen.metrics.diagnosis.result import Diagnosis
from hf_recurrent_lengthgen.metrics.maps.measure import attention_maps
from hf_recurrent_lengthgen.metrics.maps.result import AttentionMaps, save_maps
from hf_recurrent_lengthgen.metrics.misalignment import long_short_misalignment
from hf_recurrent_lengthgen.metrics.remembrance.measure import effective_remembrance
from hf_recurrent_lengthgen.metrics.repeated_token import constant_prompt
from hf_recurrent_lengthgen.metrics.retrieval.measure import retrieval_accuracy
from hf_recurrent_lengthgen.metrics.retrieval.result import RetrievalComparison, RetrievalResult
from hf_recurrent_lengthgen.metrics.states.attention import attention_apart
from hf_recurrent_lengthgen.metrics.states.attention_windows import attention_window_harm
from hf_recurrent_lengthgen.metrics.states.distance import state_drift
from hf_recurrent_lengthgen.metrics.states.measure import diagnose_states
from hf_recurrent_lengthgen.metrics.states.patching import patch_heads
from hf_recurrent_lengthgen.metrics.states.trajectory import StateObserver
from hf_recurrent_lengthgen.metrics.tables import read_rows, rows_of, write_csv

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
    "attention_apart",
    "attention_maps",
    "attention_window_harm",
    "compare",
    "constant_prompt",
    "diagnose_states",
    "effective_remembrance",
    "evaluate_model",
    "long_short_misalignment",
    "measure_accuracy",
    "patch_heads",
    "read_result",
    "read_rows",
    "retrieval_accuracy",
    "rows_of",
    "save_maps",
    "state_drift",
    "stream_nll",
    "window_nll",
    "write_csv",
    "write_result",
]
