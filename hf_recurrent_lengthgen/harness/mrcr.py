"""Which of several equal requests (multi-round co-reference resolution, MRCR).

Vodrahalli et al., 2024 (Michelangelo, arXiv:2409.12640), ask for one of several answers to equal requests in a long
conversation; OpenAI published a data set of this kind, openai/mrcr on the Hub:

    User: Write a poem about tapirs
    Assistant: ...
    User: Write a blog post about rocks
    Assistant: ...
    User: Write a poem about tapirs
    Assistant: ...
    User: Prepend aYooSG8CQg to the 2nd (1 indexed) poem about tapirs. Do not include any other text in your response.
    Assistant:

The score is that of the data set: the ratio of difflib's SequenceMatcher to the right answer, 0 without the code.
`rows` makes such conversations with texts from a small grammar; `published_rows` reads the data set.
"""

import json
import random
import string
from difflib import SequenceMatcher
from typing import Any

import datasets
from transformers import PreTrainedTokenizerBase

from hf_recurrent_lengthgen.harness.lengths import LENGTHS, check_count, check_lengths
from hf_recurrent_lengthgen.harness.local_files import Splits, folder_of, task_lines
from hf_recurrent_lengthgen.harness.tokenizers import metadata_tokenizer, number_of_tokens

Turn = tuple[str, str, str]
"""A form, a topic, and a text of this form about it."""
CODE_LENGTH = 10
ORDINALS = ("1st", "2nd", "3rd", "4th", "5th", "6th", "7th", "8th")
TOPICS = ("tapirs", "rocks", "lanterns", "rivers", "clocks", "orchards", "trains", "herons", "bridges", "islands")
OPENINGS = {
    "poem": "O {topic}, I sing of the {adjective} {noun}",
    "short story": "Once, far from any {noun}, there were {adjective} {topic}",
    "blog post": "Today I want to tell you why {topic} beat every {adjective} {noun}",
    "letter": "Dear friend, the {topic} you asked about were near the {noun}",
    "news article": "{Topic} were seen beside the {adjective} {noun} on Monday",
    "speech": "Ladies and gentlemen, {topic} deserve more than a {noun}",
    "riddle": "What has a {adjective} {noun} and thinks of {topic}",
    "review": "Of all {topic} this year, these had the most {adjective} {noun}",
}
SENTENCES = (
    "The {adjective} {noun} {verb} the {other}",
    "Nobody {verb} a {noun} as {adjective} as this one",
    "Behind the {noun}, a {adjective} {other} {verb} us",
    "Some say the {noun} never {verb} the {adjective} {other}",
    "At night the {other} {verb} what the {noun} had left",
    "We kept the {adjective} {noun} and the {other}",
)
WORDS = {
    "adjective": (
        "amber",
        "brittle",
        "calm",
        "distant",
        "early",
        "faded",
        "gentle",
        "hollow",
        "iron",
        "quiet",
        "tall",
    ),
    "noun": (
        "anchor",
        "basket",
        "candle",
        "door",
        "engine",
        "feather",
        "garden",
        "harbor",
        "mirror",
        "needle",
        "wall",
    ),
    "other": ("bell", "cloud", "drum", "field", "ladder", "market", "pillow", "ribbon", "stair", "tower", "window"),
    "verb": ("answered", "carried", "followed", "guarded", "heard", "measured", "mended", "painted", "passed"),
}


def rows(
    needles: int, max_seq_lengths: list[int] | None = None, samples: int = 100, seed: int = 0, **metadata: Any
) -> Splits:
    """Generated conversations and the answers, at each length.

    Args:
        needles: Number of equal requests, at most 8.
        max_seq_lengths: Some of `LENGTHS`, in tokens of prompt and answer (default: 4096).
        samples: Number of conversations of each length.
        seed: Another seed gives other conversations.
        metadata: Other metadata, with the tokenizer.

    Raises:
        ValueError: without a tokenizer, for impossible numbers, and for lengths too short for the requests.
    """
    check_count("samples", samples)
    lengths = max_seq_lengths or [4096]
    check_lengths(lengths)
    tokenizer = metadata_tokenizer(metadata, "filling conversations up to a number of tokens")
    found = [
        conversation(needles, length, tokenizer, random.Random(f"mrcr {seed} {needles} {length} {sample}"))
        for length in lengths
        for sample in range(samples)
    ]
    return {"test": datasets.Dataset.from_list(found)}


