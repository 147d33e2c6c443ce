"""The client of huggingface_hub, turned to an endpoint of the tests: in this process, or in another one."""

import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub import constants, file_download, hf_api, repocard
from huggingface_hub.utils import _http

from .endpoint import Endpoint

TOKEN = "hf_test"


def connect(hub: Endpoint, home: Path, monkeypatch: pytest.MonkeyPatch, token: str | None = TOKEN) -> list[float]:
    """Let the client in this process speak to `hub`, with its cache in `home` and nothing but this token.

    Returns:
        The seconds that the client would have waited before it tried again; it does not wait.
    """
    waits: list[float] = []
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(hf_api.api, "endpoint", hub.url)
    session = repocard.get_session
    post = lambda url, **given: session().post(url.replace("https://huggingface.co", hub.url), **given)  # noqa: E731
    monkeypatch.setattr(repocard, "get_session", lambda: SimpleNamespace(post=post))  # older clients ask this address
    monkeypatch.setattr("transformers.utils.hub._hf_api", None, raising=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(home / "token"))
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    if token is not None:
        monkeypatch.setenv("HF_TOKEN", token)
    names = {name: getattr(time, name) for name in dir(time) if not name.startswith("_")}
    impatient = SimpleNamespace(**names | {"sleep": waits.append})
    for module in (_http, file_download):
        monkeypatch.setattr(module, "time", impatient)
    return waits


def environment(hub: Endpoint, home: Path, token: str | None = TOKEN) -> dict[str, str]:
    """Environment for a process whose client speaks to `hub`, with its cache in `home`."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING", "TRANSF"))}
    ours = {"HF_ENDPOINT": hub.url, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    return kept | ours | ({} if token is None else {"HF_TOKEN": token}) | {"OMP_NUM_THREADS": "1"}


# Before other code of a process: any import of our package is an error.
STRANGER = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("hf_recurrent_lengthgen", "trainers"):
            raise ImportError("this process must not import " + name)
sys.meta_path.insert(0, Refuse())
"""
PYTHON = [sys.executable, "-P", "-c"]  # without -I, which would ignore the environment
