"""How a replica ends: asked to, killed, or because a rank died. Three start at the same time, on one machine."""

import os
import queue
import re
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import psutil
import pytest

from servicekit.redis.registry import Registry
from servicekit.rpc.arrays import packed
from tandem_api.common.v1.common_pb2 import CoordinatorFence
from tandem_api.rollout.v1 import rollout_pb2
from tests.kit.models import make_model
from tests.kit.processes import is_alive
from tests.kit.replicas import Replica, Trainer, lone_replica
from tests.kit.waiting import until
from tools.bench_sync.whole_groups import SampledGroup
from weightsync.membership.rendezvous import COORDINATOR_SLOT, Rendezvous

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def replicas(tmp_path_factory: pytest.TempPathFactory, module_redis: str) -> Iterator[dict[str, Replica]]:
    model = make_model(tmp_path_factory.mktemp("model") / "m")
    started = {
        name: lone_replica(tmp_path_factory.mktemp(name), model, module_redis)
        for name in ("stopped", "killed", "broken")
    }
    broken = started["broken"]
    Rendezvous(module_redis, f"tandem:{broken.run_id}").lead(COORDINATOR_SLOT, "b", 600.0)
    try:
        for replica in started.values():
            replica.wait_up()
        yield started
    finally:
        for replica in started.values():
            replica.close()


class TakenBack(threading.Thread):
    """A stream whose completions are taken back when the replica says that it leaves, as the coordinator does."""

    def __init__(self, replica: Replica) -> None:
        super().__init__()
        self.tokens: dict[int, tuple[int, int, int]] = {}
        self._asks = queue.SimpleQueue[rollout_pb2.GenerateRequest | None]()
        self._call = replica.stub.Generate(iter(self._asks.get, None), timeout=60.0)
        params = rollout_pb2.SamplingParams(temperature=1.0, top_p=1.0, top_k=-1, max_new_tokens=400)
        group = rollout_pb2.PromptGroup(
            group_id="a", prompt_ids_u32=packed("prompt_ids_u32", [1, 2]), num_completions=2
        )
        self._asks.put(rollout_pb2.GenerateRequest(sampling=params))
        self._asks.put(rollout_pb2.GenerateRequest(groups=[group], min_policy_version=1))
        self.code: grpc.StatusCode | None = None
        self.start()

    def run(self) -> None:
        for response in self._call:
            for one in (one for group in response.groups for one in group.completions):
                tokens, logprobs, _ = self.tokens.get(one.index, (0, 0, 0))
                more = len(one.token_ids_u32) // 4, len(one.logprobs_f32) // 4
                self.tokens[one.index] = (tokens + more[0], logprobs + more[1], one.finish_reason)
            if response.load.leaving:
                self._asks.put(rollout_pb2.GenerateRequest(cancel=["a"]))
        self.code = self._call.code()
        self._asks.put(None)


def gone(processes: list[psutil.Process]) -> bool:
    return not any(is_alive(process) for process in processes)


def test_sigterm_finishes_what_runs_and_exits_zero(replicas: dict[str, Replica]) -> None:
    replica = replicas["stopped"]
    assert replica.address.startswith("localhost:")
    assert replica.metrics_address.startswith("localhost:")
    trainer = Trainer(replica)
    trainer.load(replica.model)
    trainer.publish(1)
    family = replica.family()
    assert family
    groups: list[SampledGroup] = []
    call = threading.Thread(
        target=lambda: groups.extend(replica.generate([[1, 2, 3]], n=4, max_new_tokens=300, version=1))
    )
    call.start()
    until(lambda: replica.status().running_groups == 1, 10.0, "a running group")
    assert replica.status().parallel.engine == "sglang"
    taken_back = TakenBack(replica)
    until(lambda: replica.status().running_groups == 2, 10.0, "a group of a stream")
    os.killpg(replica.process.pid, signal.SIGTERM)  # as a terminal does: the ranks get it too
    assert replica.process.wait(timeout=60) == 0
    call.join(timeout=10)
    trainer.close()
    assert [len(completion.token_ids) for completion in groups[0].completions] == [300] * 4
    taken_back.join(timeout=10)
    assert taken_back.code is grpc.StatusCode.OK
    assert set(taken_back.tokens) == {0, 1}
    assert {reason for _, _, reason in taken_back.tokens.values()} == {rollout_pb2.FINISH_REASON_ABORT}
    for num_tokens, num_logprobs, _ in taken_back.tokens.values():
        assert 0 < num_tokens == num_logprobs < 400
    until(lambda: gone(family), 10.0, "the end of the ranks")
    registry = Registry(replica.redis_url, replica.run_id)
    assert registry.list("rollout") == []
    registry.close()


