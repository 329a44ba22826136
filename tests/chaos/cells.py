"""A cell of the fault matrix: who is harmed, at which phase, how; and what must come of it.

Harm happens while everybody is in the phase: a gate (gates.py) holds the target itself where it takes part in the
phase, and the seed replica where it does not.

Outcome of a replica, by what has happened to it when the round ends for it:

| harmed       | prepare, pause | transfer           | verify             | commit    |
|--------------|----------------|--------------------|--------------------|-----------|
| this replica | ABORTED        | POISONED (staged: ABORTED)              | POISONED  |
| another one  | COMMITTED: in the next round, of the living             | COMMITTED |
| the trainer  | ABORTED (*)    | POISONED (staged: ABORTED) | COMMITTED  | COMMITTED |
| coordinator  | ABORTED        | POISONED (staged: ABORTED)              | COMMITTED |
| Redis        | ABORTED (**)   | COMMITTED          | COMMITTED          | COMMITTED |

(*) lost in PAUSE, the trainer is missed in TRANSFER: as there. (**) in PREPARE only; from PAUSE on nobody needs Redis.
"""

import signal
from dataclasses import dataclass

from tests.chaos.fleet import REPLICAS
from weightsync.round.phases import NAMES, ROUND, Role

TARGETS = {
    "seed": "rollout-0",
    "middle": "rollout-1",
    "last": "rollout-2",
    "trainer0": "trainer-0",
    "trainer1": "trainer-1",
    "coordinator": "coordinator",
    "redis": "redis",
}
# Of about 12 messages that a rank sends or receives.
MID_TRANSFER = 4
# Of 13 headers that a receiver may ask for at once and its 13 acknowledgements of what it has copied.
MID_COPY = 16
_TRAINER_PHASES = tuple(rule.name for rule in ROUND if Role.TRAINER in rule.roles)


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One cell. install: "in_place" or "staged"; transport: as in sync.transport."""

    target: str
    phase: str
    harm: signal.Signals
    install: str
    transport: str = "collective"

    def __str__(self) -> str:
        return f"{self.harm.name}-{self.target}-{self.phase}-{self.install}-{self.transport}"

    @property
    def process(self) -> str:
        """Name of the process that is harmed."""
        return TARGETS[self.target]

    @property
    def killed(self) -> bool:
        """Not frozen."""
        return self.harm == signal.SIGKILL

    @property
    def message(self) -> int:
        """At which message of the phase."""
        if self.phase != "transfer" or (self.transport == "disk" and self.harms_trainer):
            return 0  # a trainer rank writes its file in one go
        return MID_COPY if self.transport == "colocated" else MID_TRANSFER

    @property
    def harms_trainer(self) -> bool:
        return self.process.startswith("trainer")

    @property
    def harms_replica(self) -> bool:
        return self.process in REPLICAS

    @property
    def holder(self) -> str:
        """Who stands at the gate."""
        if self.harms_replica or (self.harms_trainer and self.phase in _TRAINER_PHASES):
            return self.process
        return "rollout-0"

    @property
    def succeeds(self) -> bool:
        """Whether the publication does."""
        if self.harms_trainer:
            return self.phase in ("verify", "commit")
        if self.process == "redis":
            return self.phase != "prepare"
        return self.process != "coordinator"

    def outcomes(self) -> dict[str, str]:
        """Of each replica, once the round is over."""
        return {name: self._outcome(name) for name in REPLICAS}

    def _outcome(self, name: str) -> str:
        written = "POISONED" if self.install == "in_place" else "ABORTED"
        if self.harms_replica:
            own = {"prepare": "ABORTED", "pause": "ABORTED", "commit": "POISONED"}
            return own.get(self.phase, written) if name == self.process else "COMMITTED"
        if self.harms_trainer:
            by_phase = {"prepare": "ABORTED", "pause": written, "transfer": written}
        elif self.process == "coordinator":
            by_phase = {"prepare": "ABORTED", "pause": "ABORTED", "transfer": written, "verify": written}
        else:
            by_phase = {"prepare": "ABORTED"}
        return by_phase.get(self.phase, "COMMITTED")


def matrix() -> list[Cell]:
    """Every target at every phase, killed and frozen; mid-transfer also in the other install mode and transports."""
    kill, stop = signal.SIGKILL, signal.SIGSTOP
    return [
        # A staged round has no PAUSE of its own.
        Cell(target=target, phase=phase, harm=harm, install="in_place" if phase == "pause" else install)
        for harm, install in ((kill, "in_place"), (stop, "staged"))
        for target in TARGETS
        for phase in NAMES
    ] + [
        Cell(target=target, phase="transfer", harm=harm, install=install, transport=transport)
        for transport, harm, install, targets in (
            ("collective", kill, "staged", ("seed", "trainer1")),
            ("collective", stop, "in_place", ("seed", "trainer1")),
            ("colocated", kill, "in_place", ("seed", "trainer0")),
            ("colocated", kill, "staged", ("seed", "trainer0")),
            ("colocated", stop, "in_place", ("seed", "trainer0")),
            ("colocated", stop, "staged", ("seed", "trainer0")),
            ("disk", kill, "in_place", ("last",)),
            ("disk", kill, "staged", ("trainer1",)),
        )
        for target in targets
    ]
