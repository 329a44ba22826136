"""The asyncio gRPC server that every service runs: health, reflection, error mapping, drain."""

import functools
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from servicekit.addresses import join_address, split_address
from servicekit.errors import ConfigError
from servicekit.logs import get_logger
from servicekit.rpc.boundary import RpcBoundary
from servicekit.rpc.health import SERVICE_NAME, HealthServicer
from servicekit.rpc.limits import SERVER_OPTIONS
from servicekit.security.run_token import own_token
from servicekit.security.tls import CALLERS, Identity, check_caller

log = get_logger(__name__)
_UNIX = "unix:"


class GrpcServer:
    """A gRPC server. If the run has a token (run_token.py), all calls except those of health must carry it.

    Args:
        service: name in logs ("trainer").
        bind: `host:port`, port 0 for one that the system chooses, or `unix:/path.sock`.
        identity: for mutual TLS; None: no TLS.
        callers: roles that are admitted with TLS.
        health_bind: `host:port` of a further, plain server of nothing but health, for probes that cannot do TLS
            (kubelet's); None: no such server.
        max_workers: threads for handlers that are not coroutines (reflection); ours are.

    health_address: where that server listens, "" before start() and without one. Must be made and used on the event
    loop that serves.
    """

    def __init__(
        self,
        service: str,
        *,
        bind: str = "127.0.0.1:0",
        identity: Identity | None = None,
        callers: Sequence[str] = CALLERS,
        health_bind: str | None = None,
        max_workers: int = 2,
    ) -> None:
        self._service = service
        self._bind = bind
        # A Unix socket is always plain: its folder says who may connect.
        self._identity = None if bind.startswith(_UNIX) else identity
        self._health_bind = health_bind
        self._server = grpc.aio.server(
            ThreadPoolExecutor(max_workers, thread_name_prefix=f"{service}-rpc"),
            interceptors=(
                RpcBoundary(
                    None if self._identity is None else functools.partial(check_caller, callers=callers),
                    "" if bind.startswith(_UNIX) else own_token(),
                ),
            ),
            options=SERVER_OPTIONS,
        )
        self._names = [SERVICE_NAME, reflection.SERVICE_NAME]
        self._health = HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        self._health_server: grpc.aio.Server | None = None
        self.health_address = ""

    def add(self, add_to_server: Callable[..., Any], servicer: object, full_service_name: str) -> None:
        """Register a servicer; `add_to_server` is the generated add_XServicer_to_server."""
        add_to_server(servicer, self._server)
        self._names.append(full_service_name)
        self._health.add_service(full_service_name)

    async def start(self) -> str:
        """Bind and serve; live immediately, ready only after set_ready(True).

        Returns: the bound address, `host:port` or `unix:/path.sock`.
        Raises: ConfigError: the address is in use or not ours.
        """
        reflection.enable_server_reflection(self._names, self._server)
        credentials = None if self._identity is None else self._identity.server_credentials()
        address = bind_address(self._server, self._bind, credentials)
        await self._server.start()
        log.info("serving", rpc_service=self._service, address=address, tls=credentials is not None)
        if self._health_bind is not None:
            await self._start_health(self._health_bind)
        return address

    async def _start_health(self, bind: str) -> None:
        self._health_server = grpc.aio.server(options=SERVER_OPTIONS)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._health_server)
        self.health_address = bind_address(self._health_server, bind)
        await self._health_server.start()
        log.info("serving health", rpc_service=self._service, address=self.health_address)

    def set_ready(self, ready: bool) -> None:
        """Set the readiness, not the liveness."""
        self._health.set_ready(ready)

    async def drain(self, grace_s: float) -> None:
        """End serving: not ready, refuse new calls, let running ones finish for `grace_s`, then cancel the rest."""
        self._health.set_ready(False)
        self._health.close()
        # With 0 it waits with a time-out of 0, which may raise CancelledError.
        await self._server.stop(grace_s or None)
        if self._health_server is not None:  # last: a process that drains is alive
            await self._health_server.stop(None)


def bind_address(server: Any, bind: str, credentials: grpc.ServerCredentials | None = None) -> str:
    """Bind an asyncio or a threaded gRPC server.

    Returns: the address, with the port that was chosen.
    Raises: ConfigError: with the address.
    """
    if bind.startswith(_UNIX):
        _check_socket_is_free(Path(bind.removeprefix(_UNIX)))
    else:
        host = _host_of(bind)
    try:
        port = server.add_insecure_port(bind) if credentials is None else server.add_secure_port(bind, credentials)
    except RuntimeError as error:
        raise _bind_error(bind) from error
    if port == 0:
        raise _bind_error(bind)
    return bind if bind.startswith(_UNIX) else join_address(host, port)


def _host_of(bind: str) -> str:
    try:
        return split_address(bind)[0]
    except ValueError as error:
        raise ConfigError(f"bind address: {error}; port 0 is a free one") from None


def _bind_error(bind: str) -> ConfigError:
    return ConfigError(
        f"cannot listen on {bind}: the address is in use or not one of this machine; "
        "choose another (TANDEM_BIND_HOST, TANDEM_GRPC_PORT, TANDEM_HEALTH_PORT), or port 0 for a free one"
    )


def _check_socket_is_free(path: Path) -> None:
    """Check that no server uses a socket, because gRPC removes an existing socket file without a check."""
    if not path.parent.is_dir():
        raise ConfigError(f"cannot listen on unix:{path}: there is no folder {path.parent}")
    if not path.exists():
        return
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return  # left behind by a process that has ended
        except OSError as error:
            raise ConfigError(f"cannot listen on unix:{path}: {error}") from error
    raise ConfigError(f"cannot listen on unix:{path}: another process serves there")
