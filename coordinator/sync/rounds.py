"""Runs one round of weight sync at a time: describes it, watches its slots, aborts it if it fails, and records it.

The files that a round over the transport disk has left seed joiners without a round.
"""

import asyncio
import time
import uuid
from collections.abc import Coroutine, Sequence, Set
from dataclasses import replace
from typing import Any

from coordinator.leader_lease import LeaderLease
from coordinator.sync.blame import Blame, blame
from coordinator.sync.excluded_replicas import LeftOut
from coordinator.sync.forecast import Forecast
from coordinator.sync.participants import PresentServices, WeightGroup, parallel_sizes, replica_slots, trainer_slots
from coordinator.sync.publish_attempt import FailedRound, NoLongerWanted, Publication, unless_due
from coordinator.sync.slot_watch import SlotWatch
from coordinator.sync.sync_round import SyncRound
from coordinator.watch import metrics
from coordinator.watch.fleet_recorder import FleetRecorder
from servicekit.errors import ConfigError, DeadlineExceeded, PeerLost, TandemError
from servicekit.lifecycle.tasks import cancel
from servicekit.logs import get_logger
from tandem_api.weights.v1 import weights_pb2
from tandem_clients.flow import ReplicaOutcome
from tandem_clients.probing import while_alive
from tandem_clients.replica import Replica
from tandem_clients.trainer import Trainer
from tandem_config.schema import SyncSection
from weightsync.membership.rendezvous import COORDINATOR_SLOT
from weightsync.plans.limits import bucket_bytes

_INSTALL = {"in_place": weights_pb2.INSTALL_MODE_IN_PLACE, "staged": weights_pb2.INSTALL_MODE_STAGED}
_PAUSE = {
    "drain": weights_pb2.PAUSE_MODE_DRAIN,
    "keep_kv": weights_pb2.PAUSE_MODE_KEEP_KV,
    "recompute": weights_pb2.PAUSE_MODE_RECOMPUTE,
    "abort_requeue": weights_pb2.PAUSE_MODE_ABORT_REQUEUE,
}
_TRANSPORT = {
    "auto": weights_pb2.SYNC_TRANSPORT_AUTO,
    "collective": weights_pb2.SYNC_TRANSPORT_COLLECTIVE,
    "colocated": weights_pb2.SYNC_TRANSPORT_COLOCATED,
    "disk": weights_pb2.SYNC_TRANSPORT_DISK,
}

log = get_logger(__name__)


