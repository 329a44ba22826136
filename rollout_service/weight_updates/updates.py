"""A replica's states, and a weight-sync round as a transaction on it.

States of the replica (R, its state between rounds, is UNSEEDED, SERVING or POISONED):

| event                     | from                 | to       | does                                                  |
|---------------------------|----------------------|----------|-------------------------------------------------------|
| PauseGeneration           | SERVING              | PAUSED   | refuses new calls; drains, aborts, keeps or retracts  |
|                           |                      |          | running ones; freezes the engine                      |
| ResumeGeneration          | PAUSED, no round     | SERVING  | thaws the engine, accepts new calls                   |
| PREPARE                   | any                  | same     | ranks: plan, coverage, communicator                   |
| PAUSE                     | R                    | PAUSED   | as PauseGeneration                                    |
| TRANSFER                  | PAUSED (staged: any) | same     | in place: opens SGLang's session; ranks receive       |
| VERIFY                    | same                 | same     | ranks: digests                                        |
| COMMIT                    | same                 | SERVING  | ranks install; session ends; version flips; KV flushed|
| ABORT, weights untouched  | any                  | R        | ranks drop the round; the old version is served on    |
| ABORT, weights touched    | any                  | POISONED | running calls fail; only a later COMMIT helps         |
| LoadPublishedWeights      | UNSEEDED, POISONED   | SERVING  | ranks read a version from disk; it flips; KV flushed  |
| as the round's source     | SERVING              | same     | ranks send what they have; generation continues       |
| no phase for too long     | any                  | as ABORT | the coordinator is lost; the next one starts anew     |

weightsync/round decides which phase may follow which, and how a repeated one is answered (phases.py, guard.py).
"""

import asyncio
import time
from collections.abc import Callable

from rollout_service.engine import RolloutEngine
from rollout_service.weight_updates.pauses import Pauses
from rollout_service.weight_updates.ranks import Ranks
from rollout_service.weight_updates.round_steps import ReplicaRound, RoundSteps
from servicekit.errors import DigestMismatch, NotReady, PhaseOrder, Poisoned, StaleVersion
from servicekit.lifecycle.tasks import to_its_end
from servicekit.logs import get_logger
from tandem_api.weights.v1 import weights_pb2 as pb
from weightsync.round import deadlines
from weightsync.round.client import RunsPhases
from weightsync.round.guard import PhaseGuard
from weightsync.round.phases import ABORT, COMMIT, PAUSE, PREPARE, Phase, Role

log = get_logger(__name__)

UNSEEDED, SERVING = pb.REPLICA_STATE_UNSEEDED, pb.REPLICA_STATE_SERVING
PAUSED, POISONED = pb.REPLICA_STATE_PAUSED, pb.REPLICA_STATE_POISONED


