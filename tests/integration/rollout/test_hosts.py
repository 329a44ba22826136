"""Real SGLang over two hosts, which here are two addresses of one machine: the same weights, and one life."""

import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from servicekit.redis.registry import Registry
from tandem_api.rollout.v1 import rollout_pb2
from tandem_api.weights.v1 import weights_pb2 as pb
from tests.kit.models import logprobs, make_model
from tests.kit.processes import is_alive
from tests.kit.replicas import Replica, Trainer, at, lone_replica
from tests.kit.round import CALL_S
from tests.kit.waiting import until

# An engine starts in 15 s on idle cores, and in minutes where others work.
pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(900)]

PROMPT = [7, 8, 9, 10] * 4
INSTALL = {"in_place": pb.INSTALL_MODE_IN_PLACE, "staged": pb.INSTALL_MODE_STAGED}


@dataclass(frozen=True)
class Pair:
    """A replica of two ranks on two hosts."""

    leader: Replica
    worker: Replica
    trainer: Trainer

    def close(self) -> None:
        self.trainer.close()
        self.leader.close()

    def family(self) -> list[psutil.Process]:
        """All ranks, of both hosts."""
        return [*self.leader.family(), *self.worker.family()]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("models")
    return [make_model(folder / str(seed), seed=seed) for seed in range(3)]


def start_pair(folder: Path, model: Path, redis_url: str) -> Pair:
    leader = lone_replica(folder, model, redis_url, tensor_parallel=2, nodes=2)
    worker = leader.start_worker(1, at("127.0.0.2"))
    try:
        leader.wait_up()
        return Pair(leader, worker, Trainer(leader))
    except BaseException:
        leader.close()
        raise


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, models: list[Path], module_redis: str) -> Iterator[Pair]:
    started = start_pair(tmp_path_factory.mktemp("pair"), models[0], module_redis)
    yield started
    started.close()


@pytest.fixture
def mortal_pair(tmp_path: Path, models: list[Path], module_redis: str) -> Iterator[Pair]:
    """One of its own for each test."""
    started = start_pair(tmp_path, models[0], module_redis)
    yield started
    started.close()


@pytest.fixture(scope="module")
def one_host(tmp_path_factory: pytest.TempPathFactory, models: list[Path], module_redis: str) -> Iterator[Replica]:
    """The same engine on one host, seeded with the first model."""
    replica = lone_replica(tmp_path_factory.mktemp("one"), models[0], module_redis, tensor_parallel=2)
    try:
        trainer = Trainer(replica.wait_up())
        trainer.load(models[0])
        trainer.publish(1)
        yield replica
        trainer.close()
    finally:
        replica.close()


def greedy(replica: Replica, version: int) -> list[int]:
    return list(replica.greedy([PROMPT], version, 12)[0].token_ids)


def test_the_ranks_of_two_hosts_get_what_those_of_one_host_get(
    pair: Pair, one_host: Replica, models: list[Path]
) -> None:
    pair.trainer.load(models[0])
    replies = pair.trainer.publish(1, transport=pb.SYNC_TRANSPORT_COLLECTIVE)
    reports = replies[pb.ROUND_PHASE_TRANSFER].reports
    assert [report.bytes_received == report.shard_bytes > 0 for report in reports] == [True, True]
    assert pair.leader.checksums() == one_host.checksums()
    ids = greedy(pair.leader, 1)
    assert ids == logprobs(models[0], PROMPT, ids, 1.0).argmax(-1).tolist() == greedy(one_host, 1)


@pytest.mark.parametrize(("install", "version"), [("in_place", 2), ("staged", 3)])
def test_further_rounds_bring_further_weights(pair: Pair, models: list[Path], install: str, version: int) -> None:
    model = models[version - 1]
    before = pair.leader.checksums()
    pair.trainer.load(model)
    pair.trainer.publish(version, transport=pb.SYNC_TRANSPORT_COLLECTIVE, install_mode=INSTALL[install])
    after = pair.leader.checksums()
    changed = [old != new for old, new in zip(before, after, strict=True)]
    assert changed == [True, True]
    ids = greedy(pair.leader, version)
    assert ids == logprobs(model, PROMPT, ids, 1.0).argmax(-1).tolist()


