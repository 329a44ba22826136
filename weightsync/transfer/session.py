"""One process's part in sync rounds: it holds a slot, keeps the epoch's communicator, and runs the phases.

PREPARE    plan, coverage, room for a staged shard, communicator, cards
PAUSE      nothing here (the service pauses its engine)
TRANSFER   sends; or receives into staging (staged) or parameters (in place)
VERIFY     digests of what was installed
COMMIT     staging and parameters change places; the round is over
ABORT      drops staging and the communicator; the round is over

Which phase may follow which says weightsync/round/phases.py.
ABORT of a round that is not the open one changes nothing, but that the round cannot begin any more. A coordinator that
was replaced is refused in every phase. A phase that was done is answered again with its report. A failed phase leaves
the round as it was, except TRANSFER: only ABORT helps then.
"""

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from servicekit.errors import Aborted, ConfigError, DigestMismatch, NotReady, PhaseOrder, TandemError
from servicekit.logs import get_logger
from servicekit.rpc.fence import FenceGuard
from tandem_api.common.v1 import common_pb2
from tandem_api.weights.v1 import weights_pb2 as pb
from weightsync.group.rendezvous import Rendezvous, SlotLease
from weightsync.layouts.layout import Parallel
from weightsync.layouts.sglang import sglang_layout
from weightsync.model.megatron_names import in_local_spelling
from weightsync.model.spec import ModelSpec
from weightsync.plans.limits import largest_message
from weightsync.plans.participants import Participants
from weightsync.plans.round_plan import RoundPlan, plan_round, source_layout
from weightsync.round.guard import OpenRound, require
from weightsync.round.phases import ABORT, COMMIT, PREPARE, TRANSFER, VERIFY, Phase, Role, name_of
from weightsync.transfer.communicators.cache import CommunicatorCache
from weightsync.transfer.communicators.communicator import Communicator
from weightsync.transfer.communicators.watched import run_watched
from weightsync.transfer.coverage import Coverage
from weightsync.transfer.devices import on_device, wait_for_device
from weightsync.transfer.facts import own_facts
from weightsync.transfer.spare import SpareShard
from weightsync.transfer.tensors import poison_tensors, tensor_checksums, wire_dtype
from weightsync.transfer.transports.disk import check_folder, open_latest, read_version
from weightsync.transfer.transports.links import Links, Terms
from weightsync.transfer.transports.packing import Packers
from weightsync.transfer.transports.transport import (
    TransferJob,
    TransferStats,
    Transport,
    check_complete,
    wrong_messages,
)

READ_BYTES = 32 * 2**20

log = get_logger(__name__)


