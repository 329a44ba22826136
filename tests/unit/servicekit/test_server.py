"""Servers and channels: deadlines, limits, health, reflection, drain, addresses."""

import asyncio
import re
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from servicekit import errors
from servicekit.errors import rpc_errors
from servicekit.metrics import RPC_TOTAL
from servicekit.rpc import limits
from servicekit.rpc.channel import open_channel
from servicekit.rpc.server import GrpcServer
from servicekit.rpc.sync_server import start_sync_server
from tests.unit.servicekit.echo_service import KINDS, SERVICE, EchoClient, OpenClient, ServeEcho, SyncEcho, add_echo

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


async def check(address: str, service: str) -> int:
    async with grpc.aio.insecure_channel(address) as channel:  # no deadline, as probes do
        reply = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=service))
        return int(reply.status)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_channel_refuses_a_call_without_a_deadline(
    serve_echo: ServeEcho, open_client: OpenClient, kind: str
) -> None:
    _, _, address = await serve_echo()
    with pytest.raises(ValueError, match=f"/{SERVICE}/.*without a deadline"):
        await getattr(open_client(address), kind)(b"x", timeout=None)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_server_refuses_a_call_without_a_deadline(serve_echo: ServeEcho, kind: str) -> None:
    _, _, address = await serve_echo()
    async with grpc.aio.insecure_channel(address) as bare:
        with pytest.raises(errors.InvalidRequest, match=f"/{SERVICE}/.*without a deadline"), rpc_errors():
            await getattr(EchoClient(bare), kind)(b"x", timeout=None)


async def test_a_threaded_server_refuses_a_call_without_a_deadline(tmp_path: Path) -> None:
    server = start_sync_server(add_echo, SyncEcho(), f"unix:{tmp_path}/s")
    async with grpc.aio.insecure_channel(f"unix:{tmp_path}/s") as bare:
        with pytest.raises(errors.InvalidRequest, match="without a deadline"), rpc_errors():
            await EchoClient(bare).unary(b"x", timeout=None)
    server.stop(0).wait(10)


async def test_messages_over_grpcs_default_limit_pass_and_over_ours_do_not(
    serve_echo: ServeEcho, open_client: OpenClient
) -> None:
    _, _, address = await serve_echo()
    fits = bytes(5 * 2**20)
    assert await open_client(address).unary(fits) == fits
    with pytest.raises(errors.TooLarge, match="Sent message larger"), rpc_errors():
        await open_client(address).unary(bytes(limits.MAX_MESSAGE_BYTES + 1))
    unlimited = [("grpc.max_send_message_length", -1)]  # then it is the server that refuses
    async with grpc.aio.insecure_channel(address, options=unlimited) as bare:
        with pytest.raises(errors.TooLarge, match="Received message larger"), rpc_errors():
            await EchoClient(bare).unary(bytes(limits.MAX_MESSAGE_BYTES + 1))


async def test_liveness_holds_while_readiness_changes(serve_echo: ServeEcho) -> None:
    server, _, address = await serve_echo()
    for ready, expected in ((None, NOT_SERVING), (True, SERVING), (False, NOT_SERVING)):
        if ready is not None:
            server.set_ready(ready)
        assert await check(address, "liveness") == SERVING
        assert [await check(address, name) for name in ("readiness", "", SERVICE)] == [expected] * 3
    with pytest.raises(grpc.RpcError, match="no service 'nobody' here") as caught:
        await check(address, "nobody")
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_watchers_of_health_hear_changes_and_are_let_go_at_the_end(serve_echo: ServeEcho) -> None:
    server, _, address = await serve_echo()
    async with open_channel(address) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=SERVICE), timeout=30)
        assert (await watch.read()).status == NOT_SERVING
        server.set_ready(True)
        assert (await watch.read()).status == SERVING
        async with asyncio.timeout(10):  # much less than the grace: the watcher does not hold the drain up
            await server.drain(grace_s=60)
        assert (await watch.read()).status == NOT_SERVING
        assert await watch.read() is grpc.aio.EOF


