from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from prometheus_client import CollectorRegistry

from rollout_service import servicer as servicer_module
from rollout_service.metrics import RolloutMetrics
from rollout_service.servicer import RolloutServicer
from rollout_service.weight_updates.admission import Admission
from rollout_service.weight_updates.pauses import Pauses
from rollout_service.weight_updates.updates import WeightUpdates
from servicekit.errors import REASON_KEY
from servicekit.rpc.arrays import read_array
from servicekit.rpc.channel import open_channel
from servicekit.rpc.fence import FenceGuard
from servicekit.rpc.server import GrpcServer
from tandem_api.common.v1.common_pb2 import CoordinatorFence
from tandem_api.rollout.v1 import rollout_pb2 as pb
from tandem_api.rollout.v1 import rollout_pb2_grpc
from tandem_api.weights.v1 import weights_pb2, weights_pb2_grpc
from tests.fenced_calls import fenced_calls
from tests.unit.rollout.fake_engine import FakeEngine, FakeRanks
from tests.unit.rollout.test_updates import a_round
from tools.bench_sync.whole_groups import prompt_group, submission
from weightsync.layouts.layout import Parallel
from weightsync.round.client import SERVICE
from weightsync.round.phases import ABORT, COMMIT, PAUSE, PREPARE, TRANSFER, VERIFY

NAME = "tandem_api.rollout.v1.RolloutService"


class Served:
    """RolloutService over real gRPC, around a fake engine that has version 1."""

    def __init__(self, leader: CoordinatorFence | None = None) -> None:
        fence = FenceGuard(lambda: leader or CoordinatorFence())
        fence.remember(leader or CoordinatorFence())
        self.engine = FakeEngine()
        self.registry = CollectorRegistry()
        self.server = GrpcServer("rollout")
        admission = Admission()
        metrics = RolloutMetrics(self.registry)
        ranks = self.ranks = FakeRanks()
        self.updates = WeightUpdates(
            self.engine, ranks, Pauses(self.engine, admission), metrics.observe_state, metrics.sync.observe_reports
        )
        self.servicer = RolloutServicer(
            name="rollout-0",
            parallel=Parallel(tensor=2),
            max_groups=4,
            engine=self.engine,
            ranks=ranks,
            admission=admission,
            updates=self.updates,
            metrics=metrics,
            fence=fence,
            settings_digest="d1",
        )
        self.server.add(rollout_pb2_grpc.add_RolloutServiceServicer_to_server, self.servicer, NAME)
        self.server.add(weights_pb2_grpc.add_RoundServiceServicer_to_server, self.servicer, SERVICE)

    async def start(self) -> None:
        for phase in (PREPARE, PAUSE, TRANSFER, VERIFY, COMMIT):
            await self.updates.run_phase(phase, a_round("seed", 1))
        self.address = await self.server.start()
        channel = open_channel(self.address)
        self.stub = rollout_pb2_grpc.RolloutServiceStub(channel)
        self.rounds = weights_pb2_grpc.RoundServiceStub(channel)

    async def generate(self, num_groups: int = 2, version: int = 1) -> list[Any]:
        groups = [prompt_group(str(i), [1, 2], 3) for i in range(num_groups)]
        request = submission(groups, version, max_new_tokens=4)
        return [reply async for reply in self.stub.Generate(iter([request]), timeout=5.0)]


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    made = Served()
    await made.start()
    yield made
    await made.server.drain(0.0)


async def test_groups_come_back_whole(served: Served) -> None:
    replies = await served.generate()
    groups = [group for reply in replies for group in reply.groups]
    assert [group.group_id for group in groups] == ["0", "1"]
    for completion in (c for group in groups for c in group.completions):
        assert read_array(completion, "token_ids_u32").tolist() == [1] * 4
        assert completion.finish_reason == pb.FINISH_REASON_LENGTH
        (span,) = completion.version_spans
        assert (span.start, span.end, span.policy_version) == (0, 4, 1)
    assert replies[-1].engine_s > 0
    assert served.registry.get_sample_value("tandem_generated_tokens_total") == 2 * 3 * 4


async def test_status_tells_that_the_engine_computes(served: Served) -> None:
    served.engine.progress = 7
    status = await served.stub.GetStatus(pb.GetStatusRequest(), timeout=5.0)
    assert (status.engine_progress, status.generated_tokens, status.settings_digest) == (7, 0, "d1")


