"""Step 8: publish weights. Sync rounds as transactions, tried again in a new epoch while the budget lasts.

A failed round is aborted on all participants before the next one starts, and its error names the state of every
replica. The next round is made of those present then: a lost replica does not stop the others, and is seeded by a round
of its own when it returns (`seed_late_joiners`), before it gets work.
"""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence

from coordinator.clients.probing import while_alive
from coordinator.clients.replica import Replica
from coordinator.clients.trainer import Trainer
from coordinator.fleet.base import Fleet
from coordinator.flow import ReplicaOutcome, SyncResult
from coordinator.lead import Lead
from coordinator.sync.forecast import Forecast
from coordinator.sync.look_ahead import LookAhead
from coordinator.sync.publication import Publication
from coordinator.sync.roll_call import Agreement, Present, RollCall, WeightGroup, parallel_sizes, seeded_version
from coordinator.sync.sync_round import SyncRound
from coordinator.watch import metrics
from coordinator.watch.observed import Observed
from servicekit.errors import Aborted, Fenced, PeerLost, TandemError, Unavailable
from servicekit.logs import get_logger
from tandem_api.rollout.v1 import rollout_pb2
from tandem_api.weights.v1 import weights_pb2
from tandem_config.schema import SyncSection
from weightsync.plans.limits import bucket_bytes

