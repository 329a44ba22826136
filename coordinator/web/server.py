"""The page's HTTP server: answers GET from daemon threads with the page's files, or with JSON.

Samples are for those who know the run's key only: on one machine every user can reach the port. The others, which are
what metrics show too, need none.
"""

import asyncio
import functools
import hmac
import json
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from importlib import resources
from typing import Any
from urllib.parse import parse_qsl
from wsgiref.types import StartResponse, WSGIEnvironment

from servicekit.addresses import join_address
from servicekit.errors import ConfigError, TandemError, Unavailable
from servicekit.http_server import RETRY_AFTER, HttpServer, is_own_name
from servicekit.logs import get_logger

# Scripts, styles and data from this server only; no frames, no forms.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = (
    ("Content-Security-Policy", _POLICY),
    ("X-Content-Type-Options", "nosniff"),
    ("Referrer-Policy", "no-referrer"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
    ("Cache-Control", "no-store"),
)
_KINDS = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
}
_JSON = "application/json"
_TEXT = "text/plain; charset=utf-8"
# Paths of the data.
DATA = "/run.json"
SAMPLES = "/samples.json"
EARLIER = "/earlier.json"
_PRIVATE = (SAMPLES, EARLIER)
# Time-out of a snapshot. One takes milliseconds; a loop that has not taken one by then is stuck.
SNAPSHOT_S = 5.0

# Makes a JSON object from a request's parameters, in the connection's thread. Raises: TandemError: it cannot.
Answer = Callable[[Mapping[str, str]], dict[str, Any]]
_Response = tuple[str, str, bytes]
# Answers with data that are made at a time: their threads take turns with the run's. A further one waits for so long.
_MOST_ANSWERS, _WAIT_S = 4, 1.0
# For so long a snapshot is sent again: it is made on the run's loop.
_FRESH_S = 0.25

log = get_logger(__name__)


class Page:
    """The WSGI application.

    Args:
        answers: by path, what answers with data.
        bound: host on which the page is served.
        key: what a request for samples must carry, as a bearer token; "": nothing.
    """

    def __init__(self, answers: Mapping[str, Answer], bound: str = "0.0.0.0", key: str = "") -> None:
        self._answers, self._bound, self._key = answers, bound, key
        self._free = threading.BoundedSemaphore(_MOST_ANSWERS)
        self._files = {}
        for file in (resources.files(__package__) / "static").iterdir():
            kind = _KINDS.get(file.name[file.name.rfind(".") :])
            if kind is not None:
                self._files["/" if file.name == "index.html" else f"/{file.name}"] = (file.read_bytes(), kind)

    def __call__(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        """Answer one request."""
        if is_own_name(environ.get("HTTP_HOST", ""), self._bound):
            status, kind, body = self._answer(environ)
        else:
            status, kind, body = "421 Misdirected Request", _TEXT, b"this page is at localhost\n"
        headers = [("Content-Type", kind), ("Content-Length", str(len(body))), *_HEADERS]
        headers += [RETRY_AFTER] if status.startswith("503") else []
        start_response(status, headers)
        return [] if environ["REQUEST_METHOD"] == "HEAD" else [body]

    def _answer(self, environ: WSGIEnvironment) -> _Response:
        path = environ.get("PATH_INFO", "/")
        if environ["REQUEST_METHOD"] not in ("GET", "HEAD"):
            return "405 Method Not Allowed", _TEXT, b"this page can only be read\n"
        if path in self._files:
            body, kind = self._files[path]
            return "200 OK", kind, body
        if path not in self._answers:
            return "404 Not Found", _TEXT, b"not found\n"
        if path in _PRIVATE and not self._has_key(environ):
            return "401 Unauthorized", _TEXT, b"samples need the key that is in the page's whole address\n"
        if not self._free.acquire(timeout=_WAIT_S):
            return "503 Service Unavailable", _TEXT, b"too many requests; ask again\n"
        try:
            return self._data(path, environ.get("QUERY_STRING", ""))
        finally:
            self._free.release()

    def _has_key(self, environ: WSGIEnvironment) -> bool:
        given = environ.get("HTTP_AUTHORIZATION", "").removeprefix("Bearer ")
        return not self._key or hmac.compare_digest(given.encode(), self._key.encode())

    def _data(self, path: str, query: str) -> _Response:
        try:
            found = self._answers[path](dict(parse_qsl(query, max_num_fields=20)))
        except Unavailable as error:
            log.warning("page data unavailable", path=path, error=str(error))
            return "503 Service Unavailable", _TEXT, f"{error}\n".encode()
        except (TandemError, ValueError) as error:
            return "400 Bad Request", _TEXT, f"{error}\n".encode()
        except OSError as error:  # e.g. a folder of another user
            return "500 Internal Server Error", _TEXT, f"{error}\n".encode()
        return "200 OK", _JSON, json.dumps(found, allow_nan=False).encode()


class PageServer:
    """Serves the page on host:port until close(); `port` 0 is chosen by the system.

    Args:
        key: see Page.
        advice: what to do if the port is taken.
    Raises: ConfigError: the address cannot be bound.
    """

    def __init__(self, host: str, port: int, answers: Mapping[str, Answer], *, key: str = "", advice: str = "") -> None:
        try:
            self._server = HttpServer(host, port, Page(answers, host, key))
        except OSError as error:
            where = join_address(host, port)
            raise ConfigError(f"cannot serve the web page on {where} ({error}); {advice}") from error
        self.port = self._server.server_port
        self._server.start("web page")

    def close(self) -> None:
        """End the server; blocks for half a second at most."""
        self._server.shutdown()
        self._server.server_close()


def fresh(snapshot: Callable[[], dict[str, Any]]) -> Callable[[], dict[str, Any]]:
    """Make a snapshot that is taken at most once in _FRESH_S, for readers on one event loop."""
    taken = functools.lru_cache(1)(lambda _: snapshot())
    return lambda: taken(int(time.monotonic() / _FRESH_S))


def on_loop(snapshot: Callable[[], dict[str, Any]], loop: asyncio.AbstractEventLoop) -> Answer:
    """Make the page's answer from `snapshot`, which is called on `loop`, between the run's steps.

    Returns: an answer that raises Unavailable if the loop is stuck, or has ended.
    """

    async def take() -> dict[str, Any]:
        return snapshot()

    def answer(query: Mapping[str, str]) -> dict[str, Any]:
        del query
        try:
            return asyncio.run_coroutine_threadsafe(take(), loop).result(SNAPSHOT_S)
        except (TimeoutError, RuntimeError) as error:
            raise Unavailable(f"the coordinator does not answer: {error or type(error).__name__}") from error

    return answer
