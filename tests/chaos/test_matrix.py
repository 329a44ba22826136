"""The fault matrix of weight sync: any process killed or frozen at any phase, and what must come of it.

Real services, Redis, gloo and coordinator; plain tensors in the place of the engines. In every cell: the others finish
or roll back in time, each replica's outcome is right, nobody serves a mixture, and the fleet is whole again after the
harmed process has come back.

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

(*) lost in PAUSE, the trainer is missed in TRANSFER: as there; or in PREPARE, if it still owed the reply. (**) in
PREPARE only; from PAUSE on nobody needs Redis.
"""

import re
import signal
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from tandem_api.weights.v1 import weights_pb2 as pb
from tests.chaos.conftest import Fleets
from tests.chaos.fleet import REPLICAS, TRAINERS, ChaosFleet
from tests.chaos.policy import SPEC, TRAINER
from tests.kit.waiting import until
from weightsync.layouts.megatron import megatron_layout
from weightsync.round.phases import NAMES, ROUND, Role

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

GATE_S = 20.0
# Two deadlines of 2 s, the margin of 0.5 s, and what a busy host adds.
ROLL_BACK_S = 20.0
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
_TRAINER_PHASES = tuple(rule.name for rule in ROUND if Role.SENDER in rule.roles)


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


def covering(cells: Sequence[Cell]) -> list[Cell]:
    """Choose cells in which every pair of values occurs that occurs in any: the most new pairs first.

    A pair is of target, phase, harm, install and transport; 35 are the least, because each target meets each phase.
    """
    pairs = {cell: set(combinations(vars(cell).items(), 2)) for cell in cells}
    missing, chosen = set().union(*pairs.values()), list[Cell]()
    while missing:
        chosen.append(max(cells, key=lambda cell: len(pairs[cell] & missing)))
        missing -= pairs[chosen[-1]]
    return chosen


def marked(cells: Sequence[Cell]) -> list[Any]:
    """Mark as slow what is not in every run of the tests."""
    often = covering(cells)
    return [pytest.param(cell, marks=() if cell in often else pytest.mark.slow) for cell in cells]


@pytest.mark.parametrize("cell", marked(matrix()), ids=str)
def test_cell(cell: Cell, fleets: Fleets) -> None:
    with fleets.whole() as fleet:
        run_cell(cell, fleet)


def run_cell(cell: Cell, fleet: ChaosFleet) -> None:
    old = fleet.version
    fleet.train_step()
    fleet.use(install=cell.install, transport=cell.transport)
    result = harm(cell, fleet)
    said = fleet.result_of(result) if cell.process != "coordinator" else {}
    if cell.process != "coordinator":
        assert ("outcomes" in said) == cell.succeeds, said
    living = [name for name in REPLICAS if name != cell.process]
    until(lambda: all(settled(fleet, name) for name in living), ROLL_BACK_S)
    found = {name: outcome_of(fleet, name, old) for name in living}
    expected = cell.outcomes()
    in_prepare = [dict.fromkeys(living, "ABORTED")] if cell.harms_trainer and cell.phase == "pause" else []
    assert found in [{name: expected[name] for name in living}, *in_prepare], said
    if "outcomes" in said:
        assert said["outcomes"] == expected
    assert [fleet.mixture(name) for name in living] == [""] * len(living)
    make_whole(cell, fleet, living if cell.harms_replica else None)
    if cell.process == "coordinator" and not cell.killed and cell.phase != "commit":
        assert "error" in fleet.result_of(result)  # it woke after its successor's round, and was told so


def harm(cell: Cell, fleet: ChaosFleet) -> Path:
    """Begin a publication, and do it at the phase. Returns: the file that its result will be in."""
    gate = fleet.gate(cell.holder)
    gate.arm(cell.phase, cell.message)
    result = fleet.start_coordinator()
    gate.wait_reached(GATE_S)
    if cell.phase == "verify":  # a replica verifies as soon as it has its own bytes: others may still receive theirs
        until(lambda: all(fleet.phase_of(name) in ("verify", "commit") for name in REPLICAS), GATE_S, "all transfers")
    fleet.send_signal(cell.process, cell.harm)
    gate.open()
    return result


def settled(fleet: ChaosFleet, name: str) -> bool:
    """Whether a replica's round is over."""
    return fleet.status(name).state != pb.REPLICA_STATE_PAUSED and not fleet.round_is_open(name)


