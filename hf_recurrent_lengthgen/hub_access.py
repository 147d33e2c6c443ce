"""What the Hub would answer, to know it before libraries that retry for half a minute."""

import socket
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies

from huggingface_hub import constants


def is_out_of_reach(kind: str, name: str) -> bool:
    """Whether a repository of a kind ("models", "datasets") is not in the cache, and the host of the Hub has no
    address; a proxy may resolve it."""
    try:
        cached = Path(constants.HF_HUB_CACHE, f"{kind}--{name.replace('/', '--')}").is_dir()
        _ = cached or getproxies() or socket.getaddrinfo(urlsplit(constants.ENDPOINT).hostname, None)
    except OSError:
        return True
    return False
