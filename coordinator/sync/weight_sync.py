"""Step 8: publish weights. Sync rounds as transactions, tried again in a new epoch while the budget lasts.

A failed round is aborted on all participants before the next one starts, and its error names the state of every
replica. The next round is made of those present then, without the replicas whose own calls failed (blame.py): neither a
lost replica nor one that lives and fails stops the others. It is seeded by a round of its own when it returns, or ever
more rarely (excluded_replicas.py), before it gets work. Where it is not clear who failed, rounds of fewer replicas
find it out.

Replicas that join are seeded by one that serves (sources.py), or else by the trainer between its steps.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence

from coordinator.leader_lease import LeaderLease
from coordinator.sync.excluded_replicas import LeftOut
from coordinator.sync.forecast import Forecast
from coordinator.sync.look_ahead import LookAhead
from coordinator.sync.participants import Agreement, PresentServices, RollCall, WeightGroup, seeded_version
from coordinator.sync.publish_attempt import MOST_FAILURES, FailedRound, Publication, is_retriable, unless_due
from coordinator.sync.rounds import Rounds
from coordinator.sync.sources import Sources
from coordinator.watch import metrics
from coordinator.watch.fleet_recorder import FleetRecorder
from servicekit.errors import Aborted, Fenced, TandemError, Unavailable
from servicekit.logs import get_logger
from tandem_api.rollout.v1 import rollout_pb2
from tandem_clients.fleet import Fleet
from tandem_clients.flow import SyncResult
from tandem_clients.probing import while_alive
from tandem_clients.replica import Replica
from tandem_clients.trainer import Trainer
from tandem_config.schema import SyncSection

# Failed rounds after which no replica can be left out, and a publication ends: three failures are not an accident.
MAX_ROUNDS = 3
# Before the second of them; then longer (publish_attempt.py).
PAUSE_S = 1.0
SLOT_INTERVAL_S = 1.0
# For a replica to end the work of an earlier coordinator; from our first round with it on it refuses that one anyway.
TAKE_OVER_S = 60.0
# Between two looks for replicas that join, each of some reads of Redis: they take longer than that to start.
LOOK_S = 1.0

log = get_logger(__name__)


class WeightSync:
    """Brings the trainer's weights to every replica that is present, and admits those that have them to the fleet.

    Args:
        group: the weight group of the run.
        lead: our claim to be the run's only coordinator.
        agreement: the settings on which the run's services must agree; None: they are not compared.
        min_replicas: fewest replicas that must have the weights in the end.
        rejoin_timeout_s: how long to wait for them; sync.formation_timeout_s, if that is longer.
        is_queued: whether replicas are held in a queue: those times do not run while they are, and none serves.
        disk_folder: where the transport "disk" writes.
        forecast: predicts the duration of rounds; None: no prediction.
        observed: records syncs and fleet snapshots.
        ending: once it is set, because the run is to end, no service is waited for, and no round is tried again.
        warn: gets warnings for the operator, as text.
        pause_s: before a round is tried again with no replica left out; it grows.
    Attributes:
        left_out: replicas that are announced and take no part.
    """

    def __init__(
        self,
        *,
        trainer: Trainer,
        fleet: Fleet,
        group: WeightGroup,
        settings: SyncSection,
        lead: LeaderLease,
        agreement: Agreement | None = None,
        min_replicas: int = 1,
        rejoin_timeout_s: float = 0.0,
        disk_folder: str = "",
        forecast: Forecast | None = None,
        observed: FleetRecorder | None = None,
        ending: asyncio.Event | None = None,
        is_queued: Callable[[], bool] = lambda: False,
        warn: Callable[[str], None] = lambda _: None,
        pause_s: float = PAUSE_S,
    ) -> None:
        self._warn, self._pause_s = warn, pause_s
        self._trainer, self._fleet, self._settings, self._lead = trainer, fleet, settings, lead
        self._min_replicas, self._rejoin_timeout_s = min_replicas, rejoin_timeout_s
        self._observed = FleetRecorder() if observed is None else observed
        self.left_out = LeftOut(warn, self._observed.life)
        self._rounds = Rounds(
            trainer=trainer,
            group=group,
            settings=settings,
            lead=lead,
            disk_folder=disk_folder,
            forecast=forecast,
            observed=self._observed,
        )
        self._ending = asyncio.Event() if ending is None else ending
        self._roll_call = RollCall(
            trainer=trainer,
            fleet=fleet,
            group=group,
            agreement=agreement,
            min_replicas=min_replicas,
            probe_timeout_s=settings.probe_timeout_s,
            slots_timeout_s=settings.lease_ttl_s,
            timeout_s=settings.formation_timeout_s,
            ending=self._ending,
            is_queued=is_queued,
            left_out=self.left_out,
        )
        self._ahead = LookAhead(self._roll_call, trainer, fleet)
        self._sources = Sources(self._roll_call, fleet)
        # The version that replicas serve; None: none has been published.
        self._served: int | None = None
        self._alone, self._due, self._replicas_seed = asyncio.Lock(), asyncio.Event(), False

    def look_ahead(self) -> AsyncIterator[None]:
        """Look at the services for the next publication, as long as this is iterated: while the trainer works."""
        return self._ahead.run()

    async def publish(self, policy_version: int) -> SyncResult:
        """Make every replica that is present serve the trainer's weights as `policy_version`.

        Replicas that are lost meanwhile, or that fail, are left out; the result has the outcome of each.
        Raises: TandemError: the last round's, if the budget is spent, another round would not help, or too few replicas
            are present; the message names them. The round has been aborted on all participants.
        """
        self._due.set()
        try:
            async with self._alone:
                return await self._run_rounds(policy_version, first=self._fleet.serving())
        finally:
            self._due.clear()

    async def run_seeding(self) -> None:
        """Seed replicas that join by those that serve, for as long as this runs."""
        self._replicas_seed = True
        try:
            while True:
                await asyncio.sleep(LOOK_S)
                await self.seed_by_replicas()
        finally:
            self._replicas_seed = False

    async def seed_by_replicas(self) -> None:
        """Seed the replicas that have joined by one that serves, where it can; a publication that is due ends that."""
        if self._served is None:
            return
        async with self._alone:
            try:
                serving, waiting = await self._waiting(self._served, self._due)
                # Who lets weights travel through files may have no other way between the hosts of replicas.
                if serving and self._settings.transport != "disk" and any(map(self.left_out.is_due, waiting)):
                    await self._run_rounds(self._served, serving=serving, due=self._due)
            except TandemError as error:
                log.warning("late joiners could not be seeded by a replica", error=str(error))

    async def take_over(self) -> None:
        """Make trainer and replicas refuse earlier coordinators, and wait for the work that those started.

        Called before anything else. A replica that does not answer now refuses them from our first round with it on.
        Raises: TandemError: the trainer's; Fenced: another coordinator has taken over from us; ConfigurationSkew: the
            trainer, or too many replicas, have read another configuration; nothing was changed.
        """
        await self._roll_call.check_configuration()
        probe_timeout_s = self._settings.probe_timeout_s
        replicas = await self._fleet.look()
        # Concurrently: the work that an older coordinator started on the trainer may wait for a replica.
        trainer, *answers = await asyncio.gather(
            while_alive(self._trainer.take_over(), self._trainer, probe_timeout_s=probe_timeout_s),
            *(self._rounds.bounded(replica.take_over(self._lead.fence), replica, TAKE_OVER_S) for replica in replicas),
            return_exceptions=True,
        )
        for answer in (trainer, *answers):
            tolerable = answer is not trainer and isinstance(answer, TandemError) and not isinstance(answer, Fenced)
            if answer is not None and not tolerable:
                raise answer
            if answer is not None:
                log.warning("replica take-over failed", error=str(answer))

    async def newest_version(self) -> int:
        """Return the newest version that any replica that answers has had; 0 if none has had any."""
        replicas = await self._fleet.look()
        calls = (replica.status(timeout_s=self._settings.probe_timeout_s) for replica in replicas)
        answers = await asyncio.gather(*calls, return_exceptions=True)
        newest = 0
        for answer in answers:
            if isinstance(answer, rollout_pb2.GetStatusResponse):
                newest = max(newest, seeded_version(answer))
            elif not isinstance(answer, TandemError):
                raise answer
        return newest

    async def seed_late_joiners(self, policy_version: int) -> SyncResult | None:
        """Bring the trainer's weights to replicas that are present and do not serve yet; others are not interrupted.

        Those that other replicas can seed are left to `run_seeding`. If the last round went through disk, joiners
        without weights load them from there: the trainer may be busy or lost. A joiner that fails is left for the next
        call, while any replica serves.
        Returns: None: no round was needed, or it failed while others serve.
        Raises: TandemError: it failed, and no replica serves.
        """
        async with self._alone:
            serving, waiting = await self._waiting(policy_version)
            joiners = [replica for replica in waiting if self.left_out.is_due(replica)]
            if self._replicas_seed and self._settings.transport != "disk":
                joiners = [replica for replica in joiners if replica in self._sources.unserved]
            if serving and (not waiting or (not joiners and len(serving) >= self._min_replicas)):
                return None
            try:
                return await self._run_rounds(policy_version, serving=serving)
            except TandemError as error:
                if not self._fleet.serving():
                    raise
                log.warning("late joiners could not be seeded", error=str(error))
                return None

    async def _waiting(
        self, policy_version: int, due: asyncio.Event | None = None
    ) -> tuple[tuple[Replica, ...], list[Replica]]:
        """Return the replicas that serve, and those that do not, which load what is on disk."""
        announced = self._ahead.replicas() or await self._announced()
        serving = self._fleet.serving()
        self._roll_call.note_announced(announced)
        self._observed.fleet(announced, serving, self.left_out.reasons())
        waiting = [replica for replica in announced if replica not in serving]
        joiners = [replica for replica in waiting if self.left_out.is_due(replica)]
        loaded = await unless_due(due, self._rounds.load_published(policy_version, joiners, self.left_out))
        if loaded:
            serving = (*serving, *loaded)
            self._fleet.admit(serving)
        return serving, [replica for replica in waiting if replica not in loaded]

    async def _announced(self) -> tuple[Replica, ...]:
        """Return the announced replicas; while the registry is unreachable, the serving ones, or raise Unavailable."""
        try:
            return await self._fleet.look()
        except Unavailable as error:
            if not self._fleet.serving():
                raise
            log.warning("registry unreachable", error=str(error))
            return self._fleet.serving()

    async def _run_rounds(
        self,
        policy_version: int,
        *,
        serving: Sequence[Replica] = (),
        first: Sequence[Replica] = (),
        due: asyncio.Event | None = None,
    ) -> SyncResult:
        """Run rounds until every replica that can serves `policy_version`, as those of `serving` do already.

        Args:
            first: replicas that get it before any other.
            due: as in Publication.
        """
        work = Publication(
            policy_version=policy_version,
            start_s=time.perf_counter(),
            # While replicas serve, they have work to do: do not wait for others.
            rejoin_timeout_s=None if serving else self._rejoin_timeout_s,
            committed=list(serving),
            left_out=self.left_out,
            min_replicas=self._min_replicas,
            first=first,
            due=due,
        )
        lent = [replica.name for replica in self._observed.lent]
        while True:
            begun_s = time.perf_counter()
            try:
                targets = await self._targets(work)
                begun_s = time.perf_counter()
                if targets is None:
                    break
                await self._rounds.run(work, targets)
                if not work.next_group():
                    break
            except TandemError as error:
                log.warning("weight sync round failed", error=str(error))
                continues = await self._may_continue(work, error)
                work.retries_s += time.perf_counter() - begun_s
                if not continues:
                    break
        # A replica that stopped serving meanwhile (its pod leaves, or is not ready) is not admitted again here.
        staying = self._fleet.serving()
        work.committed = [replica for replica in work.committed if replica in staying or replica not in serving]
        self._fleet.admit(work.committed)
        reasons = self._roll_call.absent | self.left_out.reasons()
        self._observed.life.look((*work.committed, *self._observed.lent), reasons)
        self._served = policy_version
        gained = [replica for replica in work.committed if replica not in serving]
        if work.failures and (not gained or len(work.committed) < self._min_replicas):
            raise work.given_up() from work.failures[-1]
        result = work.result()
        if work.rounds:
            self._observed.sync(result, lent)
        if serving and gained:
            metrics.JOINER_SECONDS.labels(sender="replica" if work.source else "trainer").observe(result.total_s)
            log.info("late joiners seeded", by=work.source or "trainer", replicas=[one.name for one in gained])
        metrics.SERVING_REPLICAS.set(len(work.committed))
        return result

    async def _may_continue(self, work: Publication, error: TandemError) -> bool:
        """Decide whether another round may help after `error`, and wait until it is time for it."""
        failed, work.failed_round = work.failed_round, None
        if failed is None:  # before a round
            is_strike, work.of_replicas = True, False
            work.is_over = work.is_over or not is_retriable(error)
        else:
            is_alone = all(replica.name in failed.cause.failed for replica in failed.group)
            is_needed = len(work.committed) < self._min_replicas  # else it is seeded when it has its slot again
            waits = is_needed and work.due is None and work.waits_for_slot(error, self._settings.lease_ttl_s)
            if waits and (is_alone or not failed.cause.failed) and not self._ending.is_set():
                return await self._pause(SLOT_INTERVAL_S)
            self._warn_of(failed)
            if failed.suspect is not None:
                self._sources.note_failure(failed.suspect, error, failed.cost_s, work, self._warn)
            is_strike = work.learn(error, failed)
        work.failures.append(error)
        work.strikes += is_strike
        # `run_seeding` looks again soon.
        spent = work.strikes >= (MAX_ROUNDS if work.due is None else 1) or len(work.failures) >= MOST_FAILURES
        if spent or work.is_over or self._ending.is_set() or (failed is not None and not work.next_group()):
            return False
        return await self._pause(work.pause_s(self._pause_s)) if is_strike else True

    async def _pause(self, most_s: float) -> bool:
        """Wait, but not while the run is to end. Returns: whether it is not."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(most_s):
                await self._ending.wait()
        return not self._ending.is_set()

    def _warn_of(self, failed: FailedRound) -> None:
        """Warn of the replicas that a round has lost or that have failed, once while that lasts."""
        for replica in failed.group:
            error = failed.cause.lost.get(replica.name) or failed.cause.failed.get(replica.name)
            if error is not None and replica not in self.left_out:
                log.warning("replica left out of weight sync", replica=replica.name, error=str(error))
                self._warn(f"{replica.name} is left out of weight syncs until a round of its own succeeds: {error}")
            is_lost = replica.name in failed.cause.lost
            if error is not None and (is_lost or replica.name in failed.unreachable):
                self._roll_call.note_lost(replica, str(error), answers=replica.name not in failed.unreachable)

    async def _targets(self, work: Publication) -> PresentServices | None:
        """Find the replicas that are present and lack the version; None: there are none.

        Raises: TandemError: too few were present before the deadline.
        """
        begun_s = time.perf_counter()
        if work.due is not None:
            return await unless_due(work.due, self._sources.find(work))
        try:
            present = await self._seen_ahead(work) or await self._call_roll(work)
        finally:
            waited_s = time.perf_counter() - begun_s
            metrics.SYNC_RENDEZVOUS_SECONDS.observe(waited_s)
        work.roll_call_s += waited_s
        work.committed = [replica for replica in work.committed if replica in present.replicas]
        work.present = tuple(present.replicas)
        targets = {replica: present.replicas[replica] for replica in work.next_group()}
        return PresentServices(epoch=present.epoch, trainer=present.trainer, replicas=targets) if targets else None

    async def _seen_ahead(self, work: Publication) -> PresentServices | None:
        """Return the participants that were seen while the trainer worked, if they are a group still; None: if not."""
        present = (
            None if work.rounds or work.committed or work.failures else self._ahead.participants(work.policy_version)
        )
        if present is None:
            return None
        try:
            await asyncio.to_thread(self._lead.confirm, present.epoch, present.slots)
        except (Aborted, Unavailable) as error:
            log.info("participants of the check during training are not confirmed: checking again", error=str(error))
            self._ahead.forget()
            return None
        return present

    async def _call_roll(self, work: Publication) -> PresentServices:
        """Wait until enough services are present. Raises: TandemError: too few were before the deadline."""
        self._ahead.forget()
        try:
            present = await self._roll_call.call(work.policy_version, rejoin_timeout_s=work.rejoin_timeout_s)
        except TandemError:
            work.is_over = True
            raise
        await asyncio.to_thread(self._lead.confirm, present.epoch, present.slots)
        return present
