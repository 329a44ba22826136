"""Client channels: every call must carry a deadline, or it is refused before anything is sent."""

from collections.abc import Callable
from types import TracebackType
from typing import Any

import grpc

from servicekit.limits import CHANNEL_OPTIONS


def open_channel(address: str) -> grpc.aio.Channel:
    """A channel to `host:port` or `unix:/path.sock`; connects lazily and reconnects by itself.

    Raises: ValueError, at the call, when a call is made without `timeout=` seconds.
    """
    return DeadlineChannel(grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS))


class DeadlineChannel(grpc.aio.Channel):
    """Wraps a channel so that its calls demand `timeout=`.

    Not a gRPC interceptor: those raise only once the call is awaited or iterated, and put a queue into every stream.
    """

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._channel = channel

    def unary_unary(self, method: str, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        return _with_deadline(method, self._channel.unary_unary(method, *args, **kwargs))

    def unary_stream(self, method: str, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        return _with_deadline(method, self._channel.unary_stream(method, *args, **kwargs))

    def stream_unary(self, method: str, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        return _with_deadline(method, self._channel.stream_unary(method, *args, **kwargs))

    def stream_stream(self, method: str, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        return _with_deadline(method, self._channel.stream_stream(method, *args, **kwargs))

    async def close(self, grace: float | None = None) -> None:
        await self._channel.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._channel.channel_ready()

    async def __aenter__(self) -> "DeadlineChannel":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


def _with_deadline(method: str, call: Callable[..., Any]) -> Callable[..., Any]:
    def checked(*args: Any, timeout: float | None = None, **kwargs: Any) -> Any:
        if timeout is None:
            raise ValueError(f"call of {method} without a deadline: pass timeout=<seconds>")
        return call(*args, timeout=timeout, **kwargs)

    return checked
