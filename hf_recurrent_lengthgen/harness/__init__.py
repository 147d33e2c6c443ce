"""lm-evaluation-harness with models that carry a state: `pip install "hf_recurrent_lengthgen[eval]"`.

docs/harness.md has a command for each group of tasks. Importing this package registers the model class as `lengthgen`
with lm_eval.
"""

try:
    import lm_eval  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "hf_recurrent_lengthgen.harness runs lm-evaluation-harness, which is not installed: "
        'pip install "hf_recurrent_lengthgen[eval]".'
    ) from error

from pathlib import Path

from hf_recurrent_lengthgen.harness.lm import StateLM

TASKS = Path(__file__).parent / "tasks"
"""The task files of this package, for lm_eval's `include_path`."""

__all__ = ["TASKS", "StateLM"]
