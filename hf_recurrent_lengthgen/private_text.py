"""Find what must not leave a machine in files: passwords, keys, and paths."""

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from detect_secrets.core.plugins.util import get_mapping_from_secret_type_to_class
from detect_secrets.filters.heuristic import is_indirect_reference, is_templated_secret
from detect_secrets.plugins.base import RegexBasedDetector
from detect_secrets.plugins.keyword import (
    CONFIG_DENYLIST_REGEX_TO_GROUP,
    DENYLIST,
    QUOTES_REQUIRED_DENYLIST_REGEX_TO_GROUP,
)

HIDDEN = "HIDDEN"
_SHOWN = 3
"""Number of findings of one kind and file in a message."""

# Without the plugins that take capital words for passwords or addresses for secrets, or need a second for a megabyte.
_NOT_USED = {"ArtifactoryDetector", "IPPublicDetector", "CloudantDetector", "SoftlayerDetector"}
_NOT_USED |= {"IbmCloudIamDetector", "IbmCosHmacDetector"}
_KINDS: Mapping[str, Any] = get_mapping_from_secret_type_to_class()
_LIBRARY = [
    kind for kind in _KINDS.values() if issubclass(kind, RegexBasedDetector) and kind.__name__ not in _NOT_USED
]
# What the library lacks, each with the secret as a group: newer keys, commands and requests.
_FURTHER = {
    "a Hub token": r"(?<![A-Za-z0-9])((?:hf|api_org)_[A-Za-z0-9]{20,})",
    "an API key": r"(?<![A-Za-z0-9])(npm_[A-Za-z0-9]{36}|github_pat_\w{30,}|wandb_v1_\w{40,}|AIza[\w-]{35}"
    r"|sk-(?:proj|ant|svcacct|admin|or)-[\w-]{16,}|sk-(?=\w*\d)(?=\w*[A-Z])\w{20,}|dapi[0-9a-f]{32})",
    "a private key": r"(-----BEGIN [A-Z0-9 ]*PRIVATE KEY|PuTTY-User-Key-File-\d)",
    "a password of a request": r"(?i)(?:\bbearer|authorization\W{1,6}(?:basic|token))\s+"
    r"(?=\S{0,99}\d)([\w.~+/=-]{12,})",
    "a password or key": r"(?i)(?:--[\w-]{0,40}(?:token|key|passwo?r?d|secret)[=\"', ]+|(?<![A-Za-z0-9-])"
    r"token[\"']?\s*[:=]\s*[\"'](?=[\w-]{20}))(?!-)(?=[^\s\"']{0,99}\d)([^\s\"',\\]{8,})",
    "a key in the environment": r"(?<![A-Za-z0-9-])[A-Z0-9_]*(?:TOKEN|API_KEY|ACCESS_KEY(?:_ID)?|SECRET|PASSWORD)"
    r"\s*[=:]\s*[\"']?(?=\S{0,99}\d)(?=\S{0,99}[A-Za-z])([\w+/=~-]{12,})(?![\w.(\[])",
    "a key of a service": r"(?<![A-Za-z0-9])(gsk_[A-Za-z0-9]{40,}|xai-[A-Za-z0-9]{40,}|pplx-[A-Za-z0-9]{40,}"
    r"|r8_[A-Za-z0-9]{30,}|GOCSPX-[\w-]{20,}|ya29\.[\w-]{20,}|xapp-\d-[\w-]{20,}|do[por]_v1_[0-9a-f]{40,}"
    r"|whsec_[A-Za-z0-9+/=]{20,})",
    "a key in an address": r"(?i)(?:[?&](?:sig|signature|(?:access_)?token|x-amz-(?:signature|security-token)"
    r"|(?:api_?)?key)=|/webhooks/\d+/|hooks\.slack\.com/(?:workflows|triggers)/|\.webhook\.office\.com/webhookb2/)"
    r"(?=[\w/@-]{0,99}\d)([\w.~+/=@-]{16,})|://(?=[a-z_-]{0,99}\d)([\w-]{20,199})@|://:([^\s/@\"'\\]{4,199})@",
}
_PATTERNS = (
    *((what, re.compile(pattern)) for what, pattern in _FURTHER.items()),
    *((str(kind.secret_type), pattern) for kind in _LIBRARY for pattern in kind.denylist),
)
_NAMED = re.compile(rf"(?i)(?:{'|'.join(DENYLIST)}|access_?key).{{0,300}}")
_NEXT_LINE = re.compile(r"([:=])[ \t]*(?:[>|][+-]?[ \t]*)?\n[ \t]+(?=[\"'\w])")
_PLACEHOLDER = re.compile(r"(?i)your|[<$%{*]|\.\.\.|x{4}|changeme|placeholder|redacted|pass(?:word)?$|hidden|none$")
_SECRET_OPTION = re.compile(r"(?i)--?[\w-]*(?:token|key|passwo?r?d|secret)")
_LONG_RUN = re.compile(r"(?<![\w+/=.:?&~\\-])[\w+/=.:?&~\\-]{3000,}")
"""A picture in a notebook: longer than any key, and slow to search."""

