"""A small real gRPC service of all four kinds of RPC, whose handlers do what the request says."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import grpc

from servicekit import errors
from servicekit.rpc.server import GrpcServer

SERVICE = "tandem_test.v1.EchoService"


def obey(request: bytes) -> bytes:
    """`raise:<class>:<message>` raises; anything else is echoed."""
    command, _, rest = request.decode().partition(":")
    if command == "raise":
        name, _, message = rest.partition(":")
        builtin: dict[str, type[Exception]] = {
            "ValueError": ValueError,
            "KeyError": KeyError,
            "TimeoutError": TimeoutError,
        }
        raise builtin.get(name, getattr(errors, name, RuntimeError))(message)
    return request


class Echo:
    """`gate` holds `wait` until it is set, `entered` tells that a call has come that far."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.entered = asyncio.Event()

    async def unary(self, request: bytes, context: Any) -> bytes:
        if request == b"wait":
            self.entered.set()
            await self.gate.wait()
        if request == b"abort":
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "by the handler")
        return obey(request)

    async def replies(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        yield b"first"
        yield obey(request)

    async def requests(self, requests: AsyncIterator[bytes], context: Any) -> bytes:
        return b",".join([obey(request) async for request in requests])

    async def both(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        async for request in requests:
            yield obey(request)

    def plain(self, request: bytes, context: Any) -> bytes:
        return request


class SyncEcho:
    """The same service, for threads."""

    def unary(self, request: bytes, context: Any) -> bytes:
        if request == b"abort":
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "by the handler")
        return obey(request)

    def replies(self, request: bytes, context: Any) -> Iterator[bytes]:
        yield b"first"
        yield obey(request)

    def requests(self, requests: Iterator[bytes], context: Any) -> bytes:
        return b",".join([obey(request) for request in requests])

    def both(self, requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        for request in requests:
            yield obey(request)

    plain = unary


def add_echo(servicer: Any, server: Any) -> None:
    """Like a generated add_XServicer_to_server."""
    handlers = {
        "Unary": grpc.unary_unary_rpc_method_handler(servicer.unary),
        "Replies": grpc.unary_stream_rpc_method_handler(servicer.replies),
        "Requests": grpc.stream_unary_rpc_method_handler(servicer.requests),
        "Both": grpc.stream_stream_rpc_method_handler(servicer.both),
        "Plain": grpc.unary_unary_rpc_method_handler(servicer.plain),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))


class EchoClient:
    """Calls each kind of RPC; `timeout=None` makes a call without a deadline."""

    def __init__(self, channel: Any) -> None:
        self._channel = channel

    async def unary(self, request: bytes, timeout: float | None = 10, method: str = "Unary") -> bytes:
        reply: bytes = await self._channel.unary_unary(f"/{SERVICE}/{method}")(request, timeout=timeout)
        return reply

    async def replies(self, request: bytes, timeout: float | None = 10) -> list[bytes]:
        call = self._channel.unary_stream(f"/{SERVICE}/Replies")(request, timeout=timeout)
        return [reply async for reply in call]

    async def requests(self, request: bytes, timeout: float | None = 10) -> bytes:
        reply: bytes = await self._channel.stream_unary(f"/{SERVICE}/Requests")(iter([b"a", request]), timeout=timeout)
        return reply

    async def both(self, request: bytes, timeout: float | None = 10) -> list[bytes]:
        call = self._channel.stream_stream(f"/{SERVICE}/Both")(iter([b"a", request]), timeout=timeout)
        return [reply async for reply in call]


# What the fixtures of conftest.py give: `server, servicer, address = await serve_echo(bind)`, `open_client(address)`.
ServeEcho = Callable[..., Awaitable[tuple[GrpcServer, Echo, str]]]
OpenClient = Callable[..., EchoClient]

KINDS = ("unary", "replies", "requests", "both")
