"""Lines with hidden labels, and questions about their statistics that have one right answer; see `oolong.py`."""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import date, timedelta
from typing import Any, NamedTuple

LABELS = {
    "animals": (
        "beavers",
        "falcons",
        "goats",
        "hedgehogs",
        "otters",
        "ponies",
        "rabbits",
        "swans",
        "whales",
        "wolves",
    ),
    "food": ("bread", "cheese", "dumplings", "lentils", "noodles", "pancakes", "pears", "rice", "soup", "waffles"),
    "music": (
        "ballads",
        "cellos",
        "choirs",
        "drummers",
        "flutes",
        "guitars",
        "melodies",
        "operas",
        "pianos",
        "waltzes",
    ),
    "sports": ("archery", "badminton", "boxing", "cricket", "fencing", "hockey", "judo", "rugby", "skiing", "tennis"),
    "tools": (
        "chisels",
        "drills",
        "hammers",
        "ladders",
        "pliers",
        "rulers",
        "saws",
        "screwdrivers",
        "tongs",
        "wrenches",
    ),
    "weather": (
        "blizzards",
        "drizzle",
        "fog",
        "frost",
        "hail",
        "heatwaves",
        "rainbows",
        "snowfall",
        "storms",
        "thunder",
    ),
}
TEXTS = (
    "I was thinking about {word} again today.",
    "Could you send me more about {word}?",
    "My sister wrote a whole page on {word}.",
    "There is nothing like {word} in the morning.",
    "They never told us anything about {word}.",
    "Everybody at work talks about {word} now.",
    "It is the {word} that I will remember.",
    "We need to talk about {word} next time.",
)
FREQUENT, FREQUENT_SHARE = 0.2, 0.8
"""Four in five lines are those of one in five users, as published."""
GROUPS = ("counting", "user", "timeline")
ATTEMPTS = 40
"""Draws for each question, before lines have no further question."""


class Item(NamedTuple):
    date: date
    user: int
    label: str
    text: str


class Question(NamedTuple):
    """A question; `answer` is a list with the right answer in Python's notation, as in the published data set."""

    text: str
    answer: str
    answer_type: str
    group: str


Kind = Callable[[Sequence[Item], str, random.Random], tuple[str, Any, str] | None]


