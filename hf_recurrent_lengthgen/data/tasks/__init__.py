"""Tasks that need a long context, as training samples with the loss on the answer and as prompts for evaluation."""

from .answers import Task, right_answers
from .babilong import BabilongPrompts, BabiQuestion, babi_files, read_babi
from .grids import BabilongGrid, NeedleGrid, PasskeyGrid, RetrievalGrid
from .keyed_rows import KeyedRows, StringCollator
from .passkey import PASSKEY_STYLES, PasskeyPrompts, passkey_accuracy, passkey_prompt
from .string_accuracy import (
    EVALUATION_SEED,
    StringAccuracy,
    accuracy_by_length,
    area_under_curve,
    string_accuracy,
)
from .strings import STRING_TASKS, AssociativeRecall, CopyingStrings, SortingStrings, TaskStrings, string_task

__all__ = [
    "EVALUATION_SEED",
    "PASSKEY_STYLES",
    "STRING_TASKS",
    "AssociativeRecall",
    "BabiQuestion",
    "BabilongGrid",
    "BabilongPrompts",
    "CopyingStrings",
    "KeyedRows",
    "NeedleGrid",
    "PasskeyGrid",
    "PasskeyPrompts",
    "RetrievalGrid",
    "SortingStrings",
    "StringAccuracy",
    "StringCollator",
    "Task",
    "TaskStrings",
    "accuracy_by_length",
    "area_under_curve",
    "babi_files",
    "passkey_accuracy",
    "passkey_prompt",
    "read_babi",
    "right_answers",
    "string_accuracy",
    "string_task",
]
