"""State of one attempt to publish weights: its rounds so far, their failures, and whether another round may help."""

import asyncio
import time
from collections.abc import Awaitable, Sequence, Set
from dataclasses import dataclass, field
from typing import TypeVar, cast

from coordinator.sync.blame import Blame
from coordinator.sync.excluded_replicas import LeftOut
from coordinator.sync.sync_report import RoundReports
from servicekit.errors import (
    Aborted,
    DeadlineExceeded,
    DigestMismatch,
    Fenced,
    Internal,
    NotReady,
    PeerLost,
    PhaseOrder,
    Poisoned,
    SlotTaken,
    TandemError,
    TooLarge,
    Unavailable,
)
from servicekit.lifecycle.tasks import DEADLINE, cancel, first_of
from tandem_clients.flow import ReplicaOutcome, SyncResult
from tandem_clients.replica import Replica
from weightsync.membership.rendezvous import Evicted

# A rank whose slot another process holds gets it when that one's lease ends, or exits after two leases (rendezvous.py).
SLOT_PATIENCE_TTLS = 3.0
# Another round may succeed; after anything else (an invalid round, a stale version, plans that differ) it would not.
_RETRIABLE = (Aborted, PeerLost, Unavailable, DeadlineExceeded, DigestMismatch)
# After these of a replica too: out of memory, a device that failed, a state that a full round mends.
_RETRIABLE_OF_REPLICA = (*_RETRIABLE, Internal, TooLarge, NotReady, Poisoned, PhaseOrder)
# Rounds that fail before a publication ends, whatever was learnt from them: enough to find several that fail of 64.
MOST_FAILURES = 20
# For the seeding that is under way when a publication is due: most end by then, and a publication takes no longer.
SEEDING_MAY_TAKE_S = 3.0
# Pauses before the next round when there is no replica to leave out: they grow fourfold.
LONGEST_PAUSE_S, PAUSE_GROWTH = 30.0, 4.0

T = TypeVar("T")


class NoLongerWanted(Aborted):
    """A seeding by replicas has held up a publication for too long."""


async def unless_due(due: asyncio.Event | None, doing: Awaitable[T]) -> T:
    """Wait for a part of a seeding by replicas, which has SEEDING_MAY_TAKE_S once a publication is due.

    Raises: NoLongerWanted: it has taken longer.
    """
    if due is None:
        return await doing
    task = asyncio.ensure_future(doing)
    try:
        first = await first_of({"done": task, "due": due})
        if first.name == "due":
            first = await first_of({"done": task}, timeout_s=SEEDING_MAY_TAKE_S)
    finally:
        await cancel(task)
    if first.name == DEADLINE:
        raise NoLongerWanted("the seeding of joiners is given up: the trainer has new weights for all")
    return cast(T, first.value)


def is_retriable(error: TandemError) -> bool:
    """Whether another round, with the participants present then, may succeed after `error`."""
    return isinstance(error, _RETRIABLE) and not isinstance(error, Evicted)


def is_retriable_of_replica(error: TandemError) -> bool:
    """Whether another round with the same replica may succeed after its `error`."""
    return isinstance(error, _RETRIABLE_OF_REPLICA) and not isinstance(error, Evicted)


@dataclass(frozen=True, kw_only=True)
class FailedRound:
    """A round that failed on all replicas of `group`, or from COMMIT on on some.

    Attributes:
        suspect: the source, if the fault is its own, or of whom is not known.
        unreachable: names of replicas that did not answer when it was given up.
    """

    group: Sequence[Replica]
    cause: Blame
    unreachable: Set[str]
    cost_s: float
    suspect: Replica | None = None


