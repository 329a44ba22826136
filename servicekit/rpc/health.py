"""The standard gRPC health service, with separate liveness and readiness."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from servicekit.errors import REASON_KEY

SERVICE_NAME = "grpc.health.v1.Health"
LIVENESS = "liveness"
READINESS = "readiness"
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVICE_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


class HealthServicer(health_pb2_grpc.HealthServicer):
    """Serves "liveness" (always SERVING) and, following readiness, "readiness", "" and each service's full name.

    All methods run on the server's event loop.
    """

    def __init__(self) -> None:
        self._statuses: dict[str, int] = {LIVENESS: SERVING, READINESS: NOT_SERVING, "": NOT_SERVING}
        self._changed = asyncio.Event()
        self._closed = False

    def add_service(self, full_name: str) -> None:
        """Report the process's readiness under this name too."""
        self._statuses[full_name] = self._statuses[READINESS]

    def set_ready(self, ready: bool) -> None:
        """Set the status of every name except liveness."""
        for name in self._statuses:
            if name != LIVENESS:
                self._statuses[name] = SERVING if ready else NOT_SERVING
        self._wake_watchers()

    def close(self) -> None:
        """End the Watch streams after they have sent the last status, because a drain would wait for them."""
        self._closed = True
        self._wake_watchers()

    def _wake_watchers(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def Check(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        """Return the status of a name; abort with NOT_FOUND for an unknown one."""
        status = self._statuses.get(request.service)
        if status is None:
            known = ", ".join(sorted(name for name in self._statuses if name))
            await context.abort(
                grpc.StatusCode.NOT_FOUND,
                f"no service {request.service!r} here; there is {known}",
                trailing_metadata=((REASON_KEY, "NOT_FOUND"),),
            )
        return health_pb2.HealthCheckResponse(status=status)

    async def List(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        """Return the status of every name."""
        statuses = {name: health_pb2.HealthCheckResponse(status=status) for name, status in self._statuses.items()}
        return health_pb2.HealthListResponse(statuses=statuses)

    async def Watch(self, request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
        """Stream the status of a name, now and whenever it changes."""
        sent = None
        while True:
            changed = self._changed
            status = self._statuses.get(request.service, SERVICE_UNKNOWN)
            if status != sent:
                sent = status
                yield health_pb2.HealthCheckResponse(status=status)
            elif self._closed:
                return
            else:
                await changed.wait()
