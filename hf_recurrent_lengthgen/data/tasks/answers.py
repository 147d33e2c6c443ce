"""What all tasks share: a prompt and its answer as tokens, as a training item, and checked against a model."""

import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from hf_recurrent_lengthgen.data.packing import IGNORED_LABEL
from hf_recurrent_lengthgen.models.evaluation_mode import evaluation_mode

_ANCHOR = "a"  # a letter does not merge with the space or line break after it


class Task(NamedTuple):
    """Token ids of a question and its answer, int64.

    Attributes:
        prompt: (n,), up to where the answer begins.
        answer: (m,), the answer and the period after it, which training asks for, too.
        scored: How many tokens of `answer` must be right in evaluation: all before the period.
        distance: Tokens of the prompt that stand after what is to be found (after the first of several facts); None
            where that is not known.
    """

    prompt: Tensor
    answer: Tensor
    scored: int
    distance: int | None = None


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of a text, without special tokens, as `token_stream` reads it."""
    options = {"add_special_tokens": False, "split_special_tokens": True, "return_attention_mask": False}
    ids: list[int] = tokenizer(text, verbose=False, **options)["input_ids"]
    return ids


def encode_next(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of a text that stands after another one: without what some tokenizers put before a first word.

    Args:
        text: starts with a space or a line break, so that no token reaches over its start.

    Raises:
        ValueError: for a tokenizer whose tokens do.
    """
    anchor, both = encode(tokenizer, _ANCHOR), encode(tokenizer, _ANCHOR + text)
    if both[: len(anchor)] != anchor:
        raise ValueError(
            f"{type(tokenizer).__name__} merges {text[:10]!r} with the word before it, so that tasks cannot be put "
            "together of pieces; use a tokenizer that splits at white space."
        )
    return both[len(anchor) :]


def encode_answer(tokenizer: PreTrainedTokenizerBase, answer: str) -> tuple[list[int], int]:
    """Token ids of " answer.", and how many of them come before the period.

    Raises:
        ValueError: for a tokenizer that merges the period with the answer.
    """
    ids, without_period = encode_next(tokenizer, f" {answer}."), encode_next(tokenizer, f" {answer}")
    if ids[: len(without_period)] != without_period:
        raise ValueError(f"{type(tokenizer).__name__} merges the period with the answer {answer!r}; use another one.")
    return ids, len(without_period)


def training_item(task: Task) -> dict[str, Tensor]:
    """`{"input_ids": (n + m,), "labels": (n + m,)}`, int64; labels are -100 but on the answer and its period."""
    return {
        "input_ids": torch.cat([task.prompt, task.answer]),
        "labels": torch.cat([torch.full_like(task.prompt, IGNORED_LABEL), task.answer]),
    }


@torch.inference_mode()
def right_answers(
    model: nn.Module, tasks: Sequence[Task], batch_size: int = 1, chunk_length: int | None = None
) -> list[bool]:
    """Whether a model answers each task, from the zero state, decoding greedily.

    It reads the right answer along with the prompt; the answer counts if each of its scored tokens is the most
    likely one. That is greedy decoding: this gives the answer if and only if no token on the way differs. An answer
    that is spelled with other tokens than the tokenizer's counts as wrong in both.

    Args:
        tasks: all of one length n + m.
        batch_size: Rows of a forward pass.
        chunk_length: Tokens of a forward pass, with the state carried on; None for all at once. Long prompts need
            it: it bounds the memory, and the Mamba-2 kernel is wrong above about 61k tokens.

    Raises:
        ValueError: for tasks of several lengths, and chunks for a model that takes no initial state.
    """
    if len({len(task.prompt) + len(task.answer) for task in tasks}) != 1:
        raise ValueError("Give at least one task, and tasks of one length in tokens.")
    check_pieces(model, batch_size, chunk_length)
    device = next(model.parameters()).device
    right = []
    with evaluation_mode(model):
        for start in range(0, len(tasks), batch_size):
            batch = tasks[start : start + batch_size]
            ids = torch.stack([torch.cat([task.prompt, task.answer]) for task in batch]).to(device)  # (B, n + m)
            longest = max(len(task.answer) for task in batch)
            best = _last_logits(model, ids[:, :-1], longest, chunk_length).argmax(-1)  # (B, longest)
            hits = (best == ids[:, -longest:]).tolist()
            for task, row in zip(batch, hits, strict=True):
                first = longest - len(task.answer)
                right.append(all(row[first : first + task.scored]))
    return right


def check_pieces(model: nn.Module, batch_size: int, chunk_length: int | None) -> None:
    """Raise a `ValueError` for sizes of forward passes that are not possible with a model."""
    if batch_size < 1 or (chunk_length is not None and chunk_length < 1):
        raise ValueError(f"batch_size and chunk_length must be at least 1, got {batch_size} and {chunk_length}.")
    if chunk_length is not None and "initial_state" not in inspect.signature(model.forward).parameters:
        raise ValueError(
            f"{type(model).__name__}.forward takes no initial_state, so chunk_length must be None, got {chunk_length}."
        )


def _last_logits(model: nn.Module, ids: Tensor, count: int, chunk_length: int | None) -> Tensor:
    """Logits (B, count, V) at the last `count` tokens of `ids` (B, T)."""
    state: dict[str, Any] = {}
    if chunk_length is not None:
        for chunk in ids[:, :-count].split(chunk_length, dim=1):
            if chunk.shape[1]:
                state = {"initial_state": model(input_ids=chunk, logits_to_keep=1, **state).final_state}
        ids = ids[:, -count:]
    logits: Tensor = model(input_ids=ids, logits_to_keep=count, **state).logits
    return logits
