"""Fixtures: a served echo service and clients of it."""

import contextlib
from collections.abc import AsyncIterator

import pytest

from servicekit.rpc.channel import open_channel
from servicekit.rpc.server import GrpcServer
from tests.unit.servicekit.echo_service import SERVICE, Echo, EchoClient, OpenClient, ServeEcho, add_echo


@pytest.fixture
async def serve_echo() -> AsyncIterator[ServeEcho]:
    """`server, servicer, address = await serve_echo(bind=...)`; drained after the test."""
    async with contextlib.AsyncExitStack() as stack:

        async def serve(bind: str = "127.0.0.1:0") -> tuple[GrpcServer, Echo, str]:
            server, servicer = GrpcServer("echo", bind=bind), Echo()
            server.add(add_echo, servicer, SERVICE)
            address = await server.start()
            stack.push_async_callback(server.drain, 0)
            return server, servicer, address

        yield serve


@pytest.fixture
async def open_client() -> AsyncIterator[OpenClient]:
    """`client = open_client(address)`; closed after the test."""
    async with contextlib.AsyncExitStack() as stack:

        def connect(address: str) -> EchoClient:
            channel = open_channel(address)
            stack.push_async_callback(channel.close)
            return EchoClient(channel)

        yield connect
