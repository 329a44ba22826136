"""Nothing of a call that was refused, failed or cancelled stays in memory, whatever its kind; no collector helps."""

import asyncio
import contextlib
import gc
import weakref
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, ClassVar

import grpc
import pytest
import structlog

from servicekit.errors import REASON_KEY, InvalidRequest
from servicekit.rpc import boundary
from servicekit.rpc.server import GrpcServer
from servicekit.rpc.sync_server import start_sync_server
from tests.kit.waiting import until

SERVICE = "tandem_test.v1.KeepService"
KINDS = ("Unary", "Replies", "Requests", "Both")
ENDINGS = ("refused", "bug", "chained", "abort", "not read", "cancelled", "late", "gone", "ok")
CALLS = 4


class Kept:
    """What a handler or its request holds."""

    alive: ClassVar["weakref.WeakSet[Kept]"] = weakref.WeakSet()

    def __init__(self, data: bytes = b"") -> None:
        self.ending = data.decode()
        self.alive.add(self)


async def end(kept: Kept, context: Any) -> None:
    """End as the request says."""
    if kept.ending in ("refused", "not read"):
        raise InvalidRequest("no")
    if kept.ending == "bug":
        raise RuntimeError("a bug")
    if kept.ending == "chained":
        try:
            raise KeyError("a")
        except KeyError as error:
            raise InvalidRequest("b") from error
    if kept.ending == "abort":
        await context.abort(grpc.StatusCode.NOT_FOUND, "by the handler")
    if kept.ending in ("cancelled", "late", "gone"):
        await asyncio.Event().wait()


class Keeps:
    """Handlers with locals of their own beside the request."""

    async def unary(self, request: Kept, context: Any) -> bytes:
        beside = Kept()
        await end(request, context)
        del beside
        return b""

    async def replies(self, request: Kept, context: Any) -> AsyncIterator[bytes]:
        beside = Kept()
        yield b"first"
        await end(request, context)
        del beside

    async def requests(self, requests: AsyncIterator[Kept], context: Any) -> bytes:
        batch = []
        async for request in requests:
            batch.append(request)
            if request.ending == "not read":
                break
        await end(batch[-1], context)
        return b""

    async def both(self, requests: AsyncIterator[Kept], context: Any) -> AsyncIterator[bytes]:
        async for request in requests:
            beside = Kept()
            yield b"first"
            await end(request, context)
            del beside


class SyncKeeps:
    """The same, for threads, which nobody can cancel."""

    def unary(self, request: Kept, context: Any) -> bytes:
        beside = Kept()
        _end_now(request, context)
        del beside
        return b""

    def replies(self, request: Kept, context: Any) -> Iterator[bytes]:
        beside = Kept()
        yield b"first"
        _end_now(request, context)
        del beside

    def requests(self, requests: Iterator[Kept], context: Any) -> bytes:
        batch = []
        for request in requests:
            batch.append(request)
            if request.ending == "not read":
                break
        _end_now(batch[-1], context)
        return b""

    def both(self, requests: Iterator[Kept], context: Any) -> Iterator[bytes]:
        for request in requests:
            beside = Kept()
            yield b"first"
            _end_now(request, context)
            del beside


def _end_now(kept: Kept, context: Any) -> None:
    if kept.ending == "abort":
        context.abort(grpc.StatusCode.NOT_FOUND, "by the handler")
    with contextlib.suppress(StopIteration):
        end(kept, context).send(None)


def add(servicer: Any, server: Any) -> None:
    makes = {"request_deserializer": Kept}
    handlers = {
        "Unary": grpc.unary_unary_rpc_method_handler(servicer.unary, **makes),
        "Replies": grpc.unary_stream_rpc_method_handler(servicer.replies, **makes),
        "Requests": grpc.stream_unary_rpc_method_handler(servicer.requests, **makes),
        "Both": grpc.stream_stream_rpc_method_handler(servicer.both, **makes),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))


async def call(channel: grpc.aio.Channel, kind: str, ending: str) -> None:
    """On the wire a single message is a stream of one."""

    async def messages() -> AsyncIterator[bytes]:
        for _ in range(3 if kind in ("Requests", "Both") else 1):
            yield ending.encode()

    made = channel.stream_stream(f"/{SERVICE}/{kind}")(messages(), timeout=0.05 if ending == "late" else 10)
    if ending in ("cancelled", "gone"):
        await asyncio.to_thread(until, lambda: Kept.alive)
        await channel.close() if ending == "gone" else made.cancel()
    with contextlib.suppress(grpc.RpcError, asyncio.CancelledError):
        await _read(made)


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Without what finds cycles, and with log lines as services write them: pretty ones hold what they show."""
    before = structlog.get_config()
    structlog.configure(processors=[structlog.processors.format_exc_info, structlog.processors.JSONRenderer()])
    gc.collect()
    gc.disable()
    yield
    gc.enable()
    structlog.configure(**before)


async def nothing_is_alive(address: str, kind: str, ending: str) -> None:
    for _ in range(CALLS):
        async with grpc.aio.insecure_channel(address) as channel:
            await call(channel, kind, ending)
    with contextlib.suppress(AssertionError):
        await asyncio.to_thread(until, lambda: not Kept.alive, 1.0)
    assert len(Kept.alive) == 0


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("kind", KINDS)
async def test_an_asyncio_service_keeps_nothing(kind: str, ending: str) -> None:
    server = GrpcServer("test")
    server.add(add, Keeps(), SERVICE)
    try:
        await nothing_is_alive(await server.start(), kind, ending)
    finally:
        await server.drain(0)


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("ending", [ending for ending in ENDINGS if ending not in ("cancelled", "late", "gone")])
@pytest.mark.parametrize("kind", KINDS)
async def test_nor_does_a_threaded_one(kind: str, ending: str, tmp_path: Path) -> None:
    server = start_sync_server(add, SyncKeeps(), f"unix:{tmp_path}/s")
    try:
        await nothing_is_alive(f"unix:{tmp_path}/s", kind, ending)
    finally:
        server.stop(0).wait()


async def _read(replies: AsyncIterator[bytes]) -> None:
    async for _ in replies:
        pass


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("first", ["ok", "refused"])
@pytest.mark.parametrize("kind", ["Requests", "Both"])
async def test_a_stream_that_falls_silent_or_never_ends_has_a_deadline(
    kind: str, first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(boundary, "STREAM_SILENCE_S", 0.2)
    monkeypatch.setattr(boundary, "_READ_S", 0.2)
    server = GrpcServer("test")
    server.add(add, Keeps(), SERVICE)

    async def messages() -> AsyncIterator[bytes]:
        yield b"not read" if first == "refused" else b"ok"
        while first == "refused":
            yield b"more"
            await asyncio.sleep(0.01)
        await asyncio.Event().wait()

    async with grpc.aio.insecure_channel(await server.start()) as channel:
        made = channel.stream_stream(f"/{SERVICE}/{kind}")(messages(), timeout=10)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await asyncio.wait_for(_read(made), 5)
        if first == "ok":
            assert dict(refused.value.trailing_metadata() or ())[REASON_KEY] == "DEADLINE_EXCEEDED"
            assert "the stream is silent: 1 messages came" in (refused.value.details() or "")
    await server.drain(0)
    assert len(Kept.alive) == 0
