"""What must not leave a machine in files: passwords and keys, and where its files are."""

import codecs
import json
import re
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import unquote

from detect_secrets.plugins import (
    aws,
    azure_storage_key,
    discord,
    github_token,
    gitlab_token,
    mailchimp,
    pypi_token,
    sendgrid,
    slack,
    square_oauth,
    stripe,
    telegram_token,
    twilio,
)
from detect_secrets.plugins.base import RegexBasedDetector

HIDDEN = "HIDDEN"
SHOWN = 3
"""Findings that are told of one kind and file."""

# Keys that are known by their form. The rest of the library takes digests, prose or the password "password" for
# secrets, does not know newer forms, or takes hours for a long run of letters.
_LIBRARY: tuple[type[RegexBasedDetector], ...] = (
    aws.AWSKeyDetector,
    azure_storage_key.AzureStorageKeyDetector,
    discord.DiscordBotTokenDetector,
    github_token.GitHubTokenDetector,
    gitlab_token.GitLabTokenDetector,
    mailchimp.MailchimpDetector,
    pypi_token.PypiTokenDetector,
    sendgrid.SendGridDetector,
    slack.SlackDetector,
    square_oauth.SquareOAuthDetector,
    stripe.StripeDetector,
    telegram_token.TelegramBotTokenDetector,
    twilio.TwilioKeyDetector,
)
_START = r"(?:(?<![A-Za-z0-9])|(?<=\\[nrt]))"  # of a word, also after the "\n" of a quoted text
_PLACEHOLDER = r"(?:your|[<$%{*]|\.\.\.|x{4}|changeme|placeholder|redacted|(?:insert|replace|enter|paste)[_-]|hidden)"
_KEY_NAME = (
    r"(?:(?:api|secret|access|account|private|auth)[_-]?key(?:_id)?|passwo?r?d|passwd|passphrase|pwd"
    r"|(?:access|auth|api|secret|refresh|bot|hub|hf)[_-]?token|(?:client|app|consumer|shared)[_-]?secret)"
)
_QUOTE = r"\\*[\"']"
SECRETS = {
    "a Hub token": rf"{_START}(?:hf|api_org)_[A-Za-z0-9]{{20,}}",
    "a key of Weights & Biases": rf"{_START}wandb_v1_\w{{40,}}"
    rf"|(?i:wandb\S{{0,40}}?(?:{_QUOTE})?[\s:=]+(?:{_QUOTE})?[0-9a-f]{{40}}(?![0-9a-z]))",
    "a GitHub token": rf"{_START}github_pat_\w{{30,}}",
    "a JSON Web Token": rf"{_START}eyJ[\w=-]{{10,}}\.eyJ[\w=-]{{10,}}(?:\.[\w+/=-]*)?",
    "a private key": r"-----BEGIN [A-Z0-9 ]*PRIVATE KEY|PuTTY-User-Key-File-\d",
    "an API key": rf"{_START}(?:npm_[A-Za-z0-9]{{36}}|dapi[0-9a-f]{{32}}|AIza[\w-]{{35}}|GOCSPX-[\w-]{{20,}}"
    r"|ya29\.[\w-]{20,}|xapp-\d-[\w-]{20,}|r8_[A-Za-z0-9]{30,}|gsk_[A-Za-z0-9]{40,}|xai-[A-Za-z0-9]{40,}"
    r"|pplx-[A-Za-z0-9]{40,}|do[por]_v1_[0-9a-f]{40,}|whsec_[A-Za-z0-9+/=]{20,}"
    r"|sk-(?:(?:proj|ant|svcacct|admin|or)-[\w-]{16,}"
    r"|(?=[a-zA-Z_-]{0,99}[0-9])(?=[a-z0-9_-]{0,99}[A-Z])[\w-]{20,}))",
    "a webhook": r"discord(?:app)?\.com/api/(?:v\d+/)?webhooks/\d+/[\w-]{20,}"
    r"|hooks\.slack\.com/(?:workflows|triggers)/[\w/-]{20,}|\.webhook\.office\.com/webhookb2/[\w@/-]{20,}",
    "a password or key": rf"(?i){_START}(?:{_KEY_NAME}|(?<![\w-])(?:token|secret)(?=(?:{_QUOTE})?\s*[:=]\s*"
    rf"(?:{_QUOTE})?(?=[\w-]*\d)[\w-]{{20,}}))(?:{_QUOTE})?\s*[:=]\s*"
    rf"(?:{_QUOTE}(?!{_PLACEHOLDER})[^\"'\s\\]{{8,}}{_QUOTE}"
    rf"|(?!{_PLACEHOLDER})(?=\S{{0,99}}\d)(?=\S{{0,99}}[a-z])[\w+/=~!@#%^&*-]{{8,}}(?![\w.(\[]))",
    "a password or key of a command": r"(?i)(?<![\w-])--[\w-]{0,40}(?:token|key|passwo?r?d|passwd|secret)"
    rf"(?:[ =]+(?:{_QUOTE})?|{_QUOTE}\s*,\s*{_QUOTE})"
    rf"(?!{_PLACEHOLDER}|-)(?=[^\s\"']{{0,99}}\d)[^\s\"'\\]{{8,}}",
    "a password in an address": rf"(?i)://(?:[^\s/:@\"'\\]{{0,99}}:(?!{_PLACEHOLDER}|pass(?:word)?@)"
    r"[^\s/@\"'\\]{1,199}|(?=[a-z_-]{0,99}\d)[\w-]{20,199})@",
    "a key in an address": r"(?i)[?&](?:sig|signature|x-amz-(?:signature|security-token)|(?:access_)?token"
    rf"|(?:api_?)?key)=(?!{_PLACEHOLDER})(?=[a-z_-]{{0,99}}\d)[\w.~+/=-]{{16,}}",
    "a password of a request": rf"(?i){_START}(?:bearer\s+(?!{_PLACEHOLDER})(?=\S{{0,99}}\d)[\w.~+/=-]{{20,}}"
    rf"|authorization(?:{_QUOTE})?\s*[:=,]\s*(?:{_QUOTE})?(?:basic|token|digest|apikey)\s+"
    rf"(?!{_PLACEHOLDER})[\w.~+/=-]{{12,}})",
}
"""What the library does not know."""
_PATTERNS = (
    *((what, re.compile(pattern)) for what, pattern in SECRETS.items()),
    *((str(kind.secret_type), pattern) for kind in _LIBRARY for pattern in kind.denylist),  # type: ignore[attr-defined]
)
SECRET_OPTION = re.compile(r"(?i)--?[\w-]*(?:token|key|password|passwd|secret)")

