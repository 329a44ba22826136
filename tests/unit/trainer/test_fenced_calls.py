"""A coordinator that was replaced commands no rank, whatever it asks for; its successor waits for what it had begun."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from servicekit.errors import Fenced, Internal, NotReady, Unavailable
from servicekit.rpc.fence import FenceGuard
from tandem_api.common.v1.common_pb2 import CoordinatorFence
from tandem_api.trainer.v1 import trainer_pb2 as pb
from tandem_api.weights.v1 import weights_pb2
from tests.fakes.trainer_servicer import TrainerServicer
from tests.fenced_calls import fenced_calls
from tests.unit.trainer.batches import LIMITS, message
from trainer_service.engine import Saving
from trainer_service.ranks.commands import Command, Commander

OLD, NEW = CoordinatorFence(worker_id="a", token=7), CoordinatorFence(worker_id="b", token=8)
HEADER = pb.TrainStepHeader(step_id="s", num_updates=1, num_samples=2, fence=OLD)
ABORT = weights_pb2.ROUND_PHASE_ABORT
DEADLINE_S = 10.0


class FakeEngine:
    policy_version = 0
    limits = LIMITS
    saving: Saving | None = None


class FakeCommander(Commander):
    """Remembers the commands; they are done when the test says so."""

    def __init__(self) -> None:
        self.commands: list[Command] = []
        self.replies: list[Future[list[bytes]]] = []
        self.submitted: asyncio.Queue[Command] = asyncio.Queue()

    def submit(
        self, command: Command, parts: Sequence[bytes] = (), timeout_s: float | None = None
    ) -> "Future[list[bytes]]":
        self.commands.append(command)
        self.replies.append(Future())
        self.submitted.put_nowait(command)
        return self.replies[-1]


@pytest.fixture
def commander() -> FakeCommander:
    return FakeCommander()


@pytest.fixture
def servicer(commander: FakeCommander, tmp_path: Path) -> TrainerServicer:
    made = TrainerServicer(commander, max_samples=8, run_dir=tmp_path)
    made._engine = FakeEngine()  # type: ignore[assignment]
    return made


def led_by(leader: CoordinatorFence) -> FenceGuard:
    """What a service knows if Redis has this leader."""
    guard = FenceGuard(lambda: leader)
    guard.remember(leader)
    return guard


async def taken_over(servicer: TrainerServicer, commander: FakeCommander) -> pb.TakeOverResponse:
    asked = asyncio.create_task(servicer.TakeOver(pb.TakeOverRequest(fence=NEW), None))
    assert await commander.submitted.get() is Command.NOOP
    assert not asked.done()
    commander.replies[-1].set_result([b""])
    return await asked


def step(header: pb.TrainStepHeader, taken: asyncio.Event | None = None) -> AsyncIterator[pb.TrainStepRequest]:
    """The stream of a TrainStep; its samples come when `taken` is set."""

    async def requests() -> AsyncIterator[pb.TrainStepRequest]:
        yield pb.TrainStepRequest(header=header)
        if taken is not None:
            await taken.wait()
        yield pb.TrainStepRequest(chunk=message())

    return requests()


CALLS: dict[str, Any] = {
    "TakeOver": pb.TakeOverRequest(fence=OLD),
    "RunPhase": weights_pb2.RunPhaseRequest(phase=ABORT, round=weights_pb2.Round(round_id="r", fence=OLD)),
    "SaveCheckpoint": pb.SaveCheckpointRequest(path="/run/x", fence=OLD),
    "FinishCheckpoint": pb.FinishCheckpointRequest(path="/run/x", fence=OLD),
    "ExportModel": pb.ExportModelRequest(path="/run/x", fence=OLD),
    "RestorePolicy": pb.RestorePolicyRequest(path="", policy_version=1, fence=OLD),
}


def test_no_call_with_a_fence_is_forgotten() -> None:
    """Those within a replica come from its own service, which has refused the coordinator's before."""
    calls = fenced_calls()
    within = {"tandem_api.rollout.v1.RolloutWorkerService", "tandem_api.weights.v1.ShardReceiverService"}
    assert {service for service, names in calls.items() if names} == within | {
        *("tandem_api.trainer.v1.TrainerService", "tandem_api.rollout.v1.RolloutService"),
        "tandem_api.weights.v1.RoundService",
    }
    asked = calls["tandem_api.trainer.v1.TrainerService"] | calls["tandem_api.weights.v1.RoundService"]
    assert asked == {*CALLS, "TrainStep"}