def items(number: int, draw: random.Random) -> list[Item]:
    """Lines whose labels, users and dates are of unequal frequency."""
    weights = [draw.expovariate(1) + 0.05 for _ in LABELS]
    users = draw.sample(range(10_000, 100_000), max(5, number // 10))
    frequent = max(1, round(FREQUENT * len(users)))
    days = [date(2022, 1, 1) + timedelta(draw.randrange(4 * 365)) for _ in range(max(4, number // 2))]
    found = []
    for label in draw.choices(list(LABELS), weights, k=number):
        user = draw.choice(users[:frequent] if draw.random() < FREQUENT_SHARE else users[frequent:])
        text = draw.choice(TEXTS).format(word=draw.choice(LABELS[label]))
        found.append(Item(draw.choice(days), user, label, text))
    return found


def questions_about(lines: Sequence[Item], number: int, draw: random.Random) -> list[Question]:
    """So many different questions, of all groups in turn; fewer if that many were not found."""
    found: dict[str, Question] = {}
    for attempt in range(ATTEMPTS * number):
        if len(found) == number:
            break
        group = GROUPS[attempt % len(GROUPS)]
        before, chosen = _subset(group, lines, draw)
        asked = draw.choice(KINDS[group])(chosen, before, draw)
        if asked is not None and asked[0] not in found:
            text, answer, answer_type = asked
            found[text] = Question(text, str([answer]), f"ANSWER_TYPE.{answer_type}", group)
    return list(found.values())


def _subset(group: str, lines: Sequence[Item], draw: random.Random) -> tuple[str, Sequence[Item]]:
    """The lines that a question is about, and the beginning of the question."""
    if group == "user":
        known = sorted({line.user for line in lines})
        users = sorted(draw.sample(known, min(draw.randint(1, 3), len(known))))
        chosen = [line for line in lines if line.user in users]
        return f"Consider only the lines of the users {', '.join(map(str, users))}. Among them, ", chosen
    if group == "timeline":
        day = draw.choice(lines).date
        if draw.random() < 0.5:
            before = f"Consider only the lines with a date in {day:%B} of any year. Among them, "
            return before, [line for line in lines if line.date.month == day.month]
        before = f"Consider only the lines with a date before {day:%b %d, %Y}. Among them, "
        return before, [line for line in lines if line.date < day]
    return "In the lines above, ", lines


def _extreme(most: bool) -> Kind:
    def asked(lines: Sequence[Item], before: str, draw: random.Random) -> tuple[str, Any, str] | None:
        counts = Counter(line.label for line in lines)
        label = _only(counts, most)
        if label is None or len(counts) < 2:
            return None
        choice = ", ".join(sorted(counts))
        text = f"{before}which label is the {'most' if most else 'least'} common? Give your final answer in the form "
        return text + f"'Label: answer', where answer is one of the labels: {choice}.", label, "LABEL"

    return asked


def _number(lines: Sequence[Item], before: str, draw: random.Random) -> tuple[str, Any, str] | None:
    label = draw.choice(list(LABELS))
    text = f"{before}how many lines have the label '{label}'? Give your final answer in the form 'Answer: number'."
    return text, sum(line.label == label for line in lines), "NUMERIC"


def _comparison(lines: Sequence[Item], before: str, draw: random.Random) -> tuple[str, Any, str] | None:
    one, other = draw.sample(list(LABELS), 2)
    counts = Counter(line.label for line in lines)
    if not counts[one] and not counts[other]:
        return None
    relation = "same frequency as"
    if counts[one] != counts[other]:
        relation = "more common than" if counts[one] > counts[other] else "less common than"
    text = f"{before}is the label '{one}' more common than, less common than, or of the same frequency as the label "
    text += f"'{other}'? Give your final answer in the form 'Answer: {one} is [X] {other}', where [X] is 'more common "
    return text + "than', 'less common than', or 'same frequency as'.", relation, "COMPARISON"


def _busiest_user(lines: Sequence[Item], before: str, draw: random.Random) -> tuple[str, Any, str] | None:
    counts = Counter(line.user for line in lines)
    user = _only(counts, True)
    if user is None or len(counts) < 2:
        return None
    text = f"{before}which user has the most lines? Give your final answer in the form 'User: [X]', where [X] is the "
    return text + "number of the user.", user, "USER"


def _busiest_day(lines: Sequence[Item], before: str, draw: random.Random) -> tuple[str, Any, str] | None:
    day = _only(Counter(line.date for line in lines), True)
    if day is None:
        return None
    text = f"{before}which date has the most lines? Give your final answer in the form 'Date: [X]', where [X] is the "
    return text + "date as it stands in the lines.", day, "DATE"


def _days_with(lines: Sequence[Item], before: str, draw: random.Random) -> tuple[str, Any, str] | None:
    times = draw.randint(1, 4)
    days = sum(count == times for count in Counter(line.date for line in lines).values())
    text = f"{before}how many dates have exactly {times} {'line' if times == 1 else 'lines'}? Give your final answer "
    return text + "in the form 'Answer: number'.", days, "NUMERIC"


def _only(counts: Counter[Any], most: bool) -> Any:
    """The key of the largest or smallest count; None if several share it."""
    wanted = (max if most else min)(counts.values(), default=0)
    keys = [key for key, count in counts.items() if count == wanted]
    return keys[0] if len(keys) == 1 else None


_LABEL_KINDS = (_extreme(True), _extreme(False), _number, _comparison)
KINDS: dict[str, tuple[Kind, ...]] = {
    "counting": _LABEL_KINDS,
    "user": (*_LABEL_KINDS, _busiest_user),
    "timeline": (*_LABEL_KINDS, _busiest_day, _days_with),
}
