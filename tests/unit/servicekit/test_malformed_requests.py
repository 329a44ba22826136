"""Bytes that are no request, and values that no request may hold, get INVALID_ARGUMENT, whatever the kind of RPC."""

import logging
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc._cython import cygrpc
from structlog.testing import capture_logs

from servicekit.errors import REASON_KEY, InvalidRequest, from_rpc_error
from servicekit.rpc.boundary import Lines
from servicekit.rpc.server import GrpcServer
from servicekit.rpc.sync_server import start_sync_server
from tandem_api.trainer.v1 import trainer_pb2 as pb

SERVICE = "tandem_test.v1.RestoreService"
GARBAGE = b"\x0a" + b"\xff" * 20
BEYOND = pb.RestorePolicyRequest(policy_version=2**64 - 1).SerializeToString()
GOOD = pb.RestorePolicyRequest(policy_version=7).SerializeToString()
# Two bytes each on the wire, and so many objects in memory; bytes that nobody reads, and that are kept.
MANY = bytes([pb.RestorePolicyRequest.FENCE_FIELD_NUMBER << 3 | 2, 0]) * 300_000
PADDED = GOOD + b"\x9a\x06" + b"\x80\x80\x40" + bytes(2**20)
CASES = [
    (GARBAGE, "21 bytes that are no request"),
    (BEYOND, "policy_version is"),
    (MANY, "RestorePolicyRequest has more than 263168 fields"),
    (PADDED, "RestorePolicyRequest has 1048583 bytes; its fields need 2"),
]
KINDS = ("Unary", "Replies", "Requests", "Both")


class Restores:
    """Answers what it was asked for."""

    async def unary(self, request: Any, context: Any) -> Any:
        return request

    async def replies(self, request: Any, context: Any) -> AsyncIterator[Any]:
        yield request

    async def requests(self, requests: AsyncIterator[Any], context: Any) -> Any:
        return [request async for request in requests][-1]

    async def both(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        async for request in requests:
            yield request


class SyncRestores:
    """The same, for threads."""

    def unary(self, request: Any, context: Any) -> Any:
        return request

    def replies(self, request: Any, context: Any) -> Iterator[Any]:
        yield request

    def requests(self, requests: Iterator[Any], context: Any) -> Any:
        return list(requests)[-1]

    def both(self, requests: Iterator[Any], context: Any) -> Iterator[Any]:
        yield from requests


def add(servicer: Any, server: Any) -> None:
    ways = {"request_deserializer": pb.RestorePolicyRequest.FromString, "response_serializer": _serialized}
    handlers = {
        "Unary": grpc.unary_unary_rpc_method_handler(servicer.unary, **ways),
        "Replies": grpc.unary_stream_rpc_method_handler(servicer.replies, **ways),
        "Requests": grpc.stream_unary_rpc_method_handler(servicer.requests, **ways),
        "Both": grpc.stream_stream_rpc_method_handler(servicer.both, **ways),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))


def _serialized(message: Any) -> bytes:
    data: bytes = message.SerializeToString()
    return data


async def call(channel: grpc.aio.Channel, kind: str, payload: bytes) -> bytes:
    path = f"/{SERVICE}/{kind}"
    if kind == "Unary":
        return bytes(await channel.unary_unary(path)(payload, timeout=10))
    if kind == "Replies":
        return [bytes(each) async for each in channel.unary_stream(path)(payload, timeout=10)][-1]
    if kind == "Requests":
        return bytes(await channel.stream_unary(path)(iter([GOOD, payload]), timeout=10))
    return [bytes(each) async for each in channel.stream_stream(path)(iter([GOOD, payload]), timeout=10)][-1]


async def refused(address: str, kind: str, payload: bytes) -> InvalidRequest:
    async with grpc.aio.insecure_channel(address) as channel:
        assert await call(channel, kind, GOOD) == GOOD
        with pytest.raises(grpc.RpcError) as caught:
            await call(channel, kind, payload)
        assert dict(caught.value.trailing_metadata())[REASON_KEY] == "INVALID_REQUEST"
        error = from_rpc_error(caught.value)
        assert isinstance(error, InvalidRequest)
        assert await call(channel, kind, GOOD) == GOOD
    return error


@pytest.mark.parametrize(("payload", "says"), CASES, ids=["garbage", "beyond", "many", "padded"])
@pytest.mark.parametrize("kind", KINDS)
async def test_the_service_refuses_it_and_logs_no_traceback(
    kind: str, payload: bytes, says: str, caplog: pytest.LogCaptureFixture
) -> None:
    server = GrpcServer("test")
    server.add(add, Restores(), SERVICE)
    address = await server.start()
    with caplog.at_level(logging.WARNING):
        assert says in str(await refused(address, kind, payload))
    await server.drain(0)
    # gRPC's poller, one for all loops, may still have something for the closed loop of an earlier test
    logged = [record for record in caplog.records if "Event loop is closed" not in str(record.exc_info)]
    assert [record for record in logged if record.levelno >= logging.WARNING] == []


@pytest.mark.parametrize(("payload", "says"), CASES, ids=["garbage", "beyond", "many", "padded"])
@pytest.mark.parametrize("kind", KINDS)
async def test_so_does_a_threaded_one(kind: str, payload: bytes, says: str, tmp_path: Path) -> None:
    server = start_sync_server(add, SyncRestores(), f"unix:{tmp_path}/s")
    assert says in str(await refused(f"unix:{tmp_path}/s", kind, payload))
    server.stop(0).wait(10)


@pytest.mark.parametrize(
    ("error", "is_an_error"),
    [
        (cygrpc.ExecuteBatchError('Failed "execute_batch": (SendMessageOperation)'), False),
        (cygrpc.ExecuteBatchError("Failed grpc_call_start_batch: 8"), True),
        (ValueError("a bug"), True),
    ],
)
async def test_a_reply_that_its_caller_did_not_wait_for_is_no_error(
    error: Exception, is_an_error: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """gRPC raises the first where it sends a reply to a caller that has just gone, and logs it with a traceback."""

    def fail(reply: Any) -> bytes:
        raise error

    def add_one(servicer: Any, server: Any) -> None:
        handlers = {"Unary": grpc.unary_unary_rpc_method_handler(servicer.unary, response_serializer=fail)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))

    server = GrpcServer("test")
    server.add(add_one, Restores(), SERVICE)
    address = await server.start()
    with caplog.at_level(logging.INFO), capture_logs() as ours:
        async with grpc.aio.insecure_channel(address) as channel:
            with pytest.raises(grpc.RpcError):
                await channel.unary_unary(f"/{SERVICE}/Unary")(b"", timeout=1.0)
    await server.drain(0)
    assert any(record.exc_info for record in caplog.records) is is_an_error
    assert [line["log_level"] for line in ours if "reply not sent" in line["event"]] == (
        [] if is_an_error else ["info"]
    )


def test_a_flood_of_refusals_leaves_a_few_lines() -> None:
    lines = Lines(10, 60.0)
    assert sum(lines.take("/s/M INVALID_REQUEST") for _ in range(1000)) == 10
    assert lines.take("/s/Other INVALID_REQUEST")
