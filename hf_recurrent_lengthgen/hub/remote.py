"""Talk to the Hub: trying again what may help, and telling in words what does not."""

import hashlib
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled
from huggingface_hub.hf_api import RepoFile

from hf_recurrent_lengthgen.evaluation.provenance import installed_versions

Result = TypeVar("Result")

# The HTTP library that huggingface_hub uses depends on its version; errors of connections and answers share a base.
HTTP_ERROR: type[Exception] = next(base for base in HfHubHTTPError.__mro__ if base.__name__ == "HTTPError")
_BROKEN = (HTTP_ERROR, ConnectionError, TimeoutError, json.JSONDecodeError)
HUB_ERRORS: tuple[type[Exception], ...] = (*_BROKEN, RuntimeError)
WAITS = (1.0, 2.0, 4.0, 8.0)
LONGEST_WAIT = 60.0
BUSY = (408, 429, 500, 502, 503, 504)


def hub_api(token: str | None) -> HfApi:
    """The client; without a token it asks as nobody."""
    version = installed_versions()["hf_recurrent_lengthgen"]
    return HfApi(token=token or False, library_name="hf_recurrent_lengthgen", library_version=version)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def status_of(error: BaseException) -> int | None:
    """The HTTP status that an error comes from; None if there was no answer."""
    answers = (getattr(one, "response", None) for one in _chain(error))
    return next((answer.status_code for answer in answers if answer is not None), None)


def is_lost(error: BaseException) -> bool:
    """Whether a connection failed or broke, or brought something else than the Hub answers."""
    return status_of(error) is None and any(isinstance(one, _BROKEN) for one in _chain(error))


def _is_offline(error: BaseException) -> bool:
    return any(isinstance(one, OfflineModeIsEnabled) for one in _chain(error))


def may_pass(error: BaseException) -> bool:
    """Whether the same request may work a little later."""
    return (is_lost(error) and not _is_offline(error)) or status_of(error) in BUSY


def wait_after(error: BaseException, at_least: float) -> None:
    """Wait before the next try, as long as the answer asks for, within bounds; in seconds."""
    answers = (getattr(one, "response", None) for one in _chain(error))
    asked = next((answer.headers.get("Retry-After", "") for answer in answers if answer is not None), "")
    time.sleep(min(max(float(asked), at_least), LONGEST_WAIT) if asked.isdigit() else at_least)


def again(call: Callable[[], Result], doing: str) -> Result:
    """Do what the client does not try again by itself, up to five times.

    Raises:
        ValueError: as `told` says it.
    """
    for wait in (*WAITS, None):
        try:
            return call()
        except HUB_ERRORS as error:
            if wait is None or not may_pass(error):
                raise told(error, doing) from error
            wait_after(error, wait)
    raise AssertionError


def once(call: Callable[[], Result], doing: str) -> Result:
    """Do what the client tries again by itself.

    Raises:
        ValueError: as `told` says it.
    """
    try:
        return call()
    except HUB_ERRORS as error:
        raise told(error, doing) from error


def told(error: BaseException, doing: str) -> ValueError:
    """What went wrong and what to do, as a `ValueError` to raise."""
    return ValueError(f"{doing} failed: {_reason(error)}")


def _reason(error: BaseException) -> str:
    if _is_offline(error):
        return "HF_HUB_OFFLINE is set. Unset it."
    answered = [one for one in _chain(error) if isinstance(one, HfHubHTTPError) and one.response is not None]
    said = next((" ".join(one.server_message.split()) for one in answered if one.server_message), "")
    code = next((one.response.headers.get("X-Error-Code") for one in answered), None)
    status, quote = status_of(error), f' ("{said}")' if said else ""
    if code == "GatedRepo":
        return f"access to it must be asked for on its page{quote}."
    if status == 401:
        return f"the Hub does not accept the token{quote}: set another, by hf auth login or as HF_TOKEN."
    if status == 403:
        return (
            f"the token may not do this{quote}: take a token that can write "
            "(https://huggingface.co/settings/tokens; hf auth login), or a name of your own."
        )
    if status == 404:
        return f"it is not there{quote}, or the token may not see it."
    if status in (409, 412):
        return f"something else has changed it at the same time{quote}. Look at what is there, then run it again."
    if status == 413:
        return f"it is too large for the Hub{quote}: save the weights in smaller shards (max_shard_size)."
    if status == 429:
        return f"the Hub asks for fewer requests{quote}. Wait some minutes, then run it again."
    if status is not None and status >= 500:
        return f"the Hub answers {status}{quote}. Run it again later."
    if status is not None:
        return f"the Hub answers {status}{quote}."
    if is_lost(error):
        return f"the connection broke ({' '.join(str(error).split()) or type(error).__name__}). Run it again."
    return " ".join(str(error).split())


def list_files(api: HfApi, name: str, commit: str) -> dict[str, RepoFile]:
    """The files of a commit by path, with their sizes and hashes."""
    entries: Any = again(lambda: list(api.list_repo_tree(name, revision=commit, recursive=True)), f"Listing {name}")
    return {entry.path: entry for entry in entries if isinstance(entry, RepoFile)}


def git_name(path: Path) -> str:
    """The SHA-1 by which git, and the Hub, know the content of a file that is not large."""
    content = path.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
