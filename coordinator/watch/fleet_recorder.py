"""Records recent weight syncs and the fleet, for the metrics and the web page."""

import time
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from coordinator.watch import metrics
from coordinator.watch.life import Life
from servicekit.errors import TandemError
from tandem_clients.flow import ReplicaOutcome, SyncResult
from tandem_clients.replica import Replica

ROUNDS_KEPT = 24
NOTHING: Mapping[str, str] = {}
# All of 64 replicas that leave and join four times.
_CHANGES_KEPT = 512


@dataclass(frozen=True, kw_only=True)
class ObservedSync:
    """A weight sync, or a round that was given up, which has an `error` and no stages."""

    # Unix time of its end.
    time_s: float
    policy_version: int
    total_s: float = 0.0
    stages: Mapping[str, float] = field(default_factory=dict)
    outcomes: Mapping[str, str] = field(default_factory=dict)
    bytes_received: int = 0
    epoch: int = 0
    attempts: int = 1
    lent: tuple[str, ...] = ()  # replicas that evaluated meanwhile
    source: str = ""  # the replica that has sent; "": the trainer
    error: str = ""

    @property
    def round_s(self) -> float:
        """Seconds of the rounds that ended it: without those that failed, and the wait for participants."""
        return self.total_s - self.stages.get("retries", 0.0) - self.stages.get("roll_call", 0.0)


class FleetChange(NamedTuple):
    """A replica, or a new process of one, was seen for the first time, or is not there any more."""

    # Unix time.
    time_s: float
    name: str
    joined: bool


@dataclass(kw_only=True)
class ObservedReplica:
    """The state of a replica.

    Attributes:
        there: it is announced.
        starts: processes of it that have been found.
        sync_s: seconds of its slowest rank in its last sync; None before one.
        outcome: its outcome of the last round in which it took part.
        evaluates: it is lent to an evaluation, and neither trains on nor takes new weights meanwhile.
    """

    name: str
    there: bool = True
    serving: bool = False
    evaluates: bool = False
    starts: int = 0
    policy_version: int | None = None
    sync_s: float | None = None
    outcome: str = ""


class FleetRecorder:
    """Records syncs and fleet snapshots. A replica that is a new process is a new `Replica`.

    Attributes:
        life: notes who comes and goes.
        lent: replicas that evaluate apart (LendingFleet).
    """

    def __init__(self, life: Life | None = None) -> None:
        self.life = Life() if life is None else life
        self.rounds: deque[ObservedSync] = deque(maxlen=ROUNDS_KEPT)
        self.changes: deque[FleetChange] = deque(maxlen=_CHANGES_KEPT)
        self.replicas: dict[str, ObservedReplica] = {}
        # While the run starts: services that are not announced, and by name, after how many seconds others were.
        self.awaited: list[str] = []
        self.arrived: dict[str, float] = {}
        self.lent: set[Replica] = set()
        self._seen: weakref.WeakSet[Replica] = weakref.WeakSet()

    def fleet(
        self, announced: Sequence[Replica], serving: Sequence[Replica], left_out: Mapping[str, str] = NOTHING
    ) -> None:
        """Record a snapshot of the fleet; the series of lost replicas end, so that alerts ignore their version.

        left_out: why replicas take no part, by name.
        """
        for replica in announced:
            row = self._row(replica.name)
            if replica not in self._seen:
                self._seen.add(replica)
                row.starts += 1
                metrics.REPLICA_STARTS.labels(replica=replica.name).inc()
                if row.starts > 1 or row.policy_version is None:  # else it was there from the start
                    row.policy_version = None
                    self.changes.append(FleetChange(time.time(), replica.name, joined=True))
        names, serving_names = {replica.name for replica in announced}, {replica.name for replica in serving}
        lent = {replica.name for replica in self.lent} - names
        for name, row in self.replicas.items():
            if row.there and name not in names | lent:
                metrics.forget_replica(name)
                self.changes.append(FleetChange(time.time(), name, joined=False))
            row.there, row.serving, row.evaluates = name in names | lent, name in serving_names, name in lent
        metrics.ANNOUNCED_REPLICAS.set(len(announced))
        metrics.SERVING_REPLICAS.set(len(serving))
        self.life.look((*serving, *self.lent), left_out)

    def sync(self, result: SyncResult, lent: Sequence[str] = ()) -> None:
        """Record a weight sync that succeeded; its failed rounds were recorded when they ended.

        Args:
            lent: replicas that evaluated when it began.
        """
        metrics.observe_sync(result)
        for name, outcome in result.outcomes.items():
            row = self._row(name)
            row.outcome = outcome.value
            if outcome is ReplicaOutcome.COMMITTED:
                row.policy_version, row.sync_s, row.serving = result.policy_version, result.replica_s.get(name), True
        self.rounds.append(
            ObservedSync(
                time_s=time.time(),
                policy_version=result.policy_version,
                total_s=result.total_s,
                stages=result.stages,
                outcomes={name: outcome.value for name, outcome in result.outcomes.items()},
                bytes_received=result.bytes_received,
                epoch=result.epoch,
                attempts=result.attempts,
                lent=tuple(lent),
                source=result.source,
            )
        )

    def failed_round(
        self, policy_version: int, error: TandemError, outcomes: Mapping[str, ReplicaOutcome], total_s: float = 0.0
    ) -> None:
        """Record a round that was given up."""
        metrics.observe_failed_round(error, outcomes)
        outcome_names = {name: outcome.value for name, outcome in outcomes.items()}
        for name, outcome in outcome_names.items():
            self._row(name).outcome = outcome
        self.rounds.append(
            ObservedSync(
                time_s=time.time(),
                policy_version=policy_version,
                total_s=total_s,
                outcomes=outcome_names,
                error=str(error),
            )
        )

    def _row(self, name: str) -> ObservedReplica:
        return self.replicas.setdefault(name, ObservedReplica(name=name))
