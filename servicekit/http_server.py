"""A small HTTP server for pages and metrics, with limits on connections and their time."""

import threading
from ipaddress import ip_address
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer
from wsgiref.types import WSGIApplication

from servicekit.addresses import listen

# A client that is silent for longer loses its connection.
CLIENT_S = 10.0
# Enough for a scraper and some browsers; further connections are closed.
MOST_CONNECTIONS = 32


class HttpServer(ThreadingMixIn, WSGIServer):
    """Serves until shutdown(), with a daemon thread per connection, at most MOST_CONNECTIONS.

    Raises: OSError: the address cannot be bound.
    """

    daemon_threads = True
    # The default of 5 drops the connections of a burst: each client then waits a second or more to try again.
    request_queue_size = 4 * MOST_CONNECTIONS

    def __init__(self, host: str, port: int, application: WSGIApplication) -> None:
        self._free = threading.BoundedSemaphore(MOST_CONNECTIONS)
        super().__init__((host, port), _Handler)
        self.set_app(application)

    def server_bind(self) -> None:
        """Bind in either family, and without WSGIServer's query to the name server, which may be unreachable."""
        self.socket.close()
        self.socket = listen(str(self.server_address[0]), int(self.server_address[1]))
        self.server_name, self.server_port = self.socket.getsockname()[:2]
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Process a request in a thread, if one is free."""
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serve one connection."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore errors of a connection, e.g. of a client that disconnects."""

    def start(self, name: str) -> None:
        """Serve from a daemon thread of this name."""
        threading.Thread(target=self.serve_forever, name=name, daemon=True).start()


class _Handler(WSGIRequestHandler):
    timeout = CLIENT_S

    def log_message(self, format: str, *args: Any) -> None:
        """Do not log requests."""


def is_own_name(host: str, bound: str) -> bool:
    """Whether a request's Host header may be answered by a server that is bound to `bound`.

    On loopback only a loopback name may: a page of another site can have its own name resolve to 127.0.0.1 and would
    read ours as if it were its own (DNS rebinding). Elsewhere names are those of services and proxies.

    >>> [is_own_name(host, "127.0.0.1") for host in ("localhost:80", "127.0.0.1", "[::1]:80", "evil.example")]
    [True, True, True, False]
    """
    if not _is_loopback(bound):
        return True
    name = host.rsplit(":", 1)[0] if host.rpartition(":")[2].isdigit() else host
    return _is_loopback(name.strip("[]"))


def _is_loopback(name: str) -> bool:
    if name.lower() == "localhost":
        return True
    try:
        return ip_address(name).is_loopback
    except ValueError:
        return False
