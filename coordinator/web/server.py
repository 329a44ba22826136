"""The page's HTTP server: answers GET for four paths from a daemon thread.

A request for data gets a snapshot from the event loop, which takes it between the run's steps; the page reports a loop
that is stuck. Of a request only the method, the path and the host are read.
"""

import asyncio
import json
from collections.abc import Callable, Iterable
from importlib import resources
from typing import Any
from wsgiref.types import StartResponse, WSGIEnvironment

from servicekit.errors import ConfigError
from servicekit.http_server import HttpServer, is_own_name
from servicekit.logs import get_logger

# A snapshot takes milliseconds; a loop that has not taken one by then is stuck.
SNAPSHOT_S = 5.0
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
_FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
}
DATA = "/run.json"

Snapshot = Callable[[], dict[str, Any]]

log = get_logger(__name__)


class Page:
    """The WSGI application.

    Args:
        snapshot: returns the page's data; called on `loop`.
        bound: host on which the page is served.
    """

    def __init__(self, snapshot: Snapshot, loop: asyncio.AbstractEventLoop, bound: str = "0.0.0.0") -> None:
        self._snapshot, self._loop, self._bound = snapshot, loop, bound
        folder = resources.files(__package__) / "static"
        self._files = {path: ((folder / name).read_bytes(), kind) for path, (name, kind) in _FILES.items()}

    def __call__(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        """Answer one request."""
        if is_own_name(environ.get("HTTP_HOST", ""), self._bound):
            status, kind, body = self._answer(environ["REQUEST_METHOD"], environ.get("PATH_INFO", "/"))
        else:
            status, kind, body = "421 Misdirected Request", "text/plain", b"this page is at localhost\n"
        headers = [("Content-Type", kind), ("Content-Length", str(len(body))), *_HEADERS]
        start_response(status, headers)
        return [] if environ["REQUEST_METHOD"] == "HEAD" else [body]

    def _answer(self, method: str, path: str) -> tuple[str, str, bytes]:
        if method not in ("GET", "HEAD"):
            return "405 Method Not Allowed", "text/plain", b"this page can only be read\n"
        if path == DATA:
            return self._data()
        if path in self._files:
            body, kind = self._files[path]
            return "200 OK", kind, body
        return "404 Not Found", "text/plain", b"not found\n"

    def _data(self) -> tuple[str, str, bytes]:
        async def take() -> dict[str, Any]:
            return self._snapshot()

        try:
            taken = asyncio.run_coroutine_threadsafe(take(), self._loop).result(SNAPSHOT_S)
        except (TimeoutError, RuntimeError) as error:
            log.warning("page snapshot failed", error=str(error) or type(error).__name__)
            return "503 Service Unavailable", "text/plain", b"the coordinator does not answer\n"
        return "200 OK", "application/json", json.dumps(taken, allow_nan=False).encode()


class PageServer:
    """Serves the page on host:port until close(); `port` 0 is chosen by the system.

    Raises: ConfigError: the address cannot be bound.
    """

    def __init__(self, host: str, port: int, snapshot: Snapshot) -> None:
        page = Page(snapshot, asyncio.get_running_loop(), host)
        try:
            self._server = HttpServer(host, port, page)
        except OSError as error:
            raise ConfigError(
                f"cannot serve the web page on {host}:{port} ({error}); set TANDEM_WEB_PORT to a free port or to 0"
            ) from error
        self.port = self._server.server_port
        self._server.start("web page")

    def close(self) -> None:
        """End the server; blocks for half a second at most."""
        self._server.shutdown()
        self._server.server_close()
