"""The page's HTTP server: four fixed answers to GET, from a daemon thread, and nothing else.

A request for data asks the event loop for a snapshot: it is taken between the run's steps, and a loop that is stuck
cannot answer, which the page then says. Nothing is read from the request but its method and path.
"""

import asyncio
import json
import threading
from collections.abc import Callable, Iterable
from importlib import resources
from socketserver import TCPServer, ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer
from wsgiref.types import StartResponse, WSGIEnvironment

from servicekit.errors import ConfigError
from servicekit.logs import get_logger

# A snapshot takes milliseconds; a loop that has not taken one by then is stuck.
SNAPSHOT_S = 5.0
# A client that is silent for longer loses its connection.
_CLIENT_S = 10.0
# Scripts and styles from our own files only, data from ourselves only, no frames, no forms, nothing from elsewhere.
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
    """The WSGI application."""

    def __init__(self, snapshot: Snapshot, loop: asyncio.AbstractEventLoop) -> None:
        self._snapshot, self._loop = snapshot, loop
        folder = resources.files(__package__) / "static"
        self._files = {path: ((folder / name).read_bytes(), kind) for path, (name, kind) in _FILES.items()}

    def __call__(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        """Answers one request."""
        status, kind, body = self._answer(environ["REQUEST_METHOD"], environ.get("PATH_INFO", "/"))
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
        return "404 Not Found", "text/plain", b"there is no such page\n"

    def _data(self) -> tuple[str, str, bytes]:
        async def take() -> dict[str, Any]:
            return self._snapshot()

        try:
            taken = asyncio.run_coroutine_threadsafe(take(), self._loop).result(SNAPSHOT_S)
        except (TimeoutError, RuntimeError) as error:
            log.warning("no snapshot for the page", error=str(error) or type(error).__name__)
            return "503 Service Unavailable", "text/plain", b"the coordinator does not answer\n"
        return "200 OK", "application/json", json.dumps(taken, allow_nan=False).encode()


class _Server(ThreadingMixIn, WSGIServer):
    """One thread per connection; they end with the process."""

    daemon_threads = True

    def server_bind(self) -> None:
        """As WSGIServer's, without its question to the name server, which may be away."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()


class _Handler(WSGIRequestHandler):
    timeout = _CLIENT_S

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are no events of the run."""


class PageServer:
    """Serves the page on host:port until close(); `port` 0 is chosen by the system.

    Raises: ConfigError: the address cannot be bound.
    """

    def __init__(self, host: str, port: int, snapshot: Snapshot) -> None:
        page = Page(snapshot, asyncio.get_running_loop())
        try:
            self._server = _Server((host, port), _Handler)
        except OSError as error:
            raise ConfigError(
                f"cannot serve the web page on {host}:{port} ({error}); set TANDEM_WEB_PORT to a free port or to 0"
            ) from error
        self._server.set_app(page)
        self.port = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, name="web page", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the server; blocks for half a second at most."""
        self._server.shutdown()
        self._server.server_close()
