"""A small HTTP server for pages and metrics: few connections at a time, none of them for ever."""

import threading
from ipaddress import ip_address
from socketserver import TCPServer, ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer
from wsgiref.types import WSGIApplication

# A client that is silent for longer loses its connection.
CLIENT_S = 10.0
# A scraper and some browsers; whoever opens more is hung up on, at once.
MOST_CONNECTIONS = 32


class HttpServer(ThreadingMixIn, WSGIServer):
    """One thread per connection, at most MOST_CONNECTIONS; they end with the process. Serves until shutdown().

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
        """As WSGIServer's, without its question to the name server, which may be away."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        """In a thread, if one is free."""
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """The life of one connection."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hangs up is no event of the run."""

    def start(self, name: str) -> None:
        """Serves from a daemon thread of this name."""
        threading.Thread(target=self.serve_forever, name=name, daemon=True).start()


class _Handler(WSGIRequestHandler):
    timeout = CLIENT_S

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are no events of the run."""


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
