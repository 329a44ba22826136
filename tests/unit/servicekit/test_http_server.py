"""Pages and metrics: connections that say nothing, and too many of them, keep nobody else out for long."""

import contextlib
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from wsgiref.types import StartResponse, WSGIEnvironment

import pytest

from servicekit import http_server
from servicekit.http_server import MOST_CONNECTIONS, HttpServer, is_own_name
from tests.kit.waiting import until

# More than the buffers of two sockets hold, so that a client that does not read keeps its thread.
LARGE = b"x" * 2**24
SLOW_S = 1.2


def answer(environ: WSGIEnvironment, start: StartResponse) -> list[bytes]:
    """Answers at once; `/slow` needs longer than a client may."""
    if environ["PATH_INFO"] == "/slow":
        threading.Event().wait(SLOW_S)
    start("200 OK", [])
    return [LARGE if environ["PATH_INFO"] == "/large" else b"here"]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[HttpServer]:
    monkeypatch.setattr(http_server, "CLIENT_S", 0.5)
    made = HttpServer("127.0.0.1", 0, answer)
    made.start("test")
    yield made
    made.shutdown()
    made.server_close()


def get(server: HttpServer, path: str = "/") -> bytes:
    with urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}{path}", timeout=10) as reply:
        body: bytes = reply.read()
    return body


def test_silent_connections_take_a_few_threads_for_a_moment(server: HttpServer) -> None:
    before = threading.active_count()
    silent = [socket.create_connection(("127.0.0.1", server.server_port)) for _ in range(3 * MOST_CONNECTIONS)]
    refused = 0
    for connection in silent:  # every one ends, at once or when its time is over
        connection.settimeout(10)
        with connection.makefile("rb") as said:
            answer = said.read()
        assert not answer or (b" 503 " in answer and b"\r\nRetry-After: 1\r\n" in answer)
        refused += bool(answer)
        assert threading.active_count() <= before + MOST_CONNECTIONS
        connection.close()
    assert refused
    assert get(server) == b"here"


def ends_within(connection: socket.socket, each: bytes, most_s: float) -> bool:
    """Sends a byte now and then, as long as it may. Returns: whether the server has ended that in time."""
    began_s = time.monotonic()
    connection.settimeout(0.02)
    while time.monotonic() - began_s < most_s:
        try:
            connection.sendall(each)
            if connection.recv(1) == b"":
                return True
        except TimeoutError:
            continue
        except OSError:
            return True
    return False


@pytest.mark.parametrize(
    ("first", "each"),
    [
        (b"", b"G"),
        (b"GET / HTTP/1.1\r\nX: ", b"a"),
        (b"GET / HTTP/1.1\r\n", b"X: a\r\n"),
        (b"GET /large HTTP/1.1\r\n\r\n", b""),
    ],
    ids=["request line", "one header", "many headers", "answer"],
)
def test_a_client_that_drips_bytes_has_a_deadline(server: HttpServer, first: bytes, each: bytes) -> None:
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**12)
        connection.connect(("127.0.0.1", server.server_port))
        connection.sendall(first)
        if each:
            assert ends_within(connection, each, 4)
        else:  # it has what was sent before; the rest does not come
            until(lambda: not server._waiting and server._free._value == MOST_CONNECTIONS, 4)


@pytest.mark.parametrize("first", [b"", b"GET / HTTP/1.1\r\nX: ", b"GET /large HTTP/1.1\r\n\r\n"])
def test_connections_that_wait_give_way_to_others(
    server: HttpServer, first: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "CLIENT_S", 60.0)
    held = [socket.create_connection(("127.0.0.1", server.server_port)) for _ in range(MOST_CONNECTIONS + 8)]
    for connection in held:
        with contextlib.suppress(OSError):  # some have lost their places already
            connection.sendall(first)
    # A client that writes its request is not taken for one that says nothing.
    late = http_server._WRITES_S
    until(lambda: sum(begun_s < time.monotonic() - late for begun_s in [*server._waiting.values()]) >= 5)
    assert [get(server) for _ in range(5)] == [b"here"] * 5
    for connection in held:
        connection.close()


def test_an_answer_may_take_longer_than_a_client(server: HttpServer) -> None:
    assert get(server, "/slow") == b"here"
    assert get(server, "/large") == LARGE


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
