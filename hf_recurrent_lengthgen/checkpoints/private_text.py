"""Find what must not leave a machine: passwords and keys, the Hub token in use, and paths of its users."""

import filecmp
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

HIDDEN = "HIDDEN"

_NOT_USED = {"ArtifactoryDetector", "Base64HighEntropyString", "HexHighEntropyString", "IPPublicDetector"}
"""Plugins of detect-secrets for which words in capitals, digests of files, commits and versions are secrets."""
_HUB_TOKEN = re.compile(r"(?<![A-Za-z0-9])hf_[A-Za-z0-9]{30,}")
"""Tokens of the Hub, which detect-secrets does not know."""
_SECRET_OPTION = re.compile(r"(?i)--?[\w-]*(?:token|key|passwo?r?d|secret)")
_ABSOLUTE = re.compile(r"(?:(?<![\w./~$}\\])|(?<=\\[nrt]))(?:file://)?((?:[A-Za-z]:[\\/]+|/)\w[^\s\"'`<>)\]},;]*)")
"""Absolute paths in a text, also behind the escaped line ends of JSON; no addresses of the web."""
_USERS = ("home", "Users", "root")
"""Folders at the top of a disk that hold users' folders."""
_OWN_CODE = Path(__file__).parents[1] / "models"
_VOCABULARIES = ("tokenizer.json", "vocab.json", "vocab.txt", "merges.txt", "rwkv_vocab*.txt", "*.model", "*.tiktoken")
"""Files in which any word may stand, and which are long."""


@contextmanager
def _scan() -> Iterator[Callable[[str], Iterable[Any]]]:
    """What finds the secrets of a line with our settings of detect-secrets: no requests to verify one."""
    from detect_secrets.core.plugins.util import get_mapping_from_secret_type_to_class  # needs much
    from detect_secrets.core.scan import scan_line
    from detect_secrets.settings import transient_settings

    kinds: Iterable[type] = get_mapping_from_secret_type_to_class().values()
    used = [{"name": kind.__name__} for kind in kinds if kind.__name__ not in _NOT_USED]
    with transient_settings({"plugins_used": used}):
        yield scan_line


def private_in(path: Path, token: str | None = None, here: Iterable[Path] = ()) -> tuple[list[str], list[str]]:
    """Passwords and keys, and paths of users of this machine, in a file, by kind and line.

    Args:
        path: A text, or weights, whose header is read. This package's own code, in a checkpoint, is not read.
        token: The token of the Hub that is in use, which is found in any file.
        here: Folders whose paths are always private.
    """
    if (own := _OWN_CODE / path.name).is_file() and filecmp.cmp(own, path, shallow=False):
        return [], []
    weights = path.suffix == ".safetensors"
    with open(path, "rb") as file:
        content = file.read(min(int.from_bytes(file.read(8), "little"), 100_000_000) if weights else -1)
    text = content.decode("utf-8", errors="replace")
    secrets = [("your Hub token", _line(text, text.index(token)))] if token and token in text else []
    if any(path.match(pattern) for pattern in _VOCABULARIES):
        return _told(secrets, ": take it out"), []
    secrets += [("a Hub token", _line(text, match.start())) for match in _HUB_TOKEN.finditer(text)]
    with _scan() as scan_line:
        lines = enumerate(text.splitlines(), 1)
        secrets += [(secret.type, number) for number, line in lines for secret in scan_line(line)]
    return _told(secrets, ": take it out"), paths_in(text, here)


def paths_in(text: str, here: Iterable[Path] = ()) -> list[str]:
    """The paths of users in a text, by line: in their folders, under the name of this user, or in `here`."""
    user, own = Path.home().name, [str(place) for place in here if place.parts[1:]]

    def is_private(path: str) -> bool:
        _, *parts = re.split(r"[\\/]+", path)
        inside = any(path == place or path.startswith((f"{place}/", f"{place}\\")) for place in own)
        return inside or (len(parts) > 1 and (parts[0] in _USERS or user in parts))

    private = [match for match in _ABSOLUTE.finditer(text) if is_private(match[1])]
    return _told([(f"a path of your machine: {private[0][1]}", _line(text, match.start(1))) for match in private])


def _line(text: str, place: int) -> int:
    return text.count("\n", 0, place) + 1


def _told(places: Iterable[tuple[str, int]], advice: str = "") -> list[str]:
    """ "line 3: KIND" for the first place of each kind."""
    first: dict[str, int] = {}
    for kind, line in places:
        first.setdefault(kind, line)
    return [f"line {line}: {kind}{advice}" for kind, line in first.items()]


def hide_secrets(text: str) -> str:
    """The text with probable passwords and keys replaced."""
    shown = text.splitlines(keepends=True)
    with _scan() as scan_line:
        for number, line in enumerate(shown):
            for secret in sorted({str(secret.secret_value) for secret in scan_line(line)}, key=len, reverse=True):
                # the whole word: some plugins find only its beginning
                shown[number] = re.sub(rf"[\w.~+-]*{re.escape(secret)}[\w.~+/=-]*", HIDDEN, shown[number])
    return _HUB_TOKEN.sub(HIDDEN, "".join(shown))


# The folders of an absolute path; a blank ends a path in a text, but not in an argument.
_FOLDERS = r"(?<![\w/.~])(?:file:/+|~[\w.-]*/|/|[A-Za-z]:(?:\\|/(?!/))|\\\\)(?:[^{end}/\\]+[/\\])*(?=[^{end}/\\])"


def portable(argument: str) -> str:
    """An argument of a command with only the last part of absolute paths, also in values."""
    return re.sub(_FOLDERS.format(end="=,;\"'"), "", argument.rstrip("/\\") or argument)


def portable_text(text: str) -> str:
    """A description with only the last part of absolute paths, and without tokens and keys."""
    return re.sub(_FOLDERS.format(end=r"\s,;"), "", hide_secrets(text))


def portable_command(command: str | Sequence[str]) -> str:
    """A shell command, given as text or in parts, with `portable` arguments and without tokens and keys."""
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