class WeightUpdates(RunsPhases):
    """The state of one replica.

    Args:
        on_state: called with (state, version) after every change.
        on_reports: called with the reports of every phase that was run (not for a repeated answer).
        on_outcome: called with (outcome, epoch) when a round ends here: committed, aborted (the old version is
            intact) or poisoned; before one of the latter two, mismatch if bytes were not those sent.
        on_pause: called when calls are accepted again with the seconds for which they were refused; not for the first
            weights, before which there are no calls.
        name: the replica's, under which it may be a round's source.
        seeded: whether the engine has weights already, as version 0.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        ranks: Ranks,
        pauses: Pauses,
        on_state: Callable[[pb.ReplicaState.ValueType, int], None] = lambda state, version: None,
        on_reports: Callable[[list[pb.PhaseReport]], None] = lambda reports: None,
        on_outcome: Callable[[str, int], None] = lambda outcome, epoch: None,
        on_pause: Callable[[float], None] = lambda seconds: None,
        *,
        name: str = "",
        seeded: bool = False,
    ) -> None:
        self.policy_version = 0
        self._name = name
        self._steps = RoundSteps(engine, ranks, pauses)
        self._pauses = pauses
        self._on_state = on_state
        self._on_reports = on_reports
        self._on_outcome = on_outcome
        self._on_pause = on_pause
        self._has_served = seeded
        self._rest: pb.ReplicaState.ValueType = SERVING if seeded else UNSEEDED
        self._guard = PhaseGuard[ReplicaRound, list[pb.PhaseReport]](
            lambda opened: ReplicaRound(message=opened, role=Role.SENDER if self._sends(opened) else Role.REPLICA)
        )
        self._lock = asyncio.Lock()
        self._expiry: asyncio.TimerHandle | None = None
        self._expiring: asyncio.Task[list[pb.PhaseReport]] | None = None

    @property
    def state(self) -> pb.ReplicaState.ValueType:
        """The state that GetStatus reports."""
        return PAUSED if self._pauses.paused and self._rest == SERVING else self._rest

    @property
    def is_in_round(self) -> bool:
        """Whether a round is under way, which would fail without us."""
        return self._guard.current is not None

    def check_can_generate(self) -> None:
        """Raise Poisoned or NotReady unless the replica is SERVING."""
        if self._rest == POISONED:
            raise Poisoned("the weights were partly written by a sync that failed; a sync must seed them again")
        if self._rest == UNSEEDED:
            raise NotReady("this replica has no weights yet; sync them first (UNSEEDED)")
        if self._pauses.paused:
            raise NotReady("generation is paused until the weight sync ends, or until ResumeGeneration (PAUSED)")

    async def until_it_generates(self) -> None:
        """Wait for the end of a pause. Raises: Poisoned, NotReady: there are no weights to generate with."""
        while self._rest == SERVING and self._pauses.paused:
            await self._pauses.accepting.wait()
        self.check_can_generate()

    async def take_over(self) -> None:
        """Give up the round of an earlier coordinator, and wait for the calls that it has begun here."""
        if self._guard.current is not None:
            await self.run_phase(ABORT, self._guard.current.message)
        async with self._lock:
            self._report_state()

    @to_its_end
    async def pause(self, mode: pb.PauseMode.ValueType) -> None:
        """Pause generation for PauseGeneration, outside of a round."""
        async with self._lock:
            await self._pauses.pause(mode)
            self._report_state()

    @to_its_end
    async def resume(self) -> None:
        """Resume generation. Raises: PhaseOrder: a round is under way; Poisoned, NotReady: no verified weights."""
        async with self._lock:
            current = self._guard.current
            if current is not None and PAUSE in current.done:
                raise PhaseOrder(f"round {current.message.round_id} is under way; it resumes generation at its end")
            if self._rest != SERVING:
                self.check_can_generate()
            await self._accept_calls()
            self._report_state()

    @to_its_end
    async def load_published(self, published: pb.LoadPublishedRequest) -> None:
        """Load weights that a round has left on disk into a replica that has none, and serve them.

        Raises: PhaseOrder: it has weights, or is in a round; StaleVersion: it has had newer ones; errors of the ranks:
            its state is as before.
        """
        async with self._lock:
            if self._guard.current is not None:
                raise PhaseOrder(f"round {self._guard.current.message.round_id} is under way")
            if self._rest == SERVING:
                raise PhaseOrder(f"this replica serves version {self.policy_version} already")
            self._refuse_older(f"round {published.round_id}", published.policy_version)
            await self._pauses.pause(pb.PAUSE_MODE_ABORT_REQUEUE)
            await self._steps.load(published)
            self._rest, self.policy_version = SERVING, published.policy_version
            await self._accept_calls()
            self._report_state()
        log.info("weights loaded", folder=published.folder, policy_version=self.policy_version)

    @to_its_end
    async def run_phase(self, phase: Phase, round_: pb.Round) -> list[pb.PhaseReport]:
        """Run one phase. Returns: one report per rank, with the state. Raises: as the table; errors of the ranks."""
        if self._lock.locked() and (ended := self._guard.ended_by(phase, round_)) is not None:
            # End the ranks' waits in the phase under way, instead of waiting for its deadline.
            await self._steps.interrupt(ended.message)
        async with self._lock:
            try:
                reports = self._guard.answer(phase, round_)
                if reports is None:
                    reports = await self._run_locked(phase, round_)
                    self._guard.answered(phase, round_, reports)
                return reports
            finally:
                self._watch_round()

    async def _run_locked(self, phase: Phase, round_: pb.Round) -> list[pb.PhaseReport]:
        start_s = time.monotonic()
        reports = await self._abort(round_) if phase == ABORT else await self._advance(phase, round_)
        for report in reports:
            if phase == PAUSE:  # the ranks have no part in it
                report.seconds["pause"] = time.monotonic() - start_s
            report.state, report.policy_version = self.state, self.policy_version
        self._on_reports(reports)
        self._report_state()
        return reports

    def _watch_round(self) -> None:
        """Restart the timer that gives up an open round when no phase comes for too long."""
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None
        if self._guard.current is not None:
            message = self._guard.current.message
            silence_s = deadlines.silence_s(message)
            self._expiry = asyncio.get_running_loop().call_later(silence_s, self._expire, message)

    def _expire(self, round_: pb.Round) -> None:
        if self._guard.is_open(round_) and not self._lock.locked():
            log.warning("coordinator silent, giving up its round", round_id=round_.round_id)
            self._expiring = asyncio.create_task(self.run_phase(ABORT, round_), name=f"expire-{round_.round_id}")

    async def _advance(self, phase: Phase, round_: pb.Round) -> list[pb.PhaseReport]:
        if phase == PREPARE:
            await self._end_older_round(round_)
        with self._guard.running(phase, round_) as current:
            try:
                return await (self._commit(current) if phase == COMMIT else self._steps.run(phase, current))
            except DigestMismatch:
                self._on_outcome("mismatch", round_.epoch)
                raise

    async def _end_older_round(self, round_: pb.Round) -> None:
        """Give up an older round that is open, for the PREPARE of a new one.

        Raises: StaleVersion: the new round has an older version; PhaseOrder: it is over; Aborted: it is of an older
            epoch.
        """
        older = self._guard.superseded_by(round_)
        self._refuse_older(f"round {round_.round_id}", round_.policy_version)
        if self._sends(round_) and (self.state != SERVING or self.policy_version != round_.policy_version):
            state = pb.ReplicaState.Name(self.state).removeprefix("REPLICA_STATE_")
            raise NotReady(f"no source of version {round_.policy_version}: {state} at version {self.policy_version}")
        if older is not None:
            log.warning("round superseded", old=older.message.round_id, new=round_.round_id)
            await self._abort(older.message)

    def _sends(self, round_: pb.Round) -> bool:
        return self._name != "" and round_.source == self._name

    def _refuse_older(self, what: str, policy_version: int) -> None:
        if self._rest != UNSEEDED and policy_version < self.policy_version:
            raise StaleVersion(
                f"{what} has policy version {policy_version}, but this replica has had version "
                f"{self.policy_version}; versions only grow"
            )

    async def _commit(self, current: ReplicaRound) -> list[pb.PhaseReport]:
        start_s = time.monotonic()
        reports = await self._steps.install(current)
        if current.role is Role.SENDER:
            self._guard.close(current.message)
            return reports
        self._rest, self.policy_version = SERVING, current.message.policy_version
        self._guard.close(current.message)
        await self._accept_calls()
        for report in reports:  # what the ranks' own installing does not explain
            report.seconds["commit"] = max(0.0, time.monotonic() - start_s - report.seconds.get("install", 0.0))
        self._on_outcome("committed", current.message.epoch)
        log.info("weights committed", round_id=current.message.round_id, policy_version=self.policy_version)
        return reports

    async def _abort(self, round_: pb.Round) -> list[pb.PhaseReport]:
        current = self._guard.current
        if current is None or not self._guard.is_open(round_):
            # Not open here: it is over, or its PREPARE is still on its way and must not open it later.
            self._guard.close(round_)
            return self._steps.empty_reports()
        reports = await self._steps.give_up(current)
        self._guard.close(round_)
        if current.role is Role.SENDER:
            log.warning("round aborted, of which this is the source", round_id=round_.round_id, failure=current.failure)
            return reports
        if current.touched:
            self._poison(current)
        elif self._rest == SERVING:
            await self._accept_calls()
        self._on_outcome("poisoned" if current.touched else "aborted", round_.epoch)
        log.warning("round aborted", round_id=round_.round_id, touched=current.touched, failure=current.failure)
        return reports

    def _poison(self, current: ReplicaRound) -> None:
        self._rest = POISONED
        # Frozen requests would continue with a mix of two versions; the engine ends them after the next COMMIT.
        self._pauses.evict(
            Poisoned(f"weight sync round {current.message.round_id} failed after it had changed weights")
        )

    async def _accept_calls(self) -> None:
        refused_s = await self._pauses.resume()
        if self._has_served and refused_s is not None:
            self._on_pause(refused_s)
        self._has_served = True

    def _report_state(self) -> None:
        self._on_state(self.state, self.policy_version)
