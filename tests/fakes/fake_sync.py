"""A participant of weight-sync rounds that moves nothing but keeps the rules of a round, and fails when told to."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from servicekit.errors import TandemError
from tandem_api.weights.v1 import weights_pb2 as pb
from weightsync.membership.rendezvous import Membership
from weightsync.round.guard import OpenRound, PhaseGuard
from weightsync.round.phases import ABORT, COMMIT, PREPARE, TRANSFER, Phase, Role, name_of

# What a phase takes that moves nothing: stages must not last longer than the round that they are of.
NO_TIME_S = 1e-6


@dataclass
class Fault:
    """Raise `error` when `phase` comes; after its work is done if `lost_reply`."""

    phase: Phase
    error: TandemError
    lost_reply: bool = False


@dataclass
class FakeSync:
    """Phases of one participant, with `num_ranks` ranks.

    Attributes:
        role: by which the guard judges what may come, where the round has another source than `name`.
        received_bytes, shard_bytes: what TRANSFER reports per rank.
        seen: (round_id, phase) of every call that came.
    """

    role: Role
    name: str = ""
    num_ranks: int = 1
    received_bytes: int = 0
    shard_bytes: int = 0
    plan_digest: str = "abc"
    seconds: dict[str, float] = field(default_factory=dict)
    faults: deque[Fault] = field(default_factory=deque)
    seen: list[tuple[str, Phase]] = field(default_factory=list)
    committed: int | None = None
    aborted_after: Phase | None = None
    # By round, what names its communicator.
    counts: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._guard = PhaseGuard[OpenRound, list[pb.PhaseReport]](
            lambda message: OpenRound(message=message, role=Role.SENDER if self.sends(message) else self.role)
        )

    def sends(self, sync_round: pb.Round) -> bool:
        """Whether it is the replica that a round names as its source."""
        return self.name != "" and sync_round.source == self.name

    def run_phase(self, phase: Phase, sync_round: pb.Round) -> list[pb.PhaseReport]:
        self.seen.append((sync_round.round_id, phase))
        self.counts[sync_round.round_id] = sync_round.failed_rounds
        fault = self.faults.popleft() if self.faults and self.faults[0].phase == phase else None
        if fault is not None and not fault.lost_reply:
            raise fault.error
        reports = self._guard.answer(phase, sync_round)
        if reports is None:
            self._advance(phase, sync_round)
            reports = [self._report(phase, sync_round) for _ in range(self.num_ranks)]
            self._guard.answered(phase, sync_round, reports)
        if fault is not None:
            raise fault.error
        return reports

    def phases(self) -> list[Phase]:
        return [phase for _, phase in self.seen]

    def _advance(self, phase: Phase, sync_round: pb.Round) -> None:
        if phase == ABORT:
            self._abort(sync_round)
            return
        if phase == PREPARE and (older := self._guard.superseded_by(sync_round)) is not None:
            self._abort(older.message)
        with self._guard.running(phase, sync_round):
            if phase == COMMIT:
                self.committed = sync_round.policy_version
                self._guard.close(sync_round)

    def _abort(self, sync_round: pb.Round) -> None:
        current = self._guard.current
        is_open = current is not None and self._guard.is_open(sync_round)
        self.aborted_after = max(current.done, default=None) if current is not None and is_open else None
        self._guard.close(sync_round)

    def _report(self, phase: Phase, sync_round: pb.Round) -> pb.PhaseReport:
        name = name_of(phase)
        report = pb.PhaseReport(plan_digest=self.plan_digest, policy_version=sync_round.policy_version)
        report.seconds[name] = self.seconds.get(name, NO_TIME_S)
        if phase == TRANSFER and not self.sends(sync_round):
            report.bytes_received, report.shard_bytes = self.received_bytes, self.shard_bytes
        return report


@dataclass
class FakeGroup:
    """A weight group in which everybody but `empty` always is; the epoch counts the looks at it."""

    group: str = "tandem:test"
    epoch: int = 0
    asked: list[tuple[str, ...]] = field(default_factory=list)
    empty: tuple[str, ...] = ()
    known: dict[str, None] = field(default_factory=dict)

    def settle(self, slots: Iterable[str], timeout_s: float) -> Membership:
        self.epoch += 1
        self.asked.append(tuple(slots))
        self.known |= dict.fromkeys(self.asked[-1])
        members = {slot: "worker" for slot in self.known if slot not in self.empty}
        return Membership(epoch=self.epoch, members=members, endpoint=None)