_ROOTS = (
    r"home\d*|[Uu]sers?|root|mnt|data\d*|g?scratch\d*|pscratch|tmp|work\w*|content|kaggle|gpfs\w*|lustre\w*|lus|nfs\w*|fsx"
    r"|afs|beegfs|ceph\w*|weka\w*|media|private|Volumes|opt/ml|var|proj(?:ects?)?|homes|shared"
    r"|nobackup|ptmp|ssd\d*|nvme\d*|disk\d+|export|storage\d*|raid\d*|net|clusters?|global|[np]|dev/shm|run/user"
)
_PATHS = (
    rf"(?:(?<![\w./~$}}\\])|(?<=[:-]))(?:~(?:[A-Za-z_][\w.-]*)?|(?:[A-Za-z]:)?[\\/]+(?:{_ROOTS}))[\\/]+"
    r"(?!\.)[\w@+-][^\s\"'`<>)\]},;]*|file:/+[\w~][^\s\"'`<>]*"
)
_VOCABULARIES = ("tokenizer.json", "vocab.json", "vocab.txt", "merges.txt", "rwkv_vocab*.txt", "*.model", "*.tiktoken")
_CONFIGS = (".yaml", ".yml", ".env", ".ini", ".cfg", ".toml")
"""Suffixes of files with values without quotes."""


def private_in(path: Path, token: str | None = None, here: Iterable[Path] = ()) -> tuple[list[str], list[str]]:
    """Passwords, keys and paths of this machine in a file, by kind and line.

    Args:
        path: A text; weights, whose header is read; or a picture, which is not searched for paths.
        token: A known token of the Hub.
        here: Folders whose paths are always private.
    """
    with open(path, "rb") as file:
        header = path.name.endswith(".safetensors")
        content = file.read(min(int.from_bytes(file.read(8), "little"), 100_000_000) if header else -1)
    content = content.replace(b"\0", b"")  # zero bytes between the letters of UTF-16 and UTF-32
    binary = re.search(rb"[\x01-\x08\x0e-\x1a]", content[:1000]) is not None
    if binary:
        content = b"\n".join(re.findall(rb"[\x20-\x7e]{8,}", content))
    vocabulary = any(path.match(pattern) for pattern in _VOCABULARIES)
    text = content.decode("utf-8", errors="replace")
    text = text if vocabulary else _LONG_RUN.sub("", _unescaped(_unescaped(text)))
    forms = CONFIG_DENYLIST_REGEX_TO_GROUP if path.suffix in _CONFIGS else QUOTES_REQUIRED_DENYLIST_REGEX_TO_GROUP
    secrets = _secrets(text, token, _PATTERNS[:1] if vocabulary else _PATTERNS, {} if vocabulary else forms)
    paths = [] if binary or vocabulary else paths_in(text, here)
    return [f"{found}: take it out" for found in _lines(text, secrets)], paths


def _unescaped(text: str) -> str:
    """The text without the escapes of JSON and addresses; escaped line ends become blanks to keep line numbers."""
    if "\\" in text:
        blank = {"n": " ", "t": " ", "r": " "}
        text = re.sub(
            r"\\(u[0-9a-fA-F]{4}|[\\/\"'nrt])",
            lambda found: blank.get(found[1]) or (chr(int(found[1][1:], 16)) if len(found[1]) > 1 else found[1]),
            text,
        )
    return re.sub(r"(?:%(?!0[aA])[0-9A-Fa-f]{2})+", lambda found: unquote(found[0]), text)


def _secrets(
    text: str,
    token: str | None = None,
    patterns: Iterable[tuple[str, re.Pattern[str]]] = _PATTERNS,
    forms: Mapping[re.Pattern[str], int] = QUOTES_REQUIRED_DENYLIST_REGEX_TO_GROUP,
) -> Iterator[tuple[str, int, str]]:
    """Kind, place and text of secrets, found by their own form or by the names before them (`forms`)."""
    if token and token in text:
        yield "your Hub token", text.index(token), token
    for what, pattern in patterns:
        for found in pattern.finditer(text):
            if not _PLACEHOLDER.match(found[found.lastindex or 0]):
                yield what, found.start(), found[0]
    # a value may stand on the line below its name
    joined = _NEXT_LINE.sub(lambda found: f"{found[1]} {' ' * (len(found[0]) - 2)}", text)
    for window in _NAMED.finditer(joined) if forms else ():
        for form, group in forms.items():
            for named in form.finditer(window[0]):
                value = named[group]
                harmless = is_templated_secret(value) or _PLACEHOLDER.match(value) or is_indirect_reference(named[0])
                if len(value) >= 8 and not harmless:
                    yield "a password or key", window.start() + named.start(), value


def _lines(text: str, found: Iterable[tuple[str, int, str]]) -> list[str]:
    """ "line 3, 7: KIND" of each kind."""
    places: dict[str, list[int]] = {}
    for what, start, _ in found:
        places.setdefault(what, []).append(start)
    told = []
    for what, starts in places.items():
        lines = ", ".join(str(text.count("\n", 0, start) + 1) for start in starts[:_SHOWN])
        more = f" and {len(starts) - _SHOWN} more" if len(starts) > _SHOWN else ""
        told.append(f"line {lines}{more}: {what}")
    return told


def paths_in(text: str, here: Iterable[Path] = ()) -> list[str]:
    """The paths of a machine in a text, by line; `here` are further private folders."""
    own = [re.escape(str(place)) for place in sorted(here, key=lambda place: -len(str(place))) if place.parts[1:]]
    pattern = rf"{_PATHS}|(?<![\w./])(?:{'|'.join(own)})(?![\w-])" if own else _PATHS
    found = list(re.finditer(pattern, text))
    return _lines(text, ((f"a path of your machine: {found[0][0]}", one.start(), one[0]) for one in found))


def hide_secrets(text: str) -> str:
    """The text with probable passwords and keys replaced."""
    for _, _, secret in list(_secrets(text)):
        text = text.replace(secret, HIDDEN)
    return text


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