async def test_a_drain_lets_a_running_call_finish_and_refuses_new_ones(
    serve_echo: ServeEcho, open_client: OpenClient
) -> None:
    server, servicer, address = await serve_echo()
    client = open_client(address)
    running = asyncio.create_task(client.unary(b"wait"))
    await servicer.entered.wait()
    drain = asyncio.create_task(server.drain(grace_s=30))
    refused = await _until_refused(open_client(address))
    assert type(refused) in (errors.Unavailable, errors.Aborted)
    assert not running.done()
    assert not drain.done()
    servicer.gate.set()
    assert await running == b"wait"
    await drain


async def _until_refused(client: EchoClient) -> errors.TandemError:
    async with asyncio.timeout(10):
        while True:
            try:
                with rpc_errors():
                    await client.unary(b"new")
            except errors.TandemError as error:
                return error


async def test_a_drain_cancels_what_outlasts_its_grace(serve_echo: ServeEcho, open_client: OpenClient) -> None:
    server, servicer, address = await serve_echo()
    running = asyncio.create_task(open_client(address).unary(b"wait", timeout=60))
    await servicer.entered.wait()
    async with asyncio.timeout(10):
        await server.drain(grace_s=0.05)
    with pytest.raises(grpc.RpcError):
        await running


async def test_reflection_lists_the_services(serve_echo: ServeEcho) -> None:
    _, _, address = await serve_echo()
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    async with grpc.aio.insecure_channel(address) as channel:
        call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(iter([request]))
        names = {each.name for each in (await call.read()).list_services_response.service}
    assert names == {SERVICE, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}


@pytest.mark.parametrize("kind", ["tcp", "unix"])
async def test_an_address_in_use_is_named(serve_echo: ServeEcho, tmp_path: Path, kind: str) -> None:
    _, _, address = await serve_echo(f"unix:{tmp_path}/s" if kind == "unix" else "127.0.0.1:0")
    with pytest.raises(errors.ConfigError, match=f"cannot listen on {re.escape(address)}"):
        await serve_echo(address)
    with pytest.raises(errors.ConfigError, match=f"cannot listen on {re.escape(address)}"):
        start_sync_server(add_echo, SyncEcho(), address)


@pytest.mark.parametrize(
    ("bind", "message"),
    [
        ("192.0.2.1:0", "cannot listen on 192.0.2.1:0"),
        ("127.0.0.1", "'127.0.0.1' has no port"),
        ("fd00::5:0", "'fd00::5:0' is no host:port"),
        ("unix:/nowhere/at/all.sock", "there is no folder /nowhere/at"),
    ],
)
async def test_an_address_that_cannot_be_bound_is_named(bind: str, message: str) -> None:
    with pytest.raises(errors.ConfigError, match=re.escape(message)):
        await GrpcServer("echo", bind=bind).start()


async def test_a_socket_left_behind_is_taken_over(
    serve_echo: ServeEcho, open_client: OpenClient, tmp_path: Path
) -> None:
    import socket

    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(f"{tmp_path}/s")
    _, _, address = await serve_echo(f"unix:{tmp_path}/s")
    assert await open_client(address).unary(b"x") == b"x"


@pytest.mark.parametrize(
    ("request_", "code"), [(b"x", "OK"), (b"raise:NotReady:y", "FAILED_PRECONDITION"), (b"abort", "UNAUTHENTICATED")]
)
async def test_calls_are_counted_by_their_status(
    serve_echo: ServeEcho, open_client: OpenClient, request_: bytes, code: str
) -> None:
    _, _, address = await serve_echo()
    counter = RPC_TOTAL.labels(SERVICE, "Unary", code)
    before = counter._value.get()
    try:
        await open_client(address).unary(request_)
    except grpc.RpcError as error:
        assert error.code().name == code  # noqa: PT017 - a call that succeeds is a case, too
    async with asyncio.timeout(10):  # the server counts a moment after the client has heard
        while counter._value.get() == before:  # noqa: ASYNC110 - a counter announces nothing
            await asyncio.sleep(0)
    assert counter._value.get() == before + 1
