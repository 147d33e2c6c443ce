"""What must not leave a machine in files: passwords and keys, and where its files are."""

import json
import re
from collections.abc import Iterable
from pathlib import Path

HIDDEN = "HIDDEN"
SHOWN = 3
"""Findings that are told of one kind and file."""

_START = r"(?:(?<![A-Za-z0-9])|(?<=\\[nrt]))"  # of a word, also after the "\n" of a quoted text
_PLACEHOLDER = r"(?:your|[<$%{*]|\.\.\.|x{4}|changeme|placeholder|redacted|(?:insert|replace|enter|paste)[_-]|hidden)"
_KEY_NAME = (
    r"(?:(?:api|secret|access|private|auth)[_-]?key|passwo?r?d|passwd|(?:access|auth|api|secret|hub|hf)[_-]?token)"
)
SECRETS = {
    "a Hub token": rf"{_START}(?:hf|api_org)_[A-Za-z0-9]{{20,}}",
    "a GitHub token": rf"{_START}(?:gh[pousr]_[A-Za-z0-9]{{30,}}|github_pat_\w{{30,}})",
    "a GitLab token": rf"{_START}glpat-[A-Za-z0-9_-]{{20,}}",
    "an API key": rf"{_START}sk-(?:(?:proj|ant|svcacct|admin|or)-[A-Za-z0-9_-]{{16,}}"
    r"|(?=[a-zA-Z_-]{0,99}[0-9])(?=[a-z0-9_-]{0,99}[A-Z])[A-Za-z0-9_-]{20,})",
    "an AWS key": rf"{_START}A[KS]IA[0-9A-Z]{{16}}(?![0-9A-Za-z])",
    "a Slack token": rf"{_START}xox[abprs]-[A-Za-z0-9-]{{10,}}",
    "a Google key": rf"{_START}AIza[0-9A-Za-z_-]{{35}}",
    "a private key": r"-----BEGIN [A-Z ]*PRIVATE KEY-----",
    "a key of Weights & Biases": r"(?i)wandb\S{0,40}?\\*[\"']?[\s:=]+\\*[\"']?[0-9a-f]{40}(?![0-9a-z])",
    "a password or key": rf"(?i){_START}{_KEY_NAME}\\*[\"']?\s*[:=]\s*"
    rf"(?:\\*[\"'](?!{_PLACEHOLDER})[^\"'\s\\]{{8,}}\\*[\"']"
    rf"|(?!{_PLACEHOLDER})(?=\S{{0,99}}\d)(?=\S{{0,99}}[a-z])[\w+/=~!@#%^&*-]{{8,}}(?![\w.(\[]))",
    "a password or key of a command": r"(?i)(?<!\S)--[\w-]{0,40}(?:token|key|passwo?r?d|passwd|secret)[ =]+"
    rf"(?!{_PLACEHOLDER}|-)(?=\S{{0,99}}\d)[^\s\"']{{8,}}",
    "a password in an address": rf"(?i)://[^\s/:@\"'\\]{{0,99}}:(?!{_PLACEHOLDER}|pass(?:word)?@)[^\s/@\"'\\]{{1,199}}@",
    "a password of a request": rf"(?i){_START}bearer\s+(?!{_PLACEHOLDER})(?=\S{{0,99}}\d)[\w.~+/=-]{{20,}}",
}
SECRET_OPTION = re.compile(r"(?i)--?[\w-]*(?:token|key|password|passwd|secret)")

# Where machines keep what belongs to a person or a job.
_ROOTS = (
    r"home\d*|[Uu]sers|root|mnt\d*|data\d*|scratch\d*|tmp|work|workspace|content|kaggle|gpfs|lustre|nfs|fsx|pfs|srv"
    r"|media|private|Volumes|opt|var|export|projects?|storage|raid\d*|net|cluster|global|ssd\d*|hdd\d*"
)
_BEGIN = r"(?:(?<![\w./~$}])|(?<=\\[nrt]))"
_REST = r"[^\s\"'`<>)\]},;]*"
PATHS = "|".join(
    (
        rf"{_BEGIN}(?:file:/+)?/(?:{_ROOTS})/[\w@+.-]+{_REST}",
        rf"{_BEGIN}~\w*/(?!\.)[\w@+-]+{_REST}",
        rf"(?<!\w)[A-Za-z]:[\\/]+(?:Documents and Settings|{_ROOTS})[\\/]+[^\s\"'`<>]+",
        r"(?<![\w\\}&])\\\\[A-Za-z0-9][\w.-]+\\(?!\\)[\w$.-]+",
    )
)

_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"')


_VOCABULARIES = ("tokenizer.json", "vocab.json", "vocab.txt", "merges.txt", "rwkv_vocab*.txt", "*.model", "*.tiktoken")


def is_vocabulary(path: Path) -> bool:
    """Whether a file holds the tokens of a tokenizer, which may look like paths."""
    return any(path.match(pattern) for pattern in _VOCABULARIES)


def hide_secrets(text: str) -> str:
    """The text with what looks like a password or key replaced."""
    for pattern in SECRETS.values():
        text = re.sub(pattern, HIDDEN, text)
    return text


def secrets_in(text: str, token: str | None = None) -> list[str]:
    """What a text holds of passwords and keys, by kind and line.

    Args:
        text: As `readable_text` gives it.
        token: A token of the Hub that is known.
    """
    patterns = {f"{what}: take it out": pattern for what, pattern in SECRETS.items()}
    if token:
        patterns["your Hub token: take it out"] = re.escape(token)
    return [told for what, pattern in patterns.items() for told in _hits(what, pattern, text)]


def paths_in(text: str, here: Iterable[Path] = ()) -> list[str]:
    """The paths of a machine in a text, by line; `here` are further folders, wherever they are."""
    places = sorted({str(place) for place in here if len(place.parts) > 1}, key=len, reverse=True)
    own = rf"|{_BEGIN}(?:{'|'.join(map(re.escape, places))})(?![\w-])" if places else ""
    return _hits("a path of your machine: {found}", PATHS + own, text)


def _hits(what: str, pattern: str, text: str) -> list[str]:
    hits = list(re.finditer(pattern, text))
    if not hits:
        return []
    lines = ", ".join(str(text.count("\n", 0, hit.start()) + 1) for hit in hits[:SHOWN])
    more = f" and {len(hits) - SHOWN} more" if len(hits) > SHOWN else ""
    return [f"line {lines}{more}: {what.replace('{found}', hits[0].group())}"]


def readable_text(path: Path) -> str:
    """What of a file may hold text: all of it, or the header of weights; the strings of JSON as they are meant."""
    with open(path, "rb") as file:
        if path.name.endswith(".safetensors"):
            size = int.from_bytes(file.read(8), "little")
            text = file.read(min(size, 100_000_000)).decode("utf-8", errors="replace")
        else:
            text = file.read().decode("utf-8", errors="replace")
    return _decoded(text) if path.name.endswith((".json", ".jsonl", ".ipynb", ".safetensors")) else text


def _decoded(text: str) -> str:
    """JSON with the escapes of its strings resolved; line ends in them as "\r", so that lines keep their numbers."""
    return _QUOTED.sub(_unescaped, text)


def _unescaped(quoted: re.Match[str]) -> str:
    whole = quoted.group()
    if "\\" not in whole:
        return whole
    try:
        return f'"{json.loads(whole, strict=False)}"'.replace("\n", "\r")
    except ValueError:  # no JSON
        return whole
