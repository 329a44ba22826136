"""What a round does to a replica's engine and ranks, phase by phase; what the replica is after it, updates.py says."""

import asyncio
from collections.abc import Awaitable
from dataclasses import dataclass

from rollout_service.engine import RolloutEngine
from rollout_service.weights.pauses import Pauses
from rollout_service.weights.ranks import Ranks
from servicekit.errors import TandemError
from servicekit.logs import get_logger
from tandem_api.weights.v1 import weights_pb2 as pb
from weightsync.round import deadlines
from weightsync.round.guard import OpenRound
from weightsync.round.phases import ABORT, COMMIT, PAUSE, TRANSFER, Phase, Role

log = get_logger(__name__)


@dataclass(kw_only=True)
class ReplicaRound(OpenRound):
    """touched: parameters may differ from what was served. session: SGLang's is open."""

    role: Role = Role.REPLICA
    touched: bool = False
    session: bool = False


class RoundSteps:
    """The engine, its ranks and its pause switch, as a round uses them."""

    def __init__(self, engine: RolloutEngine, ranks: Ranks, pauses: Pauses) -> None:
        self._engine = engine
        self._ranks = ranks
        self._pauses = pauses

    async def run(self, phase: Phase, current: ReplicaRound) -> list[pb.PhaseReport]:
        """PREPARE, PAUSE, TRANSFER or VERIFY. Raises: errors of the ranks."""
        if phase == PAUSE:
            await self._pause(current.message)
            return self.empty_reports()
        if phase == TRANSFER and not current.staged:
            await self._touch(current)
        return await self._ranks.run_phase(phase, current.message)

    async def install(self, current: ReplicaRound) -> list[pb.PhaseReport]:
        """COMMIT, all but the flip: the new weights are the engine's, and it is still frozen. Raises: as run()."""
        if current.staged:
            await self._pause(current.message)
            await self._touch(current)
        installing = asyncio.ensure_future(self._ranks.run_phase(COMMIT, current.message))
        if current.staged:  # what the engine derives from the parameters, it derives from the installed ones
            await installing
        # Nothing generates before it is thawed, so their order is free: one trip to the scheduler, not three.
        await _all(
            installing,
            self._end_session(current),
            self._engine.set_version(current.message.policy_version),
            self._pauses.flush(),
        )
        return installing.result()

    async def load(self, published: pb.LoadPublishedRequest) -> None:
        """Fills the frozen engine from disk. Raises: errors of the ranks."""
        await self._engine.begin_update()
        try:
            await self._ranks.load_published(published)
        finally:
            await self._engine.end_update()
        await _all(self._engine.set_version(published.policy_version), self._pauses.flush())

    async def give_up(self, current: ReplicaRound) -> list[pb.PhaseReport]:
        """ABORT."""
        reports = await self.interrupt(current.message)
        if current.session:
            await self._engine.end_update()
        return reports

    async def interrupt(self, round_: pb.Round) -> list[pb.PhaseReport]:
        """Ends what the ranks wait for in a phase under way."""
        try:
            return await self._ranks.run_phase(ABORT, round_)
        except TandemError as error:  # the round is over all the same; the next PREPARE meets the rank again
            log.warning("rank did not answer ABORT", round_id=round_.round_id, error=str(error))
            return self.empty_reports()

    def empty_reports(self) -> list[pb.PhaseReport]:
        """Of a phase in which the ranks have no part."""
        return [pb.PhaseReport() for _ in range(self._ranks.num_ranks)]

    async def _pause(self, round_: pb.Round) -> None:
        await self._pauses.pause(round_.pause_mode, deadlines.drain_s(round_))

    async def _touch(self, current: ReplicaRound) -> None:
        await self._engine.begin_update()
        current.touched = current.session = True

    async def _end_session(self, current: ReplicaRound) -> None:
        await self._engine.end_update()
        current.session = False


async def _all(*calls: Awaitable[object]) -> None:
    """Waits for all of them. Raises: the first error, when none is under way any more."""
    for result in await asyncio.gather(*calls, return_exceptions=True):
        if isinstance(result, BaseException):
            raise result