class Rounds:
    """The rounds of a run.

    Attributes:
        on_disk: version and id of the last round that went through disk.
    """

    def __init__(
        self,
        *,
        trainer: Trainer,
        group: WeightGroup,
        settings: SyncSection,
        lead: LeaderLease,
        disk_folder: str,
        forecast: Forecast | None,
        observed: FleetRecorder,
    ) -> None:
        self._trainer, self._group, self._settings, self._lead = trainer, group, settings, lead
        self._disk_folder, self._forecast, self._observed = disk_folder, forecast, observed
        self._failed_rounds = 0
        self._group_before: tuple[Set[Replica], Set[Replica]] = (frozenset(), frozenset())
        self._usual_s: float | None = None  # of a round that succeeded
        self.on_disk = (0, "")
        self._refused: set[tuple[Replica, str]] = set()  # what a joiner could not load: a round id

    async def run(self, work: Publication, present: PresentServices) -> None:
        """Run one round over `present`.

        Raises: TandemError: it failed and was aborted, on all or, from COMMIT on, on some.
        """
        source = next(iter(present.source), None)
        if (now := (frozenset(present.replicas), frozenset(present.source))) != self._group_before:
            # Who sat out the last round may hold a communicator, of an earlier one, that the others have closed.
            self._failed_rounds, self._group_before = self._failed_rounds + 1, now
        description = self._describe(work.policy_version, present)
        if self._forecast is not None and source is None:
            self._forecast.of(description)
        work.rounds += 1
        work.epoch = present.epoch
        begun_s = time.perf_counter()
        sync_round, slots = self._made(work, present, description)
        watching = asyncio.create_task(slots.run(), name="slot-watch")
        try:
            await unless_due(work.due, sync_round.run())
        except TandemError as error:
            self._failed_rounds += 1
            sync_round.is_pressed = isinstance(error, NoLongerWanted)
            message = "; ".join([str(error), *await sync_round.abort()])
            work.outcomes |= sync_round.outcomes
            if not sync_round.is_pressed:
                seconds = time.perf_counter() - begun_s
                self._observed.failed_round(work.policy_version, error, sync_round.outcomes, seconds)
                work.failed_round = self._failed(sync_round, present, error, begun_s)
            raise type(error)(message) from error
        finally:
            await cancel(watching)
        if source is None:
            self._usual_s = time.perf_counter() - begun_s
        work.source = "" if source is None else source.name
        work.reports.merge(sync_round.reports)
        work.outcomes |= sync_round.outcomes
        metrics.observe_outcomes(sync_round.outcomes)
        if description.transport == weights_pb2.SYNC_TRANSPORT_DISK:
            self.on_disk = (work.policy_version, description.round_id)
        done = [r for r in present.replicas if sync_round.outcomes.get(r.name) is ReplicaOutcome.COMMITTED]
        work.committed.extend(done)
        work.left_out.forget(done)
        left = [replica.name for replica in present.replicas if replica not in done]
        if left:
            self._failed_rounds += 1
            uncommitted = PeerLost(f"COMMIT failed on {', '.join(left)}")
            work.failed_round = self._failed(sync_round, present, uncommitted, begun_s)
            raise uncommitted

    def _made(
        self, work: Publication, present: PresentServices, description: weights_pb2.Round
    ) -> tuple[SyncRound, SlotWatch]:
        slots = SlotWatch(
            self._group,
            # Without the trainer, our own slot: it is lost with the others if Redis loses its data.
            [COORDINATOR_SLOT] if present.trainer is None else trainer_slots(present.trainer),
            replica_slots(present.replicas | present.source),
            self._settings.lease_ttl_s,
        )
        sync_round = SyncRound(
            description,
            next(iter(present.source), self._trainer),
            tuple(present.replicas),
            probe_timeout_s=self._settings.probe_timeout_s,
            # A seeding by a replica holds nothing up.
            straggler_s=None if present.source else self._settings.straggler_timeout_s,
            # The others have the weights: it must not take longer than they did.
            usual_s=self._usual_s if work.committed else None,
            slots=slots,
        )
        return sync_round, slots

    async def load_published(self, policy_version: int, joiners: Sequence[Replica], left_out: LeftOut) -> list[Replica]:
        """Let joiners load the version that our last round wrote to disk. Returns: those that have."""
        version, round_id = self.on_disk
        if not round_id or version != policy_version:
            return []
        begun_s = time.perf_counter()
        refused = self._refused = {one for one in self._refused if one[1] == round_id}
        joiners = [one for one in joiners if not left_out.is_absent(one) and (one, round_id) not in refused]
        calls = (
            self.bounded(
                joiner.load_published(
                    self._disk_folder, policy_version=version, round_id=round_id, fence=self._lead.fence
                ),
                joiner,
                self._settings.transfer_timeout_s,
            )
            for joiner in joiners
        )
        loaded = []
        for joiner, answer in zip(joiners, await asyncio.gather(*calls, return_exceptions=True), strict=True):
            if isinstance(answer, TandemError):  # it has weights of some version: a round brings ours
                log.warning("late joiner failed to load weights from disk", error=str(answer))
                self._refused.add((joiner, round_id))
            elif isinstance(answer, BaseException):
                raise answer
            else:
                loaded.append(joiner)
        if loaded:
            metrics.JOINER_SECONDS.labels(sender="disk").observe(time.perf_counter() - begun_s)
        return loaded

    async def bounded(self, call: Coroutine[Any, Any, None], replica: Replica, most_s: float) -> None:
        """Await a call to a replica outside of rounds. Raises: DeadlineExceeded: it takes longer; as while_alive."""
        try:
            async with asyncio.timeout(most_s):
                await while_alive(call, replica, probe_timeout_s=self._settings.probe_timeout_s)
        except TimeoutError:
            raise DeadlineExceeded(f"{replica.name} has not ended its work within {most_s:g} s") from None

    def _failed(
        self, sync_round: SyncRound, present: PresentServices, error: TandemError, begun_s: float
    ) -> FailedRound:
        names = [replica.name for replica in present.replicas]
        source = next(iter(present.source), None)
        cause = blame(sync_round.errors, self._trainer.name if source is None else source.name, names)
        if source is not None and isinstance(error, ConfigError):
            cause = Blame(trainer=error)  # it may not send: the trainer may, or shows that the joiner does not fit
        suspect = source if cause.trainer is not None or not (cause.failed or cause.lost) else None
        if len(names) == 1 and cause.trainer is None and not cause.lost:
            cause = replace(cause, failed={names[0]: error})  # the sender or it: others will show
        return FailedRound(
            suspect=suspect,
            group=tuple(present.replicas),
            cause=cause,
            unreachable=sync_round.unreachable,
            cost_s=time.perf_counter() - begun_s,
        )

    def _describe(self, policy_version: int, present: PresentServices) -> weights_pb2.Round:
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
                # A replica's parameters stay where its engine has them.
                transport=_TRANSPORT["collective" if present.source else self._settings.transport],
                wire_dtype="" if self._settings.dtype == "same" else self._settings.dtype,
                disk_folder=self._disk_folder,
                fence=self._lead.fence,
                failed_rounds=self._failed_rounds,
                allow_staged_nccl=self._settings.allow_staged_nccl,
            )
        )
        return description
