"""Runs one round of weight sync at a time: describes it, watches its slots, aborts it if it fails, and records it."""

import asyncio
import time
import uuid
from dataclasses import replace

from coordinator.leader_lease import LeaderLease
from coordinator.sync.blame import blame
from coordinator.sync.forecast import Forecast
from coordinator.sync.participants import PresentServices, WeightGroup, parallel_sizes, replica_slots, trainer_slots
from coordinator.sync.publish_attempt import FailedRound, Publication
from coordinator.sync.slot_watch import SlotWatch
from coordinator.sync.sync_round import SyncRound
from coordinator.watch import metrics
from coordinator.watch.fleet_recorder import FleetRecorder
from servicekit.errors import PeerLost, TandemError
from servicekit.lifecycle.tasks import cancel
from tandem_api.weights.v1 import weights_pb2
from tandem_clients.flow import ReplicaOutcome
from tandem_clients.replica import Replica
from tandem_clients.trainer import Trainer
from tandem_config.schema import SyncSection
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
        self._group_before: frozenset[Replica] = frozenset()
        self._usual_s: float | None = None  # of a round that succeeded
        self.on_disk = (0, "")

    async def run(self, work: Publication, present: PresentServices) -> None:
        """Run one round over `present`.

        Raises: TandemError: it failed and was aborted, on all or, from COMMIT on, on some.
        """
        if (now := frozenset(present.replicas)) != self._group_before:
            # Who sat out the last round may hold a communicator, of an earlier one, that the others have closed.
            self._failed_rounds, self._group_before = self._failed_rounds + 1, now
        description = self._describe(work.policy_version, present)
        if self._forecast is not None:
            self._forecast.of(description)
        work.rounds += 1
        work.epoch = present.epoch
        begun_s = time.perf_counter()
        slots = SlotWatch(
            self._group,
            trainer_slots(present.trainer),
            replica_slots(present.replicas),
            self._settings.lease_ttl_s,
        )
        sync_round = SyncRound(
            description,
            self._trainer,
            tuple(present.replicas),
            probe_timeout_s=self._settings.probe_timeout_s,
            straggler_s=self._settings.straggler_timeout_s,
            # The others have the weights: it must not take longer than they did.
            usual_s=self._usual_s if work.committed else None,
            slots=slots,
        )
        watching = asyncio.create_task(slots.run(), name="slot-watch")
        try:
            await sync_round.run()
        except TandemError as error:
            self._failed_rounds += 1
            message = "; ".join([str(error), *await sync_round.abort()])
            seconds = time.perf_counter() - begun_s
            self._observed.failed_round(work.policy_version, error, sync_round.outcomes, seconds)
            work.outcomes |= sync_round.outcomes
            work.failed_round = self._failed(sync_round, present, error, begun_s)
            raise type(error)(message) from error
        finally:
            await cancel(watching)
        self._usual_s = time.perf_counter() - begun_s
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

    def _failed(
        self, sync_round: SyncRound, present: PresentServices, error: TandemError, begun_s: float
    ) -> FailedRound:
        names = [replica.name for replica in present.replicas]
        cause = blame(sync_round.errors, self._trainer.name, names)
        if len(names) == 1 and cause.trainer is None and not cause.lost:
            cause = replace(cause, failed={names[0]: error})  # the trainer or it: others will show
        return FailedRound(
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
                transport=_TRANSPORT[self._settings.transport],
                wire_dtype="" if self._settings.dtype == "same" else self._settings.dtype,
                disk_folder=self._disk_folder,
                fence=self._lead.fence,
                failed_rounds=self._failed_rounds,
                allow_staged_nccl=self._settings.allow_staged_nccl,
            )
        )
        return description
