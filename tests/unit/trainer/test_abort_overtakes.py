"""ABORT of a round, and a new coordinator, reach a trainer whose ranks are in that round's TRANSFER, and hang there."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import TypeVar

import pytest

from servicekit.errors import PeerLost
from tandem_api.common.v1 import common_pb2
from tandem_api.trainer.v1 import trainer_pb2
from tandem_api.weights.v1 import weights_pb2
from tests.fakes.trainer_servicer import TrainerServicer
from trainer_service.ranks.commands import Command, Commander, Wire

T = TypeVar("T")
PREPARE, TRANSFER, COMMIT, ABORT = (
    weights_pb2.ROUND_PHASE_PREPARE,
    weights_pb2.ROUND_PHASE_TRANSFER,
    weights_pb2.ROUND_PHASE_COMMIT,
    weights_pb2.ROUND_PHASE_ABORT,
)


class NoWire(Wire):
    """Of a trainer of one rank."""

    def __init__(self) -> None:
        self.rank, self.world_size = 0, 1


class HangingRank:
    """Its TRANSFER ends when its round is interrupted."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.interrupted: Future[str] = Future()

    def interrupt(self, round_id: str) -> None:
        self.interrupted.set_result(round_id)

    def publish(self, parts: object) -> bytes:
        assert isinstance(parts, list)
        request = weights_pb2.RunPhaseRequest.FromString(parts[0])
        if request.phase == TRANSFER:
            self.begun.set()
            raise PeerLost(f"{self.interrupted.result(timeout=10)} was given up")
        return weights_pb2.PhaseReport(policy_version=7).SerializeToString()


def request(phase: "weights_pb2.RoundPhase.ValueType", version: int = 7) -> weights_pb2.RunPhaseRequest:
    round_ = weights_pb2.Round(
        round_id=f"round-{version}", policy_version=version, formation_timeout_s=60, transfer_timeout_s=60
    )
    return weights_pb2.RunPhaseRequest(phase=phase, round=round_)


def behind_a_transfer(run_dir: Path, call: Callable[[TrainerServicer], Awaitable[T]]) -> T:
    """What a call answers that comes while a TRANSFER hangs, which ends by it."""
    rank, commander = HangingRank(), Commander()
    handlers = {Command.PUBLISH: rank.publish, Command.NOOP: lambda _: b""}
    threading.Thread(target=commander.run, args=(NoWire(), handlers), name="ranks", daemon=True).start()
    servicer = TrainerServicer(commander, max_samples=1, run_dir=run_dir, interrupt=rank.interrupt)
    servicer._engine = SimpleNamespace(saving=None, policy_version=7)

    async def both() -> T:
        await servicer.RunPhase(request(PREPARE), None)
        transfer = asyncio.create_task(servicer.RunPhase(request(TRANSFER), None))
        await asyncio.to_thread(rank.begun.wait, 10)
        async with asyncio.timeout(5):
            reply = await call(servicer)
        with pytest.raises(PeerLost, match="round-7 was given up"):
            await transfer
        return reply

    try:
        return asyncio.run(both())
    finally:
        commander.submit(Command.STOP)


def test_an_abort_ends_the_transfer_that_it_would_wait_behind(tmp_path: Path) -> None:
    reply = behind_a_transfer(tmp_path, lambda servicer: servicer.RunPhase(request(ABORT), None))
    assert [report.policy_version for report in reply.reports] == [7]


def test_the_next_round_ends_the_transfer_of_one_whose_abort_never_came(tmp_path: Path) -> None:
    reply = behind_a_transfer(tmp_path, lambda servicer: servicer.RunPhase(request(PREPARE, 8), None))
    assert [report.policy_version for report in reply.reports] == [7]


def test_a_late_prepare_of_an_older_round_ends_nothing(tmp_path: Path) -> None:
    async def late(servicer: TrainerServicer) -> int:
        older = asyncio.create_task(servicer.RunPhase(request(PREPARE, 6), None))
        done, _ = await asyncio.wait([older], timeout=0.2)  # it waits behind the transfer
        await servicer.RunPhase(request(ABORT), None)
        await older
        return len(done)

    assert behind_a_transfer(tmp_path, late) == 0


@pytest.mark.parametrize("end", [COMMIT, ABORT])
async def test_a_round_that_is_over_is_interrupted_no_more(
    tmp_path: Path, end: "weights_pb2.RoundPhase.ValueType"
) -> None:
    commander, interrupted = Commander(), list[str]()
    report = weights_pb2.PhaseReport().SerializeToString()
    threading.Thread(target=commander.run, args=(NoWire(), {Command.PUBLISH: lambda _: report}), daemon=True).start()
    servicer = TrainerServicer(commander, max_samples=1, run_dir=tmp_path, interrupt=interrupted.append)
    servicer._engine = SimpleNamespace(saving=None, policy_version=7)
    try:
        for phase, version in ((PREPARE, 7), (end, 7), (PREPARE, 8)):
            await servicer.RunPhase(request(phase, version), None)
    finally:
        commander.submit(Command.STOP)
    assert interrupted == (["round-7"] if end == ABORT else [])  # by ABORT itself


def test_a_new_coordinator_ends_the_transfer_whose_coordinator_is_lost_with_a_replica(tmp_path: Path) -> None:
    fence = common_pb2.CoordinatorFence(worker_id="b", token=8)
    taken = trainer_pb2.TakeOverRequest(fence=fence)
    assert behind_a_transfer(tmp_path, lambda servicer: servicer.TakeOver(taken, None)).policy_version == 7