def test_sigkill_of_the_service_leaves_no_process(replicas: dict[str, Replica]) -> None:
    replica = replicas["killed"]
    family = replica.family()
    assert any("sglang" in " ".join(child.cmdline()) for child in family)
    replica.process.kill()
    replica.process.wait(timeout=30)
    until(lambda: gone(family), 10.0, "the end of the ranks")


def test_the_death_of_a_rank_ends_the_service_with_a_clear_line(replicas: dict[str, Replica]) -> None:
    replica = replicas["broken"]
    family = replica.family()
    # Meanwhile: a coordinator that was replaced before this replica came is refused.
    older = rollout_pb2.TakeOverRequest(fence=CoordinatorFence(worker_id="a", token=1))
    with pytest.raises(grpc.RpcError, match=r"coordinator a .* coordinator b .* has taken over"):
        replica.stub.TakeOver(older, timeout=10.0)
    (rank,) = [child for child in family if "sglang::scheduler" in " ".join(child.cmdline())]
    rank.kill()
    assert replica.process.wait(timeout=30) == 1
    assert f"SGLang process {rank.pid} of replica rollout-0 died" in replica.log.read_text(encoding="utf-8")
    until(lambda: gone(family), 10.0, "the end of the other processes")


def test_sigterm_while_starting_exits_zero_and_leaves_no_process(tmp_path: Path, module_redis: str) -> None:
    replica = lone_replica(tmp_path, make_model(tmp_path / "m"), module_redis, spawned=True)
    try:
        until(lambda: len(replica.family()) > 0, 60.0, "the first rank")
        family = replica.family()
        assert "TANDEM_RUN_ID" in psutil.Process(replica.process.pid).environ()  # what finds the processes of a run
        replica.process.send_signal(signal.SIGTERM)
        assert replica.process.wait(timeout=60) == 0
        until(lambda: gone(family), 10.0, "the end of the ranks")
    finally:
        replica.close()


@pytest.mark.parametrize("generates", [True, False])
def test_a_replica_whose_scheduler_is_frozen_ends_with_a_clear_line(
    tmp_path: Path, module_redis: str, generates: bool
) -> None:
    model = make_model(tmp_path / "m")
    replica = lone_replica(tmp_path, model, module_redis, serve_model=True, stall_timeout_s=5.0)
    try:
        replica.wait_up()
        family = replica.family()
        (rank,) = [child for child in family if "sglang::scheduler" in " ".join(child.cmdline())]
        why = "has a rank that has not answered for"
        if generates:
            # Which of the two comes first depends on whether its last answer or its last token came later.
            why = f"(?:computed no token for|{why})"
            with ThreadPoolExecutor(1) as pool:
                call = pool.submit(replica.generate, [[1, 2, 3]], n=16, max_new_tokens=400)
                until(lambda: replica.status().running_groups == 1, 10.0, "a running group")
                rank.suspend()
                with pytest.raises(grpc.RpcError, match=rf"the engine of rollout-0 {why}") as error:
                    call.result(timeout=60.0)
                assert error.value.code() is grpc.StatusCode.UNAVAILABLE
        else:
            until(lambda: replica.log.read_text(encoding="utf-8").count("replica up") == 1, 10.0, "the service")
            assert replica.generate([[1, 2, 3]], n=1, max_new_tokens=2)
            rank.suspend()
        assert replica.process.wait(timeout=60) == 1
        assert re.search(f"the engine of rollout-0 {why}", replica.log.read_text(encoding="utf-8"))
        until(lambda: gone(family), 10.0, "the end of the other processes")
    finally:
        replica.close()
