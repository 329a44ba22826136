"""Step 8: publish weights. A sync round as a transaction, tried again in a new epoch while the budget lasts.

A round that fails is given up everywhere before the next one starts, and its error says what state every replica is
in: an RPC error alone says that a reply was lost, not what has happened.
"""

import asyncio
import time
import uuid
from collections.abc import Sequence
from typing import Protocol

from coordinator import metrics
from coordinator.replica import STATUS_TIMEOUT_S, Replica
from coordinator.sync_report import RoundReports, SyncResult
from coordinator.sync_round import SyncRound
from coordinator.trainer import Trainer
from servicekit.errors import Aborted, DeadlineExceeded, DigestMismatch, PeerLost, TandemError, Unavailable
from servicekit.logs import get_logger
from tandem_api.weights.v1 import weights_pb2
from tandem_config.schema import SyncSection
from weightsync.participants import Participants

# Rounds that one publication may take. What fails three times in a row is not an accident.
MAX_ROUNDS = 3
# Worth another round; anything else (an invalid round, a stale version, plans that differ) would fail again.
_RETRIABLE = (Aborted, PeerLost, Unavailable, DeadlineExceeded, DigestMismatch)

# A look at the group that outlives the run's end holds the process for so long.
_WAIT_SLICE_S = 0.5

_INSTALL = {"in_place": weights_pb2.INSTALL_MODE_IN_PLACE, "staged": weights_pb2.INSTALL_MODE_STAGED}
_PAUSE = {
    "drain": weights_pb2.PAUSE_MODE_DRAIN,
    "keep_kv": weights_pb2.PAUSE_MODE_KEEP_KV,
    "abort_requeue": weights_pb2.PAUSE_MODE_ABORT_REQUEUE,
}

log = get_logger(__name__)


class Membership(Protocol):
    """Who is in the weight group at one moment (weightsync.rendezvous.Membership)."""

    @property
    def epoch(self) -> int: ...


class Group(Protocol):
    """The weight group (weightsync.rendezvous.Rendezvous); blocking."""

    @property
    def group(self) -> str: ...

    def wait_for(self, slots: Sequence[str], timeout_s: float) -> Membership: ...


class WeightSync:
    """Brings the trainer's weights to every replica.

    Args:
        group: the weight group of the run.
    """

    def __init__(self, *, trainer: Trainer, replicas: Sequence[Replica], group: Group, settings: SyncSection) -> None:
        self._trainer = trainer
        self._replicas = tuple(replicas)
        self._group = group
        self._settings = settings
        # Parallel sizes, asked for once and again after a failure: they change only when a service is replaced.
        self._layout: weights_pb2.Round | None = None

    async def publish(self, policy_version: int) -> SyncResult:
        """Make every replica serve the trainer's weights as `policy_version`.

        Raises: TandemError: the last round's, after the budget is spent or at once if another round would not help; the
            message names the participant. Every participant has been told to give the round up.
        """
        start_s = time.perf_counter()
        failures: list[TandemError] = []
        while len(failures) < MAX_ROUNDS:
            try:
                description = await self._describe(policy_version)
            except TandemError as error:
                # A service has not come back, or a slot is empty: waited for already.
                raise _given_up(policy_version, [*failures, error]) from error
            try:
                reports = await self._round(description)
            except TandemError as error:
                metrics.SYNC_ROUNDS.labels(result="aborted").inc()
                log.warning("weight sync round failed", round_id=description.round_id, error=str(error))
                failures.append(error)
                self._layout = None
                if not isinstance(error, _RETRIABLE):
                    break
            else:
                total_s = time.perf_counter() - start_s
                result = reports.result(policy_version=policy_version, attempts=len(failures) + 1, total_s=total_s)
                metrics.observe_sync(result, [replica.name for replica in self._replicas])
                return result
        raise _given_up(policy_version, failures) from failures[-1]

    async def _round(self, description: weights_pb2.Round) -> RoundReports:
        sync_round = SyncRound(description, self._trainer, self._replicas)
        try:
            return await sync_round.run()
        except TandemError as error:
            unconfirmed = await sync_round.abort()
            state = await self._state_of_replicas()
            told = "; ".join([str(error), *state, *(f"abort: {text}" for text in unconfirmed)])
            raise type(error)(told) from error

    async def _describe(self, policy_version: int) -> weights_pb2.Round:
        """What the participants must agree on, with the epoch of a complete group."""
        if self._layout is None:
            self._layout = await self._ask_layout()
        description = weights_pb2.Round(
            round_id=f"v{policy_version}-{uuid.uuid4().hex[:12]}",
            policy_version=policy_version,
            group=self._group.group,
            trainer=self._layout.trainer,
            replicas=self._layout.replicas,
            install_mode=_INSTALL[self._settings.install],
            pause_mode=_PAUSE[self._settings.pause],
            bucket_bytes=int(self._settings.bucket_mib * 2**20),
            formation_timeout_s=self._settings.formation_timeout_s,
            transfer_timeout_s=self._settings.transfer_timeout_s,
        )
        description.epoch = await self._complete_epoch(Participants.of_round(description).slots)
        return description

    async def _ask_layout(self) -> weights_pb2.Round:
        """Parallel sizes of trainer and replicas; a service that is just coming back is waited for."""
        come_back_s = min(self._settings.formation_timeout_s, STATUS_TIMEOUT_S)
        trainer, replicas = await asyncio.gather(
            self._trainer.status(come_back_s=come_back_s),
            asyncio.gather(*(replica.status(come_back_s=come_back_s) for replica in self._replicas)),
        )
        specs = [
            weights_pb2.ReplicaSpec(name=replica.name, parallel=status.parallel)
            for replica, status in zip(self._replicas, replicas, strict=True)
        ]
        return weights_pb2.Round(trainer=trainer.parallel, replicas=specs)

    async def _complete_epoch(self, slots: Sequence[str]) -> int:
        """Epoch of the group once every slot is taken.

        Raises: DeadlineExceeded: naming the slots that are missing after sync.formation_timeout_s.
        """
        deadline_s = time.monotonic() + self._settings.formation_timeout_s
        while True:
            left_s = deadline_s - time.monotonic()
            try:
                # In a thread, since it polls Redis; in slices, since a thread cannot be cancelled when the run is.
                members = await asyncio.to_thread(self._group.wait_for, slots, max(0.0, min(left_s, _WAIT_SLICE_S)))
            except DeadlineExceeded:
                if left_s <= _WAIT_SLICE_S:
                    raise
            else:
                return members.epoch

    async def _state_of_replicas(self) -> list[str]:
        """State and version of every replica, in words."""
        answers = await asyncio.gather(*(replica.status() for replica in self._replicas), return_exceptions=True)
        told: list[str] = []
        for replica, answer in zip(self._replicas, answers, strict=True):
            if isinstance(answer, TandemError):
                told.append(f"{replica.name} does not answer ({answer})")
            elif isinstance(answer, BaseException):
                raise answer
            else:
                state = weights_pb2.ReplicaState.Name(answer.state).removeprefix("REPLICA_STATE_").lower()
                told.append(f"{replica.name} is {state} at version {answer.policy_version}")
        return told


def _given_up(policy_version: int, failures: Sequence[TandemError]) -> TandemError:
    """The error that ends a publication: the last failure, after the first if that was another one."""
    told = " | then: ".join(dict.fromkeys([str(failures[0]), str(failures[-1])]))
    return type(failures[-1])(f"weight sync of version {policy_version}, try {len(failures)}: {told}")
