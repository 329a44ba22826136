"""A replica seeds one that has joined while the trainer is frozen; either of the two is killed or frozen meanwhile.

Whatever happens to the joiner, the source serves on, unharmed; where the source is lost, another one takes its place.
"""

import signal
from pathlib import Path
from typing import Any

import pytest

from tandem_api.weights.v1 import weights_pb2 as pb
from tests.chaos.conftest import Fleets
from tests.chaos.fleet import REPLICAS, TRAINERS, ChaosFleet
from tests.kit.waiting import until

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

SOURCE, SECOND, JOINER = REPLICAS
MID_TRANSFER = 4
CELLS = [
    *((SOURCE, phase) for phase in ("prepare", "transfer", "commit")),
    *((JOINER, phase) for phase in ("prepare", "pause", "transfer", "verify", "commit")),
]


def joins(fleet: ChaosFleet, serve_in_the_end: list[str], install: str) -> tuple[Path, Path]:
    """Two replicas serve a new version, the third has just come, and the trainer is frozen.

    Returns: the file that lets the coordinator seed, and the one that its result will be in.
    """
    fleet.end(JOINER)
    fleet.train_step()
    fleet.use(install=install, transport="collective")
    seed = fleet.folder / f"seed-{fleet.version}"
    result = fleet.start_coordinator(seed_when=seed, replicas_seed=serve_in_the_end)
    until(Path(f"{result}.first").exists, 20.0)
    fleet.start_replica(JOINER)
    until(lambda: fleet.announced(JOINER), 20.0)
    for name in TRAINERS:
        fleet.send_signal(name, signal.SIGSTOP)
    return seed, result


def check(fleet: ChaosFleet, said: dict[str, Any], serving: list[str]) -> None:
    assert said.get("serving") == serving, said
    for name in serving:
        status = fleet.status(name)
        assert (status.state, status.policy_version) == (pb.REPLICA_STATE_SERVING, fleet.version), name
        assert fleet.mixture(name) == ""
        assert fleet.generates(name)


def bring_back(fleet: ChaosFleet, *, trainer_lives: bool = True) -> None:
    """Everybody serves the next version; a trainer that was frozen for longer than its own deadlines is a new one."""
    for name in TRAINERS:
        fleet.send_signal(name, signal.SIGCONT)
    if not trainer_lives:
        fleet.start_trainer()
    for name in REPLICAS:
        if name not in fleet.processes or fleet.has_ended(name):
            fleet.start_replica(name)
    fleet.wait_announced()
    fleet.train_step()
    assert fleet.publish()["serving"] == list(REPLICAS)
    assert [fleet.mixture(name) for name in REPLICAS] == [""] * 3


@pytest.mark.parametrize("install", ["in_place", "staged"])
def test_a_joiner_is_seeded_while_the_trainer_is_frozen(fleets: Fleets, install: str) -> None:
    with fleets.whole() as fleet:
        seed, result = joins(fleet, list(REPLICAS), install)
        seed.touch()
        check(fleet, fleet.result_of(result), list(REPLICAS))
        bring_back(fleet)


def lost_in(fleet: ChaosFleet, victim: str, phase: str, how: signal.Signals, install: str) -> None:
    left = [name for name in REPLICAS if name != victim]
    seed, result = joins(fleet, left, install)
    gate = fleet.gate(victim)
    gate.arm(phase, MID_TRANSFER if phase == "transfer" else 0)
    seed.touch()
    gate.wait_reached(20.0)
    fleet.send_signal(victim, how)
    gate.open()
    if how == signal.SIGSTOP:
        check_frozen(fleet, left, result)
    else:
        check(fleet, fleet.result_of(result), left)
    bring_back(fleet, trainer_lives=how == signal.SIGKILL)


def check_frozen(fleet: ChaosFleet, left: list[str], result: Path) -> None:
    """Those that are left serve although the frozen one is announced still; then it is ended."""
    until(lambda: all(fleet.status(name).state == pb.REPLICA_STATE_SERVING for name in left), 30.0)
    for name in set(REPLICAS) - set(left):
        fleet.end(name)
    check(fleet, fleet.result_of(result), left)


@pytest.mark.parametrize(("victim", "phase"), CELLS)
def test_a_death_in_a_seeding_harms_nobody_else(fleets: Fleets, victim: str, phase: str) -> None:
    with fleets.whole() as fleet:
        lost_in(fleet, victim, phase, signal.SIGKILL, "in_place")


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=lambda how: how.name)
@pytest.mark.parametrize(
    ("victim", "phase", "install"),
    [
        *((*cell, "in_place") for cell in CELLS),
        *((*cell, "staged") for cell in CELLS if cell[1] != "pause"),  # which a staged round has not by itself
    ],
)
def test_any_loss_in_a_seeding_harms_nobody_else(
    fleets: Fleets, victim: str, phase: str, how: signal.Signals, install: str
) -> None:
    with fleets.whole() as fleet:
        lost_in(fleet, victim, phase, how, install)