def published_rows(
    config_source: str,
    needles: int,
    data_dir: str | None = None,
    max_seq_lengths: list[int] | None = None,
    **metadata: Any,
) -> Splits:
    """The rows of openai/mrcr from `TASK.jsonl` in a folder, or from the Hub.

    The length of a row is the smallest of `LENGTHS` that holds prompt and answer in tokens of the model; longer rows
    are left out.

    Args:
        config_source: The task file, which lm_eval puts into the metadata.
        needles: Number of equal requests.
        data_dir: Folder; None for the Hub.
        max_seq_lengths: The lengths to keep; None for all.
        metadata: Other metadata, with the tokenizer.

    Raises:
        ValueError: as in `rows`, for a missing file, and for rows that are not those of the data set.
    """
    check_lengths(max_seq_lengths or ())
    tokenizer = metadata_tokenizer(metadata, "counting the tokens of conversations")
    if data_dir is None:
        files = f"{needles}needle/*.parquet"
        lines: Any = datasets.load_dataset("openai/mrcr", data_files=files, split="train")
    else:
        lines = task_lines(config_source, folder_of(data_dir))
    found = []
    for number, line in enumerate(lines):
        try:
            prompt = as_text(json.loads(line["prompt"]))
            answer, code = line["answer"], line["random_string_to_prepend"]
        except (KeyError, TypeError, json.JSONDecodeError) as error:
            raise ValueError(f"Row {number} is none of openai/mrcr: {type(error).__name__} {error}.") from error
        tokens = number_of_tokens(tokenizer, prompt) + number_of_tokens(tokenizer, answer)
        length = next((length for length in LENGTHS if tokens <= length), None)
        if length is not None and (max_seq_lengths is None or length in max_seq_lengths):
            found.append({"prompt": prompt, "answer": answer, "code": code, "length": length})
    if not found:
        raise ValueError(f"No row has one of the lengths {max_seq_lengths or LENGTHS}.")
    return {"test": datasets.Dataset.from_list(found)}


def conversation(
    needles: int, length: int, tokenizer: PreTrainedTokenizerBase, draw: random.Random
) -> dict[str, str | int]:
    """A row whose prompt and answer have at most `length` tokens, with as many other requests as fit.

    Raises:
        ValueError: if the equal requests alone are longer.
    """
    if not 1 <= needles <= len(ORDINALS):
        raise ValueError(f"needles must be from 1 to {len(ORDINALS)}, got {needles}.")
    form, topic = draw.choice(list(OPENINGS)), draw.choice(TOPICS)
    seen: set[str] = set()
    asked = [(form, topic, _new_piece(form, topic, draw, seen)) for _ in range(needles)]
    places = sorted(draw.random() for _ in asked)
    wanted = draw.randrange(needles)
    code = "".join(draw.choices(string.ascii_letters + string.digits, k=CODE_LENGTH))
    last = f"Prepend {code} to the {ORDINALS[wanted]} (1 indexed) {form} about {topic}. "
    last += "Do not include any other text in your response."
    answer = code + asked[wanted][2]

    def prompt(others: list[Turn]) -> str:
        turns = list(others)
        for place, turn in reversed(list(zip(places, asked, strict=True))):  # from the end, so that places stay
            turns.insert(int(place * (len(others) + 1)), turn)
        return as_text(
            [*(message for turn in turns for message in _messages(turn)), {"role": "user", "content": last}]
        )

    def size(text: str) -> int:
        return number_of_tokens(tokenizer, text)

    room = length - size(answer)
    others, filled = list[Turn](), size(prompt([]))
    while filled <= room:  # the tokens of parts add up to about those of the whole
        others.append(_other(form, topic, draw, seen))
        filled += size(as_text(_messages(others[-1]), end=""))
    while others and size(prompt(others)) > room:
        others.pop()
    if size(prompt(others)) > room:
        raise ValueError(
            f"{length} tokens of this tokenizer do not hold {needles} requests: give longer max_seq_lengths."
        )
    return {"prompt": prompt(others), "answer": answer, "code": code, "length": length}


def _messages(turn: Turn) -> list[dict[str, str]]:
    form, topic, text = turn
    request = f"Write {'an' if form[0] in 'aeiou' else 'a'} {form} about {topic}"
    return [{"role": "user", "content": request}, {"role": "assistant", "content": text}]


def as_text(messages: list[dict[str, str]], end: str = "Assistant:") -> str:
    """A conversation as plain text, up to the beginning of the next answer."""
    return "".join(f"{message['role'].capitalize()}: {message['content']}\n" for message in messages) + end


def similarity(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    """The score of the prompt's length; blanks before the code do not count, because base models begin with one."""
    response, code = results[0].lstrip(), doc["code"]
    if not response.startswith(code):
        return {str(doc["length"]): 0.0}
    matcher = SequenceMatcher(None, response.removeprefix(code), doc["answer"].removeprefix(code))
    return {str(doc["length"]): matcher.ratio()}


def _other(form: str, topic: str, draw: random.Random, seen: set[str]) -> Turn:
    """A request that shares form or topic with the equal ones in one of two cases, and never both; and its answer."""
    while True:
        near = draw.random()
        kind = form if near < 0.25 else draw.choice(list(OPENINGS))
        about = topic if 0.25 <= near < 0.5 else draw.choice(TOPICS)
        if (kind, about) != (form, topic):
            return kind, about, _new_piece(kind, about, draw, seen)


def _new_piece(form: str, topic: str, draw: random.Random, seen: set[str]) -> str:
    while (text := _piece(form, topic, draw)) in seen:
        pass
    seen.add(text)
    return text


def _piece(form: str, topic: str, draw: random.Random) -> str:
    patterns = [OPENINGS[form], *draw.choices(SENTENCES, k=5)]
    words = [{kind: draw.choice(choices) for kind, choices in WORDS.items()} for _ in patterns]
    sentences = [
        pattern.format(topic=topic, Topic=topic.capitalize(), **chosen) + ("?" if form == "riddle" else ".")
        for pattern, chosen in zip(patterns, words, strict=True)
    ]
    return ("\n" if form == "poem" else " ").join(sentences)
