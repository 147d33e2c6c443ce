"""lm-evaluation-harness with models that carry a state: `pip install "hf_recurrent_lengthgen[eval]"`.

docs/harness.md has a command for each group of tasks. Importing this package registers the model class as `lengthgen`
with lm_eval.
"""

from pathlib import Path

from hf_recurrent_lengthgen.harness.lm import StateLM

TASKS = Path(__file__).parent / "tasks"
"""The task files of this package, for lm_eval's `include_path`."""

__all__ = ["TASKS", "StateLM"]