@dataclass(kw_only=True)
class Publication:
    """Progress of one publication: the rounds so far, whom the next one is of, and whether it may help.

    Attributes:
        first: get the weights before all others, which cannot fail them.
        strikes: failed rounds after which no replica could be left out.
        most: replicas in a round at most, while it is sought who of them fails.
        due: set when the next publication is due, for a seeding by replicas; None: the trainer sends.
        source: the replica that has sent, in the last round that committed.
    """

    policy_version: int
    start_s: float
    left_out: LeftOut = field(default_factory=LeftOut)
    min_replicas: int = 1
    first: Sequence[Replica] = ()
    strikes: int = 0
    most: int | None = None
    due: asyncio.Event | None = None
    source: str = ""
    # How often others have named a replica in their errors: these come last.
    named: dict[str, int] = field(default_factory=dict)
    # The replicas of the last roll call.
    present: Sequence[Replica] = ()
    # Whether the last failure was of replicas, as far as is known.
    of_replicas: bool = False
    # Until its error is judged.
    failed_round: FailedRound | None = None
    # Whether a round has failed without a culprit.
    _is_puzzled: bool = False
    # How long to wait for replicas while too few are present (participants.py).
    rejoin_timeout_s: float | None
    reports: RoundReports = field(default_factory=RoundReports)
    outcomes: dict[str, ReplicaOutcome] = field(default_factory=dict)
    failures: list[TandemError] = field(default_factory=list)
    committed: list[Replica] = field(default_factory=list)
    rounds: int = 0
    epoch: int = 0
    roll_call_s: float = 0.0
    # Failed rounds, and the pauses before the next ones.
    retries_s: float = 0.0
    # No further round can help.
    is_over: bool = False
    # When another process was first seen in a rank's slot.
    slot_taken_s: float | None = None

    def waits_for_slot(self, error: TandemError, lease_ttl_s: float) -> bool:
        """Whether `error` is a rank's wait for its slot, which will end by itself: not counted as a failure."""
        if not isinstance(error, SlotTaken) or isinstance(error, Evicted):
            return False
        now_s = time.perf_counter()
        self.slot_taken_s = now_s if self.slot_taken_s is None else self.slot_taken_s
        return now_s - self.slot_taken_s < SLOT_PATIENCE_TTLS * lease_ttl_s

    def next_group(self) -> list[Replica]:
        """Return the replicas of the next round.

        First come those that have served, then joiners. Then comes each that has failed before by itself, if it is due,
        or if too few have the weights without it.
        """
        pending = [replica for replica in self.present if replica not in self.committed]
        well = [replica for replica in pending if replica not in self.left_out]
        group = [replica for replica in well if replica in self.first] or well
        if group:
            return sorted(group, key=lambda replica: self.named.get(replica.name, 0))[: self.most]
        due = [replica for replica in pending if self.left_out.is_due(replica)]
        return due[:1] or (pending[:1] if len(self.committed) < self.min_replicas else [])

    @property
    def has_others(self) -> bool:
        """Whether a replica that has not failed lacks the weights."""
        return any(replica not in self.committed and replica not in self.left_out for replica in self.present)

    def learn(self, error: TandemError, failed: FailedRound) -> bool:
        """Learn from a failed round. Returns: whether its error counts as a strike."""
        cause = failed.cause
        self.named |= {name: self.named.get(name, 0) + count for name, count in cause.named.items()}
        if isinstance(error, Evicted | Fenced) or (cause.trainer is not None and not is_retriable(cause.trainer)):
            self.is_over = True
        self.of_replicas = cause.trainer is None and not self.is_over
        if not self.of_replicas:
            return True
        if not cause.failed and not cause.lost:
            if not self._is_puzzled and isinstance(error, PeerLost | Aborted) and self.due is None:
                self._is_puzzled = True  # it may have been an accident
                return True
            self.most = (len(failed.group) + 1) // 2
            return False
        for replica in failed.group:
            own = cause.failed.get(replica.name)
            if own is not None and not self.left_out.is_absent(replica):
                may_pass = is_retriable_of_replica(own)
                self.left_out.note_failure(replica, own, failed.cost_s, may_pass=may_pass)
        if self.has_others:
            return False
        may_pass = not cause.failed or any(is_retriable_of_replica(own) for own in cause.failed.values())
        waiting = [replica for replica in self.present if replica not in self.committed]
        self.is_over = not may_pass and not any(self.left_out.is_due(replica) for replica in waiting)
        return True

    def pause_s(self, first_s: float) -> float:
        """Return how long to wait before the next round, after a strike."""
        return min(LONGEST_PAUSE_S, first_s * PAUSE_GROWTH ** max(self.strikes - 1, 0))

    def result(self) -> SyncResult:
        """Sum up the rounds so far."""
        return self.reports.result(
            policy_version=self.policy_version,
            attempts=self.rounds,
            total_s=time.perf_counter() - self.start_s,
            outside_s={"roll_call": self.roll_call_s} | ({"retries": self.retries_s} if self.retries_s else {}),
            outcomes=self.outcomes,
            epoch=self.epoch,
            source=self.source,
        )

    def given_up(self) -> TandemError:
        """Build the error that ends it: the first failure, then the last if it differs."""
        causes = " | then: ".join(dict.fromkeys([str(self.failures[0]), str(self.failures[-1])]))
        message = f"weight sync of version {self.policy_version}, try {len(self.failures)}: {causes}"
        kind = type(self.failures[-1])
        # A replica's own error is not ours: others may still join.
        if self.of_replicas and (kind is DeadlineExceeded or not issubclass(kind, _RETRIABLE)):
            kind = Unavailable
        return kind(message)