# Folders at the root of machines that hold what belongs to a person or a job, on clusters in particular.
_ROOTS = (
    r"home\d*|[Uu]sers?|root|mnt\d*|data\d*|g?scratch\d*|pscratch|tmp|work\d*|workspaces?|workdir|content|kaggle|gpfs\w*"
    r"|lustre\w*|lus|nfs\w*|fsx|pfs|afs|beegfs|ceph\w*|cfs|efs|weka\w*|vast|ptmp|srv|media|private|Volumes|opt|var|exports?"
    r"|projects?|proj|storage\d*|stor\d*|raid\d*|net|nas|clusters?|global|ssd\d*|hdd\d*|nvme\d*|disks?\d*|nobackup|archive"
    r"|shared?|groups?|homes|rds|local_?scratch|mmfs\d*|sagemaker|dbfs|cygdrive|p/(?:project|scratch|home|data)\w*"
    r"|dev/shm|run/(?:user|media)|[np]/\w+|u/\w+"
)
_NO_FOLDERS = (  # of data, but of every system, and of addresses without their host
    r"usr|bin|sbin|lib\w*|etc|proc|sys|dev|boot|snap|api|v\d+|docs?|assets|static|images?|img|blob|tree|raw|resolve|spaces"
    r"|datasets|models|collections|settings|papers|abs|pdf|releases"
)
_BEGIN = r"(?:(?<![\w./~$}])|(?<=\\[nrt]))"
_APART = r"(?<![^\s\"'`=(\[,:])(?<!\]\()(?<!href=[\"'])(?<!src=[\"'])"
_REST = r"[^\s\"'`<>)\]},;]*"
_PART = r"[\w@+.-]+"
PATHS = "|".join(
    (
        rf"{_BEGIN}/(?:{_ROOTS})/{_PART}{_REST}",
        # elsewhere: four parts, or three with one that is no mere word
        rf"{_APART}/(?!(?:{_NO_FOLDERS})/|{_PART}/to/|\S{{0,99}}/v\d+/)(?:(?:{_PART}/){{3}}|(?=[\w@+./-]{{0,99}}[\d._-])(?:{_PART}/){{2}}){_PART}{_REST}",
        r"(?<!\w)file:/+[\w~.-][^\s\"'`<>]*",
        rf"{_BEGIN}~(?:[A-Za-z_][\w.-]+)?/(?!\.)[\w@+-]+{_REST}",
        rf"(?<!\w)[A-Za-z]:[\\/]+(?:Documents and Settings|{_ROOTS})[\\/]+[^\s\"'`<>]+",
        # of other drives: no "Q:\n" of a quoted text, no "$X:\Omega"
        r"(?<![\w$({\\])[A-Z]:(?:\\{1,2}(?![nrt](?:[^a-z]|$))|/(?!/))(?!Windows|Program|Python)[\w.-]{2,}(?:[\\/]+[\w.-]+)*",
        r"(?<![\w\\}&])(?:\\\\[A-Za-z0-9][\w.-]+\\(?!\\)|\\{4}[A-Za-z0-9][\w.-]+\\\\)[\w$.-]+",
    )
)

