"""One weight-sync round: its phases in order, on the trainer and every replica.

PREPARE   everyone      plans equal
PAUSE     rollouts
TRANSFER  everyone      bytes received == shard bytes
VERIFY    rollouts      digests (checked by the rollouts themselves)
COMMIT    everyone      the version flips; asked for once more if a reply is lost
ABORT     everyone      after a failure, at any phase
"""

import asyncio
from collections.abc import Sequence
from typing import Protocol

from coordinator.replica import Replica
from coordinator.sync_report import RoundReports
from coordinator.trainer import Trainer
from servicekit.errors import DeadlineExceeded, TandemError, Unavailable
from servicekit.logs import get_logger
from tandem_api.weights.v1 import weights_pb2

# On top of the round's own deadlines, as the services' contracts state.
PHASE_MARGIN_S = 30.0

log = get_logger(__name__)


class Participant(Protocol):
    """The trainer or a replica, as a round sees it."""

    name: str

    async def run_phase(
        self, phase: "weights_pb2.RoundPhase.ValueType", sync_round: weights_pb2.Round, *, timeout_s: float
    ) -> list[weights_pb2.PhaseReport]:
        """Run one phase; a report per rank."""
        ...


class SyncRound:
    """A round on its way; `run` it once, `abort` it if that raises."""

    def __init__(self, description: weights_pb2.Round, trainer: Trainer, replicas: Sequence[Replica]) -> None:
        self.description = description
        self._replicas = tuple(replicas)
        self._everyone: tuple[Participant, ...] = (trainer, *replicas)
        self._timeout_s = description.formation_timeout_s + description.transfer_timeout_s + PHASE_MARGIN_S

    async def run(self) -> RoundReports:
        """All phases.

        Raises: TandemError: of the participant that failed first, named.
        """
        reports = RoundReports()
        prepared = await self._phase(weights_pb2.ROUND_PHASE_PREPARE, self._everyone)
        reports.check_plans(prepared)
        paused = await self._phase(weights_pb2.ROUND_PHASE_PAUSE, self._replicas)
        moved = await self._phase(weights_pb2.ROUND_PHASE_TRANSFER, self._everyone)
        reports.check_bytes({replica.name: moved[replica.name] for replica in self._replicas})
        verified = await self._phase(weights_pb2.ROUND_PHASE_VERIFY, self._replicas)
        for phase_reports in (prepared, paused, moved, verified, await self._commit()):
            reports.add(phase_reports)
        return reports

    async def _commit(self) -> dict[str, list[weights_pb2.PhaseReport]]:
        """COMMIT is idempotent: who has done it answers again, so that a lost reply does not undo a finished round."""
        try:
            return await self._phase(weights_pb2.ROUND_PHASE_COMMIT, self._everyone)
        except (Unavailable, DeadlineExceeded) as error:
            log.warning("a reply to COMMIT was lost; asking again", error=str(error))
            return await self._phase(weights_pb2.ROUND_PHASE_COMMIT, self._everyone)

    async def abort(self) -> list[str]:
        """Give the round up everywhere. Returns: what participants failed to confirm it, in words."""
        # As long a deadline as any phase: a participant that waits for a lost peer answers when its own wait is over.
        calls = [
            participant.run_phase(weights_pb2.ROUND_PHASE_ABORT, self.description, timeout_s=self._timeout_s)
            for participant in self._everyone
        ]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException) and not isinstance(answer, TandemError):
                raise answer
        return [str(answer) for answer in answers if isinstance(answer, TandemError)]

    async def _phase(
        self, phase: "weights_pb2.RoundPhase.ValueType", participants: Sequence[Participant]
    ) -> dict[str, list[weights_pb2.PhaseReport]]:
        """One phase on all participants at once: inside it they wait for each other."""
        tasks = {
            participant.name: asyncio.create_task(
                participant.run_phase(phase, self.description, timeout_s=self._timeout_s),
                name=f"{weights_pb2.RoundPhase.Name(phase)}-{participant.name}",
            )
            for participant in participants
        }
        try:
            await asyncio.wait(tasks.values(), return_when=asyncio.FIRST_EXCEPTION)
            # The first to fail is the one to name: the others' errors are often its consequence.
            for task in tasks.values():
                if task.done() and (error := task.exception()) is not None:
                    raise error
            return {name: task.result() for name, task in tasks.items()}
        finally:
            for task in tasks.values():
                task.cancel()
            await asyncio.gather(*tasks.values(), return_exceptions=True)
