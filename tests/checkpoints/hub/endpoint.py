"""A hub on loopback that the real client of huggingface_hub speaks to, with faults on demand.

It answers what pushing, downloading and `from_pretrained` ask for, as the Hub does (huggingface_hub 1.x and 2.x).
Large files are handed out under another host name, as by a delivery network. It offers no Xet storage; since
huggingface_hub 2 the client uploads by Xet unless set not to, so its `HF_HUB_DISABLE_XET` must be set (`client.py`).
"""

import re
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from .answers import ROUTES, Answer, Request, refusal
from .store import Refused, Repository, Store


@dataclass
class Fault:
    """What happens to the next `times` requests of a method whose path matches a pattern.

    Args:
        status: Answer with this status, and do nothing.
        message: Its message.
        cut: Close the connection when the request is done, before the answer.
        call: Called first; without any other fault the request then goes its way.
    """

    method: str
    pattern: str
    times: int = 1
    status: int | None = None
    message: str = "injected"
    cut: bool = False
    call: Callable[[], object] | None = None


class Endpoint(Store):
    """The server; a context manager. `requests` is the log, `faults` what is to go wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: list[Request] = []
        self.faults: list[Fault] = []
        self._lock = threading.RLock()
        self._servers = [ThreadingHTTPServer(("127.0.0.1", 0), self._handler()) for _ in range(2)]
        # another name than that of the hub, for the client follows redirects that stay on a host
        hosts = ("127.0.0.1", "localhost")
        ports = (server.server_port for server in self._servers)
        self.url, self.delivery = (f"http://{host}:{port}" for host, port in zip(hosts, ports, strict=True))

    def __enter__(self) -> "Endpoint":
        for server in self._servers:
            server.daemon_threads, server.block_on_close = True, False
            threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        for server in self._servers:
            server.shutdown()
            server.server_close()

    def fail(self, method: str, pattern: str, **fault: Any) -> None:
        """Queue a `Fault`; of several that match a request, the first queued happens."""
        self.faults.append(Fault(method, pattern, **fault))

    def requested(self, method: str, pattern: str) -> list[Request]:
        """Requests so far, by method and a pattern of their path."""
        return [made for made in self.requests if made.method == method and re.search(pattern, made.path)]

    def _next_fault(self, request: Request) -> Fault | None:
        with self._lock:
            for fault in self.faults:
                if fault.times and fault.method == request.method and re.search(fault.pattern, request.path):
                    fault.times -= 1
                    return fault
        return None

    def _handler(endpoint) -> type[BaseHTTPRequestHandler]:
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def log_message(self, *_: object) -> None:
                pass

            def _cut(self) -> None:
                self.close_connection = True
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")

            def _body(self) -> bytes:
                if self.headers.get("Transfer-Encoding") != "chunked":
                    return self.rfile.read(int(self.headers.get("Content-Length", 0)))
                chunks = []
                while size := int(self.rfile.readline(), 16):
                    chunks.append(self.rfile.read(size))
                    self.rfile.readline()
                self.rfile.readline()
                return b"".join(chunks)

            def _serve(self) -> None:
                parts = urlsplit(self.path)
                token = self.headers.get("Authorization", "").removeprefix("Bearer ") or None
                request = Request(self.command, parts.path, token, b"", parse_qs(parts.query))
                fault = endpoint._next_fault(request) or Fault("", "")
                endpoint.requests.append(request)
                if fault.call is not None:
                    fault.call()
                request.body = self._body()
                if fault.status is None:
                    answer = endpoint.answer(request)
                else:
                    answer = refusal(Refused(fault.status, fault.message))
                if fault.cut:
                    return self._cut()
                self.send_response(answer.status)
                for name, value in {"Content-Length": str(len(answer.body)), **answer.headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(answer.body)

            def _handle(self) -> None:
                try:
                    self._serve()
                except ConnectionError:
                    self.close_connection = True

            do_GET = do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = _handle

        return Handler

    def answer(self, request: Request) -> Answer:
        """The answer to a request; nothing is changed by one that is refused."""
        with self._lock:
            try:
                for methods, pattern, answer in ROUTES:
                    if request.method in methods and (match := re.fullmatch(pattern, request.path)):
                        return answer(self, request, **{key: unquote(at) for key, at in match.groupdict().items()})
                raise Refused(404, "Sorry, we can't find the page you are looking for.")
            except Refused as refused:
                return refusal(refused)

    def account(self, request: Request) -> str | None:
        """Who asks; None for nobody."""
        if request.token is None:
            return None
        account = self.accounts.get(request.token)
        if account is None:
            raise Refused(401, "Invalid username or password.")
        return account

    def repository(self, request: Request, name: str, write: bool = False) -> Repository:
        """The repository of that name, if who asks may read it or write to it."""
        account = self.account(request)
        repository = self.repositories.get(name)
        owned = name.partition("/")[0] == account
        if repository is None or (repository.private and not owned):
            raise Refused(401 if account is None else 404, "Repository not found", "RepoNotFound")
        if write and account is None:
            raise Refused(401, "Invalid username or password.")
        if write and not owned:
            raise Refused(403, "You don't have the required permissions to perform this action.")
        return repository
