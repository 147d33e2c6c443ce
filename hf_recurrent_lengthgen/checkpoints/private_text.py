"""Find what must not leave a machine (tokens, passwords in addresses, paths of users), and shorten paths."""

import re
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path

HIDDEN = "HIDDEN"

_SECRET = re.compile(
    r"(?<![A-Za-z0-9])(?:hf_[A-Za-z0-9]{30,}|gh[opsu]_[A-Za-z0-9]{36,}|github_pat_\w{22,}|glpat-[\w-]{20,}"
    r"|sk-[\w-]{20,}|AKIA[A-Z0-9]{16})|(?<=://)[^\s/:@\"']+:[^\s/@\"']+(?=@)"
)
"""Tokens of the Hub, GitHub, GitLab, OpenAI and AWS by how they begin, and user and password of an address."""
_SECRET_OPTION = re.compile(r"(?i)--?[\w-]*(?:token|key|passwo?r?d|secret)")
_BEGIN = r"(?:(?<![\w./~$}\\])|(?<=\\[nrt]))(?:file://)?"
"""Before an absolute path in a text, also behind the escaped line ends of JSON; not in addresses of the web."""
_OF_USERS = (r"/(?:home|Users|root)(?=/\w)", r"[A-Za-z]:[\\/]+Users(?=[\\/]+\w)")
_VOCABULARIES = ("tokenizer.json", "vocab.json", "vocab.txt", "merges.txt", "rwkv_vocab*.txt", "*.model", "*.tiktoken")
"""Files in which any word may stand, and which are long."""


def private_in(path: Path, token: str | None = None, here: Iterable[Path] = ()) -> tuple[list[str], list[str]]:
    """Tokens and passwords, and paths of users of this machine, in a file, by line.

    Args:
        path: A text, or weights, whose header is read.
        token: The token of the Hub that is in use, which no file may hold.
        here: Folders whose paths are always private.
    """
    weights = path.suffix == ".safetensors"
    with open(path, "rb") as file:
        content = file.read(min(int.from_bytes(file.read(8), "little"), 100_000_000) if weights else -1)
    text = content.decode("utf-8", errors="replace")
    secrets = _with_line("your Hub token: take it out", text, [text.index(token)] if token and token in text else [])
    if any(path.match(pattern) for pattern in _VOCABULARIES):
        return secrets, []
    places = [match.start() for match in _SECRET.finditer(text)]
    return secrets + _with_line("a token or password: take it out", text, places), paths_in(text, here)


def paths_in(text: str, here: Iterable[Path] = ()) -> list[str]:
    """The first path in a text that lies in the folders of users, or in `here`, with its line."""
    places = [*_OF_USERS, *(rf"{re.escape(str(place))}(?![\w.-])" for place in here if place.parts[1:])]
    match = re.search(rf"{_BEGIN}((?:{'|'.join(places)})[^\s\"'`<>)\]}},;]*)", text)
    return [] if match is None else _with_line(f"a path of your machine: {match[1]}", text, [match.start(1)])


def _with_line(what: str, text: str, places: Sequence[int]) -> list[str]:
    """ "line 3: WHAT" for the first place."""
    return [f"line {1 + text.count(chr(10), 0, place)}: {what}" for place in places[:1]]


def hide_secrets(text: str) -> str:
    """The text with probable tokens and passwords replaced."""
    return _SECRET.sub(HIDDEN, text)


# The folders of an absolute path; a blank ends a path in a text, but not in an argument.
_FOLDERS = r"(?<![\w/.~])(?:file:/+|~[\w.-]*/|/|[A-Za-z]:(?:\\|/(?!/))|\\\\)(?:[^{end}/\\]+[/\\])*(?=[^{end}/\\])"


def portable(argument: str) -> str:
    """An argument of a command with only the last part of absolute paths, also in values."""
    return re.sub(_FOLDERS.format(end="=,;\"'"), "", argument.rstrip("/\\") or argument)


def portable_text(text: str) -> str:
    """A description with only the last part of absolute paths, and without tokens and keys."""
    return re.sub(_FOLDERS.format(end=r"\s,;"), "", hide_secrets(text))


def portable_command(command: str | Sequence[str]) -> str:
    """A shell command, as text or in parts, with `portable` arguments and without tokens and keys."""
    try:
        program, *arguments = (shlex.split(command) if isinstance(command, str) else command) or [""]
    except ValueError:  # from sys.argv, joined without quotes
        program, *arguments = str(command).split()
    shown = []
    for before, argument in zip(["", *arguments], arguments, strict=False):
        option, equals, _ = argument.partition("=")
        if _SECRET_OPTION.fullmatch(before) and not argument.startswith("--"):
            shown.append(HIDDEN)
        elif equals and _SECRET_OPTION.fullmatch(option):
            shown.append(f"{option}={HIDDEN}")
        else:
            shown.append(portable(hide_secrets(argument)))
    return shlex.join([Path(program).name, *shown]) if program else ""
