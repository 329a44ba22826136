"""Phases of a weight-sync round on a replica: which may follow which, and what a round has come to."""

from dataclasses import dataclass, field
from typing import TypeAlias

from servicekit.errors import PhaseOrder
from tandem_api.weights.v1 import weights_pb2 as pb

Phase: TypeAlias = pb.RoundPhase.ValueType

PREPARE, PAUSE, TRANSFER = pb.ROUND_PHASE_PREPARE, pb.ROUND_PHASE_PAUSE, pb.ROUND_PHASE_TRANSFER
VERIFY, COMMIT, ABORT = pb.ROUND_PHASE_VERIFY, pb.ROUND_PHASE_COMMIT, pb.ROUND_PHASE_ABORT

NEEDS: dict[Phase, set[Phase]] = {
    PREPARE: set(),
    PAUSE: {PREPARE},
    TRANSFER: {PREPARE, PAUSE},
    VERIFY: {TRANSFER},
    COMMIT: {VERIFY},
}
# Staged bytes go to spare memory: generation need not stop before COMMIT, which pauses by itself.
NEEDS_STAGED = NEEDS | {TRANSFER: {PREPARE}}


@dataclass(kw_only=True)
class OpenRound:
    """The round under way. touched: parameters may differ from what was served. session: SGLang's is open."""

    message: pb.Round
    done: set[Phase] = field(default_factory=set)
    failure: str = ""
    touched: bool = False
    session: bool = False

    @property
    def staged(self) -> bool:
        """Whether the new weights are installed from a spare shard at COMMIT."""
        return self.message.install_mode == pb.INSTALL_MODE_STAGED


def require(current: OpenRound | None, phase: Phase, round_: pb.Round) -> OpenRound:
    """The open round, if the phase may be run now. Raises: PhaseOrder: it may not, and why."""
    name = pb.RoundPhase.Name(phase)
    if phase not in NEEDS:
        raise PhaseOrder(f"phase {name} is not one that a replica runs")
    if current is None or current.message.round_id != round_.round_id:
        raise PhaseOrder(f"{name}: round {round_.round_id!r} is not open here; it begins with PREPARE")
    if current.failure:
        raise PhaseOrder(f"{name}: round {round_.round_id} has failed ({current.failure}); abort it")
    missing = (NEEDS_STAGED if current.staged else NEEDS)[phase] - current.done
    if missing:
        names = ", ".join(pb.RoundPhase.Name(each) for each in sorted(missing))
        raise PhaseOrder(f"{name}: round {round_.round_id} has not done {names}")
    return current
