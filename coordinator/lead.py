"""Our claim to be the run's coordinator, which is asked for before anything is written."""

import asyncio
from typing import Protocol

from servicekit.errors import Unavailable
from tandem_api.common.v1 import common_pb2
from weightsync.group.rendezvous import Evicted

_RETRY_S = 0.2


class Lead(Protocol):
    """The claim (weightsync.group.coordinator_lease.CoordinatorLease); its methods block."""

    @property
    def fence(self) -> common_pb2.CoordinatorFence:
        """What calls that change something carry."""
        ...

    @property
    def is_held(self) -> bool:
        """Whether it was made good, and nobody else is known to have come since."""
        ...

    @property
    def left_s(self) -> float:
        """Seconds for which nobody else can have it, whether Redis answers or not."""
        ...

    def confirm(self, epoch: int) -> None:
        """Raises: Evicted: another coordinator has taken over; Aborted: the epoch is over; Unavailable."""
        ...

    def hold(self) -> None:
        """Raises: Evicted: another coordinator has taken over; Unavailable: Redis does not answer."""
        ...


async def check_lead(lead: Lead, patience_s: float) -> None:
    """Returns once it is certain that we lead the run: before a row, a state or a checkpoint is written.

    Args:
        patience_s: for a Redis that does not answer, once our lease may have run out.
    Raises: Evicted: another coordinator has taken over; Unavailable: Redis was away for longer.
    """
    deadline_s = asyncio.get_running_loop().time() + patience_s
    while True:
        try:
            await asyncio.to_thread(lead.hold)
            return
        except Unavailable as error:
            if lead.left_s > 0:
                return
            if asyncio.get_running_loop().time() >= deadline_s:
                raise Unavailable(
                    f"waited {patience_s:g} s to be told whether this coordinator still leads the run: {error}"
                ) from error
        await asyncio.sleep(_RETRY_S)


def last_look(lead: Lead) -> None:
    """In the moment before a write: nothing, while our lease lasts by our own clock; else Redis is asked.

    So a process that was stopped for longer than its lease since check_lead notices, without a trip to Redis per write.
    Raises: Evicted: another coordinator has taken over; Unavailable: Redis does not answer.
    """
    if lead.left_s <= 0:
        lead.hold()


async def may_write(lead: Lead, lost: "asyncio.Future[None]") -> bool:
    """Whether nobody else is known to lead the run; yes while Redis is away: one that ends of that says so on disk.

    Args:
        lost: done once another coordinator is known to have taken over.
    """
    if not lead.is_held or lost.done():
        return False
    try:
        await check_lead(lead, patience_s=0.0)
    except Unavailable:
        return True
    except Evicted:
        return False
    return True
