"""The fleet is scaled while a weight sync is at a chosen point: in, by a SIGTERM, or out, by a replica that comes.

The round ends as if nothing had happened: who leaves finishes it first, who comes is seeded after it.
"""

import signal

import pytest

from rollout_service.servicer import QUIET_S
from tests.chaos.conftest import Fleets
from tests.chaos.fleet import REPLICAS, RUN_ID
from tests.chaos.test_sources import check
from tests.kit.waiting import throughout, until
from weightsync.membership.rendezvous import Rendezvous

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

STAYS, OTHER, LEAVES = REPLICAS
PHASES = [
    "transfer",
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("prepare", "pause", "verify", "commit")),
]
ENDS_S = 30.0
# Longer than a replica without a round waits; shorter than the 2 s of the communicator that the first sync has left.
HELD_S = 1.6 * QUIET_S
# A gate holds the round for as long as a process takes to start, or would wait before it ends.
PATIENT = {"formation_timeout_s": 30.0, "transfer_timeout_s": 30.0}


@pytest.mark.parametrize("phase", PHASES)
def test_a_replica_that_is_scaled_in_during_a_sync_finishes_it_and_then_leaves(fleets: Fleets, phase: str) -> None:
    with fleets.whole() as fleet:
        fleet.train_step()
        fleet.use(**PATIENT)
        gate = fleet.gate(LEAVES)
        gate.arm(phase, 0)
        result = fleet.start_coordinator()
        gate.wait_reached(20.0)
        fleet.send_signal(LEAVES, signal.SIGTERM)
        throughout(lambda: not fleet.has_ended(LEAVES), HELD_S)
        gate.open()
        said = fleet.result_of(result)
        assert (said["attempts"], said["outcomes"]) == (1, dict.fromkeys(REPLICAS, "COMMITTED")), said
        until(lambda: fleet.has_ended(LEAVES), ENDS_S)
        assert fleet.processes[LEAVES].exitcode == 0
        check(fleet, {"serving": [STAYS, OTHER]}, [STAYS, OTHER])
        fleet.start_replica(LEAVES)
        fleet.wait_announced()
        fleet.train_step()
        check(fleet, fleet.publish(), list(REPLICAS))


@pytest.mark.parametrize("phase", PHASES)
def test_a_replica_that_is_scaled_out_during_a_sync_is_seeded_after_it(fleets: Fleets, phase: str) -> None:
    with fleets.whole() as fleet:
        fleet.end(LEAVES)
        group = Rendezvous(fleet.redis.url, f"tandem:{RUN_ID}")
        until(lambda: f"{LEAVES}/0" not in group.snapshot().members, 20.0)
        until(lambda: LEAVES not in {record.name for record in fleet.registry.list("rollout")}, 20.0)
        fleet.train_step()
        fleet.use(**PATIENT)
        gate = fleet.gate(STAYS)
        gate.arm(phase, 0)
        seed = fleet.folder / f"seed-{fleet.version}"
        result = fleet.start_coordinator(seed_when=seed, replicas_seed=list(REPLICAS))
        gate.wait_reached(20.0)
        fleet.start_replica(LEAVES)
        until(lambda: fleet.announced(LEAVES), 20.0)
        gate.open()
        seed.touch()
        said = fleet.result_of(result)
        # Who comes may be in the round already where that was repeated: the first sync's communicator waits 2 s only.
        assert said["outcomes"].items() >= dict.fromkeys((STAYS, OTHER), "COMMITTED").items(), said
        check(fleet, said, list(REPLICAS))
