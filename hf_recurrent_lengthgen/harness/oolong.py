"""Questions about the statistics of many short texts (OOLONG-synth, Bertsch et al., 2025, arXiv:2511.02817).

A line gives a date, a user and a text. The label of a text, here its subject, is not written down:

    Date: May 30, 2023 || User: 81306 || Instance: ...
    ...
    Which label is the most common? Give your final answer in the form 'Label: answer', ...
    Label:

Several questions follow the same lines. Each is about labels of all lines (counting), of some users (user), or at some
time (timeline). `rows` makes the lines and questions with texts of its own, in the columns of the published data set,
oolongbench/oolong-synth on the Hub, which `published_rows` reads. Scores are those of the authors: 0.75^|error| for
numbers, else 0 or 1.
"""

import ast
import logging
import math
import random
import re
from datetime import datetime
from typing import Any

import datasets
import dateutil.parser  # type: ignore[import-untyped]

from hf_recurrent_lengthgen.harness.lengths import LENGTHS, check_count, check_lengths
from hf_recurrent_lengthgen.harness.local_files import Splits, folder_of, task_lines
from hf_recurrent_lengthgen.harness.oolong_questions import LABELS, Item, Question, items, questions_about
from hf_recurrent_lengthgen.harness.tokenizers import metadata_tokenizer, number_of_tokens

PHRASES = ("more common", "less common", "same frequency")
SHORT = 20
"""Answers of fewer characters are taken as they are."""
ROOM_FOR_THE_ANSWER = 32
SOME_LINES = 100
"""Lines from which the tokens of a line are estimated."""
COLUMNS = ("context_len", "context_window_text", "question", "answer", "answer_type", "task_group")

logger = logging.getLogger(__name__)


def rows(
    max_seq_lengths: list[int] | None = None, contexts: int = 4, questions: int = 25, seed: int = 0, **metadata: Any
) -> Splits:
    """Generated lines and questions, at each length.

    Args:
        max_seq_lengths: Some of `LENGTHS`, in tokens of the prompt and 32 more (default: 4096).
        contexts: Number of different lines of each length.
        questions: Number of questions about each; few lines may have fewer questions with one right answer.
        seed: Another seed gives other lines and questions.
        metadata: Other metadata, with the tokenizer.

    Raises:
        ValueError: without a tokenizer, and for impossible numbers.
    """
    check_count("contexts", contexts)
    check_count("questions", questions)
    lengths = max_seq_lengths or [4096]
    check_lengths(lengths)
    tokenizer = metadata_tokenizer(metadata, "filling a context up to a number of tokens")
    found: list[dict[str, Any]] = []
    for length in lengths:
        for context in range(contexts):
            key = f"oolong {seed} {length} {context}"
            number, text, asked = _filled(length - ROOM_FOR_THE_ANSWER, questions, tokenizer, key)
            if len(asked) < questions:
                logger.warning(
                    "%d lines have %d questions with one right answer, not %d.", number, len(asked), questions
                )
            for question in asked:
                values = (length, text, question.text, question.answer, question.answer_type, question.group)
                found.append(_asked(dict(zip(COLUMNS, values, strict=True))))
    return {"test": datasets.Dataset.from_list(found)}


def _filled(room: int, questions: int, tokenizer: Any, key: str) -> tuple[int, str, list[Question]]:
    """About as many lines as fit into `room` tokens with any of their questions, and no more; their number first."""
    empty, some = (number_of_tokens(tokenizer, context_of(items(n, random.Random(key)))) for n in (0, SOME_LINES))
    per_line = (some - empty) / SOME_LINES
    number = int((room - empty) / per_line)
    while number >= 2:
        draw = random.Random(key)
        lines = items(number, draw)
        text, asked = context_of(lines), questions_about(lines, questions, draw)
        longest = max(number_of_tokens(tokenizer, prompt("", question.text)) for question in asked)
        beyond = number_of_tokens(tokenizer, text) + longest - room
        if beyond <= 0:
            return number, text, asked
        number -= math.ceil(beyond / per_line)
    raise ValueError(f"{room + ROOM_FOR_THE_ANSWER} tokens of this tokenizer do not hold two lines: give more.")


