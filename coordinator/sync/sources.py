"""Which replica seeds replicas that join: one of their layout that serves, so that the trainer may work or be lost.

It sends what it has verified itself, and generates meanwhile; the round changes nothing there. One whose part has
failed is not asked again for a while. Joiners of a layout that no other can seed are left to the trainer.
"""

from collections.abc import Callable, Iterable

from coordinator.sync.excluded_replicas import LeftOut
from coordinator.sync.participants import PresentServices, RollCall
from coordinator.sync.publish_attempt import Publication
from servicekit.errors import DigestMismatch, TandemError
from tandem_api.rollout.v1 import rollout_pb2
from tandem_api.weights.v1 import weights_pb2
from tandem_clients.fleet import Fleet
from tandem_clients.replica import Replica
from weightsync.layouts.layout import Parallel


class Sources:
    """Chooses sources.

    Attributes:
        failing: those that could not send.
        unserved: replicas that joined, and that none could seed at the last look.
    """

    def __init__(self, roll_call: RollCall, fleet: Fleet) -> None:
        self._roll_call, self._fleet = roll_call, fleet
        self.failing = LeftOut()
        self.unserved: frozenset[Replica] = frozenset()

    async def find(self, work: Publication) -> PresentServices | None:
        """Find joiners of one layout, and who seeds them; None: there are none, or no replica can."""
        seen = await self._roll_call.replicas_now(work.policy_version)
        if seen is None:
            return None
        present, serving = seen.replicas, self._fleet.serving()
        self.failing.keep(serving)
        work.present = tuple(present)
        waiting: dict[Parallel, list[Replica]] = {}
        for replica in work.next_group():
            waiting.setdefault(Parallel.from_proto(present[replica].parallel), []).append(replica)
        able = [one for one in serving if one in present and _holds(present[one], work.policy_version)]
        found = {layout: self._least_loaded(layout, able, seen) for layout in waiting}
        self.unserved = frozenset(one for layout, those in waiting.items() if found[layout] is None for one in those)
        for layout, source in found.items():
            if source is not None:
                joiners = {replica: present[replica] for replica in waiting[layout]}
                return PresentServices(epoch=seen.epoch, source={source: present[source]}, replicas=joiners)
        return None

    def note_failure(
        self, source: Replica, error: TandemError, cost_s: float, work: Publication, warn: Callable[[str], None]
    ) -> None:
        """Let others be the source for a while. One that holds other bytes than it has verified is seeded itself."""
        is_damaged = isinstance(error, DigestMismatch) and str(error).startswith(f"{source.name}:")
        if is_damaged or source not in self.failing:
            warn(f"{source.name} does not seed replicas that join for some time: {error}")
        self.failing.note_failure(source, error, cost_s, may_pass=False)
        if is_damaged:
            work.committed = [replica for replica in work.committed if replica is not source]

    def _least_loaded(self, layout: Parallel, able: Iterable[Replica], seen: PresentServices) -> Replica | None:
        alike = [
            one
            for one in able
            if Parallel.from_proto(seen.replicas[one].parallel) == layout and self.failing.is_due(one)
        ]
        return min(alike, key=lambda one: seen.replicas[one].running_groups, default=None)


def _holds(status: rollout_pb2.GetStatusResponse, policy_version: int) -> bool:
    return status.state == weights_pb2.REPLICA_STATE_SERVING and status.policy_version == policy_version
