"""Awaits a call while probing its service, which may die or freeze meanwhile."""

import asyncio
from collections.abc import Coroutine
from typing import Any, Protocol, TypeVar

from servicekit.errors import DeadlineExceeded, PeerLost, TandemError, Unavailable
from servicekit.lifecycle.tasks import first_of

T = TypeVar("T")


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
            raise NoAnswer(f"{service.name} no longer answers: {error}") from error
        except TandemError:  # an error is an answer too
            continue
