"""Errors keep their class, reason and message from the handler to the caller."""

import asyncio
import errno
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from servicekit import errors
from servicekit.errors import Unavailable, describe, from_rpc_error, rpc_errors, to_status
from servicekit.rpc.channel import open_channel
from servicekit.rpc.sync_server import start_sync_server
from tests.unit.servicekit.echo_service import KINDS, SERVICE, OpenClient, ServeEcho, SyncEcho, add_echo


@pytest.fixture(params=["asyncio", "threads", "unix"])
async def address(request: pytest.FixtureRequest, serve_echo: ServeEcho, tmp_path: Path) -> AsyncIterator[str]:
    """An echo service: in asyncio, in asyncio on a Unix socket, in threads."""
    if request.param == "threads":
        path = f"unix:{tmp_path}/echo.sock"
        server = start_sync_server(add_echo, SyncEcho(), path)
        yield path
        server.stop(0).wait(10)
        return
    _, _, bound = await serve_echo(f"unix:{tmp_path}/echo.sock" if request.param == "unix" else "127.0.0.1:0")
    yield bound


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("expected", errors.ERRORS, ids=lambda error: error.__name__)
async def test_every_error_arrives_as_itself(
    serve_echo: ServeEcho, open_client: OpenClient, kind: str, expected: type[errors.TandemError]
) -> None:
    _, _, address = await serve_echo()
    call = getattr(open_client(address), kind)
    with pytest.raises(grpc.RpcError) as caught:
        await call(f"raise:{expected.__name__}:ids [7] of 'größe' are 50 % too high".encode())
    assert caught.value.code() is expected.code
    error = from_rpc_error(caught.value)
    assert type(error) is expected
    assert str(error) == "ids [7] of 'größe' are 50 % too high"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("raised", "expected", "message"),
    [
        ("StaleVersion", errors.StaleVersion, "text"),
        ("ValueError", errors.InvalidRequest, "text"),
        ("TimeoutError", errors.DeadlineExceeded, "text"),
        ("KeyError", errors.Internal, "KeyError: 'text'"),
    ],
)
async def test_exceptions_become_errors_on_every_server(
    address: str, open_client: OpenClient, kind: str, raised: str, expected: type[errors.TandemError], message: str
) -> None:
    with pytest.raises(expected) as caught, rpc_errors():
        await getattr(open_client(address), kind)(f"raise:{raised}:text".encode())
    assert type(caught.value) is expected
    assert str(caught.value) == message


@pytest.mark.parametrize("kind", KINDS)
async def test_calls_that_do_not_fail_are_answered(address: str, open_client: OpenClient, kind: str) -> None:
    replies = {"unary": b"b", "replies": [b"first", b"b"], "requests": b"a,b", "both": [b"a", b"b"]}
    assert await getattr(open_client(address), kind)(b"b") == replies[kind]


@pytest.mark.parametrize("kind", ["Requests", "Both"])
async def test_an_error_reaches_a_client_that_is_still_sending(serve_echo: ServeEcho, kind: str) -> None:
    _, _, address = await serve_echo()
    requests = [b"raise:InvalidRequest:sample 7", *[bytes(100_000)] * 30]
    async with open_channel(address) as channel:
        make = {"Requests": channel.stream_unary, "Both": channel.stream_stream}[kind]
        for _ in range(10):  # grpc/grpc#36066 hits about one call in three
            call = make(f"/{SERVICE}/{kind}")(iter(requests), timeout=30)
            with pytest.raises(errors.InvalidRequest, match=r"^sample 7$"), rpc_errors():
                await (call if kind == "Requests" else call.read())


async def test_an_error_reaches_a_client_that_waits_for_a_reply(serve_echo: ServeEcho) -> None:
    _, _, address = await serve_echo()
    async with open_channel(address) as channel:
        call = channel.stream_stream(f"/{SERVICE}/Both")(timeout=30)
        await call.write(b"raise:InvalidRequest:sample 7")
        async with asyncio.timeout(10):
            with pytest.raises(errors.InvalidRequest, match=r"^sample 7$"), rpc_errors():
                await call.read()


async def test_a_handlers_own_abort_is_left_alone(address: str, open_client: OpenClient) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        await open_client(address).unary(b"abort")
    assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.UNAUTHENTICATED, "by the handler")


async def test_a_long_message_is_cut_and_still_arrives(address: str, open_client: OpenClient) -> None:
    with pytest.raises(errors.InvalidRequest, match=r"^ü{100}.*bytes more in the server's log") as caught, rpc_errors():
        await open_client(address).unary(f"raise:InvalidRequest:{'ü' * 50_000}".encode())
    assert len(str(caught.value)) < 1100


async def test_the_peers_name_goes_in_front(serve_echo: ServeEcho, open_client: OpenClient) -> None:
    _, _, address = await serve_echo()
    with pytest.raises(errors.Poisoned, match=r"^rollout-1: half written$"), rpc_errors("rollout-1"):
        await open_client(address).unary(b"raise:Poisoned:half written")


async def test_a_server_that_is_not_there_is_unavailable(open_client: OpenClient) -> None:
    with pytest.raises(errors.Unavailable, match=r"127\.0\.0\.1:1\b"), rpc_errors():
        await open_client("127.0.0.1:1").unary(b"x", timeout=5)


async def test_a_method_that_is_not_there_is_internal_and_says_so(
    serve_echo: ServeEcho, open_client: OpenClient
) -> None:
    _, _, address = await serve_echo()
    with pytest.raises(errors.Internal, match="UNIMPLEMENTED"), rpc_errors():
        await open_client(address).unary(b"x", method="Nothing")


async def test_a_blocking_method_is_not_run_on_the_event_loop(serve_echo: ServeEcho, open_client: OpenClient) -> None:
    _, _, address = await serve_echo()
    with pytest.raises(errors.Internal, match=r"UNIMPLEMENTED.*EchoService/Plain"), rpc_errors():
        await open_client(address).unary(b"x", method="Plain")


def test_reasons_are_unique() -> None:
    assert len({error.reason for error in errors.ERRORS}) == len(errors.ERRORS)


def test_the_error_of_an_inner_call_passes_through() -> None:
    class InnerError(grpc.RpcError):
        def code(self) -> grpc.StatusCode:
            return grpc.StatusCode.ABORTED

        def details(self) -> str:
            return "rank 3 is gone"

        def trailing_metadata(self) -> tuple[tuple[str, str], ...]:
            return (("tandem-reason", "PEER_LOST"),)

    status = to_status(InnerError())
    assert (status.code, status.reason, status.message) == (grpc.StatusCode.ABORTED, "PEER_LOST", "rank 3 is gone")


def test_an_error_whose_causes_form_a_ring_is_described() -> None:
    """An engine's error that is set on a future and raised again from what it caused."""
    error = Unavailable("rank 0 died")
    error.__cause__ = OSError(errno.ENOSPC, "No space left on device")
    error.__cause__.__cause__ = error
    assert describe(error) == "rank 0 died (make room there, then resume)"
    error.__cause__ = error
    assert describe(error) == "rank 0 died"
