"""The health check for Docker: a command that asks the service beside it."""

import asyncio
from typing import Any

import pytest

from servicekit.addresses import any_host, join_address
from servicekit.rpc.probe import probe
from tests.networks import needs_ipv6

PLENTY_S = 30.0


def port_of(address: str) -> str:
    return address.rpartition(":")[2]


@pytest.mark.parametrize("variable", ["TANDEM_GRPC_PORT", "TANDEM_HEALTH_PORT"])
async def test_it_tells_live_from_ready(serve_echo: Any, variable: str) -> None:
    server, _, address = await serve_echo()
    environ = {variable: port_of(address)}
    assert await asyncio.to_thread(probe, "liveness", environ, PLENTY_S) == ""
    assert "readiness is not SERVING" in await asyncio.to_thread(probe, "readiness", environ, PLENTY_S)
    server.set_ready(True)
    assert await asyncio.to_thread(probe, "readiness", environ, PLENTY_S) == ""


async def test_the_plain_port_goes_first(serve_echo: Any) -> None:
    _, _, address = await serve_echo()
    environ = {"TANDEM_HEALTH_PORT": port_of(address), "TANDEM_GRPC_PORT": "1"}
    assert await asyncio.to_thread(probe, "liveness", environ, PLENTY_S) == ""


@needs_ipv6
@pytest.mark.parametrize("given", ["::1", "[::1]"])
async def test_it_asks_where_the_service_listens(serve_echo: Any, given: str) -> None:
    _, _, address = await serve_echo("[::1]:0")
    environ = {"TANDEM_GRPC_PORT": port_of(address)}
    assert "does not answer" in await asyncio.to_thread(probe, "liveness", environ, PLENTY_S)
    assert await asyncio.to_thread(probe, "liveness", environ | {"TANDEM_BIND_HOST": given}, PLENTY_S) == ""


@pytest.mark.parametrize("given", ["*", "::", "0.0.0.0"])
async def test_a_service_on_every_address_is_asked_on_loopback(serve_echo: Any, given: str) -> None:
    _, _, address = await serve_echo(join_address(any_host(), 0))
    environ = {"TANDEM_GRPC_PORT": port_of(address), "TANDEM_BIND_HOST": given}
    assert await asyncio.to_thread(probe, "liveness", environ, PLENTY_S) == ""


def test_nobody_there_is_not_well() -> None:
    assert "port 1 does not answer: UNAVAILABLE" in probe("liveness", {"TANDEM_GRPC_PORT": "1"}, PLENTY_S)


@pytest.mark.parametrize(("what", "environ"), [("health", {"TANDEM_GRPC_PORT": "1"}), ("liveness", {})])
def test_a_wrong_call_says_how(what: str, environ: dict[str, str]) -> None:
    assert probe(what, environ).startswith("usage: ")