# Failed rounds after which a publication ends: three failures are not an accident.
MAX_ROUNDS = 3
SLOT_INTERVAL_S = 1.0
_INSTALL = {"in_place": weights_pb2.INSTALL_MODE_IN_PLACE, "staged": weights_pb2.INSTALL_MODE_STAGED}
_PAUSE = {
    "drain": weights_pb2.PAUSE_MODE_DRAIN,
    "keep_kv": weights_pb2.PAUSE_MODE_KEEP_KV,
    "abort_requeue": weights_pb2.PAUSE_MODE_ABORT_REQUEUE,
}
_TRANSPORT = {
    "auto": weights_pb2.SYNC_TRANSPORT_AUTO,
    "collective": weights_pb2.SYNC_TRANSPORT_COLLECTIVE,
    "colocated": weights_pb2.SYNC_TRANSPORT_COLOCATED,
    "disk": weights_pb2.SYNC_TRANSPORT_DISK,
}

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
        ending: once it is set, since the run is to end, no service is waited for, and no round is tried again.
    """

    def __init__(
        self,
        *,
        trainer: Trainer,
        fleet: Fleet,
        group: WeightGroup,
        settings: SyncSection,
        lead: Lead,
        agreement: Agreement | None = None,
        min_replicas: int = 1,
        rejoin_timeout_s: float = 0.0,
        disk_folder: str = "",
        forecast: Forecast | None = None,
        observed: Observed | None = None,
        ending: asyncio.Event | None = None,
        is_queued: Callable[[], bool] = lambda: False,
    ) -> None:
        self._trainer = trainer
        self._fleet = fleet
        self._group = group
        self._settings = settings
        self._lead = lead
        self._min_replicas, self._rejoin_timeout_s = min_replicas, rejoin_timeout_s
        self._disk_folder = disk_folder
        self._failed_rounds = 0
        self._on_disk = (0, "")  # version and id of the last round that went through disk
        self._observed = Observed() if observed is None else observed
        self._forecast = forecast
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
        )
        self._ahead = LookAhead(self._roll_call, trainer, fleet)

    def look_ahead(self) -> AsyncIterator[None]:
        """Look at the services for the next publication, as long as this is iterated: while the trainer works."""
        return self._ahead.run()

    async def publish(self, policy_version: int) -> SyncResult:
        """Make every replica that is present serve the trainer's weights as `policy_version`.

        Replicas that are lost meanwhile are left out; the result has the outcome of each.
        Raises: TandemError: the last round's, if the budget is spent, another round would not help, or too few replicas
            are present; the message names them. The round has been aborted on all participants.
        """
        return await self._run_rounds(policy_version, serving=())

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
            *(
                while_alive(replica.take_over(self._lead.fence), replica, probe_timeout_s=probe_timeout_s)
                for replica in replicas
            ),
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
        """Bring the current weights to replicas that are present and do not serve yet, without interrupting the others.

        If the last round went through disk, joiners without weights load them from there: the trainer may be busy or
        lost. A joiner that fails is left for the next call, while any replica serves.
        Returns: None: no round was needed, or it failed while others serve.
        Raises: TandemError: it failed, and no replica serves.
        """
        announced = self._ahead.replicas() or await self._announced()
        serving = self._fleet.serving()
        self._observed.fleet(announced, serving)
        if all(replica in serving for replica in announced) and serving:
            return None
        joiners = [replica for replica in announced if replica not in serving]
        loaded = await self._load_published(policy_version, joiners)
        if loaded:
            serving = (*serving, *loaded)
            self._fleet.admit(serving)
            if len(serving) == len(announced):
                return None
        try:
            return await self._run_rounds(policy_version, serving=serving)
        except TandemError as error:
            if not self._fleet.serving():
                raise
            log.warning("late joiners could not be seeded", error=str(error))
            return None

    async def _announced(self) -> tuple[Replica, ...]:
        """Return the announced replicas; while the registry is unreachable, the serving ones, or raise Unavailable."""
        try:
            return await self._fleet.look()
        except Unavailable as error:
            if not self._fleet.serving():
                raise
            log.warning("registry unreachable", error=str(error))
            return self._fleet.serving()

    async def _load_published(self, policy_version: int, joiners: Sequence[Replica]) -> list[Replica]:
        """Let joiners load the version that our last round wrote to disk. Returns: those that have."""
        version, round_id = self._on_disk
        if not round_id or version != policy_version:
            return []
        calls = (
            joiner.load_published(self._disk_folder, policy_version=version, round_id=round_id, fence=self._lead.fence)
            for joiner in joiners
        )
        loaded = []
        for joiner, answer in zip(joiners, await asyncio.gather(*calls, return_exceptions=True), strict=True):
            if isinstance(answer, TandemError):  # it has weights of some version: a round brings ours
                log.warning("late joiner failed to load weights from disk", error=str(answer))
            elif isinstance(answer, BaseException):
                raise answer
            else:
                loaded.append(joiner)
        return loaded

    async def _run_rounds(self, policy_version: int, serving: Sequence[Replica]) -> SyncResult:
        """Run rounds until every replica that is present serves `policy_version`, as those of `serving` do already."""
        work = Publication(
            policy_version=policy_version,
            start_s=time.perf_counter(),
            # While replicas serve, they have work to do: do not wait for others.
            rejoin_timeout_s=None if serving else self._rejoin_timeout_s,
            committed=list(serving),
        )
        while len(work.failures) < MAX_ROUNDS:
            begun_s = time.perf_counter()
            try:
                targets = await self._targets(work)
                begun_s = time.perf_counter()
                if targets is None or await self._round(work, targets):
                    break
            except TandemError as error:
                log.warning("weight sync round failed", error=str(error))
                if not self._ending.is_set() and work.waits_for_slot(error, self._settings.lease_ttl_s):
                    await asyncio.sleep(SLOT_INTERVAL_S)
                    work.retries_s += time.perf_counter() - begun_s
                    continue
                work.retries_s += time.perf_counter() - begun_s
                work.failures.append(error)
                if self._ending.is_set() or not work.may_retry_after(error):
                    break
        # A replica that stopped serving meanwhile (its pod leaves, or is not ready) is not admitted again here.
        staying = self._fleet.serving()
        work.committed = [replica for replica in work.committed if replica in staying or replica not in serving]
        self._fleet.admit(work.committed)
        gained = [replica for replica in work.committed if replica not in serving]
        if work.failures and (not gained or len(work.committed) < self._min_replicas):
            raise work.given_up() from work.failures[-1]
        result = work.result()
        if work.rounds:
            self._observed.sync(result)
        metrics.SERVING_REPLICAS.set(len(work.committed))
        return result

    async def _targets(self, work: Publication) -> Present | None:
        """Find the replicas that are present and lack the version; None: there are none.

        Raises: TandemError: too few were present before the deadline.
        """
        begun_s = time.perf_counter()
        try:
            present = await self._seen_ahead(work) or await self._call_roll(work)
        finally:
            waited_s = time.perf_counter() - begun_s
            metrics.SYNC_RENDEZVOUS_SECONDS.observe(waited_s)
        work.roll_call_s += waited_s
        work.committed = [replica for replica in work.committed if replica in present.replicas]
        targets = {replica: status for replica, status in present.replicas.items() if replica not in work.committed}
        return Present(epoch=present.epoch, trainer=present.trainer, replicas=targets) if targets else None

    async def _seen_ahead(self, work: Publication) -> Present | None:
        """Return the participants that were seen while the trainer worked, if they are a group still; None: if not."""
        present = None if work.committed or work.failures else self._ahead.participants(work.policy_version)
        if present is None:
            return None
        try:
            await asyncio.to_thread(self._lead.confirm, present.epoch)
        except (Aborted, Unavailable) as error:
            log.info("participants seen ahead are not confirmed", error=str(error))
            self._ahead.forget()
            return None
        return present

    async def _call_roll(self, work: Publication) -> Present:
        """Wait until enough services are present. Raises: TandemError: too few were before the deadline."""
        self._ahead.forget()
        try:
            present = await self._roll_call.call(work.policy_version, rejoin_timeout_s=work.rejoin_timeout_s)
        except TandemError:
            work.is_over = True
            raise
        await asyncio.to_thread(self._lead.confirm, present.epoch)
        return present

    async def _round(self, work: Publication, present: Present) -> bool:
        """Run one round over `present`. Returns: whether all of them have committed.

        Raises: TandemError: it failed and was aborted.
        """
        description = self._describe(work.policy_version, present)
        if self._forecast is not None:
            self._forecast.of(description)
        work.rounds += 1
        work.epoch = present.epoch
        sync_round = SyncRound(
            description, self._trainer, tuple(present.replicas), probe_timeout_s=self._settings.probe_timeout_s
        )
        try:
            await sync_round.run()
        except TandemError as error:
            self._failed_rounds += 1
            message = "; ".join([str(error), *await sync_round.abort()])
            self._observed.failed_round(work.policy_version, error, sync_round.outcomes)
            work.outcomes |= sync_round.outcomes
            raise type(error)(message) from error
        work.reports.merge(sync_round.reports)
        work.outcomes |= sync_round.outcomes
        metrics.observe_outcomes(sync_round.outcomes)
        if description.transport == weights_pb2.SYNC_TRANSPORT_DISK:
            self._on_disk = (work.policy_version, description.round_id)
        done = [r for r in present.replicas if sync_round.outcomes.get(r.name) is ReplicaOutcome.COMMITTED]
        work.committed.extend(done)
        left = [replica.name for replica in present.replicas if replica not in done]
        if left:
            self._failed_rounds += 1
            work.failures.append(PeerLost(f"COMMIT failed on {', '.join(left)}"))
        return not left

    def _describe(self, policy_version: int, present: Present) -> weights_pb2.Round:
        """Describe the round: what its participants must agree on."""
        description = parallel_sizes(present)
        description.MergeFrom(
            weights_pb2.Round(
                round_id=f"v{policy_version}-{uuid.uuid4().hex[:12]}",
                policy_version=policy_version,
                group=self._group.group,
                epoch=present.epoch,
                install_mode=_INSTALL[self._settings.install],
                pause_mode=_PAUSE[self._settings.pause],
                bucket_bytes=bucket_bytes(self._settings.bucket_mib),
                formation_timeout_s=self._settings.formation_timeout_s,
                transfer_timeout_s=self._settings.transfer_timeout_s,
                transport=_TRANSPORT[self._settings.transport],
                wire_dtype="" if self._settings.dtype == "same" else self._settings.dtype,
                disk_folder=self._disk_folder,
                fence=self._lead.fence,
                failed_rounds=self._failed_rounds,
                allow_staged_nccl=self._settings.allow_staged_nccl,
            )
        )
        return description