@pytest.mark.parametrize(
    ("arguments", "code", "reason"),
    [
        ({"version": 2}, grpc.StatusCode.FAILED_PRECONDITION, "WRONG_VERSION"),
        ({"num_groups": 5}, grpc.StatusCode.RESOURCE_EXHAUSTED, "TOO_LARGE"),
    ],
)
async def test_refusals_carry_status_and_reason(
    served: Served, arguments: dict[str, int], code: grpc.StatusCode, reason: str
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await served.generate(**arguments)
    assert refused.value.code() == code
    assert dict(refused.value.trailing_metadata() or ())[REASON_KEY] == reason


async def test_pause_status_and_checksums(served: Served) -> None:
    pause = pb.PauseGenerationRequest(mode=weights_pb2.PAUSE_MODE_DRAIN)
    assert (await served.stub.PauseGeneration(pause, timeout=5.0)).state == weights_pb2.REPLICA_STATE_PAUSED
    status = await served.stub.GetStatus(pb.GetStatusRequest(), timeout=5.0)
    assert (status.state, status.policy_version, status.parallel.tensor) == (weights_pb2.REPLICA_STATE_PAUSED, 1, 2)
    checksums = await served.stub.GetChecksums(pb.GetChecksumsRequest(), timeout=5.0)
    assert len(checksums.ranks) == 2
    resumed = await served.stub.ResumeGeneration(pb.ResumeGenerationRequest(), timeout=5.0)
    assert resumed.state == weights_pb2.REPLICA_STATE_SERVING


async def test_phases_of_one_call_run_in_turn_and_report_together(served: Served) -> None:
    async def run(round_id: str, phase: int, *then: int) -> list[weights_pb2.PhaseReport]:
        round_ = a_round(round_id, version=2)
        request = weights_pb2.RunPhaseRequest(phase=phase, round=round_, then=then)  # type: ignore[arg-type]
        return list((await served.rounds.RunPhase(request, timeout=5.0)).reports)

    with pytest.raises(grpc.aio.AioRpcError, match="TRANSFER: round early has not done PAUSE"):
        await run("early", PREPARE, TRANSFER, VERIFY)
    assert served.ranks.phases[-1] == "PREPARE"  # what failed ends the call
    await run("early", ABORT)
    both = await run("whole", PREPARE, PAUSE)
    assert [set(report.seconds) for report in both] == [{"transfer", "pause"}] * 2  # a fake rank says "transfer"
    assert await run("whole", TRANSFER, VERIFY) == await run("whole", TRANSFER, VERIFY)  # repeated: the same answer
    assert served.ranks.phases[-3:] == ["PREPARE", "TRANSFER", "VERIFY"]


async def test_a_round_without_an_id_is_refused(served: Served) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await served.rounds.RunPhase(weights_pb2.RunPhaseRequest(phase=PREPARE), timeout=5.0)
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_replies_stay_below_a_token_limit(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servicer_module, "MAX_TOKENS_PER_REPLY", 12)
    replies = await served.generate(num_groups=4)
    assert [len(reply.groups) for reply in replies if reply.groups] == [1, 1, 1, 1]


OLD, NEW = CoordinatorFence(worker_id="a", token=7), CoordinatorFence(worker_id="b", token=8)
FENCED: dict[str, Any] = {
    "TakeOver": pb.TakeOverRequest(fence=OLD),
    "RunPhase": weights_pb2.RunPhaseRequest(phase=ABORT, round=a_round("open", fence=OLD)),
    "LoadPublishedWeights": pb.LoadPublishedWeightsRequest(folder="/f", round_id="r", policy_version=9, fence=OLD),
    "PauseGeneration": pb.PauseGenerationRequest(mode=weights_pb2.PAUSE_MODE_DRAIN, fence=OLD),
    "ResumeGeneration": pb.ResumeGenerationRequest(fence=OLD),
}


def test_no_call_with_a_fence_is_forgotten() -> None:
    calls = fenced_calls()
    asked = calls["tandem_api.rollout.v1.RolloutService"] | calls["tandem_api.weights.v1.RoundService"]
    assert asked == set(FENCED)


@pytest.mark.parametrize("call", FENCED)
async def test_a_replaced_coordinator_is_refused(served: Served, call: str) -> None:
    await served.stub.TakeOver(pb.TakeOverRequest(fence=NEW), timeout=5.0)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await getattr(served.rounds if call == "RunPhase" else served.stub, call)(FENCED[call], timeout=5.0)
    assert dict(refused.value.trailing_metadata() or ())[REASON_KEY] == "FENCED"
    assert (served.updates.state, served.updates.policy_version) == (weights_pb2.REPLICA_STATE_SERVING, 1)


async def test_a_replica_that_is_started_again_refuses_it_too() -> None:
    restarted = Served(leader=NEW)
    await restarted.start()
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await restarted.stub.PauseGeneration(FENCED["PauseGeneration"], timeout=5.0)
    await restarted.server.drain(0.0)
    assert dict(refused.value.trailing_metadata() or ())[REASON_KEY] == "FENCED"


async def test_whoever_takes_over_finds_no_round_of_its_predecessor(served: Served) -> None:
    prepare = weights_pb2.RunPhaseRequest(phase=PREPARE, round=a_round("open", fence=OLD))
    await served.rounds.RunPhase(prepare, timeout=5.0)
    taken = await served.stub.TakeOver(pb.TakeOverRequest(fence=NEW), timeout=5.0)
    assert taken.policy_version == 1
    new = a_round("new", fence=NEW)
    for phase in (PREPARE, PAUSE, TRANSFER, VERIFY, COMMIT):
        await served.rounds.RunPhase(weights_pb2.RunPhaseRequest(phase=phase, round=new), timeout=5.0)
    assert served.updates.policy_version == 2
    assert served.ranks.phases[-5:] == ["ABORT", "PREPARE", "TRANSFER", "VERIFY", "COMMIT"]


@pytest.mark.parametrize("call", FENCED)
async def test_a_token_that_redis_does_not_know_locks_nobody_out(call: str) -> None:
    served = Served(leader=OLD)
    await served.start()
    request = type(FENCED[call])()
    request.CopyFrom(FENCED[call])
    (request.round.fence if call == "RunPhase" else request.fence).token = 2**53
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await getattr(served.rounds if call == "RunPhase" else served.stub, call)(request, timeout=5.0)
    assert dict(refused.value.trailing_metadata() or ())[REASON_KEY] == "UNAVAILABLE"
    assert "coordinator a (token 7) leads the run" in (refused.value.details() or "")
    await served.stub.TakeOver(pb.TakeOverRequest(fence=OLD), timeout=5.0)
    await served.server.drain(0.0)
