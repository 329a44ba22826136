"""Checks the participants during training, so that a weight sync can skip its own check if the result is fresh.

A look is fresh for AHEAD_S, while the connections to all services stand and all of its replicas serve. What it cannot
show is noticed all the same: a changed group by its epoch, which is confirmed before a round, a service that no longer
answers or has another version by PREPARE.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

from coordinator.sync.participants import PresentServices, RollCall, seeded_version
from tandem_clients.fleet import Fleet
from tandem_clients.replica import Replica
from tandem_clients.trainer import Trainer

# Between two looks, and how old one may be.
INTERVAL_S, AHEAD_S = 1.0, 2.0
# By then ranks have unpacked a batch that they were sent: a look at that time delays it by some milliseconds.
UNPACKED_S = 0.02


@dataclass(frozen=True, kw_only=True)
class _Seen:
    present: PresentServices
    # When the look began.
    begun_s: float


class LookAhead:
    """The newest look at the services, if all of them were present."""

    def __init__(self, roll_call: RollCall, trainer: Trainer, fleet: Fleet) -> None:
        self._roll_call, self._trainer, self._fleet = roll_call, trainer, fleet
        self._seen: _Seen | None = None

    async def run(self) -> AsyncIterator[None]:
        """Look again and again, first when the trainer's ranks have unpacked their batch. Yields: after each look."""
        pause_s = UNPACKED_S
        while True:
            await asyncio.sleep(pause_s)
            begun_s = time.monotonic()
            present = await self._roll_call.look_once()
            self._seen = None if present is None else _Seen(present=present, begun_s=begun_s)
            yield
            pause_s = INTERVAL_S

    def participants(self, policy_version: int) -> PresentServices | None:
        """Return the participants of a round of `policy_version`; None: look again."""
        seen = self._fresh()
        if seen is None or any(seeded_version(status) > policy_version for status in seen.present.replicas.values()):
            return None
        return seen.present

    def replicas(self) -> tuple[Replica, ...] | None:
        """Return the announced replicas, all of which serve; None: look again."""
        seen = self._fresh()
        return None if seen is None else tuple(seen.present.replicas)

    def forget(self) -> None:
        """Forget the look: it has misled."""
        self._seen = None

    def _fresh(self) -> _Seen | None:
        seen, serving = self._seen, self._fleet.serving()
        if seen is None or time.monotonic() - seen.begun_s >= AHEAD_S:
            return None
        services: tuple[Trainer | Replica, ...] = (self._trainer, *seen.present.replicas)
        are_as_seen = set(seen.present.replicas) == set(serving) and all(service.is_connected for service in services)
        return seen if are_as_seen else None
