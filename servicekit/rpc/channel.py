"""Client channels that refuse calls without a deadline, before anything is sent."""

from collections.abc import Callable
from types import TracebackType
from typing import Any

import grpc

from servicekit.errors import rpc_errors
from servicekit.rpc.limits import CHANNEL_OPTIONS
from servicekit.security.run_token import METADATA_KEY, own_token
from servicekit.security.tls import Identity, channel_credentials, name_option
from servicekit.tracing import outgoing


def open_channel(
    address: str, *, identity: Identity | None = None, peer: str = "", token: str | None = None
) -> "DeadlineChannel":
    """Open a channel to `host:port` or `unix:/path.sock`; it connects lazily and reconnects by itself.

    Args:
        token: secret of the run, sent with every call except on Unix sockets; None: this process's own.
        identity: for mutual TLS, except on Unix sockets; None: no TLS.
        peer: role that the certificate of the other end must have ("trainer"); required with `identity`.
    Raises: ValueError: TLS without a peer; and every call without `timeout=` seconds.
    """
    if address.startswith("unix:"):
        return DeadlineChannel(_Source(address))
    if identity is not None and not peer:
        raise ValueError(f"channel to {address} with TLS, but without the role of the peer")
    return DeadlineChannel(_Source(address, identity, peer), own_token() if token is None else token)


class _Source:
    """Provides channels: with TLS a new one for a new certificate, because the credentials of a channel cannot change.

    Running calls continue on the old channel, which is kept until the next change.
    """

    def __init__(self, address: str, identity: Identity | None = None, peer: str = "") -> None:
        self._address, self._identity, self._peer = address, identity, peer
        self._material = None if identity is None else identity.material()
        self._channels = [self._open()]

    def current(self) -> grpc.aio.Channel:
        """Return the channel for the next call."""
        newest = None if self._identity is None else self._identity.material()
        if newest is not self._material:
            self._material = newest
            self._channels = [self._open(), self._channels[0]]
        return self._channels[0]

    async def close(self, grace_s: float | None) -> None:
        """Close all channels; running calls get `grace_s` seconds."""
        for channel in self._channels:
            await channel.close(grace_s)

    def _open(self) -> grpc.aio.Channel:
        if self._material is None:
            return grpc.aio.insecure_channel(self._address, options=CHANNEL_OPTIONS)
        options = (*CHANNEL_OPTIONS, name_option(self._peer))
        return grpc.aio.secure_channel(self._address, channel_credentials(self._material), options=options)


class DeadlineChannel(grpc.aio.Channel):
    """Wraps a channel so that its calls require `timeout=`.

    It is not a gRPC interceptor: those raise only when the call is awaited or iterated, and add a queue to every
    stream.
    """

    def __init__(self, source: _Source, token: str = "") -> None:
        self._source = source
        self._metadata = ((METADATA_KEY, token),) if token else ()

    def unary_unary(self, method: str, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        """Make a callable, as grpc.aio.Channel does, whose calls require a deadline."""
        return self._with_deadline(method, lambda channel: channel.unary_unary(method, *args, **kwargs))

    def unary_stream(self, method: str, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        """Make a callable, as grpc.aio.Channel does, whose calls require a deadline."""
        return self._with_deadline(method, lambda channel: channel.unary_stream(method, *args, **kwargs))

    def stream_unary(self, method: str, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        """Make a callable, as grpc.aio.Channel does, whose calls require a deadline."""
        return self._with_deadline(method, lambda channel: channel.stream_unary(method, *args, **kwargs))

    def stream_stream(self, method: str, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        """Make a callable, as grpc.aio.Channel does, whose calls require a deadline."""
        return self._with_deadline(method, lambda channel: channel.stream_stream(method, *args, **kwargs))

    async def close(self, grace: float | None = None) -> None:
        """Close the channel; running calls get `grace` seconds."""
        await self._source.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        """Return the state of the connection, as grpc.aio.Channel does."""
        return self._source.current().get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        """Wait until the state is another one, as grpc.aio.Channel does."""
        await self._source.current().wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        """Wait until the channel is connected, as grpc.aio.Channel does."""
        await self._source.current().channel_ready()

    def _with_deadline(
        self, method: str, make_call: Callable[[grpc.aio.Channel], Callable[..., Any]]
    ) -> Callable[..., Any]:
        channel = self._source.current()
        call = make_call(channel)

        def checked(*args: Any, timeout: float | None = None, **kwargs: Any) -> Any:
            nonlocal channel, call
            if timeout is None:
                raise ValueError(f"call of {method} without a deadline: pass timeout=<seconds>")
            newest = self._source.current()
            if newest is not channel:
                channel, call = newest, make_call(newest)
            if added := (*self._metadata, *outgoing()):
                kwargs["metadata"] = (*(kwargs.get("metadata") or ()), *added)
            return call(*args, timeout=timeout, **kwargs)

        return checked

    async def __aenter__(self) -> "DeadlineChannel":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class ServiceClient:
    """A client of one service. Every method raises the TandemError that the service raised, prefixed with the name."""

    name: str
    _channel: DeadlineChannel

    async def _call(self, method: Callable[..., Any], request: Any, timeout_s: float) -> Any:
        with rpc_errors(self.name):
            return await method(request, timeout=timeout_s)

    @property
    def is_connected(self) -> bool:
        """Whether the channel's connection stands: that of a process that was killed does not."""
        return self._channel.get_state() is grpc.ChannelConnectivity.READY

    async def close(self) -> None:
        """Close the channel; running calls are cancelled."""
        await self._channel.close()