@pytest.mark.parametrize("call", CALLS)
async def test_a_replaced_coordinator_is_refused(
    servicer: TrainerServicer, commander: FakeCommander, tmp_path: Path, call: str
) -> None:
    await taken_over(servicer, commander)
    request = type(CALLS[call])()
    request.CopyFrom(CALLS[call])
    if "path" in request.DESCRIPTOR.fields_by_name and request.path:
        request.path = str(tmp_path / "x")
    with pytest.raises(Fenced, match=r"coordinator a \(token 7\)"):
        await asyncio.wait_for(getattr(servicer, call)(request, None), DEADLINE_S)
    assert commander.commands == [Command.NOOP]


@pytest.mark.parametrize("call", [*CALLS, "TrainStep"])
async def test_a_token_that_redis_does_not_know_locks_nobody_out(
    servicer: TrainerServicer, commander: FakeCommander, tmp_path: Path, call: str
) -> None:
    servicer.serve_engine(FakeEngine(), led_by(OLD))  # type: ignore[arg-type]
    original = CALLS.get(call, HEADER)
    request = type(original)()
    request.CopyFrom(original)
    (request.round if call == "RunPhase" else request).fence.token = 2**53
    if "path" in request.DESCRIPTOR.fields_by_name and request.path:
        request.path = str(tmp_path / "x")
    with pytest.raises(Unavailable, match=r"coordinator a \(token 7\) leads the run"):
        await getattr(servicer, call)(step(request) if call == "TrainStep" else request, None)
    assert commander.commands == []
    training = asyncio.create_task(servicer.TrainStep(step(HEADER), None))
    assert await commander.submitted.get() is Command.TRAIN_STEP
    training.cancel()


async def test_a_trainer_that_is_started_again_refuses_it_too(commander: FakeCommander, tmp_path: Path) -> None:
    restarted = TrainerServicer(commander, max_samples=8, run_dir=tmp_path)
    restarted.serve_engine(FakeEngine(), led_by(NEW))  # type: ignore[arg-type]
    with pytest.raises(Fenced, match=r"coordinator a \(token 7\)"):
        await asyncio.wait_for(restarted.TrainStep(step(HEADER), None), DEADLINE_S)
    assert commander.commands == []


async def test_a_replaced_coordinator_trains_no_step(servicer: TrainerServicer, commander: FakeCommander) -> None:
    await taken_over(servicer, commander)
    with pytest.raises(Fenced):
        await asyncio.wait_for(servicer.TrainStep(step(HEADER), None), DEADLINE_S)
    assert commander.commands == [Command.NOOP]


async def test_a_step_whose_samples_came_too_late_is_not_trained(
    servicer: TrainerServicer, commander: FakeCommander
) -> None:
    late = asyncio.Event()
    training = asyncio.create_task(servicer.TrainStep(step(HEADER, late), None))
    await asyncio.sleep(0)
    await taken_over(servicer, commander)
    late.set()
    with pytest.raises(Fenced):
        await asyncio.wait_for(training, DEADLINE_S)
    assert commander.commands == [Command.NOOP]


async def test_a_step_that_had_begun_is_done_before_the_successor_goes_on(
    servicer: TrainerServicer, commander: FakeCommander
) -> None:
    training = asyncio.create_task(servicer.TrainStep(step(HEADER), None))
    assert await commander.submitted.get() is Command.TRAIN_STEP
    await taken_over(servicer, commander)
    assert commander.commands == [Command.TRAIN_STEP, Command.NOOP]  # one at a time, in this order
    done = pb.TrainStepResponse(policy_version=1, metrics={"loss": 0.0, "grad_norm": 0.0})
    commander.replies[0].set_result([done.SerializeToString()])
    assert (await training).policy_version == 1


async def test_a_checkpoint_beside_the_training_is_done_before_the_next_coordinator_begins(
    servicer: TrainerServicer, commander: FakeCommander, tmp_path: Path
) -> None:
    folder, written = tmp_path / "step", Future[int]()
    servicer._ready().saving = Saving(folder=folder, done=written)  # type: ignore[misc]
    asked = asyncio.create_task(servicer.TakeOver(pb.TakeOverRequest(fence=NEW), None))
    await commander.submitted.get()
    commander.replies[-1].set_result([b""])
    request = pb.FinishCheckpointRequest(path=str(folder), fence=NEW)
    finishing = asyncio.create_task(servicer.FinishCheckpoint(request, None))
    await asyncio.sleep(0.05)
    assert not asked.done()
    assert not finishing.done()
    written.set_exception(Internal("the disk is full"))
    await asyncio.wait_for(asked, DEADLINE_S)
    with pytest.raises(Internal, match="the disk is full"):
        await asyncio.wait_for(finishing, DEADLINE_S)
    other = pb.FinishCheckpointRequest(path=str(tmp_path / "other"), fence=NEW)
    with pytest.raises(NotReady, match=r"other is not being written"):
        await servicer.FinishCheckpoint(other, None)