_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"')
_PERCENT = re.compile(r"(?:%[0-9A-Fa-f]{2})+")
_ENCODINGS = {
    codecs.BOM_UTF32_LE: "utf-32",  # begins as that of UTF-16
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}


_VOCABULARIES = ("tokenizer.json", "vocab.json", "vocab.txt", "merges.txt", "rwkv_vocab*.txt", "*.model", "*.tiktoken")


def is_vocabulary(path: Path) -> bool:
    """Whether a file holds the tokens of a tokenizer, which may look like paths."""
    return any(path.match(pattern) for pattern in _VOCABULARIES)


def hide_secrets(text: str) -> str:
    """The text with what looks like a password or key replaced."""
    for _, pattern in _PATTERNS:
        text = pattern.sub(HIDDEN, text)
    return text


def secrets_in(text: str, token: str | None = None) -> list[str]:
    """What a text holds of passwords and keys, by kind and line.

    Args:
        text: As `readable_text` gives it.
        token: A token of the Hub that is known.
    """
    patterns = [*_PATTERNS, *([("your Hub token", re.compile(re.escape(token)))] if token else [])]
    return [told for what, pattern in patterns for told in _hits(f"{what}: take it out", pattern, text)]


def paths_in(text: str, here: Iterable[Path] = ()) -> list[str]:
    """The paths of a machine in a text, by line; `here` are further folders, wherever they are."""
    places = sorted({str(place) for place in here if len(place.parts) > 1}, key=len, reverse=True)
    own = rf"|{_BEGIN}(?:{'|'.join(map(re.escape, places))})(?![\w-])" if places else ""
    return _hits("a path of your machine: {found}", re.compile(PATHS + own), text)


def _hits(what: str, pattern: re.Pattern[str], text: str) -> list[str]:
    hits = list(pattern.finditer(text))
    if not hits:
        return []
    lines = ", ".join(str(text.count("\n", 0, hit.start()) + 1) for hit in hits[:SHOWN])
    more = f" and {len(hits) - SHOWN} more" if len(hits) > SHOWN else ""
    return [f"line {lines}{more}: {what.replace('{found}', hits[0].group())}"]


def is_binary(text: str) -> bool:
    """Whether what `readable_text` gave is of a file of no text, such as a picture."""
    return re.search(r"[\x00-\x08\x0e-\x1a]", text[:1000]) is not None


def readable_text(path: Path) -> str:
    """What of a file may hold text: all of it, or the header of weights.

    It is as a reader sees it, of UTF-16 and UTF-32 too: strings of JSON and %xx resolved. Lines keep their numbers.
    """
    with open(path, "rb") as file:
        if path.name.endswith(".safetensors"):
            size = int.from_bytes(file.read(8), "little")
            text = file.read(min(size, 100_000_000)).decode("utf-8", errors="replace")
        else:
            text = _decoded(file.read())
    if path.name.endswith((".json", ".jsonl", ".ipynb", ".safetensors")):
        text = _QUOTED.sub(_unescaped, text)
    for _ in range(2):  # an address within an address
        text = _PERCENT.sub(lambda found: unquote(found.group()).replace("\n", "\r"), text)
    return text


def _decoded(content: bytes) -> str:
    encoding = next((name for mark, name in _ENCODINGS.items() if content.startswith(mark)), "utf-8")
    # without a mark, Latin letters of UTF-16 and UTF-32 are those of ASCII among zeros
    return content.decode(encoding, errors="replace").replace("\0", "")


def _unescaped(quoted: re.Match[str]) -> str:
    """A string of JSON without its escapes; line ends in it as "\r"."""
    whole = quoted.group()
    if "\\" not in whole:
        return whole
    try:
        return f'"{json.loads(whole, strict=False)}"'.replace("\n", "\r")
    except ValueError:  # no JSON
        return whole
