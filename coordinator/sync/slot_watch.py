"""Notices replicas with a frozen rank while a round waits for them: the rank's lease of its slot runs out.

The replica's service answers probes all the while, and its call would last until the round's own deadline. Slots that
vanish while the trainer's are gone as well show that Redis has lost its data: living ranks take theirs again.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

from coordinator.sync.participants import WeightGroup
from servicekit.errors import Unavailable
from tandem_clients.probing import NoAnswer

# Between two looks; a slot is lost if it is missing in two of them.
INTERVAL_S = 0.5


class SlotWatch:
    """Watches the slots of one round's participants.

    Args:
        trainer: slots whose loss shows that Redis has lost its data: the trainer's, or of who is sure to live else.
        replicas: those of each replica, all of which are held now.
        lease_ttl_s: for so long after Redis has lost its data no replica is lost.
    """

    def __init__(
        self, group: WeightGroup, trainer: Sequence[str], replicas: Mapping[str, Sequence[str]], lease_ttl_s: float
    ) -> None:
        self._group, self._trainer, self._replicas, self._lease_ttl_s = group, trainer, replicas, lease_ttl_s
        self._lost = {name: asyncio.Event() for name in replicas}
        self._missing: dict[str, list[str]] = {}

    async def run(self) -> None:
        """Look again and again; cancel it when the round is over."""
        slots = [*self._trainer, *(slot for own in self._replicas.values() for slot in own)]
        quiet_until_s = float("-inf")
        while True:
            await asyncio.sleep(INTERVAL_S)
            members: Mapping[str, str] | None = None
            with suppress(Unavailable):  # a round that is under way does not need Redis
                members = (await asyncio.to_thread(self._group.settle, slots, 0.0)).members
            if members is None or not set(self._trainer) <= members.keys():
                quiet_until_s = time.monotonic() + self._lease_ttl_s
            if members is None or time.monotonic() < quiet_until_s:
                self._missing = {}
                continue
            missing = {name: [slot for slot in own if slot not in members] for name, own in self._replicas.items()}
            before, self._missing = self._missing, {name: own for name, own in missing.items() if own}
            for name in before.keys() & self._missing.keys():
                self._lost[name].set()

    async def until_lost(self, name: str) -> None:
        """Wait until a replica is lost. Raises: NoAnswer: it is."""
        await self._lost[name].wait()
        slots = ", ".join(self._missing.get(name, self._replicas[name]))
        raise NoAnswer(f"{name}: {slots} lost its slot in {self._group.group} during the round: it is frozen")
