"""Questions about a document that is read twice before the answer ("Just read twice", Arora et al., 2024,
arXiv:2407.05483).

    {question} {document}.
    {document}. {cue}

Shen et al., 2025 (arXiv:2509.22630), C.2, use this prompt and count an answer as right if the continuation contains
it, ignoring case. Documents above 2,048 - 50 tokens are cut before they are repeated: around the answer if the authors
of the prompt do so, else at the end.
"""

import logging
import re
from typing import Any, NamedTuple

import datasets
from transformers import PreTrainedTokenizerBase

from hf_recurrent_lengthgen.harness import local_files

ROOM_FOR_THE_ANSWER = 50
"""Tokens that the document leaves free, as by the authors of the prompt."""

logger = logging.getLogger(__name__)


class RecallQuestion(NamedTuple):
    """A question about a document; the answer continues `cue`."""

    question: str
    document: str
    cue: str
    answers: list[str]


def rows(
    config_source: str,
    layout: str,
    keep: str,
    data_dir: str | None = None,
    times: int = 2,
    context_length: int | None = 2048,
    **metadata: Any,
) -> local_files.Splits:
    """The rows of a task as prompts and answers.

    Args:
        config_source, data_dir: As in `local_files.rows`.
        layout: Layout of the rows: "key" (text, key, value), "completion" (context, question, text, value) or
            "question" (context, question, orig_question, answers).
        keep: The part of too long documents to keep: "answer" or "beginning".
        times: Number of times that the document is read.
        context_length: Tokens for the document and an answer; None to cut nothing.
        metadata: Other metadata, with the tokenizer.

    Raises:
        KeyError: for rows that lack an entry of their layout.
        ValueError: as in `local_files.rows`.
    """
    source = local_files.rows(config_source, data_dir, **metadata)["validation"]
    prompts, without_answer = [], 0
    for row in source:
        item = LAYOUTS[layout](row)
        item = item._replace(answers=[answer.strip() for answer in item.answers if answer.strip()])
        if not item.answers:
            without_answer += 1
            continue
        if context_length is not None and len(item.document.encode()) > context_length - ROOM_FOR_THE_ANSWER:
            tokenizer = local_files.metadata_tokenizer(metadata, "cutting documents (context_length)")
            item = cut(item, tokenizer, context_length - ROOM_FOR_THE_ANSWER, keep)
        prompts.append({"prompt": prompt(item, times), "answers": item.answers})
    if without_answer:
        logger.warning("%d rows have no answer and are left out.", without_answer)
    return {"validation": datasets.Dataset.from_list(prompts)}


def prompt(item: RecallQuestion, times: int = 2) -> str:
    document = f"{item.document.strip().strip('.').strip()}."
    repeated = "\n".join([document] * times)
    return f"{item.question} {repeated} {item.cue}".strip() if times > 1 else f"{document} {item.cue}".strip()


def cut(item: RecallQuestion, tokenizer: PreTrainedTokenizerBase, longest: int, keep: str) -> RecallQuestion:
    tokens = tokenizer.encode(item.document, add_special_tokens=False)
    if len(tokens) <= longest:
        return item
    start = 0
    if keep == "answer":
        places = [item.document.lower().find(answer.lower()) for answer in item.answers]
        first = min((place for place in places if place >= 0), default=0)
        before = len(tokenizer.encode(item.document[:first], add_special_tokens=False))
        start = max(0, min(before - longest // 2, len(tokens) - longest))
    return item._replace(document=str(tokenizer.decode(tokens[start : start + longest], skip_special_tokens=True)))


def contains(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    return {"contains": float(any(answer.lower() in results[0].lower() for answer in doc["answers"]))}


def _key(row: dict[str, Any]) -> RecallQuestion:
    name = row["key"].strip()
    text = row["text"].partition("Summary of information above...")[0].strip()
    cue = f"{name[:1].upper()}{name[1:]}:"
    about = f"Information about {cue[:-1]}."
    return RecallQuestion(about, _without_end(text, f"{name}:"), cue, [row["value"]])


def _completion(row: dict[str, Any]) -> RecallQuestion:
    document, text = row["context"].partition("Question:")[0].strip(), row["text"].strip()
    if not text.startswith(document):
        document = text
    cue = text.removeprefix(document).strip()
    return RecallQuestion(row["question"].strip(), document, cue, [row["value"]])


def _question(row: dict[str, Any]) -> RecallQuestion:
    document = re.sub(r"\[(PAR|DOC|TLE)\]", "", row["context"]).strip()
    cue = row["question"].strip()
    question = (row.get("orig_question") or cue).strip().strip(":")
    return RecallQuestion(question, _without_end(document, cue), cue, row["answers"])


def _without_end(text: str, ending: str) -> str:
    while ending and text.lower().endswith(ending.lower()):
        text = text[: -len(ending)].rstrip()
    return text


LAYOUTS = {"key": _key, "completion": _completion, "question": _question}