def test_a_round_given_up_leaves_the_ranks_of_both_hosts_as_they_were(pair: Pair, models: list[Path]) -> None:
    version = pair.leader.status().policy_version
    before = pair.leader.checksums()
    pair.trainer.load(models[0])
    round_ = pair.trainer.round(version + 1, install_mode=pb.INSTALL_MODE_STAGED)
    for phase in (pb.ROUND_PHASE_PREPARE, pb.ROUND_PHASE_TRANSFER):
        pair.trainer.both(phase, round_)
    assert pair.trainer.both(pb.ROUND_PHASE_ABORT, round_).reports[0].state == pb.REPLICA_STATE_SERVING
    assert pair.leader.checksums() == before
    assert greedy(pair.leader, version)


def test_frozen_requests_go_on_after_a_round(pair: Pair) -> None:
    """Pause and resume reach the ranks of both hosts at the same token."""
    version = pair.leader.status().policy_version
    pause = rollout_pb2.PauseGenerationRequest(mode=pb.PAUSE_MODE_KEEP_KV)
    assert pair.leader.stub.PauseGeneration(pause, timeout=CALL_S).state == pb.REPLICA_STATE_PAUSED
    resumed = pair.leader.stub.ResumeGeneration(rollout_pb2.ResumeGenerationRequest(), timeout=CALL_S)
    assert resumed.state == pb.REPLICA_STATE_SERVING
    pair.trainer.publish(version + 1, pause_mode=pb.PAUSE_MODE_KEEP_KV)
    assert greedy(pair.leader, version + 1)


def test_the_worker_is_announced_with_its_own_address(pair: Pair) -> None:
    registry = Registry(pair.leader.redis_url, pair.leader.run_id)
    (record,) = registry.list("rollout-worker")
    assert [each.name for each in registry.list("rollout")] == ["rollout-0"]
    registry.close()
    assert record.name == "rollout-0-host-1"
    assert record.address.startswith("127.0.0.2:")


def gone(processes: list[psutil.Process]) -> bool:
    return not any(is_alive(process) for process in processes)


def test_a_killed_worker_ends_the_leader_which_names_it(mortal_pair: Pair) -> None:
    family = mortal_pair.family()
    mortal_pair.worker.process.kill()
    assert mortal_pair.leader.process.wait(timeout=60) == 1
    assert "host 1 of rollout-0 (rollout-0-host-1 at 127.0.0.2:" in last_line(mortal_pair.leader.log)
    until(lambda: gone(family), 20.0, "the end of all ranks")


def test_a_killed_leader_ends_the_worker_which_names_it(mortal_pair: Pair) -> None:
    family = mortal_pair.family()
    mortal_pair.leader.process.kill()
    assert mortal_pair.worker.process.wait(timeout=60) == 1
    assert "the leader of rollout-0 is lost" in last_line(mortal_pair.worker.log)
    until(lambda: gone(family), 20.0, "the end of all ranks")


def test_a_worker_that_is_asked_to_end_takes_the_replica_with_it_well(mortal_pair: Pair) -> None:
    mortal_pair.trainer.load(mortal_pair.leader.model)
    mortal_pair.trainer.publish(1)
    family = mortal_pair.family()
    mortal_pair.worker.process.send_signal(signal.SIGTERM)
    assert mortal_pair.leader.process.wait(timeout=60) == 0
    assert mortal_pair.worker.process.wait(timeout=60) == 0
    until(lambda: gone(family), 20.0, "the end of all ranks")


def test_all_hosts_of_one_machine_are_one_process(tmp_path: Path, models: list[Path], module_redis: str) -> None:
    """As `tandem run` starts it."""
    module = "rollout_service.local_hosts"
    replica = lone_replica(tmp_path, models[0], module_redis, module=module, spawned=True, tensor_parallel=2, nodes=2)
    try:
        trainer = Trainer(replica.wait_up())
        trainer.load(models[0])
        trainer.publish(1)
        ids = greedy(replica, 1)
        assert ids == logprobs(models[0], PROMPT, ids, 1.0).argmax(-1).tolist()
        family = replica.family()
        assert len([child for child in family if "--name" in child.cmdline()]) == 2
        replica.process.terminate()
        assert replica.process.wait(timeout=60) == 0
        until(lambda: gone(family), 20.0, "the end of all processes")
        trainer.close()
    finally:
        replica.close()


def last_line(log: Path) -> str:
    """The last line that is ours: a resource tracker may have a word after it."""
    return [line for line in log.read_text(encoding="utf-8").splitlines() if line.startswith("{")][-1]
