"""Real services whose slot or name was another process's: who lost it ends, who comes after a kill does not wait."""

import time
from pathlib import Path

import pytest

from tests.kit.models import make_model
from tests.kit.processes import START_S, Services
from tests.kit.replicas import configuration
from tests.kit.waiting import until
from weightsync.membership.rendezvous import Rendezvous, SlotLease

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(900)]
TTL_S = 1.0
END_S = 60.0
# No start takes as long as this lease lasts.
LONG_TTL_S = 3600.0


def test_ranks_whose_slots_another_keeps_end_their_services(services: Services, tmp_path: Path) -> None:
    """As after a fail-over of Redis that has lost the last joins: whoever starts them again has the slots back."""
    config = configuration(
        make_model(tmp_path / "model"), services.run_id, trainer={"tensor_parallel": 2}, sync={"lease_ttl_s": TTL_S}
    )
    services.start_trainer(config)
    services.start_rollout("rollout-0", config)
    services.address_of("trainer", "trainer")
    services.address_of("rollout", "rollout-0")
    group = Rendezvous(services.redis_url, f"tandem:{services.run_id}")
    # Not the trainer's rank 0: the end of another rank ends them all.
    for slot, names in (("trainer/1", ("trainer-0", "trainer-1")), ("rollout-0/0", ("rollout-0",))):
        intruder = SlotLease(group, slot, ttl_s=30.0)
        intruder.start()
        for name in names:
            assert services.processes[name].wait(timeout=END_S) == 1
        assert f"another worker holds the slot {slot} of {group.group}" in services.tail(names[-1])
        assert group.snapshot().members[slot] == intruder.worker_id
        intruder.close()
    reasons = {failure.name: failure.reason for failure in services.registry.failures()}
    assert "slot trainer/1" in reasons["trainer"]
    assert "rollout-0" in reasons


def test_a_replica_that_is_started_again_takes_the_name_of_the_one_that_was_killed(
    services: Services, tmp_path: Path
) -> None:
    config = configuration(make_model(tmp_path / "model"), services.run_id, sync={"lease_ttl_s": LONG_TTL_S})
    services.start_rollout("rollout-0", config)
    first = services.address_of("rollout", "rollout-0")
    killed = services.processes.pop("rollout-0")
    killed.kill()
    killed.wait(timeout=END_S)
    services.start_rollout("rollout-0", config)
    began = time.monotonic()
    until(lambda: services.address_of("rollout", "rollout-0") != first, START_S)
    assert time.monotonic() - began < START_S
