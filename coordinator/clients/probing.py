"""Waits for a service that may die or freeze meanwhile: it is probed while it works."""

import asyncio
from collections.abc import Coroutine
from typing import Any, Protocol, TypeVar

from servicekit.errors import DeadlineExceeded, PeerLost, TandemError, Unavailable
from servicekit.life.tasks import first_of

T = TypeVar("T")


class ProbedService(Protocol):
    """A service that answers GetStatus at once whatever it works on."""

    @property
    def name(self) -> str:
        """The service, for errors."""
        ...

    async def status(self, *, timeout_s: float) -> Any:
        """How it is. Raises: TandemError: it does not answer within timeout_s."""
        ...


async def while_alive(call: Coroutine[Any, Any, T], service: ProbedService, *, probe_timeout_s: float) -> T:
    """Await `call`, a call to `service`; give it up when the service no longer says how it is.

    A process that was killed fails its calls by itself; one that is frozen holds them until their own deadline, which
    may be an hour.

    Raises: what `call` raises; PeerLost: no answer to a probe within probe_timeout_s.
    """
    first = await first_of(
        {f"call of {service.name}": call, f"probe of {service.name}": _probe(service, probe_timeout_s)}
    )
    answer: T = first.value
    return answer


async def _probe(service: ProbedService, probe_timeout_s: float) -> None:
    """Until the service fails to answer. Raises: PeerLost."""
    while True:
        await asyncio.sleep(probe_timeout_s / 2)
        try:
            await service.status(timeout_s=probe_timeout_s)
        except (DeadlineExceeded, Unavailable) as error:
            raise PeerLost(f"{service.name} does not answer any more: {error}") from error
        except TandemError:  # it answers, if only that it has nothing to tell
            continue
