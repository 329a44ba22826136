"""ABORT of a round reaches a trainer whose ranks are in that round's TRANSFER, and hang there."""

import asyncio
import threading
from concurrent.futures import Future
from pathlib import Path

import pytest

from servicekit.errors import PeerLost
from tandem_api.weights.v1 import weights_pb2
from tests.fakes.trainer_servicer import TrainerServicer
from trainer_service.ranks.commands import Command, Commander, Wire

TRANSFER, ABORT = weights_pb2.ROUND_PHASE_TRANSFER, weights_pb2.ROUND_PHASE_ABORT


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


def request(phase: "weights_pb2.RoundPhase.ValueType") -> weights_pb2.RunPhaseRequest:
    round_ = weights_pb2.Round(round_id="round-7", formation_timeout_s=60, transfer_timeout_s=60)
    return weights_pb2.RunPhaseRequest(phase=phase, round=round_)


def test_an_abort_ends_the_transfer_that_it_would_wait_behind(tmp_path: Path) -> None:
    rank, commander = HangingRank(), Commander()
    threading.Thread(
        target=commander.run, args=(NoWire(), {Command.PUBLISH: rank.publish}), name="ranks", daemon=True
    ).start()
    servicer = TrainerServicer(commander, max_samples=1, run_dir=tmp_path, interrupt=rank.interrupt)
    servicer._engine = object()  # type: ignore[assignment]

    async def both() -> weights_pb2.RunPhaseResponse:
        transfer = asyncio.create_task(servicer.RunPhase(request(TRANSFER), None))
        await asyncio.to_thread(rank.begun.wait, 10)
        async with asyncio.timeout(5):
            reply = await servicer.RunPhase(request(ABORT), None)
        with pytest.raises(PeerLost, match="round-7 was given up"):
            await transfer
        return reply

    reply = asyncio.run(both())
    commander.submit(Command.STOP)
    assert [report.policy_version for report in reply.reports] == [7]
