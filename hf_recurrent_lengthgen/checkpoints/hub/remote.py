"""Requests to the Hub, with readable errors. The client itself retries temporary failures."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from huggingface_hub import HfApi, constants
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

from hf_recurrent_lengthgen.versions import installed_versions

# The HTTP library that huggingface_hub uses depends on its version; errors of connections and answers share a base.
_HTTP_ERROR: type[Exception] = next(base for base in HfHubHTTPError.__mro__ if base.__name__ == "HTTPError")
_BROKEN = (_HTTP_ERROR, ConnectionError, TimeoutError, json.JSONDecodeError, LocalEntryNotFoundError)

_REASONS = {
    401: "the Hub does not accept the token{said}: set another with hf auth login or HF_TOKEN.",
    403: "the token may not do this{said}: use a token that can write "
    "(https://huggingface.co/settings/tokens; hf auth login), or a repository of your own.",
    404: "it does not exist{said}, or the token may not see it.",
    409: "something else has changed it at the same time{said}. Look at its commits, then run the command again.",
    413: "it is too large for the Hub{said}: save the weights in smaller shards (max_shard_size of save_pretrained).",
    429: "the Hub asks for fewer requests{said}. Wait some minutes, then run the command again.",
}
_REASONS[412] = _REASONS[409]


def hub_api(token: str | None) -> HfApi:
    """The client of the Hub; without a token it is anonymous."""
    version = installed_versions()["hf_recurrent_lengthgen"]
    return HfApi(token=token or False, library_name="hf_recurrent_lengthgen", library_version=version)


@contextmanager
def telling(doing: str) -> Iterator[None]:
    """Turn errors of the client and of connections into a `ValueError` that says what failed and what to do."""
    try:
        yield
    except (*_BROKEN, RuntimeError) as error:
        chain: list[BaseException] = [error]
        while chain[-1].__cause__ is not None:
            chain.append(chain[-1].__cause__)
        answered = next((one for one in chain if getattr(one, "response", None) is not None), None)
        why = _unanswered(chain) if answered is None else _answer(answered)
        raise ValueError(f"{doing} failed: {why}") from error


def _unanswered(chain: list[BaseException]) -> str:
    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set. Unset it."
    broken = next((one for one in chain if isinstance(one, _BROKEN)), None)
    words = " ".join(str(broken or chain[0]).split()) or type(broken or chain[0]).__name__
    return words if broken is None else f"the connection broke ({words}). Run the command again."


def _answer(answered: Any) -> str:
    message = getattr(answered, "server_message", None)
    said = f' ("{" ".join(message.split())}")' if message else ""
    response = answered.response
    if response.headers.get("X-Error-Code") == "GatedRepo":
        return f"access to it must be requested on its page{said}."
    later = " Run the command again later." if response.status_code >= 500 else ""
    return _REASONS.get(response.status_code, f"the Hub answers {response.status_code}{{said}}.{later}").format(
        said=said
    )
