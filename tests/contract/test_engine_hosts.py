"""A leader and its worker over real Redis and mutual TLS, without SGLang: meeting, weight sync, every way to end."""

import asyncio
import contextlib
import json
import signal
import sys
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from rollout_service.hosts.host_ranks import HostRanks
from rollout_service.hosts.leader import HostWorkers
from rollout_service.sglang_engine.receiver import add_receiver
from rollout_service.weight_updates.ranks import RankGroups, rank_clients
from rollout_service.worker_app import serve_worker
from servicekit.environment import ServiceEnvironment
from servicekit.errors import DeadlineExceeded, DigestMismatch, InvalidRequest, NotReady, PermissionDenied, Unavailable
from servicekit.errors import rpc_errors as translated
from servicekit.redis.registry import Registry
from servicekit.rpc.channel import open_channel
from servicekit.rpc.sync_server import start_sync_server
from servicekit.security.tls import Identity
from tandem_api.rollout.v1 import worker_pb2, worker_pb2_grpc
from tandem_api.weights.v1 import weights_pb2 as pb
from tandem_api.weights.v1 import weights_pb2_grpc
from tandem_config.comparing.resuming import OF_A_REPLICA
from tandem_config.schema import RunConfig
from tests.kit.certificates import Authority, files_of, variables
from tests.unit.rollout.fake_engine import FakeEngine

DEADLINE_S = 20.0
ROUND = pb.Round(round_id="r", formation_timeout_s=5, transfer_timeout_s=5)


class Receiver(weights_pb2_grpc.ShardReceiverServiceServicer, weights_pb2_grpc.RoundServiceServicer):
    """A rank that tells which one it is; `fails` in a phase."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.loaded: list[str] = []
        self.fails: dict[pb.RoundPhase.ValueType, Exception] = {}

    def RunPhase(self, request: pb.RunPhaseRequest, context: Any) -> pb.RunPhaseResponse:
        if request.phase in self.fails:
            raise self.fails[request.phase]
        return pb.RunPhaseResponse(reports=[pb.PhaseReport(bytes_received=self.rank)])

    def LoadPublished(self, request: pb.LoadPublishedRequest, context: Any) -> pb.LoadPublishedResponse:
        self.loaded.append(request.folder)
        return pb.LoadPublishedResponse()

    def GetChecksums(self, request: pb.GetChecksumsRequest, context: Any) -> pb.GetChecksumsResponse:
        return pb.GetChecksumsResponse(checksums={"rank": str(self.rank)})

    def LoadFolder(self, request: pb.LoadFolderRequest, context: Any) -> pb.LoadFolderResponse:
        raise NotImplementedError

    def PoisonWeights(self, request: pb.PoisonWeightsRequest, context: Any) -> pb.PoisonWeightsResponse:
        raise NotImplementedError


class Rig:
    """One engine of four ranks on two hosts: ranks 0 and 1 are here, 2 and 3 with the worker."""

    def __init__(self, folder: Path, redis_url: str) -> None:
        self.folder = folder
        self.config = RunConfig.model_validate(
            {
                "run": {"startup_timeout_s": DEADLINE_S},
                "model": {"path": "unused"},
                "data": {"train": "unused"},
                "rollout": {"tensor_parallel": 4, "nodes": 2},
                "sync": {"lease_ttl_s": 1.0},
            }
        )
        self.files = {role: files_of(folder, AUTHORITY, role) for role in ("rollout", "coordinator")}
        self.environment = ServiceEnvironment.from_env(
            {"REDIS_URL": redis_url, "TANDEM_RUN_ID": "t", "TANDEM_RUN_DIR": str(folder)}
            | variables(self.files["rollout"])
        )
        self.registry = Registry(redis_url, "t")
        self.receivers = [Receiver(rank) for rank in range(4)]
        self.addresses = [f"unix:{folder}/{uuid.uuid4().hex[:6]}" for _ in self.receivers]
        self.servers = [
            start_sync_server(add_receiver, receiver, address)
            for receiver, address in zip(self.receivers, self.addresses, strict=True)
        ]
        self.stopped = asyncio.Event()
        self.engines: list[FakeEngine] = []
        self.workers: list[asyncio.Task[None]] = []
        self.leaders: list[HostWorkers] = []

    def start_worker(self, stop: asyncio.Event | None = None, settings: str = "") -> "asyncio.Task[None]":
        share = HostRanks(host=1, nodes=2, tensor_parallel=4, settings=settings)

        def make(config: RunConfig, name: str, environment: ServiceEnvironment, met: HostRanks) -> FakeEngine:
            assert met.store == "127.0.0.1:4"
            self.engines.append(FakeEngine())
            self.engines[-1].rank_addresses = self.addresses[2:]
            return self.engines[-1]

        run = serve_worker(self.config, "rollout-0", self.environment, stop or asyncio.Event(), share, make)
        self.workers.append(asyncio.create_task(run))
        return self.workers[-1]

    def leader(self, tensor_parallel: int = 4, settings: str = "") -> HostWorkers:
        made = HostWorkers(
            "rollout-0",
            HostRanks(nodes=2, tensor_parallel=tensor_parallel, settings=settings),
            identity=self.environment.identity("rollout"),
            ttl_s=self.config.sync.lease_ttl_s,
            on_stop=self.stopped.set,
        )
        self.leaders.append(made)
        return made

    async def joined(self, timeout_s: float = DEADLINE_S) -> HostWorkers:
        leader = self.leader()
        await leader.join("127.0.0.1:4", self.registry, timeout_s)
        return leader

    async def serving(self) -> tuple[HostWorkers, RankGroups]:
        """Once the worker's ranks are up."""
        leader = await self.joined()
        ranks = RankGroups([*rank_clients(self.addresses[:2]), *leader.ranks()])
        async with asyncio.timeout(DEADLINE_S):
            while True:
                with contextlib.suppress(NotReady):
                    await ranks.checksums()
                    return leader, ranks
                await asyncio.sleep(0.01)

    async def close(self) -> None:
        for task in self.workers:
            task.cancel()
        await asyncio.gather(*self.workers, return_exceptions=True)
        for leader in self.leaders:
            await leader.close()
        for server in self.servers:
            server.stop(grace=0)
        self.registry.close()


