"""The phases of a round on one rank's shard; guard.py decides which of them may run.

PREPARE    plan, coverage, room for a staged shard, communicator, cards
PAUSE      nothing here (the service pauses its engine)
TRANSFER   sends, a source what it has verified; or receives into staging (staged) or parameters (in place)
VERIFY     digests of what was installed
COMMIT     exchanges staging and parameters; the round is over
ABORT      drops the communicator and what was staged; the round is over
"""

import time
from dataclasses import dataclass, replace
from pathlib import Path

from servicekit.errors import ConfigError, NotReady, PhaseOrder, TandemError
from tandem_api.weights.v1 import weights_pb2 as pb
from weightsync.plans.limits import largest_message
from weightsync.plans.participants import Participants
from weightsync.plans.round_plan import RoundPlan, plan_round
from weightsync.round.phases import COMMIT, PREPARE, TRANSFER, VERIFY, Phase
from weightsync.transfer.communicators.cache import CommunicatorCache
from weightsync.transfer.communicators.communicator import Communicator
from weightsync.transfer.communicators.watched import run_watched
from weightsync.transfer.devices import wait_for_device
from weightsync.transfer.shard import OwnShard
from weightsync.transfer.transports.disk import check_folder, open_latest
from weightsync.transfer.transports.links import Links, Terms, check_source
from weightsync.transfer.transports.transport import TransferJob, TransferStats, Transport


@dataclass(frozen=True, kw_only=True)
class PreparedRound:
    """The result of PREPARE."""

    plan: RoundPlan
    participants: Participants
    communicator: Communicator
    transport: Transport


