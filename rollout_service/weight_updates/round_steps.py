"""What each phase of a round does to a replica's engine and ranks; updates.py holds the states of the replica."""

import asyncio
from dataclasses import dataclass

from rollout_service.engine import RolloutEngine
from rollout_service.weight_updates.pauses import Pauses
from rollout_service.weight_updates.ranks import Ranks
from servicekit.errors import TandemError
from servicekit.lifecycle.tasks import all_of, end_of
from servicekit.logs import get_logger
from tandem_api.weights.v1 import weights_pb2 as pb
from weightsync.round import deadlines
from weightsync.round.guard import OpenRound
from weightsync.round.phases import ABORT, COMMIT, PAUSE, TRANSFER, Phase, Role

log = get_logger(__name__)


@dataclass(kw_only=True)
class ReplicaRound(OpenRound):
    """A round that is open on a replica.

    Attributes:
        touched: the parameters may differ from those that were served.
        opening: opens SGLang's update session; None: it is not open.
    """

    role: Role = Role.REPLICA
    touched: bool = False
    opening: "asyncio.Task[None] | None" = None


class RoundSteps:
    """The engine, its ranks and its pause switch, as a round uses them."""

    def __init__(self, engine: RolloutEngine, ranks: Ranks, pauses: Pauses) -> None:
        self._engine = engine
        self._ranks = ranks
        self._pauses = pauses

    async def run(self, phase: Phase, current: ReplicaRound) -> list[pb.PhaseReport]:
        """Run PREPARE, PAUSE, TRANSFER or VERIFY. Raises: errors of the ranks."""
        receives = current.role is Role.REPLICA
        if phase == PAUSE and receives:
            await self._pause(current.message)
            self._open(current)  # TRANSFER, which comes next, waits for the answer
            return self.empty_reports()
        if phase == TRANSFER and not current.staged and receives:
            await self._touch(current)
        return await self._ranks.run_phase(phase, current.message)

    async def install(self, current: ReplicaRound) -> list[pb.PhaseReport]:
        """Run COMMIT but for the replica's own state: install the weights in the still frozen engine.

        Raises: errors of the ranks.
        """
        if current.role is Role.SENDER:
            return await self._ranks.run_phase(COMMIT, current.message)
        if current.staged:
            await self._pause(current.message)
            await self._touch(current)
        installing = asyncio.ensure_future(self._ranks.run_phase(COMMIT, current.message))
        if current.staged:  # end_update() derives data from the parameters: they must be installed before it
            await installing
        # Nothing generates before the thaw, so the order is free: one trip to the scheduler instead of three.
        await all_of(
            installing,
            self._end_session(current),
            self._engine.set_version(current.message.policy_version),
            self._pauses.flush(),
        )
        return installing.result()

    async def load(self, published: pb.LoadPublishedRequest) -> None:
        """Fill the frozen engine from disk. Raises: errors of the ranks."""
        await self._engine.begin_update()
        try:
            await self._ranks.load_published(published)
        finally:
            await self._engine.end_update()
        await all_of(self._engine.set_version(published.policy_version), self._pauses.flush())

    async def give_up(self, current: ReplicaRound) -> list[pb.PhaseReport]:
        """Run ABORT: end the phase under way and close SGLang's session."""
        reports = await self.interrupt(current.message)
        if current.opening is not None:
            await end_of(current.opening)
            if not current.opening.cancelled() and current.opening.exception() is None:
                await self._engine.end_update()
        return reports

    async def interrupt(self, round_: pb.Round) -> list[pb.PhaseReport]:
        """End the ranks' waits in a phase under way."""
        try:
            return await self._ranks.run_phase(ABORT, round_)
        except TandemError as error:  # the round is over all the same; the rank takes part again at the next PREPARE
            log.warning("rank did not answer ABORT", round_id=round_.round_id, error=str(error))
            return self.empty_reports()

    def empty_reports(self) -> list[pb.PhaseReport]:
        """Make the reports of a phase in which the ranks have no part."""
        return [pb.PhaseReport() for _ in range(self._ranks.num_ranks)]

    async def _pause(self, round_: pb.Round) -> None:
        await self._pauses.pause(round_.pause_mode, deadlines.drain_s(round_))

    def _open(self, current: ReplicaRound) -> "asyncio.Task[None]":
        """Begin to open SGLang's session, if it is not open yet."""
        if current.opening is None:
            current.opening = asyncio.create_task(self._engine.begin_update(), name=f"open-{current.message.round_id}")
        return current.opening

    async def _touch(self, current: ReplicaRound) -> None:
        await asyncio.shield(self._open(current))
        current.touched = True

    async def _end_session(self, current: ReplicaRound) -> None:
        await self._engine.end_update()
        current.opening = None
