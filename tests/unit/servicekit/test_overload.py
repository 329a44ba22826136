"""More calls than a server works on: refused before they are read, with a time to wait, and by method."""

import asyncio
import contextlib

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from servicekit import errors
from servicekit.errors import RETRY_KEY, Overloaded, TooLarge, from_rpc_error, rpc_errors
from servicekit.rpc import limits
from servicekit.rpc.boundary import RpcBoundary
from tests.unit.servicekit.echo_service import SERVICE, OpenClient, ServeEcho

MOST = 3


@pytest.fixture(autouse=True)
def _few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MOST_CALLS", MOST)


async def test_one_call_too_many_is_refused_with_a_time_and_the_others_go_through(
    serve_echo: ServeEcho, open_client: OpenClient
) -> None:
    _, servicer, address = await serve_echo()
    client = open_client(address)
    held = [asyncio.create_task(client.unary(b"wait")) for _ in range(MOST)]
    await servicer.entered.wait()
    async with asyncio.timeout(10), grpc.aio.insecure_channel(address) as bare:
        refused = None
        while refused is None:  # until all of them are there
            try:
                await client.unary(b"x")
            except grpc.RpcError as error:
                refused = error
        assert refused.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert dict(refused.trailing_metadata())[RETRY_KEY] == "1000"
        with pytest.raises(Overloaded, match=rf"echo: 3 calls of /{SERVICE}/Unary") as caught, rpc_errors("echo"):
            await client.unary(bytes(2**20))
        assert caught.value.after_s == 1.0
        # What another method does, health above all, is not delayed.
        assert await client.replies(b"x") == [b"first", b"x"]
        assert await client.both(b"x") == [b"a", b"x"]
        health = await health_pb2_grpc.HealthStub(bare).Check(health_pb2.HealthCheckRequest(service="liveness"))
        assert health.status == health_pb2.HealthCheckResponse.SERVING
        servicer.gate.set()
        assert await asyncio.gather(*held) == [b"wait"] * MOST
        assert await asyncio.gather(*(client.unary(b"x") for _ in range(MOST))) == [b"x"] * MOST


@pytest.mark.parametrize("kind", ["replies", "requests", "both"])
async def test_calls_that_were_given_up_take_no_room(serve_echo: ServeEcho, open_client: OpenClient, kind: str) -> None:
    _, _, address = await serve_echo()
    client = open_client(address)
    for _ in range(3 * MOST):
        call = asyncio.create_task(getattr(client, kind)(b"x"))
        await asyncio.sleep(0)
        call.cancel()
    served = 0
    async with asyncio.timeout(10):
        while served < 3 * MOST:
            with contextlib.suppress(Overloaded), rpc_errors():  # one that was given up may not be gone yet
                await getattr(client, kind)(b"x")
                served += 1


def test_requests_of_many_bytes_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MOST_REQUEST_BYTES", 100)
    held, large = RpcBoundary(), health_pb2.HealthCheckRequest(service="x" * 88)
    assert large.ByteSize() == 90
    more = held._holding(large)
    with held._holding(large), pytest.raises(Overloaded, match="requests of 90 bytes are under way; no room for 90"):
        more.__enter__()
    with held._holding(health_pb2.HealthCheckRequest(service="x" * 888)):  # alone, it is as large as a message may be
        pass
    assert held._bytes == 0


class Refused(grpc.RpcError):  # type: ignore[misc]
    def __init__(self, details: str, *metadata: tuple[str, str]) -> None:
        self.details, self.trailing_metadata = lambda: details, lambda: metadata
        self.code = lambda: grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.parametrize(
    ("error", "kind", "after_s"),
    [
        (Refused("Too many pending requests for this server"), Overloaded, 1.0),
        (Refused("Received message larger than max"), TooLarge, 0.0),
        (Refused("busy", ("tandem-reason", "OVERLOADED"), (RETRY_KEY, "250")), Overloaded, 0.25),
        (Refused("busy", ("tandem-reason", "OVERLOADED"), (RETRY_KEY, "-1")), Overloaded, 1.0),
        (Refused("busy", ("tandem-reason", "OVERLOADED"), (RETRY_KEY, "9" * 12)), Overloaded, 3600.0),
        (Refused("busy", ("tandem-reason", "UNAVAILABLE"), (RETRY_KEY, "500")), errors.Unavailable, 0.5),
    ],
)
def test_what_the_caller_learns(error: Refused, kind: type[errors.TandemError], after_s: float) -> None:
    found = from_rpc_error(error)
    assert (type(found), found.after_s) == (kind, after_s)
