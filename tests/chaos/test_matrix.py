"""The fault matrix of weight sync: any process killed or frozen at any phase. See cells.py for what must come of it.

Real services, Redis, gloo and coordinator; plain tensors in the place of the engines. In every cell: the others finish
or roll back in time, each replica's outcome is right, nobody serves a mixture, and the fleet is whole again after the
harmed process has come back.
"""

import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tandem_api.weights.v1 import weights_pb2 as pb
from tests.chaos.cells import Cell, matrix
from tests.chaos.conftest import Fleets
from tests.chaos.fleet import REPLICAS, TRAINERS, ChaosFleet
from tests.chaos.policy import SPEC, TRAINER
from tests.chaos.shared_memory import files_of, shared_memory
from tests.kit.waiting import until
from weightsync.layouts.megatron import megatron_layout

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

GATE_S = 20.0
# Two deadlines of 2 s, the margin of 0.5 s, and what a busy host adds.
ROLL_BACK_S = 20.0


@pytest.mark.parametrize("cell", matrix(), ids=str)
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
    assert found == {name: expected[name] for name in living}, said
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
        said = fleet.publish_by("successor")
        assert said.get("serving") == list(REPLICAS), said
    fleet.send_signal(cell.process, signal.SIGCONT)
    if cell.harms_trainer:
        fleet.start_trainer()  # a trainer that has lost a rank is started anew, as its supervisor would
    if cell.process == "coordinator":
        fleet.processes["coordinator"].join(timeout=ROLL_BACK_S)
        assert fleet.processes["coordinator"].exitcode is not None
