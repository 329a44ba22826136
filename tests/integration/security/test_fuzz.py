"""10,000 requests that nobody should send, to each real service: no exit, no hang, no growth, typed errors only."""

import contextlib
import re
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from tandem_api.coordinator.v1 import coordinator_pb2
from tandem_api.rollout.v1 import rollout_pb2
from tandem_api.trainer.v1 import trainer_pb2, trainer_pb2_grpc
from tandem_api.weights.v1 import weights_pb2
from tests.contract.test_hostile_calls import Target
from tests.hostile_requests import Attack, Hostile, Usage
from tests.kit.models import make_model
from tests.kit.processes import Services
from tests.kit.replicas import configuration
from tests.kit.round import RunPhase, new_round, run_round, service_at
from tests.near_valid_requests import CALL_S, Near, Rounds
from weightsync.layouts.layout import Parallel
from weightsync.membership.rendezvous import Rendezvous

pytestmark = [pytest.mark.slow, pytest.mark.integration, pytest.mark.timeout(3000)]

CALLS, PARTS = 10_000, 4
WARM_CALLS = 500
SEED = 11
# What a hundred connections and the allocator may take, once; and what the second half of the requests may add: 5,000
# requests that each kept 40 KB would be seen.
FIRST_MIB, GROWTH_MIB = 800, 200
STORM_CHANNELS, STORM_CALLS = 64, 20


ROUNDS = weights_pb2.DESCRIPTOR.services_by_name["RoundService"]


def under_attack(
    address: str,
    service: Any,
    pids: list[int],
    near: Near | None = None,
    leave_out: tuple[str, ...] = (),
    also: Sequence[Any] = (ROUNDS,),
) -> None:
    """The whole of it, against one service whose processes are these, and what it serves beside its own."""
    attack = Attack(address, service, also=also, leave_out=leave_out)
    attack.send(Hostile(SEED, near), WARM_CALLS)
    before = [Usage.of(pid) for pid in pids]
    odd = attack.odd_connections(100)
    asked: list[float] = []
    done = threading.Event()
    watcher = threading.Thread(target=_watch, args=(attack, asked, done))
    watcher.start()
    hostile, grown = Hostile(SEED + 1, near), []
    for _ in range(PARTS):
        attack.send(hostile, CALLS // PARTS)
        grown.append([Usage.of(pid) for pid in pids])
    _storm(address, service)
    done.set()
    watcher.join(60)
    for connection in odd:
        connection.close()
    attack.status()
    print(service.name, dict(attack.answers), [[round(usage.rss_mib) for usage in part] for part in [before, *grown]])
    assert attack.untyped == {}
    assert max(asked) < 10
    after = [Usage.of(pid) for pid in pids]
    half = grown[PARTS // 2 - 1]
    for place, pid in enumerate(pids):
        was, middle, now = before[place], half[place], after[place]
        by_part = [round(usages[place].rss_mib - was.rss_mib) for usages in grown]
        assert now.rss_mib <= was.rss_mib + FIRST_MIB, f"{pid}: {was} {now}, MiB by part {by_part}"
        assert now.rss_mib <= middle.rss_mib + GROWTH_MIB, f"{pid}: {was} {now}, MiB by part {by_part}"
        assert now.descriptors <= was.descriptors + 120, f"{pid}: {was} {now}"
    attack.close()


def _watch(attack: Attack, asked: list[float], done: threading.Event) -> None:
    """How long the status took, again and again."""
    while not done.wait(1.0) or not asked:
        began = time.monotonic()
        attack.status()
        asked.append(time.monotonic() - began)


def _storm(address: str, service: Any) -> None:
    """Many connections at once, whose calls may take a millisecond."""

    def calls(_: int) -> None:
        with grpc.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
            ask = channel.unary_unary(f"/{service.full_name}/GetStatus")
            for _ in range(STORM_CALLS):
                with contextlib.suppress(grpc.RpcError):  # most of them are too late
                    ask(b"", timeout=0.001)

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(calls, range(STORM_CHANNELS)))


def test_trainer_and_replica_outlive_it(services: Services, tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    config = configuration(model, services.run_id, trainer={"tensor_parallel": 2})
    ranks = services.start_trainer(config)
    services.start_rollout("rollout-0", config)
    trainer = trainer_pb2.DESCRIPTOR.services_by_name["TrainerService"]
    rollout = rollout_pb2.DESCRIPTOR.services_by_name["RolloutService"]
    trainer_at, rollout_at = services.address_of("trainer", "trainer"), services.address_of("rollout", "rollout-0")
    trainer_part, rollout_part = (service_at(grpc.insecure_channel(at)) for at in (trainer_at, rollout_at))
    group = Rendezvous(services.redis_url, f"tandem:{services.run_id}")
    run_dir = services.folder / "run"

    def rounds(name: str, partner: RunPhase) -> Rounds:
        def new(policy_version: int, **fields: Any) -> weights_pb2.Round:
            return new_round(group, policy_version, Parallel(tensor=2), {"rollout-0": Parallel()}, **fields)

        return Rounds(new, run_dir / "weights" / name, partner)

    near_trainer = Near(trainer_at, trainer, rounds("of-the-trainer", rollout_part), run_dir, weights_pb2.Round())
    under_attack(trainer_at, trainer, [services.processes[rank].pid for rank in ranks], near_trainer)
    status = trainer_pb2_grpc.TrainerServiceStub(grpc.insecure_channel(trainer_at)).GetStatus
    version = status(trainer_pb2.GetStatusRequest(), timeout=CALL_S).policy_version
    # What the trainer has on disk, for a replica that has weights.
    published = rounds("published", rollout_part).begun(version, weights_pb2.SYNC_TRANSPORT_DISK)
    run_round({"trainer": trainer_part, "rollout-0": rollout_part}, published)
    near_rollout = Near(rollout_at, rollout, rounds("of-the-replica", trainer_part), run_dir, published)
    under_attack(rollout_at, rollout, [services.processes["rollout-0"].pid], near_rollout)
    assert [process.poll() for process in services.processes.values()] == [None] * 3
    for name in (*ranks, "rollout-0"):
        log = (services.folder / f"{name}.log").read_text()
        assert [log[max(0, at.start() - 500) : at.start() + 3000] for at in re.finditer("Traceback", log)] == []
    (noted,) = (services.folder / "rollout-0").glob("tdm*/beside.txt")
    loads = [Path(line) for line in noted.read_text().splitlines()]
    assert loads
    assert all(each.exists() for each in loads)
    assert services.stop([*ranks, "rollout-0"]) == [0, 0, 0]
    assert not any(each.exists() for each in loads)  # SGLang leaves them behind


def test_the_coordinators_service_outlives_it(tmp_path: Path) -> None:
    target = Target("coordinator", tmp_path)
    service = coordinator_pb2.DESCRIPTOR.services_by_name["CoordinatorService"]
    try:
        under_attack(target.address, service, [target.process.pid], leave_out=("WatchEvents",), also=())
        assert target.process.poll() is None
        target.process.communicate("", timeout=20)
        assert target.process.returncode == 0
    finally:
        target.process.kill()
        target.process.wait(timeout=10)
