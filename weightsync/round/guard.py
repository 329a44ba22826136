"""Which phase may run now: the same guard for a replica and for every rank of trainer and replicas."""

from dataclasses import dataclass, field
from typing import TypeVar

from servicekit.errors import PhaseOrder
from tandem_api.weights.v1 import weights_pb2 as pb
from weightsync.round.phases import PREPARE, RULES, Phase, Role, name_of, required


@dataclass(kw_only=True)
class OpenRound:
    """A round under way at one participant.

    Attributes:
        done: phases that have succeeded here.
        failure: of a phase after which only ABORT helps; "": none.
    """

    message: pb.Round
    role: Role
    done: set[Phase] = field(default_factory=set)
    failure: str = ""

    @property
    def staged(self) -> bool:
        """Whether the new weights are installed from a spare shard at COMMIT."""
        return self.message.install_mode == pb.INSTALL_MODE_STAGED


Open = TypeVar("Open", bound=OpenRound)


def require(current: Open | None, phase: Phase, round_: pb.Round, where: str = "") -> Open:
    """The open round, if one of its phases may run now.

    Args:
        where: what the error begins with.
    Raises: PhaseOrder: it may not, and why.
    """
    if phase not in RULES:
        raise PhaseOrder(f"{where}{phase} is no phase of a round")
    name = name_of(phase).upper()
    if current is None or current.message.round_id != round_.round_id:
        raise PhaseOrder(
            f"{where}{name}: round {round_.round_id!r} is not open here; it begins with {name_of(PREPARE).upper()}"
        )
    if current.failure:
        raise PhaseOrder(f"{where}{name}: round {round_.round_id} has failed ({current.failure}); abort it")
    missing = required(phase, current.role, staged=current.staged) - current.done
    if missing:
        names = ", ".join(name_of(each).upper() for each in sorted(missing))
        raise PhaseOrder(f"{where}{name}: round {round_.round_id} has not done {names}")
    return current
