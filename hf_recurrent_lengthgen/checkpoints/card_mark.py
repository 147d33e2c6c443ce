"""The mark in a card by which `lengthgen card` recognizes its own cards, and which weights it is of."""

import hashlib
import json
from dataclasses import dataclass, field

from hf_recurrent_lengthgen.checkpoints.records import carded
from hf_recurrent_lengthgen.evaluation.json_schema import Value, document, from_json, to_json


@document("card")
@dataclass(frozen=True)
class CardMark:
    """The comment in a card by which `lengthgen card` recognizes its own cards.

    Args:
        made_of: `cards_digest` of the files that it describes.
        wrote: Names of the figures and results that belong to it.
        said: Options that a person gave for it.
    """

    made_of: str
    wrote: tuple[str, ...] = ()
    said: dict[str, Value] = field(default_factory=dict)

    def comment(self) -> str:
        """The mark as one line of HTML comment."""
        text = json.dumps(json.loads(to_json(self)), sort_keys=True)
        return f"{_BEGIN}{text.replace('<', _LESS).replace('>', _MORE)}{_END}"


_BEGIN, _END = "<!-- made by lengthgen card: ", " -->"
_LESS, _MORE = (f"\\u{ord(sign):04x}" for sign in "<>")


def read_card_mark(text: str) -> CardMark | None:
    """The last mark in a card; None without one, a `ValueError` if it is damaged or of a newer version."""
    _, _, mark = text.rpartition(_BEGIN)
    return from_json(mark.partition(_END)[0], CardMark) if _BEGIN in text else None


def cards_digest(files: dict[str, str]) -> str:
    """SHA-256 of the weights and config among `verified_files`, as stored in a card."""
    return hashlib.sha256(json.dumps(carded(files), sort_keys=True).encode()).hexdigest()
