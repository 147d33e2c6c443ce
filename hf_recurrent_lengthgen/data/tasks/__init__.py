"""Tasks that need a long context, as training samples with the loss on the answer and as prompts for evaluation."""

from .answers import Task, right_answers
from .babilong import BabilongPrompts, BabiQuestion, babi_files, read_babi
from .passkey import PASSKEY_STYLES, PasskeyPrompts, passkey_accuracy, passkey_prompt

__all__ = [
    "PASSKEY_STYLES",
    "BabiQuestion",
    "BabilongPrompts",
    "PasskeyPrompts",
    "Task",
    "babi_files",
    "passkey_accuracy",
    "passkey_prompt",
    "read_babi",
    "right_answers",
]
