"""Pages and metrics: connections that say nothing, and too many of them, keep nobody else out for long."""

import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest

from servicekit import http_server
from servicekit.http_server import MOST_CONNECTIONS, HttpServer, is_own_name


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[HttpServer]:
    monkeypatch.setattr(http_server._Handler, "timeout", 0.5)
    made = HttpServer("127.0.0.1", 0, lambda environ, start: (start("200 OK", []), [b"here"])[1])
    made.start("test")
    yield made
    made.shutdown()
    made.server_close()


def get(server: HttpServer) -> bytes:
    with urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/", timeout=10) as reply:
        body: bytes = reply.read()
    return body


def test_silent_connections_take_a_few_threads_for_a_moment(server: HttpServer) -> None:
    before = threading.active_count()
    silent = [socket.create_connection(("127.0.0.1", server.server_port)) for _ in range(3 * MOST_CONNECTIONS)]
    for connection in silent:  # every one ends, at once or when its time is over
        connection.settimeout(10)
        assert connection.recv(1) == b""
        assert threading.active_count() <= before + MOST_CONNECTIONS
        connection.close()
    assert get(server) == b"here"


@pytest.mark.parametrize(
    ("host", "bound", "own"),
    [
        ("localhost:8080", "127.0.0.1", True),
        ("LOCALHOST", "127.0.0.1", True),
        ("127.0.0.1:8080", "127.0.0.1", True),
        ("[::1]:8080", "127.0.0.1", True),
        ("evil.example:8080", "127.0.0.1", False),
        ("127.0.0.1.evil.example", "127.0.0.1", False),
        ("", "127.0.0.1", False),
        ("10.0.0.1", "127.0.0.1", False),
        ("coordinator.tandem:8080", "0.0.0.0", True),
    ],
)
def test_on_loopback_only_loopback_names_are_answered(host: str, bound: str, own: bool) -> None:
    assert is_own_name(host, bound) is own