class SyncMember:
    """A rank of the trainer or of a rollout replica, in its weight group.

    Args:
        slot: "trainer/<rank>" or "<replica>/<tp rank>".
        parallel: sizes of this process's own side.
        tensors: parameters (and persistent buffers) by engine name (Megatron's in either spelling): the memory that is
            read or written. A staged round may give them other memory (see SpareShard): they must be the engine's own,
            not aliases of them.
        group: rendezvous group in Redis.
        host: address that the other ranks reach this process at.
        on_lost: called once, from a thread, with a sentence, when another process has taken this one's place for good.
        disk_folder: where the transport disk may write and read; None: nowhere.
    """

    def __init__(
        self,
        *,
        spec: ModelSpec,
        slot: str,
        parallel: Parallel,
        tensors: Mapping[str, torch.Tensor],
        redis_url: str,
        group: str,
        host: str = "127.0.0.1",
        lease_ttl_s: float = 15.0,
        disk_folder: Path | None = None,
        on_lost: Callable[[str], None] | None = None,
    ) -> None:
        self._spec = spec
        self._disk_folder = disk_folder
        self._slot = slot
        self._role, _, rank = slot.rpartition("/")
        self._rank = int(rank)
        self._parallel = parallel
        self._tensors = in_local_spelling(spec, tensors)
        self._device = device = next(iter(tensors.values())).device
        self._lease = SlotLease(Rendezvous(redis_url, group), slot, lease_ttl_s, json.dumps(own_facts(device)), on_lost)
        self._communicators = CommunicatorCache(self._lease, host, device)
        self._lock = threading.Lock()
        own_layout = sglang_layout if self._is_receiver else source_layout
        self._layout = own_layout(self._spec, self._parallel)
        self._coverage = Coverage(self._layout, self._rank, slot)
        self._shard_elements = self._layout.elements_of(self._rank)
        self._links = Links(slot)
        self._packers = Packers(self._layout, "dst" if self._is_receiver else "src")
        self._spare = SpareShard(self._tensors)
        self._open: OpenRound | None = None
        self._fence = FenceGuard()
        self._round_id = ""
        self._over: deque[str] = deque(maxlen=64)  # a PREPARE that comes behind its ABORT must not begin
        self._epoch = 0
        self._plan: RoundPlan | None = None
        self._participants: Participants | None = None
        self._comm: Communicator | None = None
        self._transport: Transport | None = None
        self._done: dict[tuple[str, int], pb.PhaseReport] = {}
        self._target: Mapping[str, torch.Tensor] = self._tensors
        self._stats = TransferStats()

    def start(self) -> None:
        """Takes the slot and keeps its lease alive."""
        self._lease.start()

    def close(self) -> None:
        """Closes the communicator, then leaves the group."""
        self._links.close()
        self._communicators.close()
        self._lease.close()

    def checksums(self) -> dict[str, str]:
        """ "dtype:shape:xxh3-128" of every tensor, padding included, by engine name."""
        with on_device(self._device):
            return tensor_checksums(self._tensors)

    def poison(self) -> int:
        """Fills every tensor with NaN (tests of coverage). Returns: the number of tensors."""
        with on_device(self._device):
            return poison_tensors(self._tensors)

    def load_published(
        self, folder: Path, *, at_least: int, round_id: str = "", fence: common_pb2.CoordinatorFence | None = None
    ) -> int:
        """Fills the parameters from the newest version in a folder of the disk transport, and checks them.

        For late joiners and cold starts; not while a round is open. round_id: that must have published it, if given.
        fence: whose wish it is; None: of nobody who leads a run.

        Returns: the policy version.
        Raises: Fenced: a coordinator that was replaced; NotReady: nothing is published, or by another round;
            StaleVersion: it is older than at_least; DigestMismatch: a file is torn.
        """
        with self._lock, on_device(self._device):
            self._fence.admit(fence or common_pb2.CoordinatorFence())
            if self._open is not None:
                raise PhaseOrder(f"{self._slot}: round {self._open.message.round_id} is under way")
            check_folder(str(folder), self._disk_folder)
            published = open_latest(folder, self._spec.fingerprint(), at_least)
            if round_id not in ("", published.round_id):
                raise NotReady(f"{published.folder} was published by round {published.round_id}, not {round_id}")
            self._coverage.check(self._tensors)
            packer, stats = self._packers.get(self._tensors, None), TransferStats()
            read_version(published, self._layout, self._rank, packer, stats, READ_BYTES)
            self._coverage.zero_padding(self._tensors)
            check_complete(stats.received, self._shard_elements)
            if wrong_messages(stats.received, packer):
                raise DigestMismatch(f"{self._slot}: what was read from {published.folder} did not arrive")
            packer.forget()
            return published.policy_version

    def run_phase(self, phase: Phase, round_: pb.Round) -> pb.PhaseReport:
        """Runs one phase; blocks until it is done, at most the round's deadlines.

        Raises: a TandemError, by the table in the module's docstring; Fenced: its coordinator was replaced; Evicted:
            another process has the slot.
        """
        self._fence.admit(round_.fence)
        if phase == ABORT:
            self.interrupt(round_.round_id)  # a transfer that waits for a lost peer holds the lock
        with self._lock, on_device(self._device):
            self._fence.admit(round_.fence)  # it may have waited behind the phase of a newer one
            done = self._done.get((round_.round_id, phase))
            if done is not None:
                return done
            if phase != ABORT:  # an evicted worker must not act, but it must be able to give up
                self._lease.check()
            start = time.monotonic()
            report = self._run(phase, round_)
            if self._open is not None:
                self._open.done.add(phase)
            report.seconds.setdefault(name_of(phase), time.monotonic() - start)
            report.plan_digest = self._plan.digest if self._plan is not None else ""
            report.policy_version = round_.policy_version
            report.transport = self._transport.name if self._transport is not None else ""
            self._done[(round_.round_id, phase)] = report
            return report

    def interrupt(self, round_id: str) -> None:
        """Ends what a phase of this round waits for, from any thread; of any other round, and once it is over, nothing.

        The round must be aborted then.
        """
        self._communicators.interrupt(round_id)

    def _run(self, phase: Phase, round_: pb.Round) -> pb.PhaseReport:
        if phase == PREPARE:
            return self._prepare(round_)
        if phase == ABORT:
            return self._abort(round_)
        current = require(self._open, phase, round_, f"{self._slot}: ")
        if phase == TRANSFER:
            return self._transfer(current)
        if phase == VERIFY:
            return self._verify()
        return self._commit() if phase == COMMIT else pb.PhaseReport()

    def _prepare(self, round_: pb.Round) -> pb.PhaseReport:
        if round_.round_id in self._over:
            raise PhaseOrder(f"{self._slot}: round {round_.round_id} is over; start a new one")
        if self._open is not None and round_.round_id != self._round_id:
            if round_.epoch < self._epoch:
                raise Aborted(
                    f"{self._slot}: round {round_.round_id} is of epoch {round_.epoch}, here it is {self._epoch}"
                )
            # Its coordinator is gone: it would have ended the round before it began another.
            log.warning("round superseded", slot=self._slot, old=self._round_id, done=[*map(name_of, self._open.done)])
            self._over.append(self._round_id)
            self._drop()
            self._end_round()
        self._communicators.under_way = round_.round_id
        started = time.monotonic()
        try:
            terms = self._terms(round_)
        except TandemError:
            self._drop()  # the others wait for this rank's card: now they hear that it does not come
            raise
        planned = time.monotonic()
        deadline = planned + round_.formation_timeout_s
        rank = terms.participants.slots.index(self._slot)
        self._comm = self._communicators.get(round_, terms.participants, rank)
        try:
            self._transport = self._links.agree(self._comm, terms, deadline)
        except TandemError:
            self._drop()
            raise
        self._plan, self._participants = terms.plan, terms.participants
        self._round_id, self._epoch = round_.round_id, round_.epoch
        self._open = OpenRound(message=round_, role=Role.RANK if self._is_receiver else Role.TRAINER)
        self._done.clear()
        report = pb.PhaseReport(shard_bytes=self._shard_bytes())
        report.seconds["prepare"] = planned - started
        report.seconds["rendezvous"] = time.monotonic() - planned
        return report

    def _transfer(self, current: OpenRound) -> pb.PhaseReport:
        round_, current.failure = current.message, "TRANSFER did not end"  # until the last byte is there
        plan, participants, transport, communicator = self._prepared()
        wait_for_device(self._device)  # what the engine has queued may still read or write the parameters
        if self._is_receiver:
            self._target = self._spare.tensors if round_.install_mode == pb.INSTALL_MODE_STAGED else self._tensors
        job = TransferJob(
            model=self._spec.fingerprint(),
            round_id=round_.round_id,
            plan=plan,
            participants=participants,
            packer=self._packers.get(self._target, self._wire_dtype(round_)),
            policy_version=round_.policy_version,
            bucket_bytes=self._bucket_bytes(round_, participants),
            deadline=time.monotonic() + round_.transfer_timeout_s,
            timeout_s=round_.transfer_timeout_s,
        )
        late = f"transfer not finished in {job.timeout_s:g} s"
        self._stats = run_watched(communicator, lambda: transport.run(job), job.deadline, lambda: late)
        if self._is_receiver:
            self._coverage.zero_padding(self._target)
        current.failure = ""
        return self._stats.report(self._shard_bytes())

    def _verify(self) -> pb.PhaseReport:
        if self._is_receiver:
            received = self._stats.received
            check_complete(received, self._shard_elements)
            wrong = wrong_messages(received, self._packers.get(self._target, None))
            if wrong:
                names = sorted({self._layout.params[p] for p in wrong[0].ops["dst_param"]})
                raise DigestMismatch(
                    f"{self._slot}: {len(wrong)} of {len(received)} messages differ from what the trainer sent; "
                    f"the first, {wrong[0].sequence}, holds {', '.join(names[:8])}"
                )
        return pb.PhaseReport(shard_bytes=self._shard_bytes())

    def _commit(self) -> pb.PhaseReport:
        start = time.monotonic()
        if self._target is not self._tensors:
            wait_for_device(self._device)
            self._spare.install()
            self._packers.exchange(self._tensors, self._target)
        wait_for_device(self._device)  # the engine reads on streams of its own
        self._end_round()
        report = pb.PhaseReport()
        report.seconds["install"] = time.monotonic() - start
        return report

    def _abort(self, round_: pb.Round) -> pb.PhaseReport:
        self._over.append(round_.round_id)
        # Another round's may be in use. Nobody uses this one's again: the next round counts one more that has failed.
        if self._round_id == round_.round_id:
            self._drop()
            self._end_round()
        return pb.PhaseReport()

    @property
    def _is_receiver(self) -> bool:
        return self._role != "trainer"

    def _end_round(self) -> None:
        """Back to idle; reports of this round stay, so that a repeated COMMIT is answered."""
        self._communicators.under_way = ""
        self._open = None
        self._target = self._tensors
        self._stats = TransferStats()

    def _bucket_bytes(self, round_: pb.Round, participants: Participants) -> int:
        """All ranks of a round know its chains and are of one device (facts.py), and so come to the same size."""
        return largest_message(int(round_.bucket_bytes), self._device.type, participants.longest_chain)

    def _terms(self, round_: pb.Round) -> Terms:
        """What this rank brings into the round. Raises: ConfigError: it has no part in it, or does not fit it."""
        participants = Participants.of_round(round_)
        if not participants.replicas:
            raise ConfigError(f"{self._slot}: round {round_.round_id} has no replicas, so nobody to send to")
        if self._slot not in participants.slots:
            raise ConfigError(f"{self._slot} has no part in the round: {', '.join(participants.slots)}")
        expected = participants.replicas[self._role] if self._is_receiver else participants.trainer
        if expected != self._parallel:
            raise ConfigError(f"{self._slot}: the round says {expected}, this process has {self._parallel}")
        self._coverage.check(self._tensors)
        if self._is_receiver and round_.install_mode == pb.INSTALL_MODE_STAGED:
            self._spare.reserve(self._slot)
        if round_.transport == pb.SYNC_TRANSPORT_DISK:
            check_folder(round_.disk_folder, self._disk_folder)
        dtype = self._wire_dtype(round_)
        rollouts = tuple(participants.chains())
        largest = max(1, self._bucket_bytes(round_, participants) // dtype.itemsize)
        plan = plan_round(self._spec, participants.trainer, rollouts, largest)
        if self._plan is not None and plan is not self._plan:
            self._packers.forget()
        return Terms(
            round_=round_,
            plan=plan,
            participants=participants,
            tensors=self._tensors,
            packer=self._packers.get(self._tensors, dtype),
            wire_dtype=str(dtype).removeprefix("torch."),
            is_trainer=not self._is_receiver,
        )

    def _wire_dtype(self, round_: pb.Round) -> torch.dtype:
        """What a trainer rank sends; a receiver takes what it holds, and its card says so."""
        held = next(iter(self._tensors.values())).dtype
        return held if self._is_receiver else wire_dtype(round_.wire_dtype, held)

    def _drop(self) -> None:
        self._links.close()
        self._communicators.drop()
        self._transport = None

    def _shard_bytes(self) -> int:
        return self._shard_elements * int(next(iter(self._tensors.values())).dtype.itemsize)

    def _prepared(self) -> tuple[RoundPlan, Participants, Transport, Communicator]:
        if self._plan is None or self._participants is None or self._transport is None or self._comm is None:
            raise PhaseOrder(f"{self._slot}: no round is prepared")
        return self._plan, self._participants, self._transport, self._comm