def outcome_of(fleet: ChaosFleet, name: str, old: int) -> str:
    status = fleet.status(name)
    if status.state == pb.REPLICA_STATE_SERVING:
        return "ABORTED" if status.policy_version == old else "COMMITTED"
    return "POISONED" if status.state == pb.REPLICA_STATE_POISONED else f"state {status.state}"


def make_whole(cell: Cell, fleet: ChaosFleet, serving: list[str] | None) -> None:
    """The harmed process returns; then one publication, or the seeding of the one that returned, heals everything."""
    come_back(cell, fleet)
    fleet.wait_announced()
    assert [fleet.mixture(name) for name in REPLICAS] == [""] * len(REPLICAS)
    said = fleet.publish(serving=serving)
    assert said.get("serving") == list(REPLICAS), said
    if serving is not None:
        assert set(said["outcomes"]) <= {cell.process}  # the others went on undisturbed
    for name in REPLICAS:
        status = fleet.status(name)
        assert (status.state, status.policy_version) == (pb.REPLICA_STATE_SERVING, fleet.version)
        assert fleet.mixture(name) == ""
    if cell.transport == "colocated":
        check_memory(fleet)


def check_memory(fleet: ChaosFleet) -> None:
    """Receivers hold the memory of the trainer that lives, once, or none; nobody leaves a file."""
    regions = [len(megatron_layout(SPEC, TRAINER).parameters_of(rank)) for rank in range(TRAINER.world_size)]
    trainer_pids = frozenset(fleet.pid(name) for name in TRAINERS)
    for name, expected in zip(TRAINERS, regions, strict=True):
        held = shared_memory(fleet.pid(name))
        assert (held.descriptors, held.mappings) == (expected, expected), name
    mapped = {name: shared_memory(fleet.pid(name)) for name in REPLICAS}
    assert any(held.mappings for held in mapped.values())
    for name, held in mapped.items():
        assert held.descriptors == held.mappings, name  # Python's mmap keeps one for itself
        # none: its last round was one that was given up
        assert (held.mappings, held.owners) in ((sum(regions), trainer_pids), (0, frozenset())), name
    assert files_of(fleet.pids) == []


def come_back(cell: Cell, fleet: ChaosFleet) -> None:
    if cell.killed:
        revive: dict[str, Callable[[], Any]] = {"redis": fleet.redis.restart, "coordinator": lambda: None}
        revive |= {name: partial(fleet.start_replica, name) for name in REPLICAS}
        revive |= dict.fromkeys(TRAINERS, fleet.start_trainer)
        revive[cell.process]()
        return
    if cell.process == "coordinator":
        # Another one takes over while the first is frozen, and only then does that one wake.
        said = fleet.publish("successor")
        assert said.get("serving") == list(REPLICAS), said
    fleet.send_signal(cell.process, signal.SIGCONT)
    if cell.harms_trainer:
        fleet.start_trainer()  # a trainer that has lost a rank is started anew, as its supervisor would
    if cell.process == "coordinator":
        fleet.processes["coordinator"].join(timeout=ROLL_BACK_S)
        assert fleet.processes["coordinator"].exitcode is not None


# Memory of colocated weight sync, as the kernel lists it: torch names a region /dev/shm/torch_<pid of its owner>_...
# and unlinks it at once; ours are memfd:tandem-weights.
_REGION = re.compile(r"(?:/dev/shm/torch_(\d+)_|/memfd:tandem-weights)")


@dataclass(frozen=True, kw_only=True)
class SharedMemory:
    """Open descriptors and mappings of shared regions. owners: pids of the trainer ranks that the mappings are of."""

    descriptors: int
    mappings: int
    owners: frozenset[int]


def shared_memory(pid: int) -> SharedMemory:
    """What a process that lives holds now."""
    links = [_target(entry) for entry in Path(f"/proc/{pid}/fd").iterdir()]
    found = [match for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if (match := _REGION.search(line))]
    return SharedMemory(
        descriptors=sum(_REGION.search(link) is not None for link in links),
        mappings=len(found),
        owners=frozenset(int(match[1]) for match in found if match[1]),
    )


def _target(descriptor: Path) -> str:
    try:
        return str(descriptor.readlink())
    except FileNotFoundError:  # closed since it was listed
        return ""


def files_of(pids: Iterable[int]) -> list[str]:
    """Files in /dev/shm that processes of these ids have made."""
    ours = {f"torch_{pid}" for pid in pids}
    return [path.name for path in Path("/dev/shm").iterdir() if path.name.rpartition("_")[0].rpartition("_")[0] in ours]
