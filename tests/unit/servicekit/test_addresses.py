"""Addresses as text, in both families, and listening in both."""

import contextlib
import socket
from collections.abc import Iterator

import pytest

from servicekit import addresses
from servicekit.addresses import any_host, check_host, join_address, listen, reached_at, resolve, split_address
from servicekit.http_server import HttpServer
from tests.networks import needs_ipv6


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("10.0.0.7:50051", "10.0.0.7", 50051),
        ("rollout-0.rollout.ns.svc:0", "rollout-0.rollout.ns.svc", 0),
        ("[fd00::5]:50051", "fd00::5", 50051),
        ("[::1]:65535", "::1", 65535),
    ],
)
def test_an_address_is_read_as_it_is_written(text: str, host: str, port: int) -> None:
    assert split_address(text) == (host, port)
    assert join_address(host, port) == text


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("fd00::5:50051", "in brackets"),  # fd00::5 with a port, or another address without one
        ("fd00::5", "in brackets"),
        ("[fd00::5", "in brackets"),
        ("[fd00::5]", "in brackets"),
        ("[fd00::5]50051", "in brackets"),
        ("[fd00::5]:", "no port"),
        ("10.0.0.7", "no port"),
        ("10.0.0.7:", "no port"),
        ("10.0.0.7:65536", "no port"),
        ("10.0.0.7:-1", "no port"),
        ("10.0.0.7:\N{SUPERSCRIPT TWO}", "no port"),
        ("[fe80::1%eth0]:50051", "scope"),
        ("[10.0.0.7]:50051", "not a host name or an address"),
        ("[fd00::5::6]:50051", "not a host name or an address"),
        ("[]:50051", "not a host name or an address"),
        (":50051", "not a host name or an address"),
        ("http://host:80", "in brackets"),
        ("", "no port"),
    ],
)
def test_an_address_that_leads_nowhere_is_refused(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        split_address(text)


@pytest.mark.parametrize("given", ["FD00:0:0::05", "[fd00::5]", "fd00:0:0:0:0:0:0:5"])
def test_a_host_has_one_form(given: str) -> None:
    """Interfaces and certificates are looked for by text."""
    assert check_host(given) == "fd00::5"


def test_all_processes_take_the_same_of_several_addresses() -> None:
    assert reached_at(["fd00::5", "10.0.0.7", "10.0.0.8"]) == "10.0.0.7"
    assert reached_at(["fd00::5", "fd00::6"]) == "fd00::5"


def names(*found: str) -> list[tuple[int, int, int, str, tuple[str, int]]]:
    return [(0, 0, 0, "", (address, 0)) for address in found]


def test_a_name_of_both_families_is_its_ipv4_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: names("fd00::5", "10.0.0.7"))
    assert resolve("coordinator") == "10.0.0.7"
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: names("fd00::5"))
    assert resolve("coordinator") == "fd00::5"


@pytest.fixture
def echo() -> Iterator[HttpServer]:
    """A page on every address of this machine."""
    server = HttpServer(any_host(), 0, lambda environ, start: (start("200 OK", []), [b"here"])[1])
    server.start("test")
    yield server
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("host", ["127.0.0.1", pytest.param("::1", marks=needs_ipv6)])
def test_every_address_is_of_both_families(echo: HttpServer, host: str) -> None:
    with socket.create_connection((host, echo.server_port), timeout=10) as client:
        client.sendall(b"GET / HTTP/1.0\r\n\r\n")
        assert client.makefile("rb").read().endswith(b"here")


@needs_ipv6
def test_a_listener_of_one_address_is_of_its_family() -> None:
    with listen("::1") as listener:
        assert listener.getsockname()[0] == "::1"
        # Another process may listen at that port of 127.0.0.1: this listener must not be who answers.
        with contextlib.suppress(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", listener.getsockname()[1]), timeout=10).close()
        listener.setblocking(False)
        with pytest.raises(BlockingIOError):
            listener.accept()


def test_every_address_is_of_ipv4_where_the_kernel_has_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a node that was booted with ipv6.disable=1: a stand-in, because this machine's kernel has IPv6."""

    def of_ipv4(host: str, port: int = 0) -> socket.socket:
        if ":" in host:
            raise OSError(97, "Address family not supported by protocol")
        return listen(host, port)

    monkeypatch.setattr(addresses, "listen", of_ipv4)
    assert any_host() == "0.0.0.0"
