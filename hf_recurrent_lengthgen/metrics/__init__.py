"""Metrics of models beyond their training length, and their results as values, files and tables.

A metric is a folder: `measure` (numbers from a model and tokens), `result` (a typed value), `figure`, and `words`
(what is said of it, and its `Part` of a diagnosis); a small one is a module. `parts` lists those of a diagnosis. What
they share is in `hf_recurrent_lengthgen.evaluation`. The names here are loaded on first use.
"""

from typing import TYPE_CHECKING

from hf_recurrent_lengthgen.first_use import on_first_use as _on_first_use

if TYPE_CHECKING:
    from hf_recurrent_lengthgen.evaluation.files import read_result as read_result
    from hf_recurrent_lengthgen.evaluation.files import write_result as write_result
    from hf_recurrent_lengthgen.evaluation.results import DataRecord as DataRecord
    from hf_recurrent_lengthgen.evaluation.results import DataSource as DataSource
    from hf_recurrent_lengthgen.evaluation.settings import EvaluationSettings as EvaluationSettings
    from hf_recurrent_lengthgen.evaluation.streaming import stream_nll as stream_nll
    from hf_recurrent_lengthgen.metrics.accuracy.measure import measure_accuracy as measure_accuracy
    from hf_recurrent_lengthgen.metrics.accuracy.result import AccuracyComparison as AccuracyComparison
    from hf_recurrent_lengthgen.metrics.accuracy.result import AccuracyResult as AccuracyResult
    from hf_recurrent_lengthgen.metrics.context_harm.measure import compare as compare
    from hf_recurrent_lengthgen.metrics.context_harm.measure import evaluate_model as evaluate_model
    from hf_recurrent_lengthgen.metrics.context_harm.result import Comparison as Comparison
    from hf_recurrent_lengthgen.metrics.context_harm.result import EvaluationResult as EvaluationResult
    from hf_recurrent_lengthgen.metrics.context_harm.windows import window_nll as window_nll
    from hf_recurrent_lengthgen.metrics.diagnosis.result import Diagnosis as Diagnosis
    from hf_recurrent_lengthgen.metrics.maps.measure import attention_maps as attention_maps
    from hf_recurrent_lengthgen.metrics.maps.result import AttentionMaps as AttentionMaps
    from hf_recurrent_lengthgen.metrics.maps.result import save_maps as save_maps
    from hf_recurrent_lengthgen.metrics.misalignment import long_short_misalignment as long_short_misalignment
    from hf_recurrent_lengthgen.metrics.remembrance.measure import effective_remembrance as effective_remembrance
    from hf_recurrent_lengthgen.metrics.repeated_token import constant_prompt as constant_prompt
    from hf_recurrent_lengthgen.metrics.retrieval.measure import retrieval_accuracy as retrieval_accuracy
    from hf_recurrent_lengthgen.metrics.retrieval.result import RetrievalComparison as RetrievalComparison
    from hf_recurrent_lengthgen.metrics.retrieval.result import RetrievalResult as RetrievalResult
    from hf_recurrent_lengthgen.metrics.states.attention import attention_apart as attention_apart
    from hf_recurrent_lengthgen.metrics.states.attention_windows import attention_window_harm as attention_window_harm
    from hf_recurrent_lengthgen.metrics.states.distance import state_drift as state_drift
    from hf_recurrent_lengthgen.metrics.states.measure import diagnose_states as diagnose_states
    from hf_recurrent_lengthgen.metrics.states.patching import patch_heads as patch_heads
    from hf_recurrent_lengthgen.metrics.states.trajectory import StateObserver as StateObserver
    from hf_recurrent_lengthgen.metrics.tables import read_rows as read_rows
    from hf_recurrent_lengthgen.metrics.tables import rows_of as rows_of
    from hf_recurrent_lengthgen.metrics.tables import write_csv as write_csv

__getattr__, __dir__, __all__ = _on_first_use(__name__, __file__)
