"""Tasks that need a long context, as training samples with the loss on the answer and as prompts for evaluation."""

from .answers import Task
from .babilong import BabilongPrompts, BabiQuestion, babi_files, read_babi
from .grids import DEPTHS, BabilongGrid, NeedleGrid, PasskeyGrid, RetrievalGrid
from .keyed_rows import EVALUATION_SEED, KeyedRows
from .keys_in_text import KeyGrid, KeyPrompts
from .passkey import PASSKEY_STYLES, PasskeyPrompts, PasskeyTemplate
from .strings import (
    STRING_TASKS,
    AssociativeRecall,
    CopyingStrings,
    PackedStrings,
    SortingStrings,
    TaskStrings,
    string_task,
)

__all__ = [
    "DEPTHS",
    "EVALUATION_SEED",
    "PASSKEY_STYLES",
    "STRING_TASKS",
    "AssociativeRecall",
    "BabiQuestion",
    "BabilongGrid",
    "BabilongPrompts",
    "CopyingStrings",
    "KeyGrid",
    "KeyPrompts",
    "KeyedRows",
    "NeedleGrid",
    "PackedStrings",
    "PasskeyGrid",
    "PasskeyPrompts",
    "PasskeyTemplate",
    "RetrievalGrid",
    "SortingStrings",
    "Task",
    "TaskStrings",
    "babi_files",
    "read_babi",
    "string_task",
]
