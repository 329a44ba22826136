"""A small HTTP server for pages and metrics, with limits on connections and their time."""

import contextlib
import socket
import threading
import time
from collections.abc import Iterable
from ipaddress import ip_address
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

from servicekit.addresses import listen

# For a whole request, from the connection on, and again for the whole answer, as soon as it is made: a client that is
# silent, or sends or reads a byte now and then, loses its connection.
CLIENT_S = 10.0
# Enough for a scraper and some browsers. A further one takes the place of the one that has kept us waiting longest, if
# that is longer than a client needs; else it is refused.
MOST_CONNECTIONS = 32
_WRITES_S = 1.0
RETRY_AFTER = ("Retry-After", "1")
_REFUSAL = b"HTTP/1.0 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 0\r\n\r\n"
# For the thread of a connection that was ended; it needs a millisecond.
_LEAVE_S = 1.0
_CONNECTION = "tandem.connection"


class HttpServer(ThreadingMixIn, WSGIServer):
    """Serves until shutdown(), with a daemon thread per connection, at most MOST_CONNECTIONS.

    Raises: OSError: the address cannot be bound.
    """

    daemon_threads = True
    # The default of 5 drops the connections of a burst: each client then waits a second or more to try again.
    request_queue_size = 4 * MOST_CONNECTIONS

    def __init__(self, host: str, port: int, application: WSGIApplication) -> None:
        self._free = threading.BoundedSemaphore(MOST_CONNECTIONS)
        self._lock = threading.Lock()
        # Connections that wait for their clients, and since when; the longest wait is first.
        self._waiting: dict[socket.socket, float] = {}
        super().__init__((host, port), _Handler)

        def answer(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
            self._waits(environ[_CONNECTION], False)  # the time that an answer takes is ours
            try:
                return application(environ, start_response)
            finally:
                self._waits(environ[_CONNECTION], True)

        self.set_app(answer)

    def server_bind(self) -> None:
        """Bind in either family, and without WSGIServer's query to the name server, which may be unreachable."""
        self.socket.close()
        self.socket = listen(str(self.server_address[0]), int(self.server_address[1]))
        self.server_name, self.server_port = self.socket.getsockname()[:2]
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Process a request in a thread of its own."""
        wait_s = 0 if self._free._value or not self._end_waiting(1, _WRITES_S) else _LEAVE_S
        if self._free.acquire(timeout=wait_s):
            self._waits(request, True)
            super().process_request(request, client_address)
            return
        with contextlib.suppress(OSError):
            request.setblocking(False)
            request.send(_REFUSAL)
            request.recv(2**16)  # what is not read would have the refusal lost with the connection
        self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serve one connection."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._waits(request, False)
            self._free.release()

    def service_actions(self) -> None:
        """End the connections whose time is over; called after each connection, and twice a second."""
        self._end_waiting(MOST_CONNECTIONS, CLIENT_S)

    def _waits(self, connection: socket.socket, does: bool) -> None:
        with self._lock:
            self._waiting.pop(connection, None)
            if does:
                self._waiting[connection] = time.monotonic()

    def _end_waiting(self, most: int, longer_than_s: float) -> bool:
        """End those that have waited longest. Returns: whether any has."""
        since_s = time.monotonic() - longer_than_s
        with self._lock:
            longest = [one for one, begun_s in self._waiting.items() if begun_s < since_s][:most]
            for connection in longest:
                del self._waiting[connection]
        for connection in longest:
            with contextlib.suppress(OSError):  # it has ended meanwhile
                connection.shutdown(socket.SHUT_RDWR)
        return bool(longest)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore errors of a connection, e.g. of a client that disconnects."""

    def start(self, name: str) -> None:
        """Serve from a daemon thread of this name."""
        threading.Thread(target=self.serve_forever, name=name, daemon=True).start()


class _Handler(WSGIRequestHandler):
    def get_environ(self) -> WSGIEnvironment:
        """Return what describes the request, which is read by now, and its connection."""
        return super().get_environ() | {_CONNECTION: self.connection}

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
