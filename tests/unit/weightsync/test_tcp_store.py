"""Stores listen where they are told, and nowhere else."""

import ast
from pathlib import Path

import pytest

from servicekit.addresses import any_host, join_address
from servicekit.errors import DeadlineExceeded
from tests.house.repository import name_of, python_files
from tests.networks import needs_ipv6
from weightsync.transfer.communicators.communicator import join_store
from weightsync.transfer.communicators.tcp_store import bound_store


def test_a_store_listens_on_its_host_alone() -> None:
    store, port = bound_store("127.0.0.1", 5)
    store.set("key", "value")
    assert listening(port, "tcp", "tcp6") == {"0100007F"}


@needs_ipv6
def test_a_store_of_an_ipv6_host_is_joined_at_its_address() -> None:
    store, port = bound_store("::1", 5)
    assert listening(port, "tcp6") == {"00000000000000000000000001000000"}
    join_store(f"[::1]:{port}", 5).set("key", "value")
    assert store.get("key") == b"value"


@pytest.mark.parametrize("host", ["127.0.0.1", pytest.param("::1", marks=needs_ipv6)])
def test_a_store_of_every_address_is_joined_in_each_family(host: str) -> None:
    store, port = bound_store(any_host(), 5)
    join_store(join_address(host, port), 5).set("key", "value")
    assert store.get("key") == b"value"


@pytest.mark.parametrize("timeout_s", [1e-9, 1e-4])
def test_a_store_that_has_no_time_to_come_up_says_so(timeout_s: float) -> None:
    with pytest.raises(DeadlineExceeded, match=r"a store at 127.0.0.1:\d+ was not up in "):
        bound_store("127.0.0.1", timeout_s)


def listening(port: int, *tables: str) -> set[str]:
    """Addresses of this network namespace that are listened on at a port, as /proc/net/tcp writes them."""
    text = "".join(Path(f"/proc/net/{name}").read_text() for name in tables)
    sockets = [fields[1].rsplit(":", 1) for fields in map(str.split, text.splitlines()) if fields[3] == "0A"]
    return {address for address, number in sockets if int(number, 16) == port}


def test_no_other_code_serves_a_store_of_its_own() -> None:
    """TCPStore(host, port, size, True, ...) alone binds the wildcard address, whatever its host is."""
    serving = set()
    for path in python_files("weightsync", "trainer_service", "rollout_service"):
        calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
        stores = [call for call in calls if ast.unparse(call.func).endswith("TCPStore") and len(call.args) > 3]
        serving |= {name_of(path) for call in stores if ast.unparse(call.args[3]) != "False"}
    assert serving == {"weightsync/transfer/communicators/tcp_store.py"}
