"""The services' own servicers, over fake engines, under requests that nobody should send: typed errors only.

Nothing of them stays in memory, without a collector of cycles.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tandem_api.coordinator.v1 import coordinator_pb2
from tandem_api.environment.v1 import environment_pb2
from tandem_api.reward.v1 import reward_pb2
from tandem_api.rollout.v1 import rollout_pb2, worker_pb2
from tandem_api.trainer.v1 import trainer_pb2
from tandem_api.weights.v1 import weights_pb2
from tests.hostile_requests import Attack, Hostile, Usage
from tests.near_valid_requests import Near, Rounds
from weightsync.layouts.layout import Parallel

SERVICES = {
    "trainer": trainer_pb2.DESCRIPTOR.services_by_name["TrainerService"],
    "rollout": rollout_pb2.DESCRIPTOR.services_by_name["RolloutService"],
    "reward": reward_pb2.DESCRIPTOR.services_by_name["RewardService"],
    "environment": environment_pb2.DESCRIPTOR.services_by_name["EnvironmentService"],
    "coordinator": coordinator_pb2.DESCRIPTOR.services_by_name["CoordinatorService"],
    "worker": worker_pb2.DESCRIPTOR.services_by_name["RolloutWorkerService"],
    "ranks": weights_pb2.DESCRIPTOR.services_by_name["ShardReceiverService"],
}
# A call that only asks; of a worker every call is its leader's.
ASKS = {"reward": "Describe", "environment": "Describe", "ranks": "GetChecksums", "worker": ""}
# What trainer and replica serve beside their own.
ROUNDS = weights_pb2.DESCRIPTOR.services_by_name["RoundService"]
CALLS = 400
SEED = 7
# Of a process that has just begun to serve: the buffers of 40 connections and of large messages.
GROWTH_MIB = 64


class Target:
    """A service in a process of its own."""

    def __init__(self, name: str, folder: Path) -> None:
        self.folder, self.log = folder / "run", folder / "log"
        self.folder.mkdir()
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.fakes.hostile_target", name, str(self.folder)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().strip()
        assert self.address, self.log.read_text()

    def requests_alive(self) -> dict[str, int]:
        """What is left of requests, by kind."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        found: dict[str, int] = json.loads(self.process.stdout.readline())
        return found


def right_requests(name: str, target: Target) -> Near | None:
    """None: the coordinator's have no field that could be nearly right, and a reward server has no state."""
    sizes = Parallel(tensor=2).to_proto()
    replicas = [weights_pb2.ReplicaSpec(name="rollout-0", parallel=sizes)]
    new_round = partial(weights_pb2.Round, group="tandem:run", epoch=1, trainer=sizes, replicas=replicas)
    rounds = Rounds(new_round, target.folder / "weights")
    published = weights_pb2.Round(disk_folder="/nowhere", policy_version=1, round_id="r-1")
    has_state = name in ("trainer", "rollout")
    return Near(target.address, SERVICES[name], rounds, target.folder, published) if has_state else None


@pytest.fixture(params=list(SERVICES))
def target(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Target, str, Near | None]]:
    made = Target(request.param, tmp_path)
    try:
        yield made, request.param, right_requests(request.param, made)
        assert made.process.poll() is None
        made.process.communicate("", timeout=20)
        assert made.process.returncode == 0
    finally:
        made.process.kill()
        made.process.wait(timeout=10)


def test_every_request_is_answered_with_a_typed_error(target: tuple[Target, str, Near | None]) -> None:
    served, name, near = target
    service = SERVICES[name]
    also = [ROUNDS] if name in ("trainer", "rollout", "worker", "ranks") else []
    attack = Attack(served.address, service, also=also, leave_out=("WatchEvents",))  # which waits for what comes
    attack.send(Hostile(SEED), 20)
    before = Usage.of(served.process.pid)
    odd = attack.odd_connections(40)
    attack.send(Hostile(SEED + 1, near), CALLS)
    began = time.monotonic()
    attack.status(ASKS.get(name, "GetStatus"))
    assert time.monotonic() - began < 5
    for connection in odd:
        connection.close()
    assert attack.untyped == {}
    assert sum(attack.answers.values()) == CALLS + 20
    assert len({answer.split()[1] for answer in attack.answers}) >= 2, attack.answers
    # Those of a call that is just ending, and what a service must know: the round that it is in, its fence.
    assert sum(served.requests_alive().values()) <= 8, served.requests_alive()
    after = Usage.of(served.process.pid)
    assert after.descriptors <= before.descriptors + len(odd) + 5
    assert after.rss_mib <= before.rss_mib + GROWTH_MIB
    print(service.name, dict(attack.answers))
    assert "Traceback" not in served.log.read_text(), served.log.read_text()[-5000:]
    assert list(served.folder.iterdir()) == []
    attack.close()