class Transfer:
    """Plan, memory and transport of one rank, from round to round; one phase at a time.

    Args:
        disk_folder: where the transport disk may write and read; None: nowhere.
        expose_memory: see SyncMember.
    """

    def __init__(
        self, shard: OwnShard, communicators: CommunicatorCache, disk_folder: Path | None, *, expose_memory: bool
    ) -> None:
        self._shard, self._expose_memory = shard, expose_memory
        self._communicators = communicators
        self._disk_folder = disk_folder
        self._links = Links(shard.slot)
        self._plan: RoundPlan | None = None
        self._prepared: PreparedRound | None = None
        self._written = shard.tensors
        self._stats = TransferStats()

    def run(self, phase: Phase, round_: pb.Round) -> pb.PhaseReport:
        """Run any phase but ABORT. Raises: TandemError: of a peer, a digest, a deadline; call give_up() then."""
        work = {PREPARE: self._prepare, TRANSFER: self._transfer, VERIFY: self._verify, COMMIT: self._commit}.get(phase)
        return pb.PhaseReport() if work is None else work(round_)

    def give_up(self) -> None:
        """End the open round and its communicator; the next round has a higher failed_rounds."""
        self._drop()
        self._rest()

    def describe(self, report: pb.PhaseReport) -> None:
        """Write the plan's digest and the transport's name into a report."""
        report.plan_digest = self._plan.digest if self._plan is not None else ""
        report.transport = self._prepared.transport.name if self._prepared is not None else ""

    def interrupt(self, round_id: str) -> None:
        """End the waits of a phase: see SyncMember.interrupt."""
        self._communicators.interrupt(round_id)

    def load_published(self, folder: Path, *, at_least: int, round_id: str) -> int:
        """Load a published version: see SyncMember.load_published."""
        check_folder(str(folder), self._disk_folder)
        published = open_latest(folder, self._shard.spec.fingerprint(), at_least)
        if round_id not in ("", published.round_id):
            raise NotReady(f"{published.folder} was published by round {published.round_id}, not {round_id}")
        self._shard.read(published)
        return published.policy_version

    def close(self) -> None:
        """Close transport and communicator."""
        self._links.close()
        self._communicators.drop()

    def _prepare(self, round_: pb.Round) -> pb.PhaseReport:
        self._communicators.begin(round_.round_id)
        started = time.monotonic()
        try:
            terms = self._terms(round_)
        except TandemError:
            self._drop()  # the others wait for this rank's card: closing the connections ends their wait
            raise
        planned = time.monotonic()
        participants = terms.participants
        rank = participants.slots.index(self._shard.slot)
        communicator = self._communicators.get(round_, participants, rank)
        try:
            transport = self._links.agree(communicator, terms, planned + round_.formation_timeout_s)
        except TandemError:
            self._drop()
            raise
        self._plan = terms.plan
        self._prepared = PreparedRound(
            plan=terms.plan, participants=participants, communicator=communicator, transport=transport
        )
        report = pb.PhaseReport(shard_bytes=self._shard.num_bytes)
        report.seconds["prepare"] = planned - started
        report.seconds["rendezvous"] = time.monotonic() - planned
        return report

    def _transfer(self, round_: pb.Round) -> pb.PhaseReport:
        shard, prepared = self._shard, self._prepared
        if prepared is None:
            raise PhaseOrder(f"{shard.slot}: no round is prepared")
        wait_for_device(shard.device)  # what the engine has queued may still read or write the parameters
        self._written = shard.memory(round_)
        start = time.monotonic()
        job = TransferJob(
            model=shard.spec.fingerprint(),
            round_id=round_.round_id,
            plan=prepared.plan,
            participants=prepared.participants,
            packer=shard.packer(self._written, round_),
            policy_version=round_.policy_version,
            bucket_bytes=self._bucket_bytes(round_, prepared.participants),
            deadline=start + round_.transfer_timeout_s,
            timeout_s=round_.transfer_timeout_s,
        )
        late, run = f"transfer not finished in {job.timeout_s:g} s", prepared.transport.run
        self._stats = run_watched(prepared.communicator, lambda: run(job), job.deadline, lambda: late)
        seconds = time.monotonic() - start
        if not shard.sends(round_):
            shard.complete(self._written)
        return self._stats.report(shard.num_bytes, seconds)

    def _verify(self, round_: pb.Round) -> pb.PhaseReport:
        start = time.monotonic()
        if not self._shard.sends(round_):
            self._shard.verify(self._written, self._stats.received)
        report = pb.PhaseReport(shard_bytes=self._shard.num_bytes)
        report.seconds["verify"] = time.monotonic() - start
        return report

    def _commit(self, round_: pb.Round) -> pb.PhaseReport:
        start = time.monotonic()
        if not self._shard.sends(round_):
            self._shard.install(self._written, round_.policy_version, self._stats.received)
        self._rest()
        report = pb.PhaseReport()
        report.seconds["install"] = time.monotonic() - start
        return report

    def _rest(self) -> None:
        self._communicators.begin("")
        self._written = self._shard.tensors
        self._stats = TransferStats()

    def _drop(self) -> None:
        self._links.close()
        self._communicators.drop()
        self._prepared = None

    def _bucket_bytes(self, round_: pb.Round, participants: Participants) -> int:
        """Return the message size, the same on all ranks: all know the chains and have one device type (facts.py)."""
        return largest_message(int(round_.bucket_bytes), self._shard.device.type, participants.longest_chain)

    def _terms(self, round_: pb.Round) -> Terms:
        """Make this rank's terms for the round. Raises: ConfigError: it has no part in it, or does not fit it."""
        shard, participants = self._shard, Participants.of_round(round_)
        if not participants.replicas:
            raise ConfigError(f"{shard.slot}: round {round_.round_id} has no replicas; name at least one")
        if shard.slot not in participants.slots:
            raise ConfigError(f"{shard.slot} has no part in the round: {', '.join(participants.slots)}")
        expected = participants.trainer if shard.sends(round_) else participants.replicas[shard.side]
        expected, own = (replace(one, engine=one.engine or shard.usual_engine) for one in (expected, shard.parallel))
        if expected != own:
            raise ConfigError(f"{shard.slot}: the round says {expected}, this process has {own}")
        shard.check(round_)
        check_source(round_, participants, shard.device)
        if round_.transport == pb.SYNC_TRANSPORT_DISK:
            check_folder(round_.disk_folder, self._disk_folder)
        dtype = shard.wire_dtype(round_)
        largest = max(1, self._bucket_bytes(round_, participants) // dtype.itemsize)
        plan = plan_round(shard.spec, participants.trainer, tuple(participants.chains()), largest)
        if self._plan is not None and plan is not self._plan:
            shard.forget_messages()
        return Terms(
            round_=round_,
            plan=plan,
            participants=participants,
            tensors=shard.tensors,
            packer=shard.packer(shard.tensors, round_),
            wire_dtype=str(dtype).removeprefix("torch."),
            is_trainer=shard.sends(round_),
            expose_memory=self._expose_memory,
        )
