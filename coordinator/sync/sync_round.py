"""One weight-sync round: its phases in order, on the trainer and every replica.

The table of phases is weightsync/round/phases.py. What is checked here: PREPARE: plans are equal; TRANSFER: bytes
received are those of the shard. COMMIT is asked for once more if a reply is lost. Up to VERIFY all succeed or the round
is given up. From COMMIT on every replica has verified bytes of its own: losing one does not undo the others.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from coordinator.clients.probing import while_alive
from coordinator.clients.replica import Replica
from coordinator.clients.trainer import Trainer
from coordinator.flow import ReplicaOutcome
from coordinator.sync.sync_report import RoundReports
from servicekit.errors import DeadlineExceeded, PeerLost, TandemError, Unavailable
from servicekit.logs import get_logger
from servicekit.tracing import span
from tandem_api.rollout.v1 import rollout_pb2
from tandem_api.weights.v1 import weights_pb2
from weightsync.round.phases import ABORT, COMMIT, PREPARE, TRANSFER, Phase, PhaseRule, Role, first_write, rules_of

# A rank that fails closes its connections, and its peers say at once that they have lost it. Its own error, which says
# more, may come a moment later than theirs.
BLAME_S = 1.0

log = get_logger(__name__)

Reports = list[weights_pb2.PhaseReport]


Participant: TypeAlias = Trainer | Replica


class SyncRound:
    """A round on its way; `run` it once, `abort` it if that raises.

    Args:
        probe_timeout_s: a participant that does not answer a status question for so long is lost.
    """

    def __init__(
        self,
        description: weights_pb2.Round,
        trainer: Trainer,
        replicas: Sequence[Replica],
        *,
        probe_timeout_s: float = 10.0,
    ) -> None:
        self.description = description
        self.reports = RoundReports()
        self.outcomes: dict[str, ReplicaOutcome] = {}
        self._replicas = tuple(replicas)
        self._everyone: tuple[Participant, ...] = (trainer, *replicas)
        self._probe_timeout_s = probe_timeout_s
        self._begun: Phase = weights_pb2.ROUND_PHASE_UNSPECIFIED

    async def run(self) -> None:
        """All phases; `reports` and `outcomes` say what came of them.

        Raises: TandemError: of the participant that failed first, named; no replica has committed.
        """
        answers = []
        for rule in rules_of(staged=self._is_staged):
            answers.append(await self._commit() if rule.phase == COMMIT else await self._phase(rule))
            self._check(rule.phase, answers[-1])
        for reports in answers:
            self.reports.add(reports)

    def _check(self, phase: Phase, reports: dict[str, Reports]) -> None:
        """Raises: Internal, DigestMismatch: what participants report does not fit together."""
        if phase == PREPARE:
            self.reports.check_plans(reports)
        if phase == TRANSFER:
            self.reports.check_bytes({replica.name: reports[replica.name] for replica in self._replicas})

    async def _commit(self) -> dict[str, Reports]:
        """COMMIT wherever it can be had."""
        self._begun = COMMIT
        with span("sync commit"):
            answers = await asyncio.gather(*(self._commit_one(each) for each in self._everyone))
        found = dict(zip((each.name for each in self._everyone), answers, strict=True))
        done = {name: answer for name, answer in found.items() if not isinstance(answer, TandemError)}
        failed = {name: answer for name, answer in found.items() if isinstance(answer, TandemError)}
        for name, error in failed.items():
            log.warning("COMMIT failed", participant=name, round_id=self.description.round_id, error=str(error))
        if not any(replica.name in done for replica in self._replicas):
            raise next(iter(failed.values()))
        await self.abort([each for each in self._everyone if each.name in failed])
        self.outcomes |= {replica.name: ReplicaOutcome.COMMITTED for replica in self._replicas if replica.name in done}
        return done

    async def _commit_one(self, participant: Participant) -> Reports | TandemError:
        """COMMIT is idempotent: who has done it answers again, so a lost reply does not undo a finished round."""
        try:
            return await self._call(COMMIT, participant)
        except (Unavailable, DeadlineExceeded) as error:
            log.warning("a reply to COMMIT was lost; asking again", error=str(error))
        except TandemError as error:
            return error
        try:
            return await self._call(COMMIT, participant)
        except TandemError as error:
            return error

    async def abort(self, participants: Sequence[Participant] | None = None) -> list[str]:
        """Give the round up, everywhere or on some; `outcomes` says what it left on the replicas.

        Returns: in words, the state of each replica, and what participants did not confirm it.
        """
        concerned = self._everyone if participants is None else tuple(participants)
        answers = await asyncio.gather(*(self._abort_one(each) for each in concerned))
        replicas = [replica for replica in self._replicas if replica in concerned]
        states = await asyncio.gather(*(self._settle(replica) for replica in replicas))
        return [*states, *(f"abort: {answer}" for answer in answers if answer is not None)]

    async def _abort_one(self, participant: Participant) -> TandemError | None:
        # As long a deadline as any phase: a participant that waits for a lost peer answers when its own wait is over.
        try:
            await self._call(ABORT, participant)
        except TandemError as error:
            return error
        return None

    async def _settle(self, replica: Replica) -> str:
        """Find out what the round left on a replica. An RPC error says that a reply was lost, not what happened."""
        try:
            status = await replica.status(timeout_s=self._probe_timeout_s)
        except TandemError as error:
            self.outcomes[replica.name] = ReplicaOutcome.POISONED if self._may_have_written else ReplicaOutcome.ABORTED
            return f"{replica.name} does not answer ({error})"
        self.outcomes[replica.name] = self._outcome_of(status)
        state = weights_pb2.ReplicaState.Name(status.state).removeprefix("REPLICA_STATE_").lower()
        return f"{replica.name} is {state} at version {status.policy_version}"

    def _outcome_of(self, status: rollout_pb2.GetStatusResponse) -> ReplicaOutcome:
        unfinished = status.state == weights_pb2.REPLICA_STATE_PAUSED and self._may_have_written
        if status.state == weights_pb2.REPLICA_STATE_POISONED or unfinished:
            return ReplicaOutcome.POISONED
        serves = status.state == weights_pb2.REPLICA_STATE_SERVING
        # Before COMMIT nobody can have this round's version; an equal one is that of an earlier round.
        new = self._begun == COMMIT and status.policy_version == self.description.policy_version
        return ReplicaOutcome.COMMITTED if serves and new else ReplicaOutcome.ABORTED

    @property
    def _may_have_written(self) -> bool:
        """Whether a replica of which nothing is known may hold a mixture."""
        return self._begun >= first_write(staged=self._is_staged)

    @property
    def _is_staged(self) -> bool:
        return self.description.install_mode == weights_pb2.INSTALL_MODE_STAGED

    async def _phase(self, rule: PhaseRule) -> dict[str, Reports]:
        """One phase on all of its participants at once: inside it they wait for each other."""
        self._begun = rule.phase
        with span(f"sync {rule.name}"):
            return await self._phase_of_all(
                rule.phase, self._everyone if Role.TRAINER in rule.roles else self._replicas
            )

    async def _phase_of_all(self, phase: Phase, participants: Sequence[Participant]) -> dict[str, Reports]:
        tasks = {
            participant.name: asyncio.create_task(
                self._call(phase, participant), name=f"{weights_pb2.RoundPhase.Name(phase)}-{participant.name}"
            )
            for participant in participants
        }
        try:
            await asyncio.wait(tasks.values(), return_when=asyncio.FIRST_EXCEPTION)
            await wait_for_cause(tasks)
            raise_first(tasks)
            return {name: task.result() for name, task in tasks.items()}
        finally:
            for task in tasks.values():
                task.cancel()
            await asyncio.gather(*tasks.values(), return_exceptions=True)

    async def _call(self, phase: Phase, participant: Participant) -> Reports:
        call = participant.rounds.run_phase(phase, self.description)
        return await while_alive(call, participant, probe_timeout_s=self._probe_timeout_s)


async def wait_for_cause(tasks: Mapping[str, "asyncio.Task[Reports]"], blame_s: float = BLAME_S) -> None:
    """After an error: while every error says that a peer was lost, wait a little for the one that says why."""
    deadline_s = asyncio.get_running_loop().time() + blame_s
    while True:
        errors = [error for task in tasks.values() if task.done() and (error := task.exception()) is not None]
        running = [task for task in tasks.values() if not task.done()]
        left_s = deadline_s - asyncio.get_running_loop().time()
        if not running or left_s <= 0 or not all(isinstance(error, PeerLost) for error in errors):
            return
        await asyncio.wait(running, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)


def raise_first(tasks: Mapping[str, "asyncio.Task[Reports]"]) -> None:
    """Raise the first error, if any; prefer a failed peer's own error to the PeerLost that others saw."""
    errors = [error for task in tasks.values() if task.done() and (error := task.exception()) is not None]
    errors.sort(key=lambda error: isinstance(error, PeerLost))
    if errors:
        raise errors[0]