AUTHORITY = Authority("ours")


@pytest.fixture
async def rig(tmp_path: Path, redis_server: str) -> AsyncIterator[Rig]:
    made = Rig(tmp_path, redis_server)
    yield made
    await made.close()


async def end_of(worker: "asyncio.Task[None]") -> str:
    """What the worker says when it ends; "" for an end without an error."""
    async with asyncio.timeout(DEADLINE_S):
        try:
            await worker
        except Unavailable as error:
            return str(error)
        return ""


async def test_the_leader_drives_the_ranks_of_all_hosts_in_their_order(rig: Rig) -> None:
    rig.start_worker()
    _, ranks = await rig.serving()
    assert ranks.num_ranks == 4
    assert [each["rank"] for each in await ranks.checksums()] == ["0", "1", "2", "3"]
    reports = await ranks.run_phase(pb.ROUND_PHASE_TRANSFER, ROUND)
    assert [report.bytes_received for report in reports] == [0, 1, 2, 3]
    await ranks.load_published(pb.LoadPublishedRequest(folder="f"))
    assert [receiver.loaded for receiver in rig.receivers] == [["f"]] * 4


RANK = """
import signal, sys
from rollout_service.sglang_engine.receiver import ShardReceiver, add_receiver
from servicekit.rpc.sync_server import start_sync_server
server = start_sync_server(add_receiver, ShardReceiver(None, None), sys.argv[1])
print("up", flush=True)
signal.pause()
"""


