"""What one publication of weights has come to: its rounds, their failures, and whether another round may help."""

import time
from dataclasses import dataclass, field

from coordinator.clients.replica import Replica
from coordinator.flow import ReplicaOutcome, SyncResult
from coordinator.sync.sync_report import RoundReports
from servicekit.errors import (
    Aborted,
    DeadlineExceeded,
    DigestMismatch,
    PeerLost,
    SlotTaken,
    TandemError,
    Unavailable,
)
from weightsync.group.rendezvous import Evicted

# A rank whose slot another process holds gets it when that one's lease ends, or exits after two leases (rendezvous.py).
SLOT_PATIENCE_TTLS = 3.0
# Another round may succeed; after anything else (an invalid round, a stale version, plans that differ) it would not.
_RETRIABLE = (Aborted, PeerLost, Unavailable, DeadlineExceeded, DigestMismatch)


def is_retriable(error: TandemError) -> bool:
    """Whether another round, with the participants present then, may succeed after `error`."""
    return isinstance(error, _RETRIABLE) and not isinstance(error, Evicted)


@dataclass(kw_only=True)
class Publication:
    """Progress of one publication: the rounds so far, and whether another one may help."""

    policy_version: int
    start_s: float
    # How long to wait for replicas while too few are present (roll_call.py).
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

    def may_retry_after(self, error: TandemError) -> bool:
        """Whether another round may help."""
        return is_retriable(error) and not self.is_over

    def result(self) -> SyncResult:
        """Sum up the rounds so far."""
        return self.reports.result(
            policy_version=self.policy_version,
            attempts=self.rounds,
            total_s=time.perf_counter() - self.start_s,
            outside_s={"roll_call": self.roll_call_s} | ({"retries": self.retries_s} if self.retries_s else {}),
            outcomes=self.outcomes,
            epoch=self.epoch,
        )

    def given_up(self) -> TandemError:
        """Build the error that ends it: the first failure, then the last if it differs."""
        causes = " | then: ".join(dict.fromkeys([str(self.failures[0]), str(self.failures[-1])]))
        message = f"weight sync of version {self.policy_version}, try {len(self.failures)}: {causes}"
        return type(self.failures[-1])(message)
