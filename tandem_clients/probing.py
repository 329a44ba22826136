"""Awaits a call while probing its service, which may die or freeze meanwhile, and waits for servers of users."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Protocol, TypeVar

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from servicekit.errors import Aborted, DeadlineExceeded, PeerLost, TandemError, TooLarge, Unavailable, from_rpc_error
from servicekit.lifecycle.tasks import first_of
from servicekit.rpc.channel import DeadlineChannel

T = TypeVar("T")
# Failures of a call that may pass; whatever else a server answers, it will answer again.
PASSING = (Unavailable, Aborted, DeadlineExceeded, TooLarge)
ASK_S, _PAUSE_S = 10.0, 0.5


class NoAnswer(PeerLost):
    """A service has not answered a probe: it is frozen, or its host is unreachable."""


class ProbedService(Protocol):
    """A service that answers GetStatus promptly, whatever it works on."""

    @property
    def name(self) -> str:
        """Name of the service, for errors."""
        ...

    async def status(self, *, timeout_s: float) -> Any:
        """Ask for its status. Raises: TandemError: it does not answer within timeout_s."""
        ...


async def while_alive(
    call: Coroutine[Any, Any, T],
    service: ProbedService,
    *,
    probe_timeout_s: float,
    lost: Coroutine[Any, Any, Any] | None = None,
) -> T:
    """Await `call`, a call to `service`; cancel it when the service no longer answers a status call.

    The calls of a killed process fail immediately; those of a frozen one last until their deadline, which may be an
    hour.

    Args:
        lost: raises when the service is known to be lost, whether it answers or not.
    Raises: what `call` raises; NoAnswer: no answer to a probe within probe_timeout_s; what `lost` raises.
    """
    awaited = {f"call of {service.name}": call, f"probe of {service.name}": _probe(service, probe_timeout_s)}
    first = await first_of(awaited if lost is None else awaited | {f"loss of {service.name}": lost})
    answer: T = first.value
    return answer


async def _probe(service: ProbedService, probe_timeout_s: float) -> None:
    """Probe until the service fails to answer. Raises: NoAnswer."""
    while True:
        await asyncio.sleep(probe_timeout_s / 2)
        try:
            await service.status(timeout_s=probe_timeout_s)
        except (DeadlineExceeded, Unavailable) as error:
            if error.after_s:  # it has too much to do, and says so
                continue
            raise NoAnswer(f"{service.name} no longer answers: {error}") from error
        except TandemError:  # an error is an answer too
            continue


class NotServing(ValueError):
    """A server of a user does not serve in time; `why` says what it answered last."""

    def __init__(self, text: str, why: str) -> None:
        super().__init__(f"{text}: {why}")
        self.why = why


async def until_it_serves(
    ask: Callable[[], Awaitable[T]],
    channel: DeadlineChannel,
    *,
    service: str,
    kind: str,
    address: str,
    timeout_s: float,
) -> T:
    """Wait until a server that a user has started serves. Returns: the answer of `ask`.

    Args:
        ask: the first call of it.
        service: full name.
        kind: what it serves, for errors: "reward".
        address: where, for errors.
        timeout_s: the setting start_timeout_s of the server.
    Raises: NotServing: not in time; ValueError: it answers otherwise, and will do so again.
    """
    why = "it did not answer"
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                try:
                    if why := await _not_serving(channel, service):
                        raise Unavailable(why)
                    return await ask()
                except grpc.RpcError as error:
                    why = _only_passing(from_rpc_error(error), service, f"{kind} server {address}")
                except Unavailable as error:
                    why = str(error)
                await asyncio.sleep(_PAUSE_S)
    except TimeoutError:
        text = f"no {kind} server at {address} within start_timeout_s = {timeout_s:g} s"
        raise NotServing(text, why) from None


async def _not_serving(channel: DeadlineChannel, service: str) -> str:
    """Ask for the server's health. Returns: why it does not serve yet; "": it does, or it says nothing of it."""
    request = health_pb2.HealthCheckRequest(service=service)
    try:
        answer = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=ASK_S)
    except grpc.RpcError as error:
        if error.code() in (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.NOT_FOUND):
            return ""
        raise
    status = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
    return "" if status == "SERVING" else f"its health is {status}"


def _only_passing(error: TandemError, service: str, server: str) -> str:
    """Return the reason of a failure that may pass. Raises: ValueError: it is another one."""
    if isinstance(error, PASSING):
        return str(error)
    hint = f"; it must serve {service}" if "UNIMPLEMENTED" in str(error) else ""
    raise ValueError(f"{server}: {type(error).__name__}: {error}{hint}") from error
