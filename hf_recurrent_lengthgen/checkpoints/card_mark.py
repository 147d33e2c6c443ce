"""The mark in a card by which `lengthgen card` recognizes its own cards, and which weights it is of."""

import hashlib
import json
import re

from hf_recurrent_lengthgen.checkpoints.records import carded


def card_mark(files: dict[str, str]) -> str:
    """The comment in a card of these `verified_files`, with the SHA-256 of their weights and config."""
    digest = hashlib.sha256(json.dumps(carded(files), sort_keys=True).encode()).hexdigest()
    return f"<!-- made by lengthgen card of {digest} -->"


def read_card_mark(text: str) -> str | None:
    """The last mark in a card; None without one."""
    return next(reversed(re.findall(r"<!-- made by lengthgen card of \w{64} -->", text)), None)
