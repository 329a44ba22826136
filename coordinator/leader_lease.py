"""Our claim to be the run's only coordinator, checked before anything is written."""

import asyncio
from dataclasses import dataclass
from typing import Protocol

from servicekit.errors import Unavailable, describe, in_part
from servicekit.logs import get_logger
from tandem_api.common.v1 import common_pb2
from weightsync.membership.rendezvous import Evicted

_RETRY_S = 0.2
log = get_logger(__name__)


class LeaderLease(Protocol):
    """The claim (weightsync.membership.coordinator_lease.CoordinatorLease); its methods block."""

    @property
    def fence(self) -> common_pb2.CoordinatorFence:
        """The fence that calls carry if they change something."""
        ...

    @property
    def is_held(self) -> bool:
        """Whether the lead was acquired, and no other coordinator is known to have taken over since."""
        ...

    @property
    def left_s(self) -> float:
        """Seconds for which no other coordinator can acquire the lead, whether Redis answers or not."""
        ...

    def confirm(self, epoch: int) -> None:
        """Check with Redis that we lead the run and the epoch lasts.

        Raises: Evicted: another coordinator has taken over; Aborted: the epoch is over; Unavailable: no answer.
        """
        ...

    def hold(self) -> None:
        """Check with Redis that we lead the run.

        Raises: Evicted: another coordinator has taken over; Unavailable: Redis does not answer.
        """
        ...


async def check_lead(lead: LeaderLease, patience_s: float) -> None:
    """Return once it is certain that we lead the run; called before a row, a state or a checkpoint is written.

    Args:
        patience_s: how long to wait for Redis, once our lease may have run out.
    Raises: Evicted: another coordinator has taken over; Unavailable: Redis was unreachable for longer.
    """
    deadline_s = asyncio.get_running_loop().time() + patience_s
    while True:
        try:
            with in_part("lease"):
                await asyncio.to_thread(lead.hold)
            return
        except Unavailable as error:
            if lead.left_s > 0:
                return
            if asyncio.get_running_loop().time() >= deadline_s:
                raise Unavailable(
                    f"waited {patience_s:g} s to learn whether this coordinator still leads the run: {error}"
                ) from error
        await asyncio.sleep(_RETRY_S)


def check_lease(lead: LeaderLease) -> None:
    """Check the lead in the moment before a write: by our own clock while our lease lasts, else with Redis.

    So a process that was stopped for longer than its lease since check_lead notices, without a call to Redis per write.
    Raises: Evicted: another coordinator has taken over; Unavailable: Redis does not answer.
    """
    if lead.left_s <= 0:
        lead.hold()


async def may_write(lead: LeaderLease, lost: "asyncio.Future[None]") -> bool:
    """Whether no other coordinator is known to lead the run.

    True while Redis is unreachable: a run that fails because of that records it on disk.

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
    except Exception as error:  # noqa: BLE001 - of a run that ends, whose first error counts
        log.warning("lead not confirmed", error=describe(error))
        return lead.left_s > 0
    return True


@dataclass(frozen=True, kw_only=True)
class LeaderCheck:
    """Checks that we lead the run, before anything of it is written.

    Attributes:
        patience_s: how long to wait for Redis to confirm it.
    """

    lease: LeaderLease
    patience_s: float

    async def confirm(self) -> None:
        """Wait until it is certain. Raises: Evicted: another coordinator has taken over."""
        await check_lead(self.lease, self.patience_s)

    def check(self) -> None:
        """Check immediately before a file is replaced. Raises: as `check_lease`."""
        check_lease(self.lease)
