"""The client of huggingface_hub, turned to an endpoint of the tests: in this process, or in another one."""

import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub import constants, file_download, hf_api, repocard
from huggingface_hub.utils import _http

from tests.without_package import REFUSING

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
    post = lambda url, **options: session().post(url.replace("https://huggingface.co", hub.url), **options)  # noqa: E731
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


def run_stranger(hub: Endpoint, folder: Path, code: str) -> None:
    """Run code in a folder, in a process without our package whose client speaks to `hub`, with a cache of its own."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING", "TRANSF"))}
    ours = {"HF_ENDPOINT": hub.url, "HF_HOME": str(folder / "home"), "HF_TOKEN": TOKEN, "OMP_NUM_THREADS": "1"}
    ours |= {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    command = [sys.executable, "-P", "-c", REFUSING + code]  # without -I, which would ignore the environment
    done = subprocess.run(command, cwd=folder, env=kept | ours, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