@contextlib.asynccontextmanager
async def rank_process(address: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """A rank's server in a process of its own, which can be stopped."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", RANK, address, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(DEADLINE_S):
            assert await process.stdout.readline() == b"up\n"
        yield process
    finally:
        process.kill()
        await process.wait()


async def test_a_rank_whose_process_is_stopped_between_calls_ends_its_host_and_the_engine(rig: Rig) -> None:
    rig.config = rig.config.model_copy(
        update={"rollout": rig.config.rollout.model_copy(update={"stall_timeout_s": 0.5})}
    )
    rig.addresses[3] = f"unix:{rig.folder}/stopped"
    async with rank_process(rig.addresses[3]) as process:
        (rank,) = rank_clients(rig.addresses[3:])
        assert await rank.answers()
        worker = rig.start_worker()
        leader = await rig.joined()
        async with asyncio.timeout(DEADLINE_S):
            with pytest.raises(TimeoutError):  # it moves
                await asyncio.wait_for(asyncio.shield(leader.lost), 1.0)
            process.send_signal(signal.SIGSTOP)
            with pytest.raises(Unavailable, match=r"rollout-0-host-1 has a rank that has not answered"):
                await leader.lost
            assert "(rollout.stall_timeout_s)" in await end_of(worker)
        await rank.close()


async def test_an_error_of_a_remote_rank_keeps_its_kind_and_names_host_and_rank(rig: Rig) -> None:
    rig.start_worker()
    _, ranks = await rig.serving()
    rig.receivers[3].fails[pb.ROUND_PHASE_VERIFY] = DigestMismatch("not the bytes that were sent")
    with pytest.raises(DigestMismatch, match=r"host 1 of rollout-0 \(rollout-0-host-1 at .*\): rank 3: not the bytes"):
        await ranks.run_phase(pb.ROUND_PHASE_VERIFY, ROUND)


async def test_only_a_rollout_may_call_a_worker(rig: Rig) -> None:
    rig.start_worker()
    (record,) = await asyncio.to_thread(rig.registry.wait_for, "rollout-worker", ["rollout-0-host-1"], DEADLINE_S)
    identity = Identity(rig.files["coordinator"], "coordinator")
    async with open_channel(record.address, identity=identity, peer="rollout") as channel:
        stub = worker_pb2_grpc.RolloutWorkerServiceStub(channel)
        with pytest.raises(PermissionDenied, match="certificates for rollout"), translated():
            await stub.Beat(worker_pb2.BeatRequest(leader_id="x"), timeout=DEADLINE_S)


async def test_a_host_that_does_not_come_is_named(rig: Rig) -> None:
    with pytest.raises(DeadlineExceeded, match=r"host 1 of rollout-0 .*TANDEM_HOST_INDEX=1.*no rollout-0-host-1 in"):
        await rig.joined(timeout_s=0.3)


@pytest.mark.parametrize(
    ("theirs", "told"),
    [
        ('{"rollout.context_length": "8192"}', "rollout.context_length: 4096 here, 8192 there: restart the services"),
        ("[", r"the leader's cannot be read \("),
    ],
)
async def test_a_worker_that_has_read_other_settings_of_the_engine_is_refused_by_name(
    rig: Rig, theirs: str, told: str
) -> None:
    rig.start_worker(settings='{"rollout.context_length": "4096"}')
    with pytest.raises(InvalidRequest, match=f"host 1 of rollout-0 has read other settings .*: {told}"):
        await rig.leader(settings=theirs).join("127.0.0.1:4", rig.registry, DEADLINE_S)


def test_a_host_tells_the_settings_of_its_engine_and_no_others() -> None:
    sections = {"model": {"path": "unused"}, "data": {"train": "unused"}, "rollout": {"context_length": 4096}}
    config = RunConfig.model_validate(sections)
    settings = json.loads(HostRanks.of(config, {}).settings)
    assert settings["rollout.context_length"] == "4096"
    assert set(settings) == OF_A_REPLICA


async def test_a_worker_of_another_engine_is_refused_at_once(rig: Rig) -> None:
    rig.start_worker()
    with pytest.raises(InvalidRequest, match="8 ranks on 2 hosts, but this is host 1 of rollout-0, 4 ranks"):
        await rig.leader(tensor_parallel=8).join("127.0.0.1:4", rig.registry, DEADLINE_S)


async def test_a_worker_of_an_earlier_leader_ends_and_is_not_taken_over(rig: Rig) -> None:
    old = rig.start_worker()
    await rig.joined()
    second = asyncio.create_task(rig.joined())
    assert "new leader" in await end_of(old)
    assert not second.done()
    rig.start_worker()
    await asyncio.wait_for(second, DEADLINE_S)


async def test_a_leader_that_falls_silent_ends_its_worker(rig: Rig) -> None:
    worker = rig.start_worker()
    leader, _ = await rig.serving()
    await leader.close()  # no beat any more, and no word
    assert await end_of(worker) == "the leader of rollout-0 is lost: no beat for 1 s"


async def test_a_worker_that_is_gone_is_named_to_the_leader(rig: Rig) -> None:
    worker = rig.start_worker()
    leader, _ = await rig.serving()
    worker.cancel()
    with pytest.raises(Unavailable, match=r"host 1 of rollout-0 \(rollout-0-host-1 at .*\) is lost"):
        await asyncio.wait_for(leader.lost, DEADLINE_S)


async def test_what_a_rank_of_the_worker_died_of_reaches_both_ends(rig: Rig) -> None:
    worker = rig.start_worker()
    leader, _ = await rig.serving()
    rig.engines[0].failed.set_exception(RuntimeError("SGLang process 7 died"))
    with pytest.raises(Unavailable, match=r"host 1 of rollout-0 .*SGLang process 7 died"):
        await asyncio.wait_for(leader.lost, DEADLINE_S)
    why = await leader.explain(RuntimeError("our rank lost its peer"))
    assert "SGLang process 7 died; seen here as RuntimeError: our rank lost its peer" in str(why)
    await leader.leave(str(why), failed=True)
    assert "SGLang process 7 died; the leader of rollout-0 ended" in await end_of(worker)


@pytest.mark.parametrize(("failed", "said"), [(False, ""), (True, "the leader of rollout-0 ended: because")])
async def test_a_worker_ends_with_its_leader(rig: Rig, failed: bool, said: str) -> None:
    worker = rig.start_worker()
    leader, _ = await rig.serving()
    await leader.leave("because", failed=failed)
    assert await end_of(worker) == said
    assert rig.engines[0].calls[-1] == "shutdown"


async def test_a_worker_that_is_asked_to_end_waits_for_its_leader(rig: Rig) -> None:
    stop = asyncio.Event()
    worker = rig.start_worker(stop)
    leader, ranks = await rig.serving()
    stop.set()
    await asyncio.wait_for(rig.stopped.wait(), DEADLINE_S)
    assert await ranks.checksums()  # the leader drains, and the ranks are there for it
    await leader.leave("it was asked to stop", failed=False)
    assert await end_of(worker) == ""


async def test_a_worker_without_a_leader_ends_when_asked(rig: Rig) -> None:
    stop = asyncio.Event()
    worker = rig.start_worker(stop)
    await asyncio.to_thread(rig.registry.wait_for, "rollout-worker", ["rollout-0-host-1"], DEADLINE_S)
    stop.set()
    assert await end_of(worker) == ""