def published_rows(
    config_source: str, data_dir: str | None = None, max_seq_lengths: list[int] | None = None, **metadata: Any
) -> Splits:
    """The rows of oolongbench/oolong-synth from `TASK.jsonl` in a folder, or from the Hub; longer rows are left out.

    Args:
        config_source: The task file, which lm_eval puts into the metadata.
        data_dir: Folder; None for the Hub.
        max_seq_lengths: The lengths to keep, as the data set gives them (`context_len`); None for all of `LENGTHS`.
        metadata: Other metadata.

    Raises:
        ValueError: for a missing file, and for rows that are not those of the data set.
    """
    check_lengths(max_seq_lengths or ())
    kept = max_seq_lengths or LENGTHS
    if data_dir is None:
        lines: Any = datasets.load_dataset("oolongbench/oolong-synth", split="test")
    else:
        lines = task_lines(config_source, folder_of(data_dir))
    found = []
    for number, line in enumerate(lines):
        if missing := [name for name in COLUMNS if name not in line]:
            raise ValueError(f"Row {number} is none of oolong-synth, it lacks {', '.join(missing)}.")
        if int(line["context_len"]) in kept:
            found.append(_asked(line))
    if not found:
        raise ValueError(f"No row has one of the lengths {', '.join(map(str, kept))}.")
    return {"test": datasets.Dataset.from_list(found)}


def _asked(line: dict[str, Any]) -> dict[str, Any]:
    return {
        "prompt": prompt(line["context_window_text"], line["question"]),
        "cue": cue(line["question"]),
        "answer": str(line["answer"]),
        "answer_type": str(line["answer_type"]).rpartition(".")[2],
        "group": line["task_group"],
        "length": int(line["context_len"]),
    }


def context_of(lines: list[Item]) -> str:
    about = f"{len(lines)} notes, one per line. Each note is about one subject, its label, which is not written down: "
    about += f"{', '.join(LABELS)}."
    asked = f"You will be asked about the labels of all {len(lines)} notes. Count them; do not guess or estimate."
    text = "".join(f"Date: {line.date:%b %d, %Y} || User: {line.user} || Instance: {line.text}\n" for line in lines)
    return f"Here are {about} {asked}\n\n{text}\nAbove are {about} {asked}\n\n"


def cue(question: str) -> str:
    """The beginning of the answer in the form that a question asks for, such as "Label:"; empty if it names none."""
    form = re.search(r"in the form '([A-Z][a-z]+:)", question)
    return form[1] if form else ""


def prompt(context: str, question: str) -> str:
    return f"{context.rstrip()}\n\n{question.strip()}\n{cue(question)}".rstrip()


def score(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    """The score of an answer, for the length of the prompt and for the group of questions."""
    value = points(doc["answer"], doc["answer_type"], doc["cue"] + results[0])
    return {str(doc["length"]): value, doc["group"]: value}


def points(answer: str, answer_type: str, response: str) -> float:
    """The authors' score of a whole response: of numbers 0.75^|error|, else whether the answer is right."""
    found, right = answer_in(response), _first(answer)
    if found == str(right):
        return 1.0
    if found in PHRASES:
        return float(found in str(right))
    try:
        if answer_type == "NUMERIC":
            return float(0.75 ** abs(int(right) - int(found)))
        if answer_type == "DATE":
            return float(dateutil.parser.parse(found) == right)
    except (ValueError, OverflowError):  # no number, or no date
        pass
    return 0.0


def answer_in(response: str) -> str:
    """The answer in a response: what follows the last colon, without markup."""
    if ":" not in response:
        return response if len(response) < SHORT else response.split()[-1]
    found = response.split(":")[-1].strip()
    for mark in "*[]":
        found = found.replace(mark, "")
    if len(found) < SHORT:
        return found
    return next((phrase for phrase in PHRASES if phrase in found), found)


def _first(answer: str) -> Any:
    """The first of the right answers, from the notation of the data set: ['ham'], [3], [datetime.date(2025, 3, 3)]."""
    if "datetime" in answer:
        return datetime.strptime(answer, "[datetime.date(%Y, %m, %d)]")
    return ast.literal_eval(answer)[0]
