"""A participant of weight-sync rounds that moves nothing but keeps the order of phases, and fails when told to."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from servicekit.errors import PhaseOrder, TandemError
from tandem_api.weights.v1 import weights_pb2 as pb
from weightsync.plans.participants import Participants

PREPARE, PAUSE, TRANSFER = pb.ROUND_PHASE_PREPARE, pb.ROUND_PHASE_PAUSE, pb.ROUND_PHASE_TRANSFER
VERIFY, COMMIT, ABORT = pb.ROUND_PHASE_VERIFY, pb.ROUND_PHASE_COMMIT, pb.ROUND_PHASE_ABORT


@dataclass
class Fault:
    """Raise `error` when `phase` comes; after its work is done if `lost_reply`."""

    phase: pb.RoundPhase.ValueType
    error: TandemError
    lost_reply: bool = False


@dataclass
class FakeSync:
    """Phases of one participant, with `num_ranks` ranks.

    Attributes:
        order: phases that a round must go through here.
        received_bytes, shard_bytes: what TRANSFER reports per rank.
        seen: (round_id, phase) of every call that came.
    """

    order: tuple[pb.RoundPhase.ValueType, ...]
    num_ranks: int = 1
    received_bytes: int = 0
    shard_bytes: int = 0
    plan_digest: str = "abc"
    seconds: dict[str, float] = field(default_factory=dict)
    faults: deque[Fault] = field(default_factory=deque)
    seen: list[tuple[str, pb.RoundPhase.ValueType]] = field(default_factory=list)
    committed: int | None = None
    aborted_after: pb.RoundPhase.ValueType | None = None
    _round_id: str = ""
    _done: list[pb.RoundPhase.ValueType] = field(default_factory=list)

    def run_phase(self, phase: pb.RoundPhase.ValueType, sync_round: pb.Round) -> list[pb.PhaseReport]:
        self.seen.append((sync_round.round_id, phase))
        fault = self.faults.popleft() if self.faults and self.faults[0].phase == phase else None
        if fault is not None and not fault.lost_reply:
            raise fault.error
        self._advance(phase, sync_round)
        if fault is not None:
            raise fault.error
        return [self._report(phase, sync_round) for _ in range(self.num_ranks)]

    def phases(self) -> list[pb.RoundPhase.ValueType]:
        return [phase for _, phase in self.seen]

    def _advance(self, phase: pb.RoundPhase.ValueType, sync_round: pb.Round) -> None:
        if phase == ABORT:
            self.aborted_after = self._done[-1] if self._done and self._round_id == sync_round.round_id else None
            self._done = []
            return
        if phase == PREPARE:
            self._round_id, self._done = sync_round.round_id, []
        if self._round_id == sync_round.round_id and phase in self._done:
            return  # done already: answered again
        staged = sync_round.install_mode == pb.INSTALL_MODE_STAGED
        order = [each for each in self.order if not (staged and each == PAUSE)]  # COMMIT pauses then
        if self._round_id != sync_round.round_id or order[len(self._done)] != phase:
            raise PhaseOrder(f"{pb.RoundPhase.Name(phase)} came after {self._done}")
        self._done.append(phase)
        if phase == COMMIT:
            self.committed = sync_round.policy_version

    def _report(self, phase: pb.RoundPhase.ValueType, sync_round: pb.Round) -> pb.PhaseReport:
        name = pb.RoundPhase.Name(phase).removeprefix("ROUND_PHASE_").lower()
        report = pb.PhaseReport(plan_digest=self.plan_digest, policy_version=sync_round.policy_version)
        report.seconds[name] = self.seconds.get(name, 0.001)
        if phase == TRANSFER:
            report.bytes_received, report.shard_bytes = self.received_bytes, self.shard_bytes
        return report


@dataclass(frozen=True)
class FakeMembership:
    epoch: int
    members: dict[str, str]


@dataclass
class FakeGroup:
    """A weight group in which everybody but `empty` always is; the epoch counts the looks at it."""

    group: str = "tandem:test"
    epoch: int = 0
    asked: list[tuple[str, ...]] = field(default_factory=list)
    empty: tuple[str, ...] = ()

    def settle(self, slots: Iterable[str], timeout_s: float) -> FakeMembership:
        self.epoch += 1
        self.asked.append(tuple(slots))
        return FakeMembership(self.epoch, {slot: "worker" for slot in slots if slot not in self.empty})


def slots_of(sync_round: pb.Round) -> tuple[str, ...]:
    return Participants.of_round(sync_round).slots
